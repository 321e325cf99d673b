"""Masks: which rows or elements of a parameter may be updated at all.

A mask turns a gradient into a smaller one: a strided gradient becomes one that has entries where
the mask is True, a sparse one loses the entries outside. No value is copied, and the result is
updated like any other gradient: elements without an entry keep their bits.

A mask over elements is also the layout of the state, which has one value for each kept element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import local_slices, version_of
from sparsestep.errors import InputError, message
from sparsestep.grads.indexed import IndexedGrad, check_indices
from sparsestep.memory.tensors import check_has_values, is_distributed, is_plain_meta

Masks = Tensor | Sequence[Tensor | None] | None


def check_masks(masks: Masks, params: Sequence[Tensor], *, defers: bool = False) -> None:
    """Raise InputError if masks do not fit a group's parameters.

    With ``defers``, updates are deferred by rows, and a mask must select rows.
    """
    for index, (mask, param) in enumerate(zip(per_param(masks, params), params, strict=True)):
        check_mask(f"mask {index}", mask, param, defers=defers)


def check_mask(name: str, mask: Tensor | None, param: Tensor, *, defers: bool = False) -> None:
    """Raise InputError if a mask does not fit a parameter; ``defers`` as in ``check_masks``."""
    if mask is None:
        return
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise InputError(message(f"{name} must be a bool tensor", got))
    if mask.layout is not torch.strided:
        raise InputError(message(f"{name} must be a strided tensor", mask.layout))
    shapes = [tuple(param.shape[:1])]
    if not defers and param.dim() > 1:
        shapes.append(tuple(param.shape))
    if tuple(mask.shape) not in shapes or mask.device != param.device:
        wanted = " or ".join(map(str, shapes)) + " with semantics='dense'" * defers
        requirement = f"{name} must have shape {wanted} and be on {param.device}"
        raise InputError(message(requirement, f"{tuple(mask.shape)} on {mask.device}"))
    check_has_values(name, mask)
    if is_plain_meta(mask):
        raise InputError(message(f"{name} must have values", "a tensor on the meta device"))


def local_mask(mask: Tensor, param: Tensor) -> Tensor:
    """Return the part of a mask that belongs to the local part of a DTensor parameter."""
    if not is_distributed(param):
        return mask
    if any(type(each).__name__ not in ("Shard", "Replicate") for each in param.placements):
        requirement = "a DTensor parameter with a mask must have the placements Shard or Replicate"
        raise InputError(message(requirement, param.placements))
    return mask[local_slices(param)[: mask.dim()]]


def per_param(masks: Masks, params: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return one mask, or None, for each parameter."""
    if masks is None:
        return [None] * len(params)
    if isinstance(masks, Tensor):
        masks = [masks]
    is_list = isinstance(masks, Sequence) and not isinstance(masks, str)
    if not is_list or len(masks) != len(params):
        got = f"a list of {len(masks)}" if is_list else type(masks).__name__
        remedy = "Use None for a parameter that is not masked"
        requirement = f"mask must be a tensor for one parameter, or a list of {len(params)}"
        raise InputError(message(requirement, got, remedy))
    return masks


def changed_entries(old: Tensor | None, new: Tensor | None, shape: torch.Size) -> Tensor | None:
    """Return where two masks of a parameter differ, by rows, or by elements if one of them is.

    ``None`` instead of a mask selects everything; the result is ``None`` if both do.

    Example:
        >>> rows, elements = torch.tensor([True, False]), torch.tensor([[True, False]] * 2)
        >>> changed_entries(rows, None, torch.Size([2, 2]))
        tensor([False,  True])
        >>> changed_entries(rows, elements, torch.Size([2, 2]))
        tensor([[False,  True],
                [ True, False]])
    """
    if old is None or new is None:
        given = new if old is None else old
        return None if given is None else ~given
    if old.shape != new.shape:
        old, new = over_elements(old, shape), over_elements(new, shape)
    return old ^ new


def over_elements(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return a mask by rows as one that broadcasts over the elements of a parameter."""
    return mask.view(-1, *[1] * (len(shape) - 1)).expand(shape) if mask.dim() == 1 else mask


def all_elements(mask: Tensor | None, param: Tensor) -> Tensor:
    """Return a mask as one over the elements of a parameter; ``None`` selects all."""
    if mask is None:
        return torch.ones((), dtype=torch.bool, device=param.device).expand(param.shape)
    return over_elements(mask, param.shape)


class PackedMask(NamedTuple):
    """A mask over elements at one time, and the layout of state that has only what it keeps."""

    words: Tensor  # int64, a bit for each element, in order
    ranks: Tensor  # int64, the number of kept elements before each eight words, for the core
    kept: int  # the number of kept elements
    shape: torch.Size  # of the mask

    @classmethod
    def of(cls, mask: Tensor) -> PackedMask:
        """Read a mask."""
        flat = mask.detach().reshape(-1).contiguous()  # one column may be a view with gaps
        count = -(-flat.numel() // 64)
        device = mask.device  # not the default device, which may be another
        ranks = torch.zeros(-(-count // 8), dtype=torch.int64, device=device)
        if ext is not None:
            words = torch.empty(count, dtype=torch.int64, device=device)
            return cls(words, ranks, ext.pack_mask(flat, words, ranks), mask.shape)
        bits = torch.zeros(count * 64, dtype=torch.uint8, device=device)
        bits[: flat.numel()] = flat
        shifts = torch.arange(8, dtype=torch.uint8, device=device)
        packed = (bits.view(-1, 8) << shifts).sum(1, dtype=torch.uint8)
        return cls(packed.view(torch.int64), ranks, int(flat.sum()), mask.shape)

    def bits(self) -> Tensor:
        """Return the mask in one dim, and False up to the next multiple of 64."""
        shifts = torch.arange(8, dtype=torch.uint8, device=self.words.device)
        bits = (self.words.view(torch.uint8)[:, None] >> shifts).bitwise_and_(1)
        return bits.view(torch.bool).view(-1)

    def indices(self) -> Tensor:
        """Return the kept elements, in ascending order."""
        return self.bits().nonzero().squeeze(1)

    def same_as(self, other: PackedMask | None) -> bool:
        """Whether both keep the same elements."""
        return self is other or (
            other is not None
            and self.shape == other.shape
            and self.kept == other.kept
            and torch.equal(self.words, other.words)
        )

    def locate(self, elements: Tensor) -> tuple[Tensor, Tensor]:
        """Return which of some elements are kept, and where packed state has the values of those.

        Example:
            >>> packed = PackedMask.of(torch.tensor([False, True, True]))
            >>> packed.locate(torch.tensor([[0, 2]]))
            (tensor([[False,  True]]), tensor([1]))
        """
        kept = self.bits()[elements]
        return kept, torch.searchsorted(self.indices(), elements[kept])

    def select(self, grad: IndexedGrad) -> IndexedGrad:
        """Return the kept elements of a dense gradient, each as a slot of its own."""
        elements = self.indices()
        numel = self.shape.numel()
        return IndexedGrad(elements, grad.values, numel, 1, value_index=elements)


# Row masks as the native core reads them: indices, number of slots, shape of the parameter.
SelectedSlots = tuple[Tensor, int, torch.Size]


class MaskSelection:
    """What a mask selects, cached until the mask's version changes."""

    def __init__(self, mask: Tensor, shape: torch.Size) -> None:
        self.version: int | None = None  # of the mask when it was read
        self.mask = mask
        self.shape = shape  # of the parameter that it was checked against
        # The selection as the native core reads it.
        self.native: SelectedSlots | PackedMask = (torch.empty(0).long(), 0, shape)
        self._rows: tuple[object, Tensor] = (None, torch.empty(0).long())

    def refresh(self, *, packs: bool = False) -> MaskSelection:
        """Read the mask if it has changed. Inference tensors have no version: always.

        With ``packs``, it is the layout of the parameter's state.
        """
        mask, before = self.mask, self.packed
        version = version_of(mask)
        if version < 0 or version != self.version or packs != (before is not None):
            if packs:
                packed = PackedMask.of(mask)
                self.native = before if before is not None and packed.same_as(before) else packed
            else:
                self.native = (mask.reshape(-1).nonzero().squeeze(1), mask.numel(), self.shape)
            self.version = version  # last, for other threads that read both
        return self

    @property
    def packed(self) -> PackedMask | None:
        """The layout of the state, if that is packed."""
        return self.native if isinstance(self.native, PackedMask) else None

    @property
    def rows(self) -> Tensor:
        """The rows with a selected element, in ascending order."""
        native, (known, rows) = self.native, self._rows
        if known is not native:
            rows = self.mask.flatten(1).any(1).nonzero().squeeze(1)
            self._rows = native, rows
        return rows

    @property
    def indices(self) -> Tensor:
        """The selected slots, in ascending order."""
        native = self.native
        return native.indices() if isinstance(native, PackedMask) else native[0]


# A parameter, its mask, the mask's version, and the selection at that version.
CachedMask = tuple[Tensor, Tensor | None, int, SelectedSlots | PackedMask | None]


def cached_masks(
    params: Sequence[Tensor], selections: Sequence[MaskSelection | None]
) -> list[CachedMask] | None:
    """Return what the core compares the refreshed masks with; None if one has no version."""
    cached: list[CachedMask] = []
    for param, selection in zip(params, selections, strict=True):
        if selection is None:
            cached.append((param, None, 0, None))
        elif selection.version is None or selection.version < 0:
            return None
        else:
            cached.append((param, selection.mask, selection.version, selection.native))
    return cached


def apply_mask(
    grad: IndexedGrad, selection: MaskSelection, numel: int, *, by_row: bool = False
) -> IndexedGrad:
    """Return the part of the gradient of ``numel`` elements that a refreshed mask selects.

    With ``by_row``, the slots of a dense gradient are rows even if the mask is over elements.

    Example:
        >>> rows = MaskSelection(torch.tensor([True, False, True]), torch.Size([3, 4])).refresh()
        >>> found = apply_mask(IndexedGrad(None, torch.ones(3, 4), 1, 12), rows, 12)
        >>> found.indices.tolist(), found.value_index.tolist(), found.num_slots, found.slot_size
        ([0, 2], [0, 2], 3, 4)
    """
    if by_row and grad.indices is None and selection.mask.dim() > 1 and numel:
        elements = selection.mask.flatten(1)
        rows = selection.rows
        values, (num_rows, size) = grad.values.reshape(elements.shape), elements.shape
        return IndexedGrad(rows, values, num_rows, size, value_index=rows, element_mask=elements)
    mask = selection.mask.reshape(-1)
    num_slots = len(mask)
    if not numel:
        return IndexedGrad(selection.indices[:0], grad.values.reshape(-1)[:0], num_slots, 0)
    slot_size = numel // num_slots if num_slots else 0
    if grad.indices is None:
        indices = selection.indices
        return IndexedGrad(indices, grad.values, num_slots, slot_size, value_index=indices)
    indices = grad.indices.reshape(-1)
    check_indices(indices, grad.num_slots)
    value_index, scale = grad.value_index, grad.scale
    if num_slots <= grad.num_slots:  # the mask's slots are as large as the gradient's, or larger
        per_slot = grad.num_slots // num_slots if num_slots else 1
        kept = mask[indices.div(per_slot, rounding_mode="floor")].nonzero().squeeze(1)
        return grad._replace(
            indices=indices[kept],
            value_index=kept if value_index is None else value_index[kept],
            scale=None if scale is None else scale[kept],
        )
    per_slot = num_slots // grad.num_slots
    selected = mask.view(grad.num_slots, per_slot)[indices]
    if grad.element_mask is not None:
        held = grad.element_mask.reshape(-1, per_slot, grad.slot_size // per_slot)
        selected &= (held if value_index is None else held[value_index]).any(2)
    entries, columns = selected.nonzero(as_tuple=True)
    rows = entries if value_index is None else value_index[entries]
    return IndexedGrad(
        indices[entries] * per_slot + columns,
        grad.values,
        num_slots,
        slot_size,
        value_index=rows * per_slot + columns,
        scale=None if scale is None else scale[entries],
    )
