"""Checks of hyperparameters, shared by the optimizers. Torch's words come first in each message."""

from __future__ import annotations

from torch import Tensor

from sparsestep.errors import InputError


def learning_rate(lr: float | Tensor) -> None:
    """Refuse a negative learning rate; zero is fine, warm-ups begin there."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise InputError(f"Tensor lr must be 1-element. Got shape {tuple(lr.shape)}.")
    if not lr >= 0.0:
        raise InputError(f"Invalid learning rate: {lr}. It must be at least 0.")


def epsilon(eps: float) -> None:
    """Refuse an eps that leaves 0 / 0 possible."""
    if not eps > 0.0:
        raise InputError(f"Invalid epsilon value: {eps}. It must be greater than 0.")


def betas(betas: tuple[float, float]) -> None:
    """Refuse averages that would never forget, or grow."""
    if len(betas) != 2:
        raise InputError(f"betas must be a pair. Got {betas}.")
    for index, beta in enumerate(betas):
        if not 0.0 <= beta < 1.0:
            raise InputError(
                f"Invalid beta parameter at index {index}: {beta}. It must be in [0, 1)."
            )
