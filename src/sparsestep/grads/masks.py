"""Masks: which rows or elements of a parameter may move at all.

A mask turns a gradient into a smaller one. A strided gradient becomes one that touches what the
mask selects; a sparse one loses the entries outside. Either way no value is copied, and everything
after it works as for any other gradient: what is not touched is bit-for-bit unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsestep._torch import version_of
from sparsestep.errors import InputError, message
from sparsestep.grads.indexed import IndexedGrad, check_positions

Masks = Tensor | Sequence[Tensor | None] | None


def checked(masks: Masks, params: Sequence[Tensor], *, by_row: bool) -> None:
    """Refuse masks that do not fit a group's parameters."""
    for index, (mask, param) in enumerate(zip(listed(masks, params), params, strict=True)):
        if mask is None:
            continue
        shapes = [tuple(param.shape[:1])]
        if not by_row and param.dim() != 1:
            shapes.append(tuple(param.shape))
        wanted = " or ".join(map(str, shapes))
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise InputError(message(f"mask {index} must be a bool tensor", got))
        if tuple(mask.shape) not in shapes or mask.device != param.device:
            raise InputError(
                message(
                    f"mask {index} must have shape {wanted} and be on {param.device}",
                    f"{tuple(mask.shape)} on {mask.device}",
                )
            )


def listed(masks: Masks, params: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """One mask, or none, for each parameter."""
    if masks is None:
        return [None] * len(params)
    if isinstance(masks, Tensor):
        masks = [masks]
    if not isinstance(masks, Sequence) or len(masks) != len(params):
        got = len(masks) if isinstance(masks, Sequence) else type(masks).__name__
        remedy = "Use None for a parameter that is not masked"
        requirement = f"mask must be a tensor for one parameter, or a list of {len(params)}"
        raise InputError(message(requirement, got, remedy))
    return masks


class Selection:
    """The slots that a mask selects, found once and again when the mask has changed."""

    def __init__(self, mask: Tensor, shape: torch.Size) -> None:
        self.version: int | None = None  # of the mask, when it was looked at
        self.mask = mask
        self.shape = shape  # of the parameter that the mask was found to fit
        # The slots, how many there are to choose from, and of a parameter of which shape.
        self.for_core: tuple[Tensor, int, torch.Size] = (
            torch.empty(0, dtype=torch.int64),
            0,
            shape,
        )

    def update(self) -> Selection:
        """Bring it up to date with the mask."""
        mask = self.mask
        # An inference tensor does not count its changes; then it is looked at every time.
        version = version_of(mask)
        if version < 0 or version != self.version:
            positions = mask.reshape(-1).nonzero().squeeze(1)
            self.for_core = (positions, mask.numel(), self.shape)
            self.version = version  # last: other threads may look at it meanwhile
        return self

    @property
    def positions(self) -> Tensor:
        """The slots that are selected, in ascending order."""
        return self.for_core[0]


# A parameter, and its mask with the version that was looked at and what it selected then.
MaskBefore = tuple[Tensor, Tensor | None, int, tuple[Tensor, int, torch.Size] | None]


def as_they_were(
    params: Sequence[Tensor], selections: Sequence[Selection | None]
) -> list[MaskBefore] | None:
    """What the core compares masks with; ``None`` where one does not count its changes.

    Args:
        params: of a group.
        selections: of their masks, up to date.
    """
    before: list[MaskBefore] = []
    for param, selection in zip(params, selections, strict=True):
        if selection is None:
            before.append((param, None, 0, None))
        elif selection.version is None or selection.version < 0:
            return None
        else:
            before.append((param, selection.mask, selection.version, selection.for_core))
    return before


def select(touched: IndexedGrad, selection: Selection, numel: int) -> IndexedGrad:
    """The part of a gradient that a mask lets through.

    Args:
        touched: the gradient.
        selection: of the mask, up to date.
        numel: how many elements the parameter has.

    Example:
        >>> rows = Selection(torch.tensor([True, False, True]), torch.Size([3, 4])).update()
        >>> t = select(IndexedGrad(None, torch.ones(3, 4), 1, 12), rows, 12)
        >>> t.indices.tolist(), t.value_index.tolist(), t.num_slots, t.slot_size
        ([0, 2], [0, 2], 3, 4)
    """
    mask = selection.mask.reshape(-1)
    slots = len(mask)
    if not numel:
        nothing = selection.positions[:0]
        return IndexedGrad(nothing, touched.values.reshape(-1)[:0], slots, 0)
    block = numel // slots if slots else 0
    if touched.indices is None:
        return IndexedGrad(selection.positions, touched.values, slots, block, selection.positions)
    positions = touched.indices.reshape(-1)
    check_positions(positions, touched.num_slots)
    source, scale = touched.value_index, touched.scale
    if slots <= touched.num_slots:  # the mask is as coarse as the gradient, or coarser
        per = touched.num_slots // slots if slots else 1
        held = mask[positions.div(per, rounding_mode="floor")].nonzero().squeeze(1)
        return touched._replace(
            indices=positions[held],
            value_index=held if source is None else source[held],
            scale=None if scale is None else scale[held],
        )
    per = slots // touched.num_slots
    entries, columns = mask.view(touched.num_slots, per)[positions].nonzero(as_tuple=True)
    rows = entries if source is None else source[entries]
    return IndexedGrad(
        positions[entries] * per + columns,
        touched.values,
        slots,
        block,
        value_index=rows * per + columns,
        scale=None if scale is None else scale[entries],
    )
