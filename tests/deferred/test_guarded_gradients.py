"""Which gradient a table gets, however its parameter is wrapped: never a dense one by accident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from sparsestep.nn import lookup
from tests.table import same_bits

ROWS, DIM = 50, 4
IDS = torch.tensor([[3, 7, 3], [0, 7, 49]])

pytestmark = pytest.mark.usefixtures("one_thread")


class Collection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = sparsestep.nn.EmbeddingBagCollection([(ROWS, DIM), (ROWS, DIM)])

    def forward(self, ids: Tensor) -> Tensor:
        return sum(self.tables([ids, ids]))


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = sparsestep.nn.EmbeddingBag(ROWS, DIM, mode="sum")
        self.factors = nn.Parameter(torch.ones(IDS.shape))

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids, per_sample_weights=self.factors)


class Tied(nn.Module):
    """Two modules with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = (sparsestep.nn.Embedding(ROWS, DIM) for _ in range(2))
        self.other.weight = self.one.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.one(ids) + self.other(ids + 0)


COMPACT: dict[str, Callable[[], nn.Module]] = {
    "Embedding": lambda: sparsestep.nn.Embedding(ROWS, DIM),
    "Embedding, padding": lambda: sparsestep.nn.Embedding(ROWS, DIM, padding_idx=0),
    "Embedding, max_norm": lambda: sparsestep.nn.Embedding(ROWS, DIM, max_norm=1.0),
    "EmbeddingBag": lambda: sparsestep.nn.EmbeddingBag(ROWS, DIM),
    "EmbeddingBag, max": lambda: sparsestep.nn.EmbeddingBag(ROWS, DIM, mode="max"),
    "EmbeddingBag, max_norm": lambda: sparsestep.nn.EmbeddingBag(ROWS, DIM, max_norm=1.0),
    "weighted bags": Weighted,
    "EmbeddingBagCollection": Collection,
    "fused": lambda: sparsestep.nn.fuse(nn.Sequential(nn.Embedding(ROWS, DIM, sparse=True))),
    "tied": Tied,
}
COO: dict[str, Callable[[], nn.Module]] = {
    "torch's Embedding": lambda: nn.Embedding(ROWS, DIM, sparse=True),
    "torch's EmbeddingBag": lambda: nn.EmbeddingBag(ROWS, DIM, sparse=True, mode="sum"),
}


# Rows are rescaled, or factors are guarded parameters themselves.
USES_OPERATIONS = {"Embedding, max_norm", "EmbeddingBag, max_norm", "weighted bags"}


def plain(model: nn.Module, optimizer: Any) -> None:
    """As an optimizer finds it."""


def tracked(model: nn.Module, optimizer: Any) -> None:
    optimizer.track(model)


def guarded(model: nn.Module, optimizer: Any) -> None:
    optimizer.track(model, guard=True)


def guarded_twice(model: nn.Module, optimizer: Any) -> None:
    guarded(model, optimizer)
    other = sparsestep.AdamW(model.parameters(), lr=0.01, semantics="dense")
    model.other_optimizer = [other]  # kept, or its guard would be idle
    guarded(model, other)


def unguarded(model: nn.Module, optimizer: Any) -> None:
    optimizer.track(model, guard=True).remove()


def own_memory(model: nn.Module, optimizer: Any) -> None:
    """Other memory for the same parameters."""
    guarded(model, optimizer)
    for param in model.parameters():
        param.data = param.data.clone()


WRAPPERS = [plain, tracked, guarded, guarded_twice, unguarded, own_memory]
each_wrapper = pytest.mark.parametrize("wrapper", WRAPPERS, ids=lambda w: w.__name__)


def made(make: Callable[[], nn.Module], wrapper: Callable[..., None]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = make()
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1, semantics="dense")
    wrapper(model, optimizer)
    return model, optimizer


def tables_of(model: nn.Module) -> list[Tensor]:
    return [param for name, param in model.named_parameters() if name != "factors"]


@each_wrapper
@pytest.mark.parametrize("kind", COMPACT)
@pytest.mark.filterwarnings("ignore::sparsestep.errors.StaleWarning")  # of max_norm, untracked
def test_gradients_of_our_modules_stay_compact(kind: str, wrapper: Callable[..., None]):
    model, optimizer = made(COMPACT[kind], wrapper)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS).square().sum().backward()
        for table in tables_of(model):
            assert type(table.grad) is CompactGrad
        optimizer.step()


@each_wrapper
@pytest.mark.parametrize("kind", COO)
def test_gradients_of_torchs_sparse_modules_stay_sparse(kind: str, wrapper: Callable[..., None]):
    model, optimizer = made(COO[kind], wrapper)
    for _ in range(2):
        optimizer.zero_grad()
        model(IDS).square().sum().backward()
        for table in tables_of(model):
            assert table.grad is not None
            assert table.grad.layout is torch.sparse_coo
        optimizer.step()


@pytest.mark.skipif(lookup.ext is None, reason="needs the native core")
@pytest.mark.parametrize("kind", sorted(set(COMPACT) - USES_OPERATIONS))
def test_the_core_looks_up_guarded_tables(kind: str, monkeypatch: pytest.MonkeyPatch):
    found = []
    core = lookup.ext

    class Watched:
        def look_up(self, *args: Any) -> Any:
            found.append(core.look_up(*args))
            return found[-1]

    monkeypatch.setattr(lookup, "ext", Watched())
    model, _ = made(COMPACT[kind], guarded)
    model(IDS)
    assert found
    assert all(each is not None for each in found)


@pytest.mark.parametrize("kind", [*COMPACT, *COO])
def test_a_guard_changes_no_bit(kind: str):
    make = COMPACT.get(kind) or COO[kind]
    one, optimizer = made(make, tracked)
    other, its_optimizer = made(make, guarded)
    for step in range(6):
        for model, opt in ((one, optimizer), (other, its_optimizer)):
            opt.zero_grad()
            model((IDS + 5 * step) % ROWS).square().sum().backward()
            opt.step()
    optimizer.catch_up()
    its_optimizer.catch_up()
    for param, its_param in zip(one.parameters(), other.parameters(), strict=True):
        assert same_bits(param.detach().clone(), its_param.detach().clone())


def test_a_module_outside_the_tracked_model_reads_current_rows():
    """It has no hooks: the guarded weight itself brings the rows of the lookup up to date."""
    model, optimizer = made(COMPACT["Embedding"], guarded)
    outside = sparsestep.nn.Embedding(ROWS, DIM)
    outside.weight = model.weight
    for step in range(4):
        optimizer.zero_grad()
        model((IDS + step % 2) % ROWS).square().sum().backward()
        optimizer.step()
    clock = optimizer.deferred[id(model.weight)]
    assert clock.num_deferred() > 0
    read = outside(IDS).detach().clone()
    assert clock.num_deferred() > 0  # no more than the rows of the lookup
    optimizer.catch_up()
    assert same_bits(read, model.weight.detach().clone()[IDS])
