"""Updates in DistributedDataParallel while the gradients of other parameters are being reduced.

Torch's own class silently skips sparse gradients: it only reads the dense ones of a bucket. This
one takes a sparse gradient from the bucket's buffer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsestep._torch import register_overlapped
from sparsestep.optim.optimizer import RuleOptimizer

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
