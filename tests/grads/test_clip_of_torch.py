"""Torch's own clipping of sparse gradients, in the releases that have it."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.torch_versions import needs_clipping_of_sparse_gradients


def clipped(clip: Callable[..., Tensor], norm_type: float) -> list[Tensor]:
    """The norm, and the gradients of two tables that share their values and of a layer."""
    rows = torch.tensor([3, 1, 3, 3])
    tables = [torch.nn.Parameter(torch.zeros(5, 2)) for _ in range(2)]
    layer = torch.nn.Parameter(torch.ones(2))
    found = sum(torch.nn.functional.embedding(rows, table, sparse=True) for table in tables)
    ((found + layer) * torch.arange(1.0, 9.0).reshape(4, 2)).sum().backward()
    params = [*tables, layer]
    norm = clip(params, 0.5, norm_type=norm_type)
    return [norm, *(param.grad.to_dense() for param in params)]


@needs_clipping_of_sparse_gradients
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, math.inf])
def test_torchs_clipping_is_ours(norm_type: float):
    ours = clipped(sparsestep.clip_grad_norm_, norm_type)
    theirs = clipped(torch.nn.utils.clip_grad_norm_, norm_type)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=0.0)
