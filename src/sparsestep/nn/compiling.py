"""Where torch looks into a call: torch.compile, and the transforms of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function as it is when torch.compile comes across it.

    This is ``torch.compiler.disable`` without its cost where nothing is compiled: it would import
    the compiler, and a call of what it returns takes half as long as a small look-up.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            left_out: Callable[Arguments, Result] = torch.compiler.disable(function)
            return left_out(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def is_transformed() -> bool:
    """Whether torch.func's ``grad``, ``vmap`` or the like is at work.

    They know torch's own operations only, and want their ordinary gradients.
    """
    return torch._C._are_functorch_transforms_active()
