"""Sums of entries that name the same slot: the one place where Python computes them.

Duplicates are summed in order of appearance, in at least float32, as the native core does.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsestep.gradients.touched import Touched, check_positions

_ELEMENTS = 1 << 20  # of a chunk: small enough for a cache, large enough for torch's kernels


def sums(touched: Touched, elements: int = _ELEMENTS) -> Iterator[tuple[Tensor, Tensor]]:
    """The unique slots in ascending order, and the sum of the values of each, chunk by chunk.

    So the rows need not all be written out.

    Args:
        touched: the gradient; it has positions.
        elements: how many a chunk may have.

    Example:
        >>> bag = torch.tensor([0, 0, 1])
        >>> grad = Touched(torch.tensor([3, 1, 3]), torch.tensor([[1.0], [2.0]]), 5, 1, bag)
        >>> for slots, total in sums(grad, elements=1):
        ...     print(slots.tolist(), total.tolist())
        [1] [[1.0]]
        [3] [[3.0]]
    """
    assert touched.positions is not None
    positions = touched.positions.reshape(-1)
    check_positions(positions, touched.slots)
    order = torch.argsort(positions, stable=True)
    slots, counts = torch.unique_consecutive(positions[order], return_counts=True)
    per_chunk = max(1, elements // max(1, touched.block))
    ends = [0, *counts.cumsum(0).tolist()] if len(slots) > per_chunk else []
    dtype = torch.promote_types(touched.values.dtype, torch.float32)
    for first in range(0, len(slots), per_chunk):
        last = min(first + per_chunk, len(slots))
        entries = order[ends[first] : ends[last]] if len(slots) > per_chunk else order
        if len(entries) == last - first:
            yield slots[first:last], _rows(touched, entries).to(dtype)
            continue
        which = torch.repeat_interleave(counts[first:last])
        # A sum that begins with -0.0 keeps every first value as it is, -0.0 too.
        total = touched.values.new_zeros(last - first, touched.block, dtype=dtype).neg_()
        for some, where in zip(entries.split(per_chunk), which.split(per_chunk), strict=True):
            total.index_add_(0, where, _rows(touched, some).to(dtype))
        yield slots[first:last], total


def _rows(touched: Touched, entries: Tensor) -> Tensor:
    """The rows of some entries, written out."""
    block = touched.block
    count = touched.values.numel() // block if block else len(touched.values)
    rows: Tensor = touched.values.reshape(count, block)
    rows = rows[entries if touched.source is None else touched.source[entries]]
    return rows if touched.scale is None else rows * touched.scale[entries, None]


def summed(touched: Touched) -> tuple[Tensor | None, Tensor]:
    """The unique slots in ascending order, and the sum of the values of each, all at once.

    Without positions, every slot comes once: ``None``, and the values.

    Example:
        >>> values = torch.tensor([[1.0], [2.0], [4.0]])
        >>> summed(Touched(torch.tensor([3, 1, 3]), values, 5, 1))
        (tensor([1, 3]), tensor([[2.],
                [5.]]))
    """
    positions, values = touched.positions, touched.values
    if positions is None:
        return None, values.reshape(touched.slots, touched.block)
    positions = positions.reshape(-1)
    everything = max(1, positions.numel() * touched.block)
    found = next(sums(touched, everything), None) if touched.block else None
    if found is not None:
        return found
    check_positions(positions, touched.slots)
    return positions, values.new_zeros(len(positions), touched.block)


def coarser(touched: Touched, slots: int) -> Touched:
    """The same gradient over larger slots, each of which is held in part.

    The cost is that of the larger slots that are touched.

    Example:
        >>> t = coarser(Touched(torch.tensor([5, 1, 5]), torch.ones(3, 1), 6, 1), slots=2)
        >>> t.positions.tolist(), t.held.tolist()
        ([0, 1], [[False, True, False], [False, False, True]])
        >>> t.values[t.held].tolist()
        [1.0, 2.0]
    """
    unique, total = summed(touched)
    assert unique is not None
    per = touched.slots // slots if slots else 1
    larger, where = torch.unique(unique.div(per, rounding_mode="floor"), return_inverse=True)
    cells = where * per + unique % per
    values = total.new_zeros(len(larger) * per, touched.block)
    values[cells] = total
    held = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    held[cells] = True
    shape = (len(larger), per * touched.block)
    return Touched(larger, values.view(shape), slots, shape[1], held=held.view(shape))
