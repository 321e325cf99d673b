"""Checks of hyperparameters, shared by the optimizers. Torch's words come first in each message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from sparsestep.errors import InputError, sentence


def learning_rate(lr: float | Tensor, group: Mapping[str, Any] | None = None) -> None:
    """Refuse a negative learning rate; zero is fine, warm-ups begin there."""
    if isinstance(lr, Tensor):
        _one_element("lr", lr, group)
    if not lr >= 0.0:
        raise InputError(f"Invalid learning rate: {lr}. It must be at least 0.")


def _one_element(name: str, value: Tensor, group: Mapping[str, Any] | None) -> None:
    if group and group["foreach"] and not group["capturable"]:
        what = "lr as a Tensor" if name == "lr" else f"{name} as a Tensor"
        raise InputError(f"{what} is not supported for capturable=False and foreach=True.")
    if value.numel() != 1:
        raise InputError(f"Tensor {name} must be 1-element. Got shape {tuple(value.shape)}.")


def at_least_zero(name: str, value: float | Tensor, *, but_not_zero: bool = False) -> None:
    """Refuse a negative value, or not a number."""
    if not (value > 0.0 if but_not_zero else value >= 0.0):
        bound = "greater than 0" if but_not_zero else "at least 0"
        raise InputError(f"Invalid {name} value: {value}. It must be {bound}.")


def betas(betas: Sequence[float | Tensor], group: Mapping[str, Any] | None = None) -> None:
    """Refuse averages that would never forget, or grow."""
    if len(betas) != 2:
        raise InputError(sentence("betas must be a pair", betas))
    for index, beta in enumerate(betas):
        if isinstance(beta, Tensor):
            _one_element(f"betas[{index}]", beta, group)
        if not 0.0 <= beta < 1.0:
            raise InputError(
                f"Invalid beta parameter at index {index}: {beta}. It must be in [0, 1)."
            )
    if isinstance(betas[0], Tensor) != isinstance(betas[1], Tensor):
        raise InputError(f"betas must be either both floats or both Tensors. Got {betas}.")


def implementation(group: Mapping[str, Any]) -> None:
    """Refuse torch's ``fused`` together with what excludes it."""
    if group["fused"] and group["differentiable"]:
        raise InputError("`fused` does not support `differentiable`. Set only one of them.")
    if group["fused"] and group["foreach"]:
        raise InputError("`fused` and `foreach` cannot be `True` together. Set only one of them.")


def torch_kernel(group: Mapping[str, Any], *, takes_tensors: bool) -> None:
    """Refuse what torch's kernels refuse, before any of them is called.

    The options may have been changed since the optimizer was made.

    Args:
        group: the param group.
        takes_tensors: whether the foreach kernel takes tensors for ``lr`` and ``betas``.
    """
    if group.get("foreach") or group.get("fused"):
        known = {"foreach": None, "fused": None, "capturable": False, "differentiable": False}
        options = {**known, **group}
        implementation(options)
        if not takes_tensors:
            for name, value in (("lr", group.get("lr")), *_betas(group)):
                if isinstance(value, Tensor):
                    _one_element(name, value, options)


def _betas(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(f"betas[{i}]", beta) for i, beta in enumerate(group.get("betas", ()))]
