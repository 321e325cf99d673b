"""Checks of what is passed for a model and for an optimizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from sparsestep.errors import InputError, message
from sparsestep.optim.optimizer import RuleOptimizer


def check_model_and_optimizer(who: str, model: Any, optimizer: Any) -> None:
    """Refuse anything else, and the two in the wrong order.

    Example:
        >>> try:
        ...     check_model_and_optimizer("save", "model", None)
        ... except InputError as error:
        ...     print(error)
        save: the model must be an nn.Module. Got str.
    """
    if not isinstance(model, nn.Module):
        requirement = f"{who}: the model must be an nn.Module"
        raise InputError(message(requirement, type(model).__name__))
    if not isinstance(optimizer, RuleOptimizer):
        requirement = f"{who}: the optimizer must be one of sparsestep"
        kind = type(optimizer)
        raise InputError(message(requirement, f"{kind.__module__}.{kind.__qualname__}"))
