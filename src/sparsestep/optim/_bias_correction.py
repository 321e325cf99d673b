"""How Adam's running averages are corrected for their start at zero.

The averages begin at zero, so after ``t`` updates they hold only ``1 - beta^t`` of what they
should. Torch counts the parameter's steps. A row of an embedding that is first seen at step 2001
then counts as long corrected and moves almost three times as far as the first rows did; with
``bias_correction="per_row"`` each row counts its own updates. The native twin is
``native/rules/bias_correction.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.rules.idle import Motion
from sparsestep.rules.rule import Rule, State

Pair = tuple[float, float]

# The row's own count. Exact up to 2^24 updates.
ROW_STEP = State("row_step", per_row=True, dtype=torch.float32)


class Correction(NamedTuple):
    """What a formula corrects its averages with: numbers, or columns with one for each row.

    Attributes:
        step_size: ``lr / (1 - beta1^t)``.
        root: ``sqrt(1 - beta2^t)``.
    """

    step_size: Any
    root: Any


def by_step(step: int, lr: float, betas: Pair) -> Correction:
    """By the number of the parameter's steps.

    Example:
        >>> by_step(1, 0.5, (0.5, 0.75))
        Correction(step_size=1.0, root=0.5)
    """
    beta1, beta2 = betas
    return Correction(lr / (1 - beta1**step), math.sqrt(1 - beta2**step))


def by_row(row_step: Tensor, lr: float, betas: Pair) -> tuple[Correction, Tensor]:
    """By each row's own count of updates; also returns the counts after this one."""
    row_step = row_step + 1
    count = row_step.double()
    step_size = lr / (1 - betas[0] ** count)
    root = (1 - betas[1] ** count).sqrt()
    return Correction(step_size.to(row_step), root.to(row_step)), row_step


def rules(
    name: str, update: Callable[..., Any], state: tuple[State, ...], motion: Motion
) -> dict[bool, Rule]:
    """The rules of a formula that takes its bias correction as an argument.

    Args:
        name: that of the native twin, with ``_per_row`` where rows are counted.
        update: ``(param, grad, *state, correction=..., betas=..., eps=...)``.
        state: what it keeps; with the rows' counts, one more.
        motion: what it does without a gradient, as long as steps are counted.

    Returns:
        By whether rows are counted.
    """

    def with_steps(
        param: Tensor, grad: Tensor, *state: Tensor, step: int, lr: float, betas: Pair, eps: float
    ) -> tuple[Tensor, ...]:
        correction = by_step(step, lr, betas)
        new: tuple[Tensor, ...] = update(
            param, grad, *state, correction=correction, betas=betas, eps=eps
        )
        return new

    def with_rows(
        param: Tensor, grad: Tensor, *state: Tensor, step: int, lr: float, betas: Pair, eps: float
    ) -> tuple[Tensor, ...]:
        correction, row_step = by_row(state[-1], lr, betas)
        new = update(param, grad, *state[:-1], correction=correction, betas=betas, eps=eps)
        return *new, row_step

    return {
        False: Rule(name, with_steps, state, is_native=True, motion=motion),
        True: Rule(f"{name}_per_row", with_rows, (*state, ROW_STEP), is_native=True),
    }


def is_per_row(group: dict[str, Any]) -> bool:
    """Whether a param group asks for it."""
    return bool(group.get("bias_correction") == "per_row")
