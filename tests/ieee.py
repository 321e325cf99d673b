"""Torch operations with IEEE 754's rounding, in which engines agree to the bit.

Torch takes roots with MKL, which rounds one in five to the other neighbor, numbers over tensors by
their reciprocals, and means in the order of its vectors.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

_sqrt = Tensor.sqrt


def use_ieee_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "sqrt", root)
    monkeypatch.setattr(Tensor, "__rtruediv__", quotient)
    monkeypatch.setattr(Tensor, "mean", mean)


def root(tensor: Tensor) -> Tensor:
    return _sqrt(tensor.double()).to(tensor.dtype)


def quotient(tensor: Tensor, number: float) -> Tensor:
    return torch.full_like(tensor, number) / tensor


def mean(tensor: Tensor, dim: int, *, keepdim: bool) -> Tensor:
    assert dim == 1
    assert keepdim
    lanes = torch.nn.functional.pad(tensor, (0, -tensor.shape[1] % 16)).view(len(tensor), -1, 16)
    total = sum(lanes.unbind(1))
    while total.shape[1] > 1:
        total = total[:, : total.shape[1] // 2] + total[:, total.shape[1] // 2 :]
    return total / tensor.shape[1]
