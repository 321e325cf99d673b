"""Deferred rows catch up where torch looks into a model: torch.func and torch.export."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vmap
from torch.nn import functional

import sparsestep

IDS = torch.tensor([[3, 5], [7, 8]])


class Doubled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 2


class OwnLookup(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return functional.embedding(input, self.weight)


class OneTable(sparsestep.nn.EmbeddingBagCollection):
    """A collection that is called as a single table is."""

    def __call__(self, ids: Tensor) -> Tensor:
        return super().__call__([ids])[0]


class Holder(nn.Module):
    """A layer of the user's own, which reads the table as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 3))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight.index_select(0, ids.flatten())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "torch": lambda: nn.Embedding(20, 3),
    "fused": lambda: sparsestep.nn.Embedding(20, 3),
    "bag": lambda: sparsestep.nn.EmbeddingBag(20, 3),
    "subclass": lambda: sparsestep.nn.fuse(Doubled(20, 3)),
    "own lookup": lambda: OwnLookup(20, 3),
    "own module": Holder,
    "n-grams": lambda: sparsestep.nn.NgramEmbedding(20, 3),
    "collection": lambda: OneTable([(20, 3)]),
}


def loss(model: nn.Module, weight: Tensor, ids: Tensor) -> Tensor:
    ((name, _),) = model.named_parameters()
    return functional_call(model, {name: weight}, (ids,)).sin().sum()


def weight_of(model: nn.Module) -> Tensor:
    (weight,) = model.parameters()
    return weight.detach()


def derivative(model: nn.Module) -> Tensor:
    weight = weight_of(model)
    return jvp(lambda weight: loss(model, weight, IDS), (weight,), (weight,))[1]


READS: dict[str, Callable[[nn.Module], Tensor]] = {
    "functional_call": lambda model: loss(model, weight_of(model), IDS),
    "grad": lambda model: grad(partial(loss, model))(weight_of(model), IDS),
    "per sample": lambda model: vmap(grad(partial(loss, model)), in_dims=(None, 0))(
        weight_of(model), IDS.unsqueeze(1)
    ),
    "vmap": lambda model: vmap(model)(IDS.unsqueeze(1)),
    "jvp": derivative,
    "export": lambda model: torch.export.export(model, (IDS,), strict=False).module()(IDS),
    "strict export": lambda model: torch.export.export(model, (IDS,), strict=True).module()(IDS),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:`torch.jit")
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("read", READS)
def test_rows_catch_up(model: str, read: str, guard: bool):
    if model == "collection" and "export" in read:
        pytest.skip("torch.export calls forward, whose argument is a list")
    if model in ("bag", "collection") and read == "jvp":
        pytest.skip("torch has no forward derivative of embedding_bag")
    table: Any = MODELS[model]()
    (weight,) = table.parameters()
    opt = sparsestep.AdamW(table.parameters(), lr=0.1, semantics="dense")
    opt.track(table, guard=guard)
    for rows in (torch.arange(20), torch.tensor([2])):  # the other rows miss the second step
        values = torch.ones(len(rows), 3)
        weight.grad = torch.sparse_coo_tensor(rows.unsqueeze(0), values, (20, 3))
        opt.step()
    assert opt.deferred[id(weight)].has_deferred
    found = READS[read](table)
    opt.catch_up()
    assert torch.equal(found, READS[read](table))
