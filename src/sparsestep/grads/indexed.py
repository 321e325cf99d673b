"""IndexedGrad, the canonical form of a gradient; ``layouts.py`` converts every layout to it.

A parameter is viewed as ``[num_slots, slot_size]``: a slot is the smallest contiguous piece that is
updated or skipped as a whole. A row-sparse COO gradient updates rows, so its slots are rows;
one that is sparse in every dimension updates single elements.

The engines check that indices are in range, because they read them anyway. Code that derives other
indices from them calls ``check_indices`` first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._torch import cat
from sparsestep.errors import RangeError, message
from sparsestep.memory.tensors import out_of_range


class IndexedGrad(NamedTuple):
    """Which slots of a parameter a gradient updates, and with what values.

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
        values: ``[n, ...]``, the elements of a slot for each entry.
        num_slots: the number of slots of the parameter; by default, its rows.
        slot_size: the number of elements of a slot; by default, those of a row.
        value_index: int64 or int32, ``[n]``: the row of ``values`` that each entry uses; by
            default, entry ``i`` uses row ``i``. Selects a part of a gradient without copying it.
        scale: ``[n]``, real: a factor for the row of each entry, applied before summing. The
            products are rounded to the precision of ``values``.
        element_mask: bool, of the shape of ``values``: the elements that are updated; by default,
            all. If a slot is repeated, an element is updated if one of its entries says so. The
            values of other elements count as zeros in the mean square of a row.
    """

    indices: Tensor | None
    values: Tensor
    num_slots: int = None  # type: ignore[assignment]  # filled in by layouts.indexed_grad
    slot_size: int = None  # type: ignore[assignment]
    value_index: Tensor | None = None
    scale: Tensor | None = None
    element_mask: Tensor | None = None

    @classmethod
    def from_coo(cls, indices: Tensor, values: Tensor, shape: Sequence[int]) -> IndexedGrad:
        """Flatten the indices of a COO gradient. Raises if that would hide one out of range.

        Example:
            >>> indices = torch.tensor([[1, 0], [2, 0]])
            >>> IndexedGrad.from_coo(indices, torch.ones(2), (2, 3)).indices.tolist()
            [5, 0]
        """
        sparse_dim = len(indices)
        flat = indices
        if sparse_dim != 1:
            flat = indices.new_zeros(indices.shape[1])
            for dim, (row, size) in enumerate(zip(indices, shape, strict=False)):
                check_indices(row, size, dim=dim)
                flat.mul_(size).add_(row)
        num_slots, slot_size = math.prod(shape[:sparse_dim]), math.prod(shape[sparse_dim:])
        return cls(flat.contiguous(), values, num_slots, slot_size)

    @classmethod
    def cat(cls, parts: Sequence[IndexedGrad]) -> IndexedGrad:
        """Concatenate the entries of gradients, over the smallest slots that any of them has."""
        num_slots = max(part.num_slots for part in parts)
        parts = [
            part if part.num_slots == num_slots else part.split_slots(num_slots) for part in parts
        ]
        value_index = scale = None
        if any(part.value_index is not None for part in parts):
            value_indices, first = [], 0
            for part in parts:
                own = part.value_index
                if own is None:
                    own = torch.arange(part.num_value_rows, device=part.values.device)
                value_indices.append(own + first)
                first += part.num_value_rows
            value_index = cat(value_indices)
        if any(part.scale is not None for part in parts):
            scale = cat([part.scales() for part in parts])
        indices = cat([part.flat_indices for part in parts])
        values = cat([part.values.reshape(part.num_value_rows, part.slot_size) for part in parts])
        return cls(indices, values, num_slots, parts[0].slot_size, value_index, scale)

    @property
    def flat_indices(self) -> Tensor:
        """The indices, which must not be None, as a vector."""
        assert self.indices is not None
        return self.indices.reshape(-1)

    @property
    def num_value_rows(self) -> int:
        """The number of slots that ``values`` has elements for."""
        return self.values.numel() // self.slot_size if self.slot_size else len(self.values)

    def scales(self) -> Tensor:
        """Return ``scale``, or ones."""
        if self.scale is not None:
            return self.scale
        dtype = self.values.dtype.to_real()
        return torch.ones(self.flat_indices.numel(), dtype=dtype, device=self.values.device)

    def view_as_real(self) -> IndexedGrad:
        """View complex values as pairs of real ones."""
        values = torch.view_as_real(self.values.resolve_conj())
        mask = self.element_mask
        if mask is not None:
            mask = mask.repeat_interleave(2, dim=1)
        return self._replace(values=values, slot_size=2 * self.slot_size, element_mask=mask)

    def materialize_values(self) -> IndexedGrad:
        """Gather ``values`` by ``value_index`` and apply ``scale``: a copy with one row per entry.

        Example:
            >>> both = torch.tensor([0, 0])
            >>> grad = IndexedGrad(torch.tensor([1, 2]), torch.ones(1, 4), 5, 4, both)
            >>> grad.materialize_values().values.shape
            torch.Size([2, 4])
        """
        if self.value_index is None and self.scale is None:
            return self
        values = self.values.reshape(self.num_value_rows, self.slot_size)
        if self.value_index is not None:
            values = values[self.value_index]
        if self.scale is not None:
            values = values * self.scale[:, None]
        return self._replace(values=values, value_index=None, scale=None)

    def split_slots(self, num_slots: int) -> IndexedGrad:
        """Return the same gradient over smaller slots; no value is copied.

        Example:
            >>> grad = IndexedGrad(torch.tensor([1]), torch.ones(1, 4), 2, 4)
            >>> grad.split_slots(4).indices.tolist()
            [2, 3]
        """
        assert self.indices is not None
        check_indices(self.indices, self.num_slots)  # a product of a bad one may be in range
        per_slot = num_slots // self.num_slots if self.num_slots else 1
        offsets = torch.arange(per_slot, device=self.indices.device)
        indices = (self.indices.reshape(-1, 1) * per_slot + offsets).reshape(-1)
        value_index = self.value_index
        if value_index is not None:
            value_index = (value_index.reshape(-1, 1) * per_slot + offsets).reshape(-1)
        scale = None if self.scale is None else self.scale.repeat_interleave(per_slot)
        slot_size = self.slot_size // per_slot if per_slot else 0
        mask = self.element_mask
        return IndexedGrad(indices, self.values, num_slots, slot_size, value_index, scale, mask)

    def select_elements(self, mask: Tensor, numel: int) -> IndexedGrad:
        """Keep the elements of ``values`` that a mask selects, each as a slot of its own.

        Example:
            >>> grad = IndexedGrad(torch.tensor([1]), torch.ones(1, 2), 3, 2)
            >>> grad.select_elements(torch.tensor([[False, True]]), 6).indices.tolist()
            [3]
        """
        if self.indices is None:
            selected = mask.reshape(-1).nonzero().squeeze(1)
            return IndexedGrad(selected, self.values, numel, 1, value_index=selected)
        elements, mask = self.split_slots(numel), mask.reshape(-1)
        value_index, scale = elements.value_index, elements.scale
        selected = (mask if value_index is None else mask[value_index]).nonzero().squeeze(1)
        return elements._replace(
            indices=elements.flat_indices[selected],
            value_index=selected if value_index is None else value_index[selected],
            scale=None if scale is None else scale[selected],
        )

    def with_value_rows(self) -> IndexedGrad:
        """Reshape ``values`` to ``[num_value_rows, slot_size]``, as a view if possible."""
        values = self.values.reshape(self.num_value_rows, self.slot_size)
        return self._replace(values=values.contiguous() if self.indices is None else values)


def check_indices(indices: Tensor, size: int, *, dim: int = 0) -> None:
    """Raise RangeError if an index is outside its dimension."""
    bad = out_of_range(indices, size)
    if bad is not None:
        raise index_error(bad, size, dim=dim)


def index_error(index: int, size: int, *, dim: int = 0) -> RangeError:
    """Return the error for an index of a gradient that is outside its dimension."""
    requirement = f"the gradient's indices of dim {dim} must be in [0, {size})"
    return RangeError(message(requirement, index, "Check the ids that went into the embedding"))
