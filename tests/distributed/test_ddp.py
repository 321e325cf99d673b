"""DistributedDataParallel: updates while gradients are being reduced, and sparse gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsestep
from tests.ranks import Rank, ranks
from tests.table import all_same_bits, same_bits
from tests.torch_versions import needs_lookups_in_graphs

ROWS, STEPS = 12, 5
BUCKET = 1e-6  # megabytes: every parameter has a bucket of its own, from the second step on

Options = dict[str, Any]
# Of rank and step: the ids of a batch.
Batches = Callable[[int, int], Tensor]


class Model(nn.Module):
    def __init__(self, *, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(ROWS, 4, sparse=sparse, dtype=dtype)
        self.layer = nn.Linear(4, 3, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids)).square().sum()


def result(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def full(rank: int, step: int) -> Tensor:
    """Ids with repetitions; the last row never comes."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(0, ROWS - 1, (5, 3), generator=generator)


def one_empty(rank: int, step: int) -> Tensor:
    return full(rank, step)[: 0 if rank == 1 and step % 2 else None]


def all_empty(rank: int, step: int) -> Tensor:
    return full(rank, step)[: 0 if step == 1 else None]


def backward(ddp: Any, batches: Batches, step: int) -> None:
    ddp(batches(torch.distributed.get_rank(), step)).backward()


def accumulated(ddp: Any, batches: Batches, step: int) -> None:
    """The last backward reduces what all of them have added up."""
    for part in range(3):
        with ddp.no_sync() if part < 2 else contextlib.nullcontext():
            backward(ddp, batches, 3 * step + part)


def outside_of_ddp(ddp: Any, batches: Batches, step: int) -> None:
    """A part of the gradient comes from the module itself."""
    with ddp.no_sync():
        backward(ddp.module, batches, step)
    backward(ddp, batches, step + 7)


def trained(
    model: nn.Module,
    cls: Any = sparsestep.Adam,
    options: Options | None = None,
    batches: Batches = full,
    work: Callable[..., None] = backward,
    wrap: Callable[[Any], Any] = lambda ddp: ddp,
    is_zeroed: bool = False,
    **settings: Any,
) -> list[Tensor]:
    ddp = DistributedDataParallel(model, **settings)
    opt = cls(ddp.parameters(), **(options or {"lr": 0.01}))
    run = wrap(ddp)
    for step in range(STEPS):
        opt.zero_grad(set_to_none=not is_zeroed)
        work(run, batches, step)
        opt.step()
    return result(model)


def overlapped(model: Model, cls: Any, options: Options, batches: Batches = full) -> list[Tensor]:
    sparsestep.distributed.register()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET)
    ddp._register_fused_optim(cls, **options)
    for step in range(STEPS):
        ddp.zero_grad()
        backward(ddp, batches, step)
    return result(model)


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


CLASSES: dict[str, tuple[type[torch.optim.Optimizer], Options]] = {
    "AdamW": (sparsestep.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (sparsestep.SGD, {"lr": 0.01, "momentum": 0.9}),
    "rounding": (
        sparsestep.Adam,
        {"lr": 0.01, "state_dtype": torch.bfloat16, "stochastic_rounding": True},
    ),
    "torch's": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
}


@ranks(2)
@pytest.mark.parametrize("name", list(CLASSES))
def test_overlapped_updates_are_those_of_step(rank: Rank, name: str):
    cls, options = CLASSES[name]
    for sparse in (False, True) if name != "torch's" else (False,):
        ours = overlapped(Model(sparse=sparse), cls, options)
        assert all_same_bits(
            ours, trained(Model(sparse=sparse), cls, options, bucket_cap_mb=BUCKET)
        )
        assert not all_same_bits(ours, result(Model(sparse=sparse)))
        assert all(all_same_bits(ours, theirs) for theirs in rank.gather(ours))


@ranks(2)
@pytest.mark.parametrize("batches", [full, one_empty, all_empty])
def test_sparse_gradients_are_reduced_and_few_rows_updated(rank: Rank, batches: Batches):
    """Also where a process has an empty batch; one that leaves the table out, DDP itself refuses.

    The same training in one process has the gradients of both batches, halved.
    """

    def model() -> Model:
        return Model(sparse=True, dtype=torch.float64)

    reference, fuse = model(), sparsestep.nn.fuse
    before = result(reference)
    opt = sparsestep.Adam(reference.parameters(), lr=0.01)
    used = set()
    for step in range(STEPS):
        opt.zero_grad()
        for index in range(2):
            ids = batches(index, step)
            used |= set(ids.flatten().tolist())
            (reference(ids) / 2).backward()
        opt.step()
    ours = trained(model(), batches=batches, bucket_cap_mb=BUCKET)
    assert all(all_same_bits(ours, theirs) for theirs in rank.gather(ours))
    assert_close(ours, result(reference))
    moved = (ours[0] != before[0]).any(dim=1)
    assert set(moved.nonzero().flatten().tolist()) == used
    views = {"bucket_cap_mb": BUCKET, "gradient_as_bucket_view": True}
    assert all_same_bits(trained(model(), batches=batches, **views), ours)
    assert all_same_bits(trained(fuse(model()), batches=batches, bucket_cap_mb=BUCKET), ours)
    for each in (model(), fuse(model())):
        assert all_same_bits(overlapped(each, sparsestep.Adam, {"lr": 0.01}, batches), ours)


@ranks(2)
def test_chosen_parameters_and_the_zero_redundancy_optimizer(rank: Rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = Model(sparse=True)
    before = result(model)
    options = {"lr": 0.01, "optim_params": [model.layer.weight, model.table.weight]}
    after = overlapped(model, sparsestep.Adagrad, options)
    same = [same_bits(*each) for each in zip(before, after, strict=True)]
    assert same == [False, False, True]  # table, weight and bias of the layer
    options = {"optimizer_class": sparsestep.AdamW, "lr": 0.01}
    sharded = trained(Model(sparse=False), ZeroRedundancyOptimizer, options)
    assert all_same_bits(sharded, trained(Model(sparse=False), sparsestep.AdamW))


# Compact gradients against torch's sparse ones


class Tables(nn.Module):
    """Several tables, of which one is looked up twice and one is shared by two modules."""

    def __init__(self, kinds: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"sparse": True, "dtype": torch.float64}
        self.rows = kinds.Embedding(ROWS, 4, padding_idx=1, **options)
        self.sums = kinds.EmbeddingBag(ROWS, 4, mode="sum", **options)
        self.means = kinds.EmbeddingBag(ROWS, 4, **options)
        self.tied = kinds.Embedding(ROWS, 4, **options)
        self.tied.weight = self.rows.weight
        bags = [nn.EmbeddingBag(ROWS, 4, mode="sum", **options) for _ in range(2)]
        is_ours = kinds is sparsestep.nn
        self.bags = kinds.EmbeddingBagCollection(bags) if is_ours else nn.ModuleList(bags)
        self.out = nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.sums(ids) + self.sums(ids[:, :1]) * self.means(ids)
        inputs = [ids, ids[:, :2]]
        if isinstance(self.bags, nn.ModuleList):
            bags = [bag(each) for bag, each in zip(self.bags, inputs, strict=True)]
        else:
            bags = self.bags(inputs)
        found = found + bags[0] * bags[1]
        return self.out((found + self.rows(ids).sum(1) * self.tied(ids[:, 0])).sin()).sum()


LOOPS: dict[str, Options] = {
    "plain": {},
    "a bucket each": {"bucket_cap_mb": BUCKET},
    "views of buckets": {"gradient_as_bucket_view": True},
    "unused parameters": {"find_unused_parameters": True},
    "static graph": {"static_graph": True},
    "zeroed": {"is_zeroed": True},
    "no_sync": {"work": accumulated},
    "outside of DDP": {"work": outside_of_ddp},
}


@ranks(2)
@pytest.mark.parametrize("name", list(LOOPS))
def test_compact_gradients_train_like_torchs_sparse_ones(rank: Rank, name: str):
    ours = trained(Tables(sparsestep.nn), batches=one_empty, **LOOPS[name])
    assert all(all_same_bits(ours, theirs) for theirs in rank.gather(ours))
    assert_close(ours, trained(Tables(nn), batches=one_empty, **LOOPS[name]))
    assert not all_same_bits(ours, result(Tables(sparsestep.nn)))


@ranks(2)
@needs_lookups_in_graphs
def test_a_compiled_model_trains_as_it_does_in_eager(rank: Rank):
    models = [sparsestep.nn.fuse(Model(sparse=True)) for _ in range(2)]
    eager = trained(models[0], sparsestep.AdamW)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # the compiler's
        compiled = trained(
            models[1], sparsestep.AdamW, wrap=lambda ddp: torch.compile(ddp, backend="aot_eager")
        )
    assert all_same_bits(eager, compiled)
    assert all(all_same_bits(compiled, theirs) for theirs in rank.gather(compiled))
    assert models[1].table.graph_anchor is not None  # the lookup was in a graph
