"""Sums of entries that name the same slot, and their norms.

Duplicates are summed in order of appearance, in at least float32, as the native core does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from sparsestep._native import ext, isa
from sparsestep._torch import stack
from sparsestep.grads.indexed import IndexedGrad, check_indices, index_error

_CHUNK_ELEMENTS = 1 << 20  # small enough for a cache, large enough for torch's kernels
_NATIVE_ORDERS = {1.0: 1, 2.0: 2, math.inf: 3}  # as in native/core/types.h


def iter_sums(
    grad: IndexedGrad, elements: int = _CHUNK_ELEMENTS
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the unique slots in ascending order with their sums, in chunks of so many elements."""
    if grad.values.is_complex():
        for slots, total in iter_sums(grad.view_as_real(), 2 * elements):
            yield slots, torch.view_as_complex(total.reshape(len(total), grad.slot_size, 2))
        return
    if not grad.flat_indices.numel():
        return
    all_slots, starts, all_entries = _sort_entries(grad)
    num_unique = len(all_slots)
    per_chunk = max(1, elements // max(1, grad.slot_size))
    bounds = starts.tolist() if num_unique > per_chunk else [0, len(all_entries)]
    for first in range(0, num_unique, per_chunk):
        last = min(first + per_chunk, num_unique)
        begin, end = (bounds[first], bounds[last]) if num_unique > per_chunk else bounds
        order = all_entries[begin:end]
        if len(order) == last - first:
            total = _gather_rows(grad, order).to(_accumulate_dtype(grad))
        else:
            total = _sum_runs(grad, order, starts[first : last + 1] - begin, per_chunk)
        yield all_slots[first:last], total


def _sort_entries(grad: IndexedGrad) -> tuple[Tensor, Tensor, Tensor]:
    """Return the unique slots, the start of each one's run and the last end, and all entries.

    Entries are in order of slots, then of appearance. The host waits once, for the number of slots
    and for whether they are in range.
    """
    indices, order = torch.sort(grad.flat_indices, stable=True)
    run = torch.zeros_like(indices)  # the number of each entry's run
    torch.cumsum(indices[1:] != indices[:-1], 0, out=run[1:])
    low, high, last = stack([indices[0], indices[-1], run[-1]]).cpu().tolist()
    if low < 0 or high >= grad.num_slots:
        raise index_error(low if low < 0 else high, grad.num_slots)
    starts = torch.arange(last + 2, device=order.device)
    if last + 1 == len(order):
        return indices, starts, order
    starts = torch.searchsorted(run, starts)
    return indices[starts[:-1]], starts, order


def _accumulate_dtype(grad: IndexedGrad) -> torch.dtype:
    return torch.promote_types(grad.values.dtype, torch.float32)


def _sum_runs(grad: IndexedGrad, order: Tensor, starts: Tensor, per_chunk: int) -> Tensor:
    """Sum runs of entries, each in its order; at most ``per_chunk`` rows are gathered at a time."""
    dtype, num_runs = _accumulate_dtype(grad), len(starts) - 1
    if not order.is_cpu:
        # One thread sums a run, column by column; index_add_ adds in any order there.
        return _segment_sum(_gather_rows(grad, order).to(dtype), starts)
    run = torch.repeat_interleave(starts.diff(), output_size=len(order))
    # Adding to -0.0 preserves every first value, including -0.0.
    total = grad.values.new_zeros(num_runs, grad.slot_size, dtype=dtype).neg_()
    for entries, runs in zip(order.split(per_chunk), run.split(per_chunk), strict=True):
        total.index_add_(0, runs, _gather_rows(grad, entries).to(dtype))
    return total


def _segment_sum(rows: Tensor, starts: Tensor) -> Tensor:
    """Sum each run of rows, in order, on any device."""
    try:
        return torch.segment_reduce(rows, "sum", offsets=starts, axis=0, unsafe=True, initial=-0.0)
    except NotImplementedError:  # as on Apple's GPUs: add the second of each run, the third, ...
        total, at = rows[starts[:-1]], starts[:-1] + 1
        for _ in range(1, int(starts.diff().max())):
            more = at < starts[1:]
            total = torch.where(more[:, None], total + rows[torch.where(more, at, 0)], total)
            at = at + 1
        return total


def _gather_rows(grad: IndexedGrad, entries: Tensor) -> Tensor:
    rows: Tensor = grad.values.reshape(grad.num_value_rows, grad.slot_size)
    rows = rows[entries if grad.value_index is None else grad.value_index[entries]]
    return rows if grad.scale is None else rows * grad.scale[entries, None]


def sum_duplicates(grad: IndexedGrad) -> tuple[Tensor | None, Tensor]:
    """Return the unique slots, ascending, and the sum of each; ``None`` for every slot once."""
    if grad.indices is None:
        return None, grad.values.reshape(grad.num_slots, grad.slot_size)
    indices = grad.flat_indices
    elements = max(1, indices.numel() * grad.slot_size)
    found = next(iter_sums(grad, elements), None) if grad.slot_size else None
    if found is not None:
        return found
    check_indices(indices, grad.num_slots)
    return indices, grad.values.new_zeros(len(indices), grad.slot_size)


def merge_slots(grad: IndexedGrad, num_slots: int) -> IndexedGrad:
    """Return the same gradient over larger slots, with an ``element_mask``.

    The cost is that of the larger slots that have an entry.

    Example:
        >>> grad = IndexedGrad(torch.tensor([5, 1, 5]), torch.ones(3, 1), 6, 1)
        >>> merged = merge_slots(grad, num_slots=2)
        >>> merged.indices.tolist(), merged.element_mask.tolist()
        ([0, 1], [[False, True, False], [False, False, True]])
        >>> merged.values[merged.element_mask].tolist()
        [1.0, 2.0]
    """
    unique, total = sum_duplicates(grad)
    assert unique is not None
    per_slot = grad.num_slots // num_slots if num_slots else 1
    indices, which = torch.unique(unique.div(per_slot, rounding_mode="floor"), return_inverse=True)
    cells = which * per_slot + unique % per_slot
    values = total.new_zeros(len(indices) * per_slot, grad.slot_size)
    values[cells] = total
    mask = torch.zeros(values.shape, dtype=torch.bool, device=values.device)
    mask[cells] = True
    shape = (len(indices), per_slot * grad.slot_size)
    values, mask = values.view(shape), mask.view(shape)
    return IndexedGrad(indices, values, num_slots, shape[1], element_mask=mask)


def slot_norms(parts: tuple[IndexedGrad, ...], order: float) -> Tensor | None:
    """Return the norm of every slot's sum, in float64, without storing the sums.

    There is a number for each entry: the slot's norm for the first of a slot, zero for the others.
    ``None`` if the core cannot compute it.
    """
    native_order = _NATIVE_ORDERS.get(order)
    if ext is None or native_order is None or not all(part.values.is_cpu for part in parts):
        return None
    parts = tuple(part if part.values.is_contiguous() else part.with_value_rows() for part in parts)
    entries = sum(part.flat_indices.numel() for part in parts)
    norms = torch.zeros(entries, dtype=torch.float64, device="cpu")
    done = ext.norms(parts, native_order, norms, torch.get_num_threads(), isa.index)
    if done is None:
        return None
    if done[0] is not None:
        raise index_error(done[0], parts[0].num_slots)
    return norms


def norm_of_sums(grad: IndexedGrad, order: float) -> tuple[Tensor, int]:
    """Return a tensor whose norm equals that of all sums, and the number of summed elements."""
    chunks = iter_sums(grad)
    empty = grad.values.new_empty(0, dtype=_accumulate_dtype(grad))
    first = next((total for _, total in chunks), empty)
    norms, count = [], first.numel()
    for _, total in chunks:
        count += total.numel()
        norms.append(torch.linalg.vector_norm(total, order))
    if not norms:
        return first, count
    return stack([torch.linalg.vector_norm(first, order), *norms]), count
