"""Adam's running averages, and how they are corrected for their start at zero.

The averages begin at zero, so after ``t`` updates they hold only ``1 - beta^t`` of what they
should. Torch counts the parameter's steps. A row of an embedding that is first seen at step 2001
then counts as long corrected and moves almost three times as far as the first rows did; with
``bias_correction="per_row"`` each row counts its own updates. The native kernel is
``native/rules/bias_correction.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.rules.idle import IdleUpdate
from sparsestep.rules.options import Betas
from sparsestep.rules.rule import Rule, StateSpec

MOMENTS = (
    StateSpec("exp_avg", int8_format="signed"),
    StateSpec("exp_avg_sq", int8_format="unsigned"),
)

# The row's own count. Exact up to 2^24 updates.
ROW_STEP = StateSpec("row_step", per_row=True, dtype=torch.float32)


class BiasCorrection(NamedTuple):
    """What a formula corrects its averages with: numbers, or columns with one for each row.

    Attributes:
        step_size: ``lr / (1 - beta1^t)``.
        root: ``sqrt(1 - beta2^t)``.
    """

    step_size: Any
    root: Any


def global_correction(step: int, lr: float, betas: Betas) -> BiasCorrection:
    """By the number of the parameter's steps.

    Example:
        >>> global_correction(1, 0.5, (0.5, 0.75))
        BiasCorrection(step_size=1.0, root=0.5)
    """
    beta1, beta2 = betas
    return BiasCorrection(lr / (1 - beta1**step), math.sqrt(1 - beta2**step))


def step_size(step: int, hyperparams: Mapping[str, Any]) -> BiasCorrection:
    """How far an idle row moves, for an ``IdleUpdate``."""
    return global_correction(step, hyperparams["lr"], hyperparams["betas"])


def decays(hyperparams: Mapping[str, Any]) -> dict[str, float]:
    """How the averages of an idle row decay, for an ``IdleUpdate``."""
    return dict(zip(("exp_avg", "exp_avg_sq"), hyperparams["betas"], strict=True))


def per_row_correction(row_step: Tensor, lr: float, betas: Betas) -> tuple[BiasCorrection, Tensor]:
    """By each row's own count of updates; also returns the counts after this one."""
    row_step = row_step + 1
    count = row_step.double()
    step_size = lr / (1 - betas[0] ** count)
    root = (1 - betas[1] ** count).sqrt()
    return BiasCorrection(step_size.to(row_step), root.to(row_step)), row_step


def rules_with_bias_correction(
    name: str,
    update: Callable[..., tuple[Tensor, ...]],
    state: tuple[StateSpec, ...],
    idle_update: IdleUpdate,
) -> dict[bool, Rule]:
    """The rules of ``update(param, grad, *state, correction, betas, eps)``, by uses_per_row."""

    def with_steps(
        param: Tensor, grad: Tensor, *state: Tensor, step: int, lr: float, betas: Betas, eps: float
    ) -> tuple[Tensor, ...]:
        correction = global_correction(step, lr, betas)
        return update(param, grad, *state, correction=correction, betas=betas, eps=eps)

    def with_rows(
        param: Tensor, grad: Tensor, *state: Tensor, step: int, lr: float, betas: Betas, eps: float
    ) -> tuple[Tensor, ...]:
        correction, row_step = per_row_correction(state[-1], lr, betas)
        new = update(param, grad, *state[:-1], correction=correction, betas=betas, eps=eps)
        return *new, row_step

    return {
        False: Rule(name, with_steps, state, has_native_kernel=True, idle_update=idle_update),
        True: Rule(f"{name}_per_row", with_rows, (*state, ROW_STEP), has_native_kernel=True),
    }


def uses_per_row(group: dict[str, Any]) -> bool:
    """Whether a param group asks for it."""
    return bool(group.get("bias_correction") == "per_row")
