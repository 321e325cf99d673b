"""What ``torch.distributed.optim.DistributedOptimizer`` can compile.

It turns the functional optimizer that it finds in torch's map into TorchScript, which a Python
class around a C++ core cannot be. So it is given an object of one line, which hands over to Python.

Without ``from __future__ import annotations``: TorchScript reads the annotations as objects.
"""

from typing import Any

import torch
from torch import Tensor

from sparsestep.by_hand import FunctionalOptimizer


def functional(
    cls: type[FunctionalOptimizer],
    params: list[Tensor],
    *args: Any,
    _allow_empty_param_list: bool = False,
    **options: Any,
) -> Any:
    """Make a functional optimizer for whoever asks.

    Whoever has no parameters yet will pass each one to ``step_param``, in Python, and gets the
    optimizer itself. Only ``DistributedOptimizer`` does not say ``_allow_empty_param_list``: it
    has all its parameters, and compiles what it gets.
    """
    optimizer = cls(params, *args, _allow_empty_param_list=_allow_empty_param_list, **options)
    return optimizer if _allow_empty_param_list else Scripted(_token_of(optimizer))


class Scripted:
    """A functional optimizer that TorchScript can compile."""

    def __init__(self, token: Tensor) -> None:
        self.token = token

    def step(self, gradients: list[Tensor | None]) -> None:
        """Update every parameter whose gradient is not ``None``."""
        _step(self.token, gradients)


def _token_of(optimizer: FunctionalOptimizer) -> Tensor:
    """Something that a compiled object may keep, and that keeps the optimizer.

    A compiled object has no Python attributes, but tensors; and a tensor has its Python attributes
    for as long as anybody has the tensor.
    """
    token = torch.empty(0)
    token.optimizer = optimizer  # type: ignore[attr-defined]
    return token


@torch.jit.ignore
def _step(token: Tensor, gradients: list[Tensor | None]) -> None:
    token.optimizer.step(gradients)  # type: ignore[attr-defined]
