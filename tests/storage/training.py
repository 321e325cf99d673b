"""Tables in files and in memory, trained alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import load, manifest, save
from tests.table import same_bits

ROWS, DIM = 300, 24


def initial(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table_in(
    path: Path,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[list[Tensor]], RuleOptimizer] | None = None,
) -> sparsestep.storage.Mapped:
    table = sparsestep.storage.mapped(path, (ROWS, DIM), dtype, optimizer=optimizer)
    table.copy_(initial(dtype=dtype))
    return table


def embedding(table: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(table, freeze=False, sparse=True)


def batches(seed: int) -> Iterator[Tensor]:
    """Some rows come often, one after the other is new."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.rand(9, generator=chance).pow(3) * ROWS).long()


def train(model: nn.Module, optimizer: RuleOptimizer, steps: int, seed: int = 0) -> None:
    for rows, _ in zip(batches(seed), range(steps), strict=False):
        optimizer.zero_grad()
        model(rows).square().sum().backward()
        optimizer.step()


def state_of(optimizer: RuleOptimizer) -> list[Tensor]:
    """Every tensor of its state, in order."""
    return [
        torch.as_tensor(value)
        for record in optimizer.state_dict()["state"].values()
        for value in record.values()
    ]


class Run:
    """A model with a table in a file and other parameters, and what it was at checkpoints."""

    def __init__(self, folder: Path, optimizer=sparsestep.Adam, together=False, **options):
        self.folder = folder
        make = functools.partial(optimizer, lr=0.1, **options)
        table = table_in(folder / "table", optimizer=make if together else None)
        self.model = nn.Sequential(embedding(table), nn.Linear(DIM, 3))
        nn.init.constant_(self.model[1].weight, 0.1)
        self.optimizer = make(self.model.parameters())
        if options.get("semantics") == "dense":
            self.optimizer.track(self.model)
        self.batches = batches(0)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(next(self.batches)).square().sum().backward()
            self.optimizer.step()

    def save(self, **more) -> None:
        save(self.folder / "saved", self.model, self.optimizer, **more)

    def load(self):
        return load(self.folder / "saved", self.model, self.optimizer)

    @property
    def now(self) -> list[Tensor]:
        tensors = [*self.model.state_dict().values(), *state_of(self.optimizer)]
        return [tensor.clone() for tensor in tensors]

    @property
    def journals(self) -> list[int]:
        found = manifest.read(self.folder / "saved")
        return [sum(part.rows for part in each.parts) for each in found.journals]


def same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(same_bits, before, after))
