"""Our classes, and torch's of the same name that take dense gradients."""

from __future__ import annotations

import pytest
import torch

import sparsestep
from sparsestep.optim import OPTIMIZERS

# Torch's SparseAdam takes no dense gradients.
COUNTERPARTS = [
    (ours, getattr(torch.optim, ours.__name__))
    for ours in OPTIMIZERS
    if hasattr(torch.optim, ours.__name__) and ours is not sparsestep.SparseAdam
]
each_counterpart = pytest.mark.parametrize(
    ("ours", "theirs"), COUNTERPARTS, ids=[ours.__name__ for ours, _ in COUNTERPARTS]
)
