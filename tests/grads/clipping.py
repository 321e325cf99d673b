"""Parameters with gradients to be clipped, and how gradients are compared."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tests.generate.grads import as_dense

NORM_TYPES = (2.0, 1.0, 0.5, 3.0, math.inf, -math.inf, 0.0, -1.0, -2.0)


def with_grad(grad: Tensor) -> Tensor:
    param = torch.zeros(1, dtype=grad.dtype).expand(grad.shape)
    param.grad = grad
    return param


def coo(indices: list, values: Tensor | list, shape: tuple, dtype=torch.float32) -> Tensor:
    values = torch.as_tensor(values, dtype=dtype)
    return torch.sparse_coo_tensor(torch.tensor(indices).reshape(-1, len(values)), values, shape)


def assert_same_gradients(ours: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    for our, their in zip(ours, theirs, strict=True):
        if their.grad is None:
            assert our.grad is None
            continue
        assert our.grad.dtype == their.grad.dtype
        left, right = as_dense(our.grad), as_dense(their.grad)
        torch.testing.assert_close(left, right, rtol=tolerance, atol=tolerance)


def form(param: Tensor) -> object:
    """What scaling leaves as it is."""
    grad = param.grad
    if grad is None or not grad.is_sparse:
        return id(grad)
    return id(grad), grad._indices().tolist(), grad.is_coalesced()
