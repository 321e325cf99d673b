"""Gradients of every layout for a user's own formula, and what must come of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.optim.own_rules import (
    SHAPE,
    FunctionalAdagrad,
    FunctionalSm3,
    adagrad,
    adagrad_formula,
    seeded,
)
from tests.table import sm3_by_rows


@dataclass
class Given:
    """A gradient, and the same as a sum of all its entries and what it holds."""

    grad: Any
    total: Tensor
    held: Tensor


def exact(*shape: int, seed: int) -> Tensor:
    """Values whose sums are exact in every order, none of them zero."""
    values = torch.randint(1, 17, shape, generator=seeded(seed)) / 8
    return values * (1 - 2 * torch.randint(0, 2, shape, generator=seeded(seed + 1)))


def some_rows(seed: int) -> Given:
    rows = torch.tensor([[4, 1, 4]])
    grad = torch.sparse_coo_tensor(rows, exact(3, 4, seed=seed), SHAPE)
    held = torch.zeros(SHAPE, dtype=torch.bool)
    held[[1, 4]] = True
    return Given(grad, grad.to_dense(), held)


def elements(seed: int) -> Tensor:
    """A dense tensor that is zero in many places; a different one for each seed."""
    return exact(*SHAPE, seed=seed) * torch.randint(0, 2, SHAPE, generator=seeded(seed + 2))


def converted(convert: Callable[[Tensor], Tensor]) -> Callable[[int], Given]:
    def make(seed: int) -> Given:
        total = elements(seed)
        return Given(convert(total), total, total != 0)

    return make


def in_blocks(convert: Callable[..., Tensor]) -> Callable[[int], Given]:
    """Of a blocked layout, whole blocks are held."""

    def make(seed: int) -> Given:
        total = elements(seed) * torch.tensor([1.0, 1, 0, 0, 1, 1])[:, None]
        total[:2, 2:] = 0
        held = total.unfold(0, 2, 2).unfold(1, 2, 2).ne(0).any(-1).any(-1)
        held = held.repeat_interleave(2, 0).repeat_interleave(2, 1)
        return Given(convert(total, (2, 2)), total, held)

    return make


def masked(seed: int) -> Given:
    values, held = exact(*SHAPE, seed=seed), elements(seed) != 0
    return Given(torch.masked.masked_tensor(values, held), values * held, held)


def strided(seed: int) -> Given:
    total = exact(*SHAPE, seed=seed)
    return Given(total, total, torch.ones(SHAPE, dtype=torch.bool))


def by_hand(seed: int) -> Given:
    same = some_rows(seed)
    grad = sparsestep.IndexedGrad(same.grad._indices()[0], same.grad._values())
    return Given(grad, same.total, same.held)


LAYOUTS: dict[str, Callable[[int], Given]] = {
    "COO, rows": some_rows,
    "COO, elements": converted(Tensor.to_sparse_coo),
    "CSR": converted(Tensor.to_sparse_csr),
    "CSC": converted(Tensor.to_sparse_csc),
    "BSR": in_blocks(Tensor.to_sparse_bsr),
    "BSC": in_blocks(Tensor.to_sparse_bsc),
    "MaskedTensor": masked,
    "strided": strided,
    "IndexedGrad": by_hand,
}

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
of_masked_tensors = pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
of_compressed = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")


def adagrad_oracle(param: Tensor, kept: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    new, sum = adagrad_formula(param, given.total, kept, lr=0.1)
    return torch.where(given.held, new, param), torch.where(given.held, sum, kept)


def sm3_oracle(param: Tensor, kept: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    bound = kept[:, None] + given.total.square()
    new = param - 0.1 * given.total / (bound.sqrt() + 1e-10)
    held = given.held
    return torch.where(held, new, param), torch.where(held.any(1), bound.amax(1), kept)


CASES = {
    "per element": (adagrad, FunctionalAdagrad, adagrad_oracle, "sum", SHAPE),
    "per row": (sm3_by_rows, FunctionalSm3, sm3_oracle, "accumulator", SHAPE[:1]),
}
each_kind = pytest.mark.parametrize("kind", CASES)
