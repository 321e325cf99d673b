"""Tables of torch's and of ours, trained alike by DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import sparsestep
from tests.distributed.pair import Results

ROWS, STEPS = 12, 4


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
        self.out = torch.nn.Linear(4, 1, dtype=torch.float64)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.sums(ids) + self.sums(ids[:, :1]) * self.means(ids)
        return self.out((found + self.rows(ids).sum(1) * self.tied(ids[:, 0])).sin()).sum()

    def result(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def ids_of(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
    return torch.randint(
        0, ROWS, (0 if step == 2 and dist.get_rank() else 5, 3), generator=generator
    )


Train = Callable[[DistributedDataParallel, Any, int], None]


def usual(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
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


def beside(ddp: DistributedDataParallel, optimizer: Any, step: int) -> None:
    """A part of the gradient comes from the module itself."""
    optimizer.zero_grad()
    with ddp.no_sync():
        ddp.module(ids_of(step)).backward()
    ddp(ids_of(step + 7)).backward()
    optimizer.step()


LOOPS: dict[str, tuple[Train, dict[str, Any]]] = {
    "usual": (usual, {}),
    "a bucket each": (usual, {"bucket_cap_mb": 1e-6}),
    "views of buckets": (usual, {"gradient_as_bucket_view": True}),
    "unused parameters": (usual, {"find_unused_parameters": True}),
    "static graph": (usual, {"static_graph": True}),
    "zeroed": (zeroed, {}),
    "no_sync": (accumulated, {}),
    "beside": (beside, {}),
}


def trained(model: torch.nn.Module, train: Train, settings: dict[str, Any]) -> list[Tensor]:
    ddp = DistributedDataParallel(model, **settings)
    optimizer = sparsestep.Adam(ddp.parameters(), lr=0.01)
    for step in range(STEPS):
        train(ddp, optimizer, step)
    return [param.detach().clone() for param in model.parameters()]


class Lists(torch.nn.Module):
    """The tables of a collection, looked up one after the other or all at once."""

    def __init__(self, together: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            torch.nn.EmbeddingBag(ROWS, 4, sparse=True, mode="sum", dtype=torch.float64)
            for _ in range(3)
        ]
        kind = sparsestep.nn.EmbeddingBagCollection if together else torch.nn.ModuleList
        self.tables = kind(tables)
        self.together = together

    def forward(self, ids: Tensor) -> Tensor:
        each = [ids, ids[:, :2], ids[:, :1]]
        if self.together:
            found = self.tables(each)
        else:
            found = [table(some) for table, some in zip(self.tables, each, strict=True)]
        return torch.stack(found).sin().square().sum()


def work() -> Results:
    found: Results = {}
    for name, (train, settings) in LOOPS.items():
        found["torch's", name] = trained(Tables(torch.nn), train, settings)
        found["ours", name] = trained(Tables(sparsestep.nn), train, settings)
    found["collection"] = tuple(trained(Lists(t), usual, {}) for t in (False, True))
    return found
