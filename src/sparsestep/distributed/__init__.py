"""x."""

from __future__ import annotations

import warnings
from functools import partial

import torch

from sparsestep.by_hand import FUNCTIONAL
from sparsestep.errors import InputError

__all__ = ["register"]


def register() -> None:
    """X."""
    from sparsestep.distributed.scripted import functional

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        from torch.distributed.optim.utils import register_functional_optim
    for cls in FUNCTIONAL:
        register_functional_optim(cls.optimizer_class, partial(functional, cls))
