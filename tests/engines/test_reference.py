"""The reference engine computes everything before it writes anything."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsestep


@sparsestep.rule(state={"left": 0.0, "right": 1.0})
def swap(param: Tensor, grad: Tensor, left: Tensor, right: Tensor, *, lr: float):
    """Returns what it was given."""
    return param - lr * grad, right, left


@pytest.mark.parametrize("sparse", [False, True])
def test_a_formula_may_return_what_it_was_given(sparse: bool):
    param = torch.nn.Parameter(torch.zeros(3, 2))
    optimizer = swap([param], lr=1.0)
    param.grad = torch.ones(3, 2).to_sparse(1) if sparse else torch.ones(3, 2)
    optimizer.step()
    assert bool((optimizer.state[param]["left"] == 1).all())
    assert bool((optimizer.state[param]["right"] == 0).all())


def test_a_value_that_stays_in_a_tensor_with_gaps():
    """With a learning rate of zero FTRL keeps its sum; torch copies no tensor onto itself."""
    param = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64)[::2])
    optimizer = sparsestep.Ftrl([param], lr=torch.tensor(0.0), engine="reference")
    param.grad = torch.randn(1, dtype=torch.complex64)
    optimizer.step()
    assert bool(param.isfinite().all())
