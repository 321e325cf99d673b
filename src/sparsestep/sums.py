"""The sums of a gradient's entries, a chunk at a time: so that rows need not all be written out."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from sparsestep.grads import Touched, check_positions

_ELEMENTS = 1 << 20  # of a chunk: small enough for a cache, large enough for torch's kernels


def sums(touched: Touched, elements: int = _ELEMENTS) -> Iterator[tuple[Tensor, Tensor]]:
    """The unique slots in ascending order, and the sum of the values of each, a row per slot.

    Duplicates are summed in order of appearance, in at least float32, as the engines do.

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
    ends = [0, *counts.cumsum(0).tolist()]
    per_chunk = max(1, elements // max(1, touched.block))
    for first in range(0, len(slots), per_chunk):
        last = min(first + per_chunk, len(slots))
        entries = order[ends[first] : ends[last]]
        which = torch.repeat_interleave(counts[first:last])
        dtype = torch.promote_types(touched.values.dtype, torch.float32)
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
