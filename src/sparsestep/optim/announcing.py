"""Parameters in files: a step announces the rows that it is about to write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep._torch import coo_indices
from sparsestep.grads.compact import Compact
from sparsestep.grads.indexed import Touched
from sparsestep.grads.layouts import Gradient
from sparsestep.grads.masks import Selection
from sparsestep.memory.mapped_file import about_to_write, file_of


def announce(
    state: Mapping[Tensor, Any],
    params: Iterable[Tensor],
    grads: Sequence[Gradient | None] | None = None,
    selections: Sequence[Selection | None] | None = None,
) -> None:
    """Reserve and mark the rows that a step will write; raises ``OSError`` if the disk is full.

    Covers the gradients that the core or torch's kernels take directly. Other gradients, and the
    first step of a parameter, are announced once they have been checked and the state exists.

    Args:
        state: the optimizer's state.
        params: all or some of its parameters.
        grads: their gradients, if passed by hand.
        selections: what the masks of the parameters select, if the group has masks.
    """
    for index, param in enumerate(params):
        grad = param.grad if grads is None else grads[index]
        if grad is None or file_of(param) is None:
            continue
        param_state = state.get(param) or {}
        selection = None if selections is None else selections[index]
        for rows in _rows_of(param, grad, selection):
            about_to_write(param, param_state.values(), rows)


def announce_unmasked(state: Mapping[Tensor, Any], groups: Iterable[Mapping[str, Any]]) -> bool:
    """Announce a whole step; ``False`` if that needs a mask, which only the plan has checked."""
    for group in groups:
        if group.get("mask") is not None and any(file_of(p) is not None for p in group["params"]):
            return False
    for group in groups:
        announce(state, group["params"])
    return True


def announce_checked(param: Tensor, state: Iterable[Tensor], gradient: Touched) -> None:
    """The same for a gradient that was checked, of a parameter whose state is there."""
    about_to_write(param, state, _as_rows(param, gradient.positions, gradient.slots))


def _rows_of(param: Tensor, grad: Gradient, selection: Selection | None) -> list[Tensor | None]:
    """Rows that a gradient writes, in parts: ``None`` for all rows, no part if it is unusual."""
    if isinstance(grad, Compact):
        if not grad.is_materialized:
            parts = (_as_rows(param, part.positions, part.slots) for part in grad.parts())
            return [_selected(param, rows, selection) for rows in parts]
        grad = grad.materialize_()
    if not isinstance(grad, Tensor) or isinstance(grad, MaskedTensor) or grad.is_nested:
        return []
    if grad.shape != param.shape:
        return []
    if grad.layout is torch.sparse_coo and grad.sparse_dim():
        return [_selected(param, coo_indices(grad)[0].contiguous(), selection)]
    if grad.layout is not torch.strided:
        return []
    return [_selected(param, None, selection)]


def _selected(param: Tensor, rows: Tensor | None, selection: Selection | None) -> Tensor | None:
    """Those of the rows in which a mask selects anything."""
    if selection is None or selection.shape != param.shape:  # the latter is refused later
        return rows
    if rows is None:
        return _as_rows(param, selection.positions, selection.mask.numel())
    rows = rows[(rows >= 0) & (rows < len(param))]
    chosen = selection.mask[rows]
    return rows[chosen if chosen.dim() == 1 else chosen.flatten(1).any(1)]


def _as_rows(param: Tensor, positions: Tensor | None, slots: int) -> Tensor | None:
    if positions is None or not param.dim():
        return None
    positions = positions.reshape(-1).long()
    if slots != len(param):
        positions = positions.div(max(1, slots // len(param)), rounding_mode="floor")
    return positions.contiguous()
