"""Gradients for the scripts beside this one."""

from __future__ import annotations

import torch
from torch import Tensor

SETS = 8  # fresh rows in every step: the sets of ids take turns


def uniform(rows: int, dim: int, lookups: int) -> list[Tensor]:
    """Uncoalesced COO gradients, as ``nn.Embedding(sparse=True)`` gives them, one per set."""
    torch.manual_seed(0)
    return [
        torch.sparse_coo_tensor(
            torch.randint(0, rows, (1, lookups)),
            torch.randn(lookups, dim),
            (rows, dim),
            check_invariants=False,
        )
        for _ in range(SETS)
    ]
