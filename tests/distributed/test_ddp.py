"""DistributedDataParallel: updates while gradients are being reduced, and sparse gradients."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsestep
from tests.ranks import Rank, ranks
from tests.table import same_bits
from tests.torch_versions import needs_lookups_in_graphs

ROWS, STEPS = 12, 5
BUCKET = 1e-6  # megabytes: every parameter has a bucket of its own, from the second step on

Options = dict[str, Any]
# Of rank and step: the ids of a batch.
Batches = Callable[[int, int], Tensor]

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], Options]] = {
    "AdamW": (sparsestep.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "SGD": (sparsestep.SGD, {"lr": 0.01, "momentum": 0.9}),
    "rounding": (
        sparsestep.Adam,
        {"lr": 0.01, "state_dtype": torch.bfloat16, "stochastic_rounding": True},
    ),
    "torch's": (torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
}


class Model(torch.nn.Module):
    def __init__(self, *, sparse: bool, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(ROWS, 4, sparse=sparse)
        self.layer = torch.nn.Linear(4, 3)
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids)).square().sum()


def result(model: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def full(rank: int, step: int) -> Tensor:
    """Ids with repetitions; the last row never comes."""
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(0, ROWS - 1, (6,), generator=generator)


def one_empty(rank: int, step: int) -> Tensor:
    return full(rank, step)[: 0 if rank == 1 and step % 2 else None]


def all_empty(rank: int, step: int) -> Tensor:
    return full(rank, step)[: 0 if step == 1 else None]


def plain(model: Model, cls: Any, options: Options, batches: Batches = full, **more: Any) -> Any:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET, **more)
    opt = cls(ddp.parameters(), **options)
    for step in range(STEPS):
        opt.zero_grad()
        ddp(batches(torch.distributed.get_rank(), step)).backward()
        opt.step()
    return result(model)


def overlapped(model: Model, cls: Any, options: Options, batches: Batches = full) -> Any:
    sparsestep.distributed.register()
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET)
    ddp._register_fused_optim(cls, **options)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batches(torch.distributed.get_rank(), step)).backward()
    return result(model)


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def assert_close(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-12)


@ranks(2)
@pytest.mark.parametrize("name", list(CLASSES))
def test_overlapped_updates_are_those_of_step(rank: Rank, name: str):
    cls, options = CLASSES[name]
    for sparse in (False, True) if name != "torch's" else (False,):
        ours = overlapped(Model(sparse=sparse), cls, options)
        assert equal(ours, plain(Model(sparse=sparse), cls, options))
        assert not equal(ours, result(Model(sparse=sparse)))
        assert all(equal(ours, theirs) for theirs in rank.gather(ours))


@ranks(2)
@pytest.mark.parametrize("batches", [full, one_empty, all_empty])
def test_sparse_gradients_are_reduced_and_few_rows_updated(rank: Rank, batches: Batches):
    """Also where a process has an empty batch; one that leaves the table out, DDP itself refuses.

    The same training in one process has the gradients of both batches, halved.
    """

    def model() -> Model:
        return Model(sparse=True, dtype=torch.float64)

    reference = model()
    before = result(reference)
    opt = sparsestep.Adam(reference.parameters(), lr=0.01)
    touched = set()
    for step in range(STEPS):
        opt.zero_grad()
        for index in range(2):
            ids = batches(index, step)
            touched |= set(ids.tolist())
            (reference(ids) / 2).backward()
        opt.step()
    options = {"lr": 0.01}
    trained = plain(model(), sparsestep.Adam, options, batches)
    assert all(equal(trained, theirs) for theirs in rank.gather(trained))
    assert_close(trained, result(reference))
    moved = (trained[0] != before[0]).any(dim=1)
    assert set(moved.nonzero().flatten().tolist()) == touched
    views = plain(model(), sparsestep.Adam, options, batches, gradient_as_bucket_view=True)
    assert equal(views, trained)
    assert equal(overlapped(model(), sparsestep.Adam, options, batches), trained)
    # Compact gradients
    fuse = sparsestep.nn.fuse
    assert equal(plain(fuse(model()), sparsestep.Adam, options, batches), trained)
    assert equal(overlapped(fuse(model()), sparsestep.Adam, options, batches), trained)


@ranks(2)
def test_only_the_chosen_parameters_are_updated(rank: Rank):
    model = Model(sparse=True)
    before = result(model)
    options = {"lr": 0.01, "optim_params": [model.layer.weight, model.table.weight]}
    after = overlapped(model, sparsestep.Adagrad, options)
    same = [same_bits(*each) for each in zip(before, after, strict=True)]
    assert same == [False, False, True]  # table, weight and bias of the layer


@ranks(2)
def test_zero_redundancy_optimizer_takes_the_optimizers(rank: Rank):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    options = {"optimizer_class": sparsestep.AdamW, "lr": 0.01}
    sharded = plain(Model(sparse=False), ZeroRedundancyOptimizer, options)
    assert equal(sharded, plain(Model(sparse=False), sparsestep.AdamW, {"lr": 0.01}))


# Compact gradients against torch's sparse ones


class Tables(torch.nn.Module):
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
        bags = [torch.nn.EmbeddingBag(ROWS, 4, mode="sum", **options) for _ in range(2)]
        is_ours = kinds is sparsestep.nn
        self.bags = kinds.EmbeddingBagCollection(bags) if is_ours else torch.nn.ModuleList(bags)
        self.out = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.sums(ids) + self.sums(ids[:, :1]) * self.means(ids)
        inputs = [ids, ids[:, :2]]
        if isinstance(self.bags, torch.nn.ModuleList):
            bags = [bag(each) for bag, each in zip(self.bags, inputs, strict=True)]
        else:
            bags = self.bags(inputs)
        found = found + bags[0] * bags[1]
        return self.out((found + self.rows(ids).sum(1) * self.tied(ids[:, 0])).sin()).sum()


def ids_of(step: int) -> Tensor:
    rank = torch.distributed.get_rank()
    generator = torch.Generator().manual_seed(2 * step + rank)
    return torch.randint(0, ROWS, (0 if step == 2 and rank else 5, 3), generator=generator)


def plain_loop(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    optimizer.zero_grad()
    ddp(ids_of(step)).backward()
    optimizer.step()


def zeroed(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    optimizer.zero_grad(set_to_none=False)
    ddp(ids_of(step)).backward()
    optimizer.step()


def accumulated(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    """The last backward reduces what all of them have added up."""
    optimizer.zero_grad()
    for part in range(3):
        with ddp.no_sync() if part < 2 else contextlib.nullcontext():
            ddp(ids_of(3 * step + part)).backward()
    optimizer.step()


def outside_of_ddp(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    """A part of the gradient comes from the module itself."""
    optimizer.zero_grad()
    with ddp.no_sync():
        ddp.module(ids_of(step)).backward()
    ddp(ids_of(step + 7)).backward()
    optimizer.step()


LOOPS: dict[str, tuple[Callable[..., None], Options]] = {
    "plain": (plain_loop, {}),
    "a bucket each": (plain_loop, {"bucket_cap_mb": 1e-6}),
    "views of buckets": (plain_loop, {"gradient_as_bucket_view": True}),
    "unused parameters": (plain_loop, {"find_unused_parameters": True}),
    "static graph": (plain_loop, {"static_graph": True}),
    "zeroed": (zeroed, {}),
    "no_sync": (accumulated, {}),
    "outside of DDP": (outside_of_ddp, {}),
}


def trained(model: torch.nn.Module, train: Callable[..., None], settings: Options) -> list[Tensor]:
    ddp = DistributedDataParallel(model, **settings)
    optimizer = sparsestep.Adam(ddp.parameters(), lr=0.01)
    for step in range(4):
        train(ddp, optimizer, step)
    return result(model)


@ranks(2)
@pytest.mark.parametrize("name", list(LOOPS))
def test_compact_gradients_train_like_torchs_sparse_ones(rank: Rank, name: str):
    ours = trained(Tables(sparsestep.nn), *LOOPS[name])
    assert all(equal(ours, theirs) for theirs in rank.gather(ours))
    assert_close(ours, trained(Tables(torch.nn), *LOOPS[name]))
    assert not equal(ours, result(Tables(sparsestep.nn)))


@ranks(2)
@needs_lookups_in_graphs
def test_a_compiled_model_trains_as_it_does_in_eager(rank: Rank):
    results = []
    for is_compiled in (False, True):
        model = sparsestep.nn.fuse(Model(sparse=True))
        ddp: Any = DistributedDataParallel(model)
        optimizer = sparsestep.AdamW(ddp.parameters())
        run = torch.compile(ddp, backend="aot_eager") if is_compiled else ddp
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")  # the compiler's
            for step in range(STEPS):
                optimizer.zero_grad()
                run(full(torch.distributed.get_rank(), step)).backward()
                optimizer.step()
        results.append(result(model))
    assert equal(*results)
    assert all(equal(results[1], theirs) for theirs in rank.gather(results[1]))
    assert model.table.graph_anchor is not None  # the lookup was in a graph


@ranks(2)
def test_ngrams(rank: Rank):
    """Both ranks train as one process does on the mean of their losses."""

    def made() -> sparsestep.nn.NgramEmbedding:
        torch.manual_seed(0)
        return sparsestep.nn.NgramEmbedding(ROWS, 4, weight=torch.randn(ROWS, 4).double())

    ours, theirs = made(), made()
    ddp = DistributedDataParallel(ours)
    optimizers = [sparsestep.Adam(each.parameters()) for each in (ours, theirs)]
    for step in range(3):
        tokens = [torch.randint(3, (1, 2 + step + each)) for each in range(2)]
        ddp(tokens[torch.distributed.get_rank()]).square().sum().backward()
        sum(theirs(each).square().sum() / 2 for each in tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(result(ours), result(theirs))
