"""What torch's map of functional optimizers has for ours.

Up to torch 2.13, ``DistributedOptimizer`` compiles what it finds there into TorchScript, which a
Python class around a C++ core cannot be. Were ours not in the map, it would set ``param.grad`` and
call ``step()``. But then it leaves ``param.grad`` where it is, and a parameter that the next batch
does not use is updated with the gradient of the one before. So it gets a class of one line that it
can compile and that hands over to Python. Later releases call it from Python.

There is no ``from __future__ import annotations``: TorchScript needs them as types.
"""

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsestep.locks import fork_safe_lock
from sparsestep.optim.functional import FunctionalOptimizer


def functional(
    cls: type[FunctionalOptimizer],
    params: list[Tensor],
    *args: Any,
    _allow_empty_param_list: bool = False,
    **options: Any,
) -> Any:
    """Make the functional optimizer that the caller can use.

    Whoever passes ``_allow_empty_param_list`` works in Python and gets the optimizer itself. Only
    ``DistributedOptimizer`` does not: it has all its parameters from the beginning.
    """
    optimizer = cls(params, *args, _allow_empty_param_list=_allow_empty_param_list, **options)
    return optimizer if _allow_empty_param_list else Scripted(_token_of(Served(optimizer)))


class Served:
    """An optimizer of parameters that several trainers may have optimizers of.

    Each trainer's ``DistributedOptimizer`` has its own here, with its own state. Updates of one
    parameter wait for each other nevertheless, so that none is lost.
    """

    _guard = fork_safe_lock()
    _all_locks = WeakTensorKeyDictionary()

    def __init__(self, optimizer: FunctionalOptimizer) -> None:
        self._optimizer = optimizer
        self._params = optimizer.param_group["params"]
        with Served._guard:
            self._locks = {
                id(p): Served._all_locks.setdefault(p, fork_safe_lock()) for p in self._params
            }

    def step(self, gradients: list[Tensor | None]) -> None:
        """Update every parameter whose gradient is not ``None``."""
        pairs = zip(self._params, gradients, strict=False)
        with ExitStack() as stack:
            # Everybody takes the locks in the same order.
            for key in sorted({id(param) for param, grad in pairs if grad is not None}):
                stack.enter_context(self._locks[key])
            self._optimizer.step(gradients)


class Scripted:
    """A functional optimizer that TorchScript can compile."""

    def __init__(self, token: Tensor) -> None:
        self.token = token

    def step(self, gradients: list[Tensor | None]) -> None:
        """Update every parameter whose gradient is not ``None``."""
        _step(self.token, gradients)


def _token_of(served: Served) -> Tensor:
    """What a compiled object can keep, and what keeps the optimizer alive for as long.

    It cannot have Python objects but tensors, and a tensor keeps its Python attributes.
    """
    token = torch.empty(0)
    token.served = served  # type: ignore[attr-defined]
    return token


@torch.jit.ignore
def _step(token: Tensor, gradients: list[Tensor | None]) -> None:
    token.served.step(gradients)  # type: ignore[attr-defined]
