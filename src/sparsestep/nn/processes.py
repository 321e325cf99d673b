"""Gradients that DistributedDataParallel reduces."""

from __future__ import annotations

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from sparsestep.grads.compact import Compact
from sparsestep.grads.exchange import source_of


def write_out_for_ddp(weight: Tensor) -> None:
    """See to it that the gradient of a weight is an ordinary one by the time DDP looks at it.

    DDP reduces gradients in C++, which takes a compact one for a dense one. It does so when a
    gradient has been accumulated, after the hooks of the weight. So a hook is all it takes; the
    lookup registers it when it is called from within DDP's forward. It stays, for the weight stays
    DDP's: what activation checkpointing computes again is computed outside of that forward.
    """
    if DistributedDataParallel._active_ddp_module is None or not weight.requires_grad:
        return
    if source_of(weight) is not None:  # a sharded table is none of DDP's
        return
    hooks = weight._post_accumulate_grad_hooks
    if hooks is None or _write_out not in hooks.values():
        weight.register_post_accumulate_grad_hook(_write_out)


def _write_out(weight: Tensor) -> None:
    grad = weight.grad
    if isinstance(grad, Compact):
        weight.grad = grad.materialize_()
