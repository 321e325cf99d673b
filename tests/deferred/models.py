"""Models that read a table of twenty rows in every way, and how they are trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep


def ids_of(t: int, *shape: int) -> Tensor:
    """Few ids often, many rarely; the last two never."""
    generator = torch.Generator().manual_seed(t)
    return (18 * torch.rand(shape, generator=generator) ** 2).long()


class OneTable(nn.Module):
    """The table itself, with ids of several dims."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=sparse)

    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 2, 2)).sin().sum()


class ByKeyword(OneTable):
    def forward(self, t: int) -> Tensor:
        return self.table(input=ids_of(t, 3).int()).sin().sum()


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 3, mode="sum", sparse=sparse)


class BagWithOffsets(Bag):
    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 5), torch.tensor([0, 2])).sin().sum()


class BagOfRows(Bag):
    def forward(self, t: int) -> Tensor:
        return self.table(ids_of(t, 2, 3)).sin().sum()


class BagByKeyword(Bag):
    def forward(self, t: int) -> Tensor:
        weights = torch.ones(5, dtype=self.table.weight.dtype)
        offsets = torch.tensor([0, 0, 4])
        bag = self.table(input=ids_of(t, 5), offsets=offsets, per_sample_weights=weights)
        return bag.sin().sum()


class Nested(nn.Module):
    """Two tables, one of them used twice, and layers with dense gradients."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a": nn.Sequential(nn.Embedding(20, 3, sparse=sparse), nn.Linear(3, 3))}
        )
        self.table = nn.Embedding(20, 3, sparse=sparse)

    def forward(self, t: int) -> Tensor:
        read = self.table(ids_of(t, 2)) * self.table(ids_of(t + 1, 2))
        return (self.parts["a"](ids_of(t, 2)) + read).sin().sum()


MODELS = [OneTable, ByKeyword, BagWithOffsets, BagOfRows, BagByKeyword, Nested]
each_model = pytest.mark.parametrize("model", MODELS, ids=lambda m: m.__name__)


def made(
    cls: Any, sparse: bool, optimizer: Any = sparsestep.AdamW, **more: Any
) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = cls(sparse).double()
    if sparse:
        more = {"semantics": "dense", **more}
    options = {"momentum": 0.9} if optimizer is sparsestep.SGD else {}
    return model, optimizer(model.parameters(), lr=0.05, **options, **more)


def train(model: nn.Module, opt: Any, steps: range) -> Iterator[float]:
    for t in steps:
        opt.zero_grad()
        loss = model(t)
        loss.backward()
        opt.step()
        yield float(loss.detach())


def finish(model: nn.Module, opt: Any, steps: range) -> list[float]:
    return list(train(model, opt, steps))
