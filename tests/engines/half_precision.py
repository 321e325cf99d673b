"""The dtypes that are rounded at random."""

from __future__ import annotations

import pytest
import torch

HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)
