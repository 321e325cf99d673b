"""State dicts and copies of a tracked model are current."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from sparsestep.optim.optimizer import RuleOptimizer
from tests.deferred.models import Nested, OneTable, each_model, finish, made
from tests.table import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


# Saving and loading


@each_model
def test_the_state_dict_of_a_model_is_current(model: Any):
    ours, opt = made(model, True)
    theirs, dense = made(model, False)
    opt.track(ours)
    finish(ours, opt, range(15))
    finish(theirs, dense, range(15))
    saved = copy.deepcopy(ours.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(saved[name], tensor, rtol=1e-11, atol=1e-13)


def test_the_state_dict_of_a_part_and_of_what_is_around_it():
    ours, opt = made(Nested, True)
    theirs, dense = made(Nested, False)
    opt.track(ours)
    finish(ours, opt, range(15))
    finish(theirs, dense, range(15))
    part, around = ours.table.state_dict(), nn.ModuleList([ours]).state_dict()
    assert torch.allclose(part["weight"], theirs.table.weight, rtol=1e-11, atol=1e-13)
    for name, tensor in theirs.state_dict().items():
        assert torch.allclose(around[f"0.{name}"], tensor, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("part", [False, True], ids=["the model", "a part of it"])
def test_what_is_loaded_into_a_model_stands(part: bool):
    """As in the dense run: what rows had missed before is not made up for after."""
    results = []
    for sparse in (True, False):
        model, opt = made(Nested, sparse)
        if sparse:
            opt.track(model)
        of = model.table if part else model
        best = copy.deepcopy(of.state_dict())
        finish(model, opt, range(10))
        of.load_state_dict(best)
        if sparse:
            opt.catch_up()
        for name, tensor in of.state_dict().items():
            assert same_bits(tensor, best[name])
        finish(model, opt, range(10, 20))
        results.append(copy.deepcopy(model.state_dict()))
    ours, theirs = results
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, rtol=1e-11, atol=1e-13)


def test_a_run_is_resumed_from_checkpoints_of_model_and_optimizer():
    model, opt = made(Nested, True)
    opt.track(model)
    finish(model, opt, range(10))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    losses = finish(model, opt, range(10, 20))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed, again = made(Nested, True)
    again.track(resumed)
    finish(resumed, again, range(30, 35))  # something else, all of which is forgotten
    resumed.load_state_dict(saved["model"])
    again.load_state_dict(saved["opt"])
    assert finish(resumed, again, range(10, 20)) == losses
    for (name, ours), theirs in zip(
        resumed.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert same_bits(ours, theirs), name


# Copies of the model


@pytest.mark.parametrize("root", [True, False], ids=["a table", "a model"])
@pytest.mark.parametrize(
    "how",
    [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m)), None],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_a_copy_of_the_model_is_current_and_on_its_own(root: bool, how: Any):
    """It does not drag the optimizer along, with all its state."""
    model, opt = made(OneTable, True)
    opt.track(model.table if root else model)
    finish(model, opt, range(10))
    if how is None:
        file = io.BytesIO()
        torch.save(model.table if root else model, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    else:
        copied = how(model.table if root else model)
    table = copied if root else copied.table
    opt.catch_up()
    assert same_bits(table.weight.detach(), model.table.weight.detach())
    assert not {"train", "__getstate__"} & vars(table).keys()
    weight = table.weight.detach().clone()
    finish(model, opt, range(10, 15))
    table(torch.arange(20))
    copied.state_dict()
    assert same_bits(table.weight.detach(), weight)
    for hook in table._forward_pre_hooks.values():
        assert not any(isinstance(v, RuleOptimizer) for v in vars(hook.__self__).values())
