"""IndexedGrad, the canonical form of a gradient; ``layouts.py`` converts every layout to it.

A parameter is viewed as ``[num_slots, slot_size]``: a slot is the smallest contiguous piece that is
updated or skipped as a whole. A row-sparse COO gradient updates rows, so its slots are rows;
one that is sparse in every dimension updates single elements.

Everything that can be checked without reading the indices is checked here. The indices
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


class IndexedGrad(NamedTuple):
    """Which slots of a parameter a gradient touches, and with what values.

    Example:
        A gradient made by hand: rows 3 and 1, one of them twice.

        >>> import sparsestep
        >>> weight = torch.zeros(5, 2)
        >>> grad = sparsestep.IndexedGrad(torch.tensor([3, 1, 3]), torch.ones(3, 2))
        >>> sparsestep.functional.sgd_(weight, grad, lr=0.5)
        >>> weight[:, 0].tolist()
        [0.0, -0.5, 0.0, -1.0, 0.0]

    Attributes:
        indices: int64 or int32, ``[n]`` (or ``[1, n]``, as in COO): the slot of each entry. The
            values of repeated slots are summed. ``None`` means every slot once, in order; then
            ``values`` has the parameter's shape.
        values: ``[n, ...]``, a block for each entry.
        num_slots: the number of slots of the parameter. Zero, with a block of zero: its rows.
        slot_size: the number of elements of a slot.
        value_index: int64 or int32, ``[n]``: the row of ``values`` that each entry uses; by
            default, entry ``i`` uses row ``i``. Selects a part of a gradient without copying it.
        scale: ``[n]``, real: a factor for the row of each entry, applied before summing. The
            products are rounded to the precision of ``values``.
        element_mask: internal; must be ``None``.
    """

    indices: Tensor | None
    values: Tensor
    num_slots: int = 0
    slot_size: int = 0
    value_index: Tensor | None = None
    scale: Tensor | None = None
    element_mask: Tensor | None = None

    def as_real(self) -> IndexedGrad:
        """Complex values as pairs of real numbers."""
        values = torch.view_as_real(self.values.resolve_conj())
        element_mask = (
            None if self.element_mask is None else self.element_mask.repeat_interleave(2, dim=1)
        )
        return self._replace(values=values, slot_size=2 * self.slot_size, element_mask=element_mask)

    def expanded(self) -> IndexedGrad:
        """The same gradient with a row of values of its own for each entry, as a copy.

        Example:
            >>> both = torch.tensor([0, 0])
            >>> grad = IndexedGrad(torch.tensor([1, 2]), torch.ones(1, 4), 5, 4, both)
            >>> grad.expanded().values.shape
            torch.Size([2, 4])
        """
        if self.value_index is None and self.scale is None:
            return self
        rows = self.values.numel() // self.slot_size if self.slot_size else len(self.values)
        values = self.values.reshape(rows, self.slot_size)
        if self.value_index is not None:
            values = values[self.value_index]
        if self.scale is not None:
            values = values * self.scale[:, None]
        return self._replace(values=values, value_index=None, scale=None)

    def finer(self, num_slots: int) -> IndexedGrad:
        """The same gradient over smaller slots; no value is copied.

        Example:
            >>> IndexedGrad(torch.tensor([1]), torch.ones(1, 4), 2, 4).finer(4).indices.tolist()
            [2, 3]
        """
        assert self.indices is not None
        check_positions(self.indices, self.num_slots)  # what is multiplied may come to lie inside
        per = num_slots // self.num_slots if self.num_slots else 1
        inside = torch.arange(per, device=self.indices.device)
        indices = (self.indices.reshape(-1, 1) * per + inside).reshape(-1)
        value_index = None
        if self.value_index is not None:
            value_index = (self.value_index.reshape(-1, 1) * per + inside).reshape(-1)
        scale = None if self.scale is None else self.scale.repeat_interleave(per)
        return self._replace(
            indices=indices,
            num_slots=num_slots,
            slot_size=self.slot_size // per if per else 0,
            value_index=value_index,
            scale=scale,
        )

    def in_rows(self) -> IndexedGrad:
        """The same with values as rows: a view where that is possible, else a copy."""
        rows = self.values.numel() // self.slot_size if self.slot_size else len(self.values)
        values = self.values.reshape(rows, self.slot_size)
        return self._replace(values=values.contiguous() if self.indices is None else values)


def check_positions(indices: Tensor, num_slots: int) -> None:
    """Refuse positions that are no slots."""
    if indices.numel():
        low, high = (int(bound) for bound in indices.aminmax())
        if low < 0 or high >= num_slots:
            raise InputError(bad_index(0, num_slots, low if low < 0 else high))


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
