"""Formulas of a user's own, tables and gradients for them, and checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsestep

SHAPE = (6, 4)


def adagrad_formula(param, grad, sum, *, lr, eps=1e-10):
    """Adagrad, as one writes it in a notebook."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


@sparsestep.rule(state={"sum": 0.0})
def adagrad(param, grad, sum, *, lr, eps=1e-10):
    """Adagrad, as one writes it in a notebook."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def table_of(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(randn(*SHAPE, dtype=dtype))


def rows_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient that holds some rows, one of them twice."""
    rows = torch.randint(0, SHAPE[0], (1, 3), generator=seeded(seed))
    rows = torch.cat([rows, rows[:, :1]], dim=1)
    return torch.sparse_coo_tensor(rows, randn(4, 4, seed=seed, dtype=dtype), SHAPE)


def train(opt: torch.optim.Optimizer, params: list[Tensor], steps: range = range(5)) -> None:
    for step in steps:
        for param in params:
            param.grad = rows_of(step, param.dtype)
        opt.step()


def trained(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    param = table_of(dtype)
    train(make([param], **options), [param])
    return param.detach()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)
