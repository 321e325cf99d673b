"""Sums of entries that name the same slot: the one place where Python computes them.

Duplicates are summed in order of appearance, in at least float32, as the native core does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsestep._torch import stack
from sparsestep.errors import InputError
from sparsestep.grads.indexed import IndexedGrad, bad_index, check_positions

_ELEMENTS = 1 << 20  # of a chunk: small enough for a cache, large enough for torch's kernels


def sums(touched: IndexedGrad, elements: int = _ELEMENTS) -> Iterator[tuple[Tensor, Tensor]]:
    """The unique slots in ascending order, and the sum of the values of each, chunk by chunk.

    So the rows need not all be written out.

    Args:
        touched: the gradient; it has positions.
        elements: how many a chunk may have.

    Example:
        >>> bag = torch.tensor([0, 0, 1])
        >>> grad = IndexedGrad(torch.tensor([3, 1, 3]), torch.tensor([[1.0], [2.0]]), 5, 1, bag)
        >>> for slots, total in sums(grad, elements=1):
        ...     print(slots.tolist(), total.tolist())
        [1] [[1.0]]
        [3] [[3.0]]
    """
    runs = _Runs.of(touched)
    if runs is None:
        return
    per_chunk = max(1, elements // max(1, touched.slot_size))
    ends = runs.begins.tolist() if runs.count > per_chunk else [0, len(runs.order)]
    for first in range(0, runs.count, per_chunk):
        last = min(first + per_chunk, runs.count)
        begin, end = (ends[first], ends[last]) if runs.count > per_chunk else ends
        entries = runs.order[begin:end]
        if len(entries) == last - first:
            total = _rows(touched, entries).to(_dtype(touched))
        else:
            total = _totals(touched, entries, runs.begins[first : last + 1] - begin, per_chunk)
        yield runs.slots[first:last], total


@dataclass(frozen=True)
class _Runs:
    """Equal positions brought together.

    Attributes:
        order: the entries by position, those of a slot in order of appearance.
        count: how many different slots there are.
        slots: these, in ascending order.
        begins: where the entries of each begin among ``order``, and where the last ones end.
    """

    order: Tensor
    count: int
    slots: Tensor
    begins: Tensor

    @classmethod
    def of(cls, touched: IndexedGrad) -> _Runs | None:
        """Sort; the host waits once, for how many there are and whether they are slots."""
        assert touched.indices is not None
        positions = touched.indices.reshape(-1)
        if not positions.numel():
            return None
        positions, order = torch.sort(positions, stable=True)
        # The number of each entry's slot among all that come.
        which = torch.zeros_like(positions)
        torch.cumsum(positions[1:] != positions[:-1], 0, out=which[1:])
        ends = stack([positions[0], positions[-1], which[-1]])
        low, high, last = ends.cpu().tolist()
        if low < 0 or high >= touched.num_slots:
            raise InputError(bad_index(0, touched.num_slots, low if low < 0 else high))
        if last + 1 == len(order):
            begins = torch.arange(last + 2, device=order.device)
            return cls(order, last + 1, positions, begins)
        begins = torch.searchsorted(which, torch.arange(last + 2, device=order.device))
        return cls(order, last + 1, positions[begins[:-1]], begins)


def _dtype(touched: IndexedGrad) -> torch.dtype:
    """At least float32."""
    return torch.promote_types(touched.values.dtype, torch.float32)


def _totals(touched: IndexedGrad, entries: Tensor, begins: Tensor, per_chunk: int) -> Tensor:
    """The sums of runs of entries, each in its order.

    Args:
        touched: the gradient.
        entries: of the runs, one run after the other.
        begins: where each run begins, and where the last one ends.
        per_chunk: how many rows to write out at a time.
    """
    dtype, count = _dtype(touched), len(begins) - 1
    if not entries.is_cpu:
        # One thread goes over a run, column by column; index_add_ adds in any order there.
        return _reduced(_rows(touched, entries).to(dtype), begins)
    which = torch.repeat_interleave(begins.diff(), output_size=len(entries))
    # A sum that begins with -0.0 keeps every first value as it is, -0.0 too.
    total = touched.values.new_zeros(count, touched.slot_size, dtype=dtype).neg_()
    for some, where in zip(entries.split(per_chunk), which.split(per_chunk), strict=True):
        total.index_add_(0, where, _rows(touched, some).to(dtype))
    return total


def _reduced(rows: Tensor, begins: Tensor) -> Tensor:
    """The sum of each run of rows, in order, on any device."""
    try:
        return torch.segment_reduce(rows, "sum", offsets=begins, axis=0, unsafe=True, initial=-0.0)
    except NotImplementedError:  # not there, as on Apple's GPUs: the second of each run, the third
        total, at = rows[begins[:-1]], begins[:-1] + 1
        for _ in range(1, int(begins.diff().max())):
            more = at < begins[1:]
            row = rows[torch.where(more, at, 0)]
            total = torch.where(more[:, None], total + row, total)
            at = at + 1
        return total


def _rows(touched: IndexedGrad, entries: Tensor) -> Tensor:
    """The rows of some entries, written out."""
    block = touched.slot_size
    count = touched.values.numel() // block if block else len(touched.values)
    rows: Tensor = touched.values.reshape(count, block)
    rows = rows[entries if touched.value_index is None else touched.value_index[entries]]
    return rows if touched.scale is None else rows * touched.scale[entries, None]


def summed(touched: IndexedGrad) -> tuple[Tensor | None, Tensor]:
    """The unique slots in ascending order, and the sum of the values of each, all at once.

    Without positions, every slot comes once: ``None``, and the values.

    Example:
        >>> values = torch.tensor([[1.0], [2.0], [4.0]])
        >>> summed(IndexedGrad(torch.tensor([3, 1, 3]), values, 5, 1))
        (tensor([1, 3]), tensor([[2.],
                [5.]]))
    """
    positions, values = touched.indices, touched.values
    if positions is None:
        return None, values.reshape(touched.num_slots, touched.slot_size)
    positions = positions.reshape(-1)
    everything = max(1, positions.numel() * touched.slot_size)
    found = next(sums(touched, everything), None) if touched.slot_size else None
    if found is not None:
        return found
    check_positions(positions, touched.num_slots)
    return positions, values.new_zeros(len(positions), touched.slot_size)


def coarser(touched: IndexedGrad, slots: int) -> IndexedGrad:
    """The same gradient over larger slots, each of which is held in part.

    The cost is that of the larger slots that are touched.

    Example:
        >>> t = coarser(IndexedGrad(torch.tensor([5, 1, 5]), torch.ones(3, 1), 6, 1), slots=2)
        >>> t.indices.tolist(), t.element_mask.tolist()
        ([0, 1], [[False, True, False], [False, False, True]])
        >>> t.values[t.element_mask].tolist()
        [1.0, 2.0]
    """
    unique, total = summed(touched)
    assert unique is not None
    per = touched.num_slots // slots if slots else 1
    larger, where = torch.unique(unique.div(per, rounding_mode="floor"), return_inverse=True)
    cells = where * per + unique % per
    values = total.new_zeros(len(larger) * per, touched.slot_size)
    values[cells] = total
    held = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    held[cells] = True
    shape = (len(larger), per * touched.slot_size)
    return IndexedGrad(larger, values.view(shape), slots, shape[1], element_mask=held.view(shape))
