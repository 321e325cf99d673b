"""Parameters in files: a step announces the rows that it is about to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep.gradients.compact import Compact
from sparsestep.gradients.layouts import Gradient
from sparsestep.gradients.touched import Touched
from sparsestep.memory.files import about_to_write, file_of
from sparsestep.torch_internals import coo_indices


def announce(
    state: Mapping[Tensor, Any],
    params: Iterable[Tensor],
    grads: Sequence[Gradient | None] | None = None,
    chosen: Sequence[Tensor | None] | None = None,
) -> None:
    """Make ready for a step; raises where the disk has no room for it.

    This is for gradients that the core or torch's kernels take as they are. Others are announced
    when they have been checked, and so is a first step, when its state is made.

    Args:
        state: of the optimizer.
        params: its parameters, all or some.
        grads: their gradients, where these are passed by hand.
        chosen: the rows or elements that masks let move, where there are masks.
    """
    for index, param in enumerate(params):
        grad = param.grad if grads is None else grads[index]
        if grad is None or file_of(param) is None:
            continue
        record = state.get(param) or {}
        of_mask = None if chosen is None else chosen[index]
        for rows in _rows_of(param, grad, of_mask):
            about_to_write(param, record.values(), rows)


def announce_checked(param: Tensor, state: Iterable[Tensor], gradient: Touched) -> None:
    """The same for a gradient that was checked, of a parameter whose state is there."""
    about_to_write(param, state, _as_rows(param, gradient.positions, gradient.slots))


def _rows_of(param: Tensor, grad: Gradient, chosen: Tensor | None) -> list[Tensor | None]:
    """The rows that a gradient touches, in parts; ``None`` for all, nothing for unusual ones."""
    if isinstance(grad, Compact):
        if not grad.is_materialized:
            parts = grad.parts()
            return [_as_rows(param, part.positions, part.slots) for part in parts]
        grad = grad.materialize_()
    if not isinstance(grad, Tensor) or isinstance(grad, MaskedTensor) or grad.shape != param.shape:
        return []
    if grad.layout is torch.sparse_coo and grad.sparse_dim():
        return [coo_indices(grad)[0].contiguous()]
    if grad.layout is not torch.strided:
        return []
    if chosen is None:
        return [None]
    slots = len(param) if len(chosen) == len(param) else param.numel()
    return [_as_rows(param, chosen.reshape(-1).nonzero().squeeze(1), slots)]


def _as_rows(param: Tensor, positions: Tensor | None, slots: int) -> Tensor | None:
    if positions is None or not param.dim():
        return None
    positions = positions.reshape(-1).long()
    if slots != len(param):
        positions = positions.div(max(1, slots // len(param)), rounding_mode="floor")
    return positions.contiguous()
