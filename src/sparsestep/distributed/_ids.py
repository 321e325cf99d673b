"""Ids, split by owner and without duplicates; rows of duplicates, summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.memory.tensors import HALF_DTYPES
from sparsestep.nn.id_table import IdTable, Options


class BagSplit(NamedTuple):
    """Bags of ids, sorted by the ranks that own the ids."""

    rows: Tensor  # each id as its owner numbers it
    ids_per_rank: Tensor
    order: Tensor  # which id each was; empty if not requested
    bags: Tensor  # the bag of each part; empty if every rank gets a part of every bag
    lengths: Tensor  # ids of each part, int32
    parts_per_rank: Tensor


def split_by_owner(
    ids: Tensor,
    offsets: Tensor | None,
    world_size: int,
    dtype: torch.dtype,
    *,
    needs_order: bool = True,
    to_all_ranks: bool = False,
) -> BagSplit:
    """Split bags of ids among the owners of round-robin rows, numbered by owners in ``dtype``.

    ``offsets`` are where each bag begins, and where the last one ends, int64; ``None``: one id
    each, whose bags and lengths are left out. With ``to_all_ranks``, every rank gets a part of
    every bag, even an empty one.
    """
    assert ext is not None
    ids, count = ids.long().contiguous(), len(ids)
    rows, counts = torch.empty(count, dtype=dtype), torch.empty(2, world_size, dtype=torch.int64)
    order = torch.empty(count if needs_order else 0, dtype=torch.int64)
    if offsets is None:
        bags, lengths = order[:0], rows[:0]
    else:
        bags = torch.empty(0 if to_all_ranks else count, dtype=torch.int64)
        num_lengths = world_size * (len(offsets) - 1) if to_all_ranks else count
        lengths = torch.empty(num_lengths, dtype=torch.int32)
    ext.split_by_owner(
        ids,
        None if offsets is None else offsets.contiguous(),
        world_size,
        rows,
        order if needs_order else None,
        None if offsets is None or to_all_ranks else bags,
        None if offsets is None else lengths,
        counts,
    )
    ids_per_rank, parts_per_rank = counts
    total = int(parts_per_rank.sum())
    return BagSplit(rows, ids_per_rank, order, bags[:total], lengths[:total], parts_per_rank)


def unique_ids(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Distinct ids, and the index of each id among them; all are below ``rows``."""
    assert ext is not None
    ids = ids.long().contiguous()
    unique, inverse = torch.empty_like(ids), torch.empty_like(ids)
    return unique[: ext.unique(ids, rows, unique, inverse)], inverse


def distinct_ids(ids: Tensor) -> tuple[Tensor, Tensor]:
    """The same of ids of any value, in the order in which they appear."""
    known = IdTable(Options(rows=len(ids) + 1, shared=1, admit=1, evict=None))
    inverse = known.claim(ids, 1).rows - 1
    unique = ids.new_empty(int(inverse.max()) + 1 if len(ids) else 0)
    unique[inverse] = ids
    return unique, inverse


def sum_all_duplicates(requests: Sequence[tuple[Tensor, Tensor, int]]) -> list[Tensor]:
    """Sum the rows with the same index, as ``sum_duplicates`` does, in one call where possible."""
    sums = [values.new_zeros(count, *values.shape[1:]) for values, _, count in requests]
    asked = [(v.detach(), inverse, s) for (v, inverse, _), s in zip(requests, sums, strict=True)]
    if ext is not None and ext.sum_rows(asked):
        return sums
    return [sum_duplicates(*each) for each in requests]


def sum_duplicates(values: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Sum the rows with the same index; half precision is rounded once."""
    wide = values.float() if values.dtype in HALF_DTYPES else values
    sums = wide.new_zeros(count, *wide.shape[1:])
    return sums.index_add_(0, inverse, wide).to(values.dtype)
