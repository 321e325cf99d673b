"""A model with sparse and dense gradients, and its batches."""

from __future__ import annotations

import torch
from torch import Tensor


class Model(torch.nn.Module):
    """One table with sparse gradients, one layer with dense ones."""

    def __init__(self, *, sparse: bool = True) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(12, 4, sparse=sparse)
        self.layer = torch.nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids))

    def bits(self) -> list[Tensor]:
        return [param.detach().clone() for param in self.parameters()]


def batch(step: int) -> Tensor:
    """Ids with repetitions; 11 never comes."""
    return torch.randint(0, 11, (9,), generator=torch.Generator().manual_seed(step))


def loss_of(model: Model, step: int) -> Tensor:
    return model(batch(step)).square().mean()
