"""Where torch looks into a call: torch.compile, torch.export, the transforms of torch.func."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def outside_graphs(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Run a function as it is when torch.compile comes across it.

    This is ``torch.compiler.disable`` without its cost where nothing is compiled: it would import
    the compiler, and a call of what it returns takes half as long as a small look-up.
    """

    @functools.wraps(function)
    def run(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        if torch.compiler.is_compiling() and not torch.compiler.is_exporting():
            left_out: Callable[Arguments, Result] = torch.compiler.disable(function)
            return left_out(*args, **kwargs)
        return function(*args, **kwargs)

    return run


def is_for_torch(*weights: Tensor) -> bool:
    """Whether a look-up is left to torch's own operation, with its ordinary gradient.

    The transforms of torch.func, export and tracing know no other, and where there are no numbers
    (the device ``meta``) there is nothing to check.
    """
    return (
        torch._C._are_functorch_transforms_active()
        or torch.compiler.is_exporting()
        or torch._C._is_tracing()
        or any(weight.is_meta for weight in weights)
    )
