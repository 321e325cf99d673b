"""A table that is the weight of a tied head as well, and how it is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep


def ids_of(t: int) -> Tensor:
    generator = torch.Generator().manual_seed(t)
    return (18 * torch.rand(4, generator=generator) ** 2).long()


class Model(nn.Module):
    """A table, and a head of the same weight that is used in some batches."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 3, sparse=sparse)
        self.layer = nn.Linear(3, 3)
        self.head = nn.Linear(3, 20, bias=False)
        self.head.weight = self.table.weight

    def forward(self, t: int, with_head: bool = False) -> Tensor:
        hidden = self.layer(self.table(ids_of(t)))
        loss = hidden.sin().sum()
        if with_head:
            loss = loss + 0.1 * self.head(hidden).cos().sum()
        return loss


def made(sparse: bool, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model(sparse).double()
    if not sparse:
        return model, torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, sparsestep.AdamW(model.parameters(), lr=0.05, semantics="dense", **options)


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
    if isinstance(ours, Tensor):
        return torch.allclose(ours, theirs, rtol=1e-11, atol=1e-13)
    return ours == pytest.approx(theirs, rel=1e-11)
