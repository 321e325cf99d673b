"""Tables in files and in memory, trained alike."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optimizer.base import RuleOptimizer

ROWS, DIM = 300, 24


def initial(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table_in(path: Path, dtype: torch.dtype = torch.float32) -> sparsestep.storage.Mapped:
    table = sparsestep.storage.mapped(path, (ROWS, DIM), dtype)
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
