"""A sparse gradient with the same number everywhere."""

from __future__ import annotations

import torch


def coo(rows: list[int], shape: tuple[int, ...], value: float = 1.0) -> torch.Tensor:
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), torch.full((len(rows), *shape[1:]), value), shape
    )
