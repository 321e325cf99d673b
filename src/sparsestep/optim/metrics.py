"""``metrics()``: numbers about the latest step, for loggers."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import cat
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.layouts import GradLayout, classify
from sparsestep.grads.masks import MaskSelection
from sparsestep.memory.tensors import memory_of
from sparsestep.optim.step import rows_of


class RowCounts(NamedTuple):
    """Rows of a parameter, entries of its gradient, and the distinct rows among them."""

    rows: int
    entries: int
    touched: int


def count_rows(param: Tensor, selection: MaskSelection | None) -> RowCounts:
    """Count what the gradient of a parameter updates, from its indices alone.

    Example:
        >>> table = torch.nn.Embedding(10, 4, sparse=True)
        >>> table(torch.tensor([2, 7, 2])).sum().backward()
        >>> count_rows(table.weight, None)
        RowCounts(rows=10, entries=3, touched=2)
    """
    memory = memory_of(param)
    rows = len(memory) if memory.dim() else 1
    row_mask = None if selection is None or selection.mask.dim() != 1 else selection
    indices = _row_indices(memory, param.grad)
    if indices is None:
        count = rows if row_mask is None else row_mask.refresh().indices.numel()
        return RowCounts(rows, count, count)
    if row_mask is not None:
        indices = indices[row_mask.mask[indices]]
    return RowCounts(rows, indices.numel(), _count_distinct(indices, rows))


def _row_indices(param: Tensor, grad: Any) -> Tensor | None:
    """Return the row of each entry of the gradient; ``None`` if it is dense."""
    if classify(grad) not in (GradLayout.COO, GradLayout.COMPACT):
        return None
    if isinstance(grad, CompactGrad) and grad.has_pending_parts:  # an exchange takes all ranks
        return torch.empty(0, dtype=torch.long, device=param.device)
    found = [rows for rows in rows_of(param, grad) if rows is not None]
    return cat(found) if found else None


def _count_distinct(indices: Tensor, rows: int) -> int:
    if ext is None or not indices.is_cpu:
        return int(indices.unique().numel())
    indices = indices.long().contiguous()
    found = ext.unique(indices, rows, torch.empty_like(indices), torch.empty_like(indices))
    return max(found, 0)
