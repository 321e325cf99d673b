"""Ids, rows and gradients, to and from the buffers that ranks send each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import cat
from sparsestep.memory.tensors import HALF_DTYPES


class BagSplit(NamedTuple):
    """Bags of ids, sorted by the ranks that own the ids."""

    rows: Tensor  # each id as its owner numbers it
    ids_per_rank: list[int]
    order: Tensor  # which id each was; empty if not requested
    bags: Tensor  # the bag of each part; empty if every rank gets a part of every bag
    lengths: Tensor  # ids of each part, int32
    parts_per_rank: list[int]


def split_by_owner(
    ids: Tensor,
    offsets: Tensor | None,
    world_size: int,
    dtype: torch.dtype,
    *,
    needs_order: bool = True,
    to_all_ranks: bool = False,
) -> BagSplit:
    """Split bags of ids among the owners of round-robin rows.

    Args:
        ids: rows of a table, one bag after the other.
        offsets: where each bag begins, and where the last one ends, int64; ``None``: one id each.
        world_size: the number of ranks.
        dtype: of the owners' row numbers.
        needs_order: whether to return ``order``.
        to_all_ranks: whether every rank gets a part of every bag, even an empty one.
    """
    assert ext is not None
    ids, count = ids.long().contiguous(), len(ids)
    offsets = torch.arange(count + 1) if offsets is None else offsets.contiguous()
    rows = torch.empty(count, dtype=dtype)
    order = torch.empty(count if needs_order else 0, dtype=torch.int64)
    bags = torch.empty(0 if to_all_ranks else count, dtype=torch.int64)
    num_lengths = world_size * (len(offsets) - 1) if to_all_ranks else count
    lengths = torch.empty(num_lengths, dtype=torch.int32)
    ids_per_rank, parts_per_rank = ext.split_by_owner(
        ids,
        offsets,
        world_size,
        rows,
        order if needs_order else None,
        None if to_all_ranks else bags,
        lengths,
    )
    total = sum(parts_per_rank)
    return BagSplit(rows, ids_per_rank, order, bags[:total], lengths[:total], parts_per_rank)


def unique_ids(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Distinct ids, and the index of each id among them; all are below ``rows``."""
    assert ext is not None
    ids = ids.long().contiguous()
    unique, inverse = torch.empty_like(ids), torch.empty_like(ids)
    return unique[: ext.unique(ids, rows, unique, inverse)], inverse


def sum_duplicates(values: Tensor, inverse: Tensor, count: int) -> Tensor:
    """Sum the rows with the same index; half precision is rounded once."""
    wide = values.float() if values.dtype in HALF_DTYPES else values
    sums = wide.new_zeros(count, *wide.shape[1:])
    return sums.index_add_(0, inverse, wide).to(values.dtype)


def split_by_rank(tensor: Tensor, counts: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
    """Yield each rank's non-empty slice."""
    begin, total = 0, len(tensor)
    for rank, count in enumerate(counts):
        if count:
            yield rank, tensor if count == total else tensor.narrow(0, begin, count)
            begin += count


def concat(pieces: Sequence[Tensor], dtype: torch.dtype | None = None) -> Tensor:
    """Concatenate. A single non-empty piece is returned without a copy, whatever its dtype."""
    some = [each for each in pieces if each.numel()] or pieces[:1]
    if len(some) == 1:
        return some[0]
    if dtype is None:
        return cat(some)
    whole, begin = torch.empty(sum(map(len, some)), dtype=dtype), 0
    for piece in some:
        whole[begin : (begin := begin + len(piece))] = piece
    return whole


def pack_bytes(tensors: Sequence[Tensor]) -> Tensor:
    pieces = [as_bytes(each) for each in tensors if each.numel()]
    if len(pieces) == 1:
        return pieces[0]
    return cat(pieces) if pieces else torch.empty(0, dtype=torch.uint8)


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor; a view, if it is contiguous."""
    flat = tensor.reshape(-1)
    if flat.stride(0) != 1:  # a single element may have any
        flat = torch.empty_like(flat, memory_format=torch.contiguous_format).copy_(flat)
    return flat.view(torch.uint8)


class BufferReader:
    """Reads the tensors of a message. One in a shared buffer is copied as it is read."""

    def __init__(self, message: Tensor, *, is_shared: bool = False) -> None:
        self._message = message
        self._is_shared = is_shared
        self._offset = 0

    def read(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        piece = self._message.narrow(0, self._offset, size)
        self._offset += size
        if self._is_shared or piece.storage_offset() % dtype.itemsize:  # or unaligned
            piece = piece.clone()
        return piece.view(dtype)


class LocalReader(BufferReader):
    """Reads this rank's own tensors, which are never sent: without a copy, in their dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = iter([each for each in tensors if each.numel()])

    def read(self, count: int, dtype: torch.dtype) -> Tensor:
        if not count:
            return torch.empty(0, dtype=dtype)
        found = next(self._tensors).reshape(-1)
        assert found.numel() == count
        return found


def read_all(
    readers: Sequence[BufferReader], counts: Sequence[int], dtype: torch.dtype
) -> list[Tensor]:
    """The next elements of each rank's message."""
    return [reader.read(count, dtype) for reader, count in zip(readers, counts, strict=True)]
