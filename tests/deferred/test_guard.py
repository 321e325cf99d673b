"""``optimizer.track(model, guard=True)``: a parameter that brings up to date what is read of it."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsestep
from tests.deferred.tied_model import made, train
from tests.table import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_guard_reads_no_more_rows_than_are_asked_for():
    model, opt = made(True)
    opt.track(model, guard=True)
    train(model, opt, range(10))
    clock = opt.deferred[id(model.table.weight)]
    weight = model.table.weight
    behind = (clock.last_step.abs() < 9).nonzero().squeeze(1)
    assert behind.numel() > 4
    for read, rows in (
        (lambda: functional.embedding(behind[:1], weight), behind[:1]),
        (lambda: weight[behind[1:2]], behind[1:2]),
        (lambda: weight.index_select(0, behind[2:3]), behind[2:3]),
        (
            lambda: (weight.shape, weight.grad, weight.detach().T, weight.is_contiguous()),
            behind[:0],
        ),
    ):
        before = clock.last_step.clone()
        read()
        assert (clock.last_step != before).nonzero().squeeze(1).tolist() == rows.tolist()
    weight.sum()
    assert not clock.has_deferred


def test_a_step_that_fails_leaves_the_guard_at_work(monkeypatch):
    def fail(*_):
        raise MemoryError

    model, opt = made(True)
    opt.track(model, guard=True)
    train(model, opt, range(5))
    with monkeypatch.context() as patched:
        patched.setattr("sparsestep.optim.step.EngineDispatcher.prepare", fail)
        with pytest.raises(MemoryError):
            train(model, opt, range(5, 6))
    model.table.weight.sum()
    assert not opt.deferred[id(model.table.weight)].has_deferred


def test_a_guard_that_is_removed_leaves_an_ordinary_parameter():
    model, opt = made(True)
    weight = model.table.weight
    handle = opt.track(model, guard=True)
    assert isinstance(weight, nn.Parameter)
    alias = weight.detach()
    train(model, opt, range(5))
    handle.remove()
    assert type(weight) is nn.Parameter
    assert not vars(weight)
    before = weight.clone()
    assert same_bits(alias.clone(), before)


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_may_guard_one_table(first: int):
    model, opt = made(True)
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    handles = [opt.track(model, guard=True), other.track(model, guard=True)]
    handles[first].remove()
    one = other if first == 0 else opt
    train(model, one, range(5))
    model.table.weight.sum()
    assert not one.deferred[id(model.table.weight)].has_deferred
    handles[1 - first].remove()
    assert type(model.table.weight) is nn.Parameter


def saved(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict, by way of a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded: dict[str, Tensor] = torch.load(file, weights_only=True)
    return loaded


@pytest.mark.parametrize(
    "again", [saved, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_a_state_dict_of_guarded_tables_is_saved_and_copied(again):
    """Its tensors are views of the tables: what is written is current, and an ordinary tensor."""
    model, opt = made(True)
    opt.track(model, guard=True)
    state = model.state_dict()
    train(model, opt, range(5))
    found = again(state)
    weight = model.table.weight
    assert not opt.deferred[id(weight)].has_deferred
    for name, tensor in found.items():
        assert type(tensor) is Tensor
        assert same_bits(tensor, state[name].clone())
        assert tensor.data_ptr() != state[name].data_ptr()
