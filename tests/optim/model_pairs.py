"""Two equal models: one takes its steps within backward, the other after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import STATEFUL, same_bits, state_tensors, steps_of

STEPS = 4
each_stateful = pytest.mark.parametrize("variant", STATEFUL, ids=str)


class Model(torch.nn.Module):
    """Tables with sparse and dense gradients, one of them looked up twice, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.nn.Embedding(12, 4, sparse=True)
        self.dense = torch.nn.Embedding(12, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = self.sparse(ids) + self.dense(ids) * self.sparse(ids + 1)
        return self.last(self.layer(looked_up).tanh() + self.layer(looked_up))


def loss_of(model: Model, number: int) -> Tensor:
    ids = torch.randint(0, 10, (7,), generator=torch.Generator().manual_seed(number))
    return model(ids).square().mean()


def pair(make: Callable[..., RuleOptimizer], **options: Any) -> list[tuple[Model, RuleOptimizer]]:
    """Two equal models, each with its optimizer: two groups with learning rates of their own."""
    found = []
    for _ in range(2):
        model = Model()
        first = [*model.sparse.parameters(), *model.layer.parameters()]
        second = [*model.dense.parameters(), *model.last.parameters()]
        groups = [{"params": first}, {"params": second, "lr": 0.05}]
        found.append((model, make(groups, **options)))
    return found


def assert_same(one: tuple[Model, RuleOptimizer], other: tuple[Model, RuleOptimizer]) -> None:
    ours, theirs = (
        [*(param.detach() for param in model.parameters()), *state_tensors(opt)]
        for model, opt in (one, other)
    )
    assert len(ours) == len(theirs)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, its), number
    for mine, its in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert steps_of(one[1], mine) == steps_of(other[1], its)


def train(model: Model, opt: RuleOptimizer, numbers: range) -> None:
    """As usual."""
    for number in numbers:
        opt.zero_grad()
        loss_of(model, number).backward()
        opt.step()


def has_no_gradients(model: Model) -> bool:
    return all(param.grad is None for param in model.parameters())
