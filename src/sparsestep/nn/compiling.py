"""What torch.compile is to leave out of its graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function as it is when torch.compile comes across it.

    This is ``torch.compiler.disable`` without its cost where nothing is compiled, which would be
    half that of a small look-up.
    """
    left_out: Callable[Arguments, Result] = torch.compiler.disable(function)

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling():
            return left_out(*args, **kwargs)
        return function(*args, **kwargs)

    return run
