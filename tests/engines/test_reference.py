"""The reference engine: what it writes."""

from __future__ import annotations

import torch

import sparsestep


def test_a_value_that_stays_in_a_tensor_with_gaps():
    """With a learning rate of zero FTRL keeps its sum; torch copies no tensor onto itself."""
    param = torch.nn.Parameter(torch.randn(2, dtype=torch.complex64)[::2])
    optimizer = sparsestep.Ftrl([param], lr=torch.tensor(0.0), engine="reference")
    param.grad = torch.randn(1, dtype=torch.complex64)
    optimizer.step()
    assert bool(param.isfinite().all())
