"""What a user's formula is given: slots, each once, in the widest dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.own_rules import trained


def test_what_the_function_sees():
    """Slots and blocks; each slot once, with the sum of its entries; nothing for no entries."""
    seen: list[tuple[Any, ...]] = []

    @sparsestep.rule(state={"kept": 0.0})
    def by_element(param, grad, kept):
        seen.append((param.tolist(), grad.tolist()))
        return param, kept

    weight = torch.arange(6.0).view(3, 2)
    opt = type("Watched", (FunctionalOptimizer,), {"optimizer_class": by_element})(
        [weight], engine="reference"
    )
    opt.step([sparsestep.IndexedGrad(torch.tensor([2, 0, 2]), torch.ones(3, 2))])
    opt.step([torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()])
    opt.step([torch.ones(3, 2)])
    opt.step([torch.zeros(3, 2).to_sparse_coo()])
    assert seen == [
        ([[0, 1], [4, 5]], [[1, 1], [2, 2]]),
        ([[1], [4]], [[3], [4]]),
        ([[0, 1, 2, 3, 4, 5]], [[1] * 6]),
    ]
    assert int(opt.state[weight]["step"]) == 4

    @sparsestep.rule(row_state={"kept": 0.0})
    def by_row(param, grad, kept):
        seen.append((param.tolist(), grad.tolist(), tuple(kept.shape)))
        return param, kept

    seen.clear()
    opt = type("Watched", (FunctionalOptimizer,), {"optimizer_class": by_row})(
        [weight], engine="reference"
    )
    opt.step([torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()])
    opt.step([torch.ones(3, 2)])
    assert seen == [
        ([[0, 1], [4, 5]], [[0, 3], [4, 0]], (2, 1)),
        ([[0, 1], [2, 3], [4, 5]], [[1, 1]] * 3, (3, 1)),
    ]


@pytest.mark.parametrize(
    ("param", "state", "seen"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_arithmetic_is_in_the_widest_dtype_and_at_least_float32(
    param: torch.dtype, state: torch.dtype | None, seen: torch.dtype
):
    found = set()

    @sparsestep.rule(state={"kept": 0.0})
    def watched(param, grad, kept):
        found.update({param.dtype, grad.dtype, kept.dtype})
        return param, kept

    trained(watched, param, state_dtype=state, engine="reference")
    assert found == {seen}


def test_autograd_does_not_see_the_formula():
    seen = set()

    @sparsestep.rule
    def watched(param, grad, *, lr):
        new = param - lr * grad
        seen.add((param.requires_grad, new.requires_grad, torch.is_grad_enabled()))
        return new

    with torch.enable_grad():
        trained(watched, lr=0.1, engine="reference")
    assert seen == {(False, False, False)}
