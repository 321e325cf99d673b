"""register: our optimizers in ``torch.distributed.optim`` and in DistributedDataParallel.

Up to torch 2.13, ``DistributedOptimizer`` compiles its functional optimizers to TorchScript, which
a Python class around a C++ core cannot be. Without ours it would set ``param.grad`` and call
``step()``. But then it leaves ``param.grad`` in place, and a parameter that the next batch does not
use is updated with the gradient of the one before. So it gets a class of one line that it can
compile and that calls Python. Later releases call it from Python.

There is no ``from __future__ import annotations``: TorchScript needs them as types.
"""

import warnings
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep._process import fork_safe_lock
from sparsestep._torch import register_overlapped
from sparsestep.errors import InputError, message
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer


def register() -> None:
    """Register the optimizers with ``torch.distributed``, which can then use them like its own.

    - ``torch.distributed.optim.utils.as_functional_optim`` creates the functional optimizer of the
      same name.
    - ``torch.distributed.optim.DistributedOptimizer`` trains parameters in other processes over
      RPC, with gradients of any layout. Call this first, in the process that creates it.
    - ``DistributedDataParallel._register_fused_optim`` updates parameters while the gradients of
      others are being reduced. With torch's optimizers, it skips sparse gradients.

    Torch's own optimizers are not affected. You do not need this for ``DistributedDataParallel`` or
    ``ZeroRedundancyOptimizer``. You may call it more than once.

    Raises:
        InputError: torch was built without ``torch.distributed``.

    Example:
        >>> import torch, sparsestep.distributed
        >>> sparsestep.distributed.register()
        >>> from torch.distributed.optim.utils import as_functional_optim
        >>> optimizer = as_functional_optim(sparsestep.SGD, lr=0.5)
        >>> type(optimizer).__name__
        'FunctionalSGD'
        >>> weight = torch.zeros(3, 2)
        >>> optimizer.step_param(weight, torch.eye(3, 2).to_sparse_coo())
        >>> weight.tolist()
        [[-0.5, 0.0], [0.0, -0.5], [0.0, 0.0]]
    """
    if not torch.distributed.is_available():
        requirement = "sparsestep.distributed needs a torch that was built with torch.distributed"
        remedy = "With a single process there is nothing to register"
        raise InputError(message(requirement, f"torch {torch.__version__} without it", remedy))
    with warnings.catch_warnings():
        # Older releases compile their own functional optimizers here, and warn of the compiler.
        warnings.filterwarnings("ignore", r"`torch\.jit\.", module=r"torch\.jit")
        from torch.distributed.optim.utils import register_functional_optim
    for cls in FUNCTIONAL:
        register_functional_optim(cls.optimizer_class, partial(make_functional, cls))
    register_overlapped(RuleOptimizer, OverlappedOptimizer)


def make_functional(
    cls: type[FunctionalOptimizer],
    params: list[Tensor],
    *args: Any,
    _allow_empty_param_list: bool = False,
    **options: Any,
) -> Any:
    """The optimizer, or for ``DistributedOptimizer`` one that TorchScript can compile.

    Only that one does not pass ``_allow_empty_param_list``: it has its parameters from the start.
    """
    optimizer = cls(params, *args, _allow_empty_param_list=_allow_empty_param_list, **options)
    if _allow_empty_param_list:
        return optimizer
    token = torch.empty(0)  # scripted objects hold tensors, and this one keeps the optimizer alive
    token.optimizer = optimizer  # type: ignore[attr-defined]
    return ScriptableOptimizer(token)


class ScriptableOptimizer:
    """A functional optimizer that TorchScript can compile."""

    def __init__(self, token: Tensor) -> None:
        self.token = token

    def step(self, gradients: list[Tensor | None]) -> None:
        _call_step(self.token, gradients)


# Several trainers may have optimizers of one parameter: as in torch, one steps at a time.
_lock = fork_safe_lock()


@torch.jit.ignore
def _call_step(token: Tensor, gradients: list[Tensor | None]) -> None:
    with _lock:
        token.optimizer.step(gradients)  # type: ignore[attr-defined]


class OverlappedOptimizer:
    """Updates parameters in DDP while the gradients of others are being reduced.

    ``DistributedDataParallel._register_fused_optim`` makes it of an optimizer class. Torch's own
    class silently skips sparse gradients: it only reads the dense ones of a bucket.
    """

    def __init__(
        self,
        optimizer_class: type[RuleOptimizer],
        params: Iterable[Tensor] | None,
        *args: Any,
        **options: Any,
    ) -> None:
        from torch.distributed.optim.utils import as_functional_optim

        self._optimizer = as_functional_optim(optimizer_class, *args, **options)
        self._params = None if params is None else set(params)

    def register_ddp(self, ddp: Any) -> None:
        # In the model's order, not that of gradients: the bits of stochastic rounding depend on a
        # parameter's number, and must be the same in every process.
        for param in ddp.module.parameters():
            if self._handles(param):
                self._optimizer.step_param(param, None)
        # DDP reads the annotations of a hook as types; a lambda has none.
        ddp.register_comm_hook(ddp.process_group, lambda group, bucket: self._hook(group, bucket))

    def _handles(self, param: Tensor) -> bool:
        return self._params is None or param in self._params

    def _hook(self, group: Any, bucket: Any) -> Any:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def step(_: Any) -> Tensor:
            buffer: Tensor = bucket.buffer()
            grads = bucket.gradients() or [buffer]  # sparse: one parameter, no views
            for param, grad in zip(bucket.parameters(), grads, strict=True):
                if self._handles(param):
                    self._optimizer.step_param(param, grad)
            return buffer

        return allreduce_hook(group, bucket).then(step)
