"""How Adam's running averages are corrected for their start at zero.

The averages begin at zero, so after ``t`` updates they hold only ``1 - beta^t`` of what they
should. Torch counts the parameter's steps. A row of an embedding that is first seen at step 2001
then counts as long corrected and moves almost three times as far as the first rows did; with
``bias_correction="per_row"`` each row counts its own updates. The native twin is
``native/rules/bias.h``.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract.rule import State

# The row's own count. Exact up to 2^24 updates.
ROW_STEP = State("row_step", per_row=True, dtype=torch.float32)


def by_step(step: int, lr: float, betas: tuple[float, float]) -> tuple[float, float]:
    """``lr / (1 - beta1^t)`` and ``sqrt(1 - beta2^t)``.

    Example:
        >>> by_step(1, 0.5, (0.5, 0.75))
        (1.0, 0.5)
    """
    beta1, beta2 = betas
    return lr / (1 - beta1**step), math.sqrt(1 - beta2**step)


def by_row(
    row_step: Tensor, lr: float, betas: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """The rows' counts after this update, and what ``by_step`` gives for each."""
    row_step = row_step + 1
    count = row_step.double()
    step_size = lr / (1 - betas[0] ** count)
    root = (1 - betas[1] ** count).sqrt()
    return row_step, step_size.to(row_step.dtype), root.to(row_step.dtype)


def is_per_row(group: dict[str, Any]) -> bool:
    """Whether a param group asks for it."""
    return bool(group.get("bias_correction") == "per_row")
