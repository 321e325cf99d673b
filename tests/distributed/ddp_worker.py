"""One of two processes that train a model by DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import sparsestep
import sparsestep.distributed
from sparsestep.optimizer.base import RuleOptimizer
from tests.distributed import ddp_compact
from tests.distributed.pair import Results, main

ROWS, STEPS, RANKS = 12, 5, 2
BUCKET = 1e-6  # megabytes: every parameter has a bucket of its own, from the second step on

Options = dict[str, Any]
# Of rank and step: the ids of a batch.
Batches = Callable[[int, int], Tensor]

CLASSES: list[tuple[type[RuleOptimizer], Options]] = [
    (sparsestep.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (sparsestep.SGD, {"lr": 0.01, "momentum": 0.9}),
    (sparsestep.Adagrad, {"lr": 0.1}),
    (sparsestep.RowwiseAdam, {"lr": 0.01}),
]


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

    def result(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def name_of(cls: type[Optimizer], options: Options) -> str:
    return "-".join([cls.__name__, *(f"{k}={v}" for k, v in options.items())])


def full(rank: int, step: int) -> Tensor:
    """Ids with repetitions; the last row never comes."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    return torch.randint(0, ROWS - 1, (6,), generator=generator)


def one_empty(rank: int, step: int) -> Tensor:
    return full(rank, step)[: 0 if rank == 1 and step % 2 else None]


def all_empty(rank: int, step: int) -> Tensor:
    return full(rank, step)[: 0 if step == 1 else None]


BATCHES: dict[str, Batches] = {"full": full, "one empty": one_empty, "all empty": all_empty}


def plain(
    model: Model,
    optimizer: Callable[..., Optimizer],
    options: Options,
    batches: Batches = full,
    **settings: Any,
) -> list[Tensor]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET, **settings)
    opt = optimizer(ddp.parameters(), **options)
    for step in range(STEPS):
        opt.zero_grad()
        ddp(batches(dist.get_rank(), step)).backward()
        opt.step()
    return model.result()


def overlapped(
    model: Model,
    optimizer: type[Optimizer],
    options: Options,
    batches: Batches = full,
    **settings: Any,
) -> list[Tensor]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=BUCKET, **settings)
    ddp._register_fused_optim(optimizer, **options)
    for step in range(STEPS):
        ddp.zero_grad()
        ddp(batches(dist.get_rank(), step)).backward()
    return model.result()


def work(rank: int, meeting: str) -> Results:
    sparsestep.distributed.register()
    from torch.distributed.optim import ZeroRedundancyOptimizer

    dist.init_process_group(
        "gloo",
        init_method=meeting,
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    found: Results = {}
    for sparse in (False, True):
        for cls, options in CLASSES:
            found["overlap", sparse, name_of(cls, options)] = (
                plain(Model(sparse=sparse), cls, options),
                overlapped(Model(sparse=sparse), cls, options),
            )
    found["torch"] = (
        plain(Model(sparse=False), torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
        overlapped(Model(sparse=False), torch.optim.SGD, {"lr": 0.01, "momentum": 0.9}),
    )
    for name, batches in BATCHES.items():
        for view in (False, True):
            model = Model(sparse=True, dtype=torch.float64)
            found["sparse", name, view] = plain(
                model, sparsestep.Adam, {"lr": 0.01}, batches, gradient_as_bucket_view=view
            )
        model = Model(sparse=True, dtype=torch.float64)
        found["sparse overlap", name] = overlapped(model, sparsestep.Adam, {"lr": 0.01}, batches)
        model = sparsestep.nn.fuse(Model(sparse=True, dtype=torch.float64))
        found["compact", name] = plain(model, sparsestep.Adam, {"lr": 0.01}, batches)
        model = sparsestep.nn.fuse(Model(sparse=True, dtype=torch.float64))
        found["compact overlap", name] = overlapped(model, sparsestep.Adam, {"lr": 0.01}, batches)
    found |= ddp_compact.work()
    model = Model(sparse=True)
    before = model.result()
    options = {"lr": 0.01, "optim_params": [model.layer.weight, model.table.weight]}
    found["some"] = (before, overlapped(model, sparsestep.Adagrad, options))
    options = {"lr": 0.01, "state_dtype": torch.bfloat16, "stochastic_rounding": True}
    torch.manual_seed(7)
    found["rounding"] = (
        plain(Model(sparse=True), sparsestep.Adam, options),
        overlapped(Model(sparse=True), sparsestep.Adam, options),
    )
    found["zero"] = (
        plain(Model(sparse=False), sparsestep.AdamW, {"lr": 0.01}),
        plain(
            Model(sparse=False),
            ZeroRedundancyOptimizer,
            {"optimizer_class": sparsestep.AdamW, "lr": 0.01},
        ),
    )
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    main(work)
