"""``optimizer.track(model, guard=True)``: a parameter whose rows catch up when they are read.

Programs that read the table beside the lookups of a tracked model are compared with the same
program with dense gradients and torch's AdamW.
"""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from sparsestep.nn import lookup
from tests.deferred.models import Tied, close, ids_of, made, train
from tests.deferred.runs import on_both_engines
from tests.table import running_on, same_bits, through_a_file

pytestmark = pytest.mark.usefixtures("one_thread")


# Programs that take model and optimizer, and return numbers to compare.


def averaged(model: Any, opt: Any) -> Any:
    average = AveragedModel(model)
    exponential = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for t in range(12):
        train(model, opt, range(t, t + 1))
        average.update_parameters(model)
        exponential.update_parameters(nn.ModuleDict({"module": model})["module"])
    return torch.cat([each.module.table.weight.detach() for each in (average, exponential)])


def tied_head_in_some_batches(model: Any, opt: Any) -> Any:
    losses = []
    for t in range(12):
        losses += train(model, opt, range(t, t + 1), with_head=t % 4 == 3)
    return losses


def evaluation(model: Any, opt: Any) -> Any:
    """Over the whole weight, as a recommender ranks all items."""
    train(model, opt, range(10))
    assert model.eval() is model
    assert not model.table.training
    ranked = model.table.weight.detach().clone()
    losses = train(model.train(), opt, range(10, 12))
    nn.Sequential(model).eval()
    return torch.cat([ranked, model.table.weight.detach(), torch.tensor([[*losses, 0.0]]).double()])


def renormalized(model: Any, opt: Any) -> Any:
    """Torch writes the rows that are looked up, without a warning."""
    model.table.max_norm = 0.5
    if opt.semantics == "dense":
        opt.track(model.table)
    losses = train(model, opt, range(10))
    model.eval()
    return torch.cat([model.table.weight.detach().flatten(), torch.tensor(losses).double()])


def own_average(model: Any, opt: Any) -> Any:
    """As many programs have it."""
    shadow = [param.detach().clone() for param in model.parameters()]
    for t in range(12):
        train(model, opt, range(t, t + 1))
        for average, param in zip(shadow, model.parameters(), strict=True):
            average.lerp_(param.data, 0.1)
    return shadow[0]


def direct_lookups(model: Any, opt: Any) -> Any:
    def read(t: int) -> Tensor:
        weight = model.table.weight
        return functional.embedding(ids_of(t, 4), weight, sparse=model.table.sparse).sin().sum()

    return train(read, opt, range(12))


def module_elsewhere(model: Any, opt: Any) -> Any:
    """It has no hooks: the guarded weight itself catches up the rows of the lookup."""
    others = [cls(20, 3, dtype=torch.float64) for cls in (nn.Embedding, sparsestep.nn.Embedding)]
    for number, other in enumerate(others):
        other.weight = model.table.weight
        train(model, opt, range(10 * number, 10 * number + 10))
        others[number] = other(torch.arange(20)).detach()
    return torch.cat(others)


def old_alias(model: Any, opt: Any) -> Any:
    """A view that was taken before the steps."""
    alias = model.table.weight.detach()
    train(model, opt, range(10))
    return alias * 1


def normalized(model: Any, opt: Any) -> Any:
    """The whole table is written by hand after each step, as knowledge graph embeddings do it."""
    losses = []
    for t in range(10):
        losses += train(model, opt, range(t, t + 1))
        weight = model.table.weight
        weight.data = functional.normalize(weight.data)
        with torch.no_grad():
            weight[3:5] *= 0.5
            weight.clamp_(-0.5, 0.5)
    return losses


def after_training(read: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """A program that reads the model after some steps."""

    def program(model: Any, opt: Any) -> Any:
        train(model, opt, range(10))
        with torch.no_grad():
            return read(model)

    return program


def indexed(model: Any) -> Any:
    weight = model.table.weight.data
    rows = [weight[torch.tensor([3, 1])], weight[7], weight[2:4], weight.T[:, 5], weight[[8]]]
    rows += [functional.embedding_bag(torch.tensor([[1, 2], [17, 3]]), weight, mode="sum")]
    rows += [weight[..., 0], weight.index_select(0, torch.tensor([11])), weight[weight.sum(1) > 0]]
    return torch.cat([each.flatten() for each in rows])


def pickled(model: Any) -> Any:
    weight = pickle.loads(pickle.dumps(model.table.weight))
    assert type(weight) is type(copy.deepcopy(model.table.weight)) is nn.Parameter
    assert not vars(weight)
    return weight


def detached(model: Any) -> Any:
    return functional_call(model, {n: p.detach() for n, p in model.named_parameters()}, (20,))


# What tracking alone makes right.
TRACKED: dict[str, Callable[[Any, Any], Any]] = {
    **{each.__name__: each for each in (averaged, tied_head_in_some_batches, evaluation)},
    "renormalized": renormalized,
    "tied head": after_training(lambda model: model.head(torch.ones(3).double())),
    "detached": after_training(detached),
    "shallow copy": after_training(lambda model: copy.copy(model.table).weight.clone()),
}
# What tracking cannot see, and the guard makes right.
GUARDED: dict[str, Callable[[Any, Any], Any]] = {
    **{each.__name__: each for each in (own_average, direct_lookups, module_elsewhere, old_alias)},
    "normalized": normalized,
    "indexed": after_training(indexed),
    "pickled": after_training(pickled),
    "numpy": after_training(lambda model: torch.tensor(model.table.weight.detach().numpy())),
}


def results(program: Callable[[Any, Any], Any], guard: bool, **options: Any) -> tuple[Any, Any]:
    model, opt = made(Tied, True, **options)
    opt.track(model, guard=guard)
    return program(model, opt), program(*made(Tied, False))


@pytest.mark.parametrize("program", TRACKED)
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_what_tracking_sees_is_as_in_the_dense_run(program: str, guard: bool):
    assert close(*results(TRACKED[program], guard))


@pytest.mark.parametrize("program", GUARDED)
@on_both_engines
def test_what_only_the_guard_sees_is_as_in_the_dense_run(program: str, engine: str):
    with running_on(engine) as name:
        assert close(*results(GUARDED[program], True, engine=name))


@pytest.mark.parametrize("program", [own_average, module_elsewhere, old_alias])
def test_without_the_guard_it_is_not(program: Any):
    """Or the tests above would show nothing."""
    assert not close(*results(program, False))


def guarded() -> tuple[Any, Any, Any]:
    model, opt = made(Tied, True)
    return model, opt, opt.track(model, guard=True)


def test_a_guarded_table_may_outlive_model_and_optimizer():
    model, opt, handle = guarded()
    train(model, opt, range(10))
    weight = model.table.weight
    del model, opt, handle
    gc.collect()
    dense, torchs = made(Tied, False)
    train(dense, torchs, range(10))
    assert close(weight * 1, dense.table.weight)


def test_a_guard_catches_up_only_the_rows_that_are_read():
    model, opt, _ = guarded()
    train(model, opt, range(10))
    weight = model.table.weight
    deferred = opt.deferred[id(weight)]
    stale = (deferred.last_step.abs() < 9).nonzero().squeeze(1)
    assert stale.numel() > 4
    reads: list[tuple[Callable[[], Any], Tensor]] = [
        (lambda: functional.embedding(stale[:1], weight), stale[:1]),
        (lambda: weight[stale[1:2]], stale[1:2]),
        (lambda: weight.index_select(0, stale[2:3]), stale[2:3]),
        (lambda: (weight.shape, weight.grad, weight.detach().T), stale[:0]),
        (lambda: weight.is_contiguous(), stale[:0]),
    ]
    for read, rows in reads:
        before = deferred.last_step.clone()
        read()
        assert (deferred.last_step != before).nonzero().squeeze(1).tolist() == rows.tolist()
    weight.sum()
    assert not deferred.has_deferred


def test_a_step_that_fails_leaves_the_guard_at_work(monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise MemoryError

    model, opt, _ = guarded()
    train(model, opt, range(5))
    with monkeypatch.context() as patched:
        patched.setattr("sparsestep.optim.step.EngineDispatcher.prepare", fail)
        with pytest.raises(MemoryError):
            train(model, opt, range(5, 6))
    model.table.weight.sum()
    assert not opt.deferred[id(model.table.weight)].has_deferred


@pytest.mark.parametrize("first", [0, 1])
def test_two_optimizers_may_guard_one_table(first: int):
    model, opt, handle = guarded()
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    handles = [handle, other.track(model, guard=True)]
    handles[first].remove()
    one, weight = other if first == 0 else opt, model.table.weight
    train(model, one, range(5))
    weight.sum()
    assert not one.deferred[id(weight)].has_deferred
    handles[1 - first].remove()
    assert type(weight) is nn.Parameter
    assert not vars(weight)


@pytest.mark.parametrize(
    "copied", [through_a_file, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))]
)
def test_a_state_dict_of_guarded_tables_is_saved_and_copied(copied: Any):
    """Its tensors are views of the tables: copies are current, and ordinary tensors."""
    model, opt, _ = guarded()
    state = model.state_dict()
    train(model, opt, range(5))
    found = copied(state)
    assert not opt.deferred[id(model.table.weight)].has_deferred
    for name, tensor in found.items():
        assert type(tensor) is Tensor
        assert same_bits(tensor, state[name].clone())
        assert tensor.data_ptr() != state[name].data_ptr()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: sparsestep.nn.Embedding(50, 4, padding_idx=0),
    "EmbeddingBag": lambda: sparsestep.nn.EmbeddingBag(50, 4),
    "EmbeddingBag, max": lambda: sparsestep.nn.EmbeddingBag(50, 4, mode="max"),
    "EmbeddingBag, max_norm": lambda: sparsestep.nn.EmbeddingBag(50, 4, max_norm=1.0),
    "torch's": lambda: nn.EmbeddingBag(50, 4, sparse=True, mode="sum"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_guard_changes_no_bit_and_no_layout_of_a_gradient(kind: str):
    """And the core looks its tables up."""
    weights = []
    spy = mock.Mock(look_up=mock.Mock(wraps=lookup.ext and lookup.ext.look_up))
    for guard in (False, True):
        torch.manual_seed(0)
        table: Any = KINDS[kind]()
        optimizer = sparsestep.Adam(table.parameters(), lr=0.1, semantics="dense")
        optimizer.track(table, guard=guard)
        for step in range(6):
            optimizer.zero_grad()
            with mock.patch.object(lookup, "ext", lookup.ext and spy):
                output = table((torch.tensor([[3, 7, 3], [0, 7, 49]]) + 5 * step) % 50)
            output.square().sum().backward()
            expected = Tensor if kind == "torch's" else CompactGrad
            assert type(table.weight.grad) is expected
            assert table.weight.grad.is_sparse
            optimizer.step()
        optimizer.catch_up()
        weights.append(table.weight.detach().clone())
    assert same_bits(*weights)
    if lookup.ext is not None and kind not in ("EmbeddingBag, max_norm", "torch's"):
        (requests, *_), _ = spy.look_up.call_args
        assert lookup.ext.look_up(requests, 1, 0) is not None
