"""Touched: the one canonical form of a gradient. How each layout becomes one is in ``layouts.py``.

A parameter is seen as ``[slots, block]``: a slot is the smallest contiguous piece that is touched
or not as a whole. A gradient in row-sparse COO form touches rows, so its slots are rows; one that
is sparse in every dimension touches single elements.

Everything that can be checked without reading the positions is checked here. The positions
themselves are checked by the engine, which reads them anyway.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep.errors import InputError, message

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
HALVES = frozenset({torch.float16, torch.bfloat16})
COMPLEX = frozenset({torch.complex64, torch.complex128})


class Touched(NamedTuple):
    """Which slots of a parameter a gradient touches, and with what values.

    Example:
        A gradient made by hand: rows 3 and 1, one of them twice.

        >>> import sparsestep
        >>> weight = torch.zeros(5, 2)
        >>> grad = sparsestep.Touched(torch.tensor([3, 1, 3]), torch.ones(3, 2))
        >>> sparsestep.functional.sgd_(weight, grad, lr=0.5)
        >>> weight[:, 0].tolist()
        [0.0, -0.5, 0.0, -1.0, 0.0]

    Attributes:
        positions: int64 or int32, ``[n]`` (or ``[1, n]``, as in COO): the slot of each entry. The
            values of repeated slots are summed. ``None`` means every slot once, in order; then
            ``values`` has the parameter's shape.
        values: ``[n, ...]``, a block for each entry.
        slots: the number of slots of the parameter. Zero, with a block of zero: its rows.
        block: the number of elements of a slot.
        source: int64 or int32, ``[n]``: the row of ``values`` that each entry uses; by default,
            entry ``i`` uses row ``i``. Selects a part of a gradient without copying it.
        scale: ``[n]``, real: a factor for the row of each entry, applied before summing. The
            products are rounded to the precision of ``values``.
        held: internal; must be ``None``.
    """

    positions: Tensor | None
    values: Tensor
    slots: int = 0
    block: int = 0
    source: Tensor | None = None
    scale: Tensor | None = None
    held: Tensor | None = None

    def as_real(self) -> Touched:
        """Complex values as pairs of real numbers."""
        values = torch.view_as_real(self.values.resolve_conj())
        held = None if self.held is None else self.held.repeat_interleave(2, dim=1)
        return self._replace(values=values, block=2 * self.block, held=held)

    def expanded(self) -> Touched:
        """The same gradient with a row of values of its own for each entry, as a copy.

        Example:
            >>> grad = Touched(torch.tensor([1, 2]), torch.ones(1, 4), 5, 4, torch.tensor([0, 0]))
            >>> grad.expanded().values.shape
            torch.Size([2, 4])
        """
        if self.source is None and self.scale is None:
            return self
        rows = self.values.numel() // self.block if self.block else len(self.values)
        values = self.values.reshape(rows, self.block)
        if self.source is not None:
            values = values[self.source]
        if self.scale is not None:
            values = values * self.scale[:, None]
        return self._replace(values=values, source=None, scale=None)

    def finer(self, slots: int) -> Touched:
        """The same gradient over smaller slots; no value is copied.

        Example:
            >>> Touched(torch.tensor([1]), torch.ones(1, 4), 2, 4).finer(4).positions.tolist()
            [2, 3]
        """
        assert self.positions is not None
        check_positions(self.positions, self.slots)  # what is multiplied may come to lie inside
        per = slots // self.slots if self.slots else 1
        inside = torch.arange(per, device=self.positions.device)
        positions = (self.positions.reshape(-1, 1) * per + inside).reshape(-1)
        source = None
        if self.source is not None:
            source = (self.source.reshape(-1, 1) * per + inside).reshape(-1)
        scale = None if self.scale is None else self.scale.repeat_interleave(per)
        return self._replace(
            positions=positions,
            slots=slots,
            block=self.block // per if per else 0,
            source=source,
            scale=scale,
        )

    def in_rows(self) -> Touched:
        """The same with values as rows: a view where that is possible, else a copy."""
        rows = self.values.numel() // self.block if self.block else len(self.values)
        values = self.values.reshape(rows, self.block)
        return self._replace(values=values.contiguous() if self.positions is None else values)


def check_positions(positions: Tensor, slots: int) -> None:
    """Refuse positions that are no slots."""
    if positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= slots:
            raise InputError(bad_index(0, slots, low if low < 0 else high))


def check_index(dim: int, indices: Tensor, size: int) -> None:
    """Refuse indices that a dimension does not have."""
    if indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= size:
            raise InputError(bad_index(dim, size, low if low < 0 else high))


def bad_index(dim: int, size: int, index: int) -> str:
    """Phrase the refusal of an index that its dimension does not have."""
    return message(
        f"the gradient's indices of dim {dim} must be in [0, {size})",
        index,
        "Check the ids that went into the embedding",
    )
