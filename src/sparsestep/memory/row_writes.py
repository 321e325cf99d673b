"""Rows of several tensors, overwritten together."""

from __future__ import annotations

import torch
from torch import Tensor

from sparsestep._native import ext


class RowWrites:
    """Collects rows to overwrite: ``add`` does everything that can fail, ``commit`` writes.

    For tensors on the CPU, ``commit`` is one call of the core, which neither allocates nor raises.
    Without the core, and for other tensors, it uses torch's operations.

    Example:
        >>> table, writes = torch.zeros(3, 2), RowWrites()
        >>> writes.add(table, torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> writes.commit()
        >>> table
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """

    def __init__(self) -> None:
        self._native = None if ext is None else ext.RowWrites()
        self._others: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, tensor: Tensor, rows: Tensor, values: Tensor) -> None:
        """Overwrite rows of a tensor with ``commit``.

        Args:
            tensor: with at least one dim.
            rows: int64 of one dim, contiguous, on the CPU, all of them rows of the tensor.
            values: contiguous, of the tensor's dtype; a row for each, or one row for all.
        """
        if self._native is None or not self._native.add(tensor, rows, values):
            values = values.to(tensor.device).expand(len(rows), *tensor.shape[1:])
            self._others.append((tensor, rows.to(tensor.device), values))

    def commit(self) -> None:
        """Write everything that was added."""
        if self._native is not None:
            self._native.commit()
        if self._others:
            with torch.no_grad():
                for tensor, rows, values in self._others:
                    tensor.index_copy_(0, rows, values)
