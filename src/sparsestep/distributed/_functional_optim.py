"""Updates in DistributedDataParallel while the gradients of other parameters are being reduced.

Torch's own class silently skips sparse gradients: it only reads the dense ones of a bucket. This
one takes a sparse gradient from the bucket's buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from sparsestep._process import fork_safe_lock
from sparsestep._torch import register_overlapped
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer


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


if TYPE_CHECKING:
    from torch.distributed import GradBucket, ProcessGroup  # type: ignore[attr-defined]
    from torch.nn.parallel import DistributedDataParallel

    Future = torch.futures.Future[Tensor]


def register() -> None:
    """Have DDP take :class:`Overlapped` for every optimizer of this package."""
    register_overlapped(RuleOptimizer, Overlapped)


class Overlapped:
    """What ``DistributedDataParallel._register_fused_optim`` makes of an optimizer class."""

    def __init__(
        self,
        optimizer_class: type[RuleOptimizer],
        params: Iterable[Tensor] | None,
        *args: Any,
        **options: Any,
    ) -> None:
        from torch.distributed.optim.utils import as_functional_optim

        self._optimizer = as_functional_optim(optimizer_class, *args, **options)
        self._chosen = None if params is None else set(params)

    def register_ddp(self, ddp: DistributedDataParallel) -> None:
        """Update each parameter of the model when its gradient has been reduced."""
        # Taken on in the model's order, not as gradients arrive: the bits of stochastic rounding
        # depend on a parameter's number, and must be the same in every process.
        for param in ddp.module.parameters():
            if self._is_meant(param):
                self._optimizer.step_param(param, None)
        # DDP looks at the annotations of a hook, as types; a lambda has none.
        ddp.register_comm_hook(ddp.process_group, lambda group, bucket: self._hook(group, bucket))

    def _is_meant(self, param: Tensor) -> bool:
        return self._chosen is None or param in self._chosen

    def _hook(self, group: ProcessGroup, bucket: GradBucket) -> Future:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        def step(_: Future) -> Tensor:
            grads = bucket.gradients() or [bucket.buffer()]  # sparse: one parameter, no views
            for param, grad in zip(bucket.parameters(), grads, strict=True):
                if self._is_meant(param):
                    self._optimizer.step_param(param, grad)
            return bucket.buffer()

        return allreduce_hook(group, bucket).then(step)
