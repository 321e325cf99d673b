"""Models that read a table of twenty rows in every way, and how they are trained."""

from __future__ import annotations

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
    """The table itself, with ids of several dims, by position and by keyword."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=sparse)

    def forward(self, t: int) -> Tensor:
        if t % 2:
            return self.table(input=ids_of(t, 3).int()).sin().sum()
        return self.table(ids_of(t, 2, 2)).sin().sum()


class Bag(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(20, 3, mode="sum", sparse=sparse)

    def forward(self, t: int) -> Tensor:
        if t % 2:
            return self.table(ids_of(t, 2, 3)).sin().sum()
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


class Tied(nn.Module):
    """A table, and a head of the same weight that some batches use."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=sparse)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, t: int, with_head: bool = False) -> Tensor:
        hidden = self.layer(self.table(ids_of(t, 4)))
        loss = hidden.sin().sum()
        if with_head:
            loss = loss + 0.1 * self.head(hidden).cos().sum()
        return loss


class WeightedBags(Bag):
    """Reads a table twice, with weights that need a gradient: for that, backward reads it again."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse)
        self.weights = nn.Parameter(torch.ones(2, 4))

    def forward(self, t: int) -> Tensor:
        return self.read(ids_of(t, 2, 2), ids_of(t, 2, 2).flip(0))

    def read(self, *both: Tensor) -> Tensor:
        bags = [
            self.table(ids, per_sample_weights=weights.view(2, 2))
            for ids, weights in zip(both, self.weights, strict=True)
        ]
        return (bags[0] * bags[1]).sin().sum()


class Normalized(OneTable):
    """Its weight is computed from others."""

    def __init__(self, sparse: bool) -> None:
        super().__init__(sparse=False)
        nn.utils.parametrizations.weight_norm(self.table)


def densify(param: Tensor) -> None:
    assert param.grad is not None
    param.grad = param.grad.to_dense()


class Collection(nn.Module):
    """Bags of several tables in one call, by position and by keyword, or table by table."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        sizes = {"a": (20, 3), "b": (30, 3)}
        self.tables = sparsestep.nn.EmbeddingBagCollection(sizes, mode="sum")
        for param in self.parameters() if not sparse else ():
            param.register_post_accumulate_grad_hook(densify)

    def forward(self, t: int) -> Tensor:
        ids = ids_of(t, 3, 2, 2)
        found = self.tables(inputs=ids) if t % 2 else self.tables(ids)
        if t % 4 == 3:
            found = {name: table(ids[:, 0]) for name, table in self.tables.tables.items()}
        return (found["a"] * found["b"]).sin().sum()


class Ngrams(nn.Module):
    """Rows that tokens are hashed to; document ids by keyword."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = sparsestep.nn.NgramEmbedding(50, 3)
        if not sparse:
            self.table.weight.register_post_accumulate_grad_hook(densify)

    def forward(self, t: int) -> Tensor:
        documents = torch.tensor([[0, 0, 0, 1, 1, 1]] * 2)
        return self.table(ids_of(t, 2, 6) % 4, document_ids=documents).sin().sum()


MODELS = [OneTable, Bag, Nested, Tied, WeightedBags, Normalized, Collection, Ngrams]


def made(cls: Any, sparse: bool, optimizer: Any = sparsestep.AdamW, **more: Any) -> tuple[Any, Any]:
    """A model and its optimizer; with sparse gradients, under dense semantics."""
    torch.manual_seed(0)
    model = cls(sparse).double()
    if sparse:
        more = {"semantics": "dense", **more}
    options = {"momentum": 0.9} if optimizer is sparsestep.SGD else {}
    return model, optimizer(model.parameters(), lr=0.05, **options, **more)


def train(model: Any, opt: Any, steps: range, **how: Any) -> list[float]:
    losses = []
    for t in steps:
        opt.zero_grad()
        loss = model(t, **how)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    return losses


def close(ours: Any, theirs: Any) -> bool:
    """To a few roundings: numbers, tensors, or state dicts."""
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(close(ours[k], theirs[k]) for k in ours)
    if isinstance(ours, Tensor):
        return torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)
    return ours == pytest.approx(theirs, rel=1e-11)
