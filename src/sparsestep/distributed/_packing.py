"""Which ids go to which rank: row ``i`` is rank ``i % world``'s, which calls it ``i // world``.

The core does it in two passes over the ids; without it, torch sorts. Ids of any value, which have
no row yet, go where a hash of them says (``owner_of``).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.grads.indexed import HALVES


class Split(NamedTuple):
    """Ids in the order of the ranks that own their rows, and otherwise in their own.

    Attributes:
        rows: the owner's number of each row.
        counts: how many of them each rank has.
        order: which id it was; empty where nobody asks for it.
        bags: of the bags of which a rank has a part, which they are; empty where every rank has
            a part of each.
        lengths: how many ids such a part has; int32.
        parts: how many parts each rank has.
    """

    rows: Tensor
    counts: list[int]
    order: Tensor
    bags: Tensor
    lengths: Tensor
    parts: list[int]


def split(
    ids: Tensor,
    starts: Tensor,
    world: int,
    dtype: torch.dtype,
    *,
    wants_order: bool = True,
    wants_all: bool = False,
) -> Split:
    """Divide bags of ids among the owners of their rows.

    Args:
        ids: rows of a table, one bag after the other.
        starts: where each bag begins, and where the last one ends; int64.
        world: how many ranks there are.
        dtype: of the owner's numbers.
        wants_order: whether to say which id is where.
        wants_all: whether every rank has a part of every bag, and be it empty.

    Example:
        >>> found = split(torch.tensor([5, 4, 2, 3]), torch.tensor([0, 3, 4]), 2, torch.int32)
        >>> found.rows.tolist(), found.counts, found.order.tolist()
        ([2, 1, 2, 1], [2, 2], [1, 2, 0, 3])
        >>> found.bags.tolist(), found.lengths.tolist(), found.parts
        ([0, 0, 1], [2, 1, 1], [1, 2])
    """
    ids, count = ids.long().contiguous(), len(ids)
    if ext is None:
        return _split_by_torch(ids, starts, world, dtype, wants_all=wants_all)
    rows = torch.empty(count, dtype=dtype)
    order = torch.empty(count if wants_order else 0, dtype=torch.int64)
    bags = torch.empty(0 if wants_all else count, dtype=torch.int64)
    most = world * (len(starts) - 1) if wants_all else count
    lengths = torch.empty(most, dtype=torch.int32)
    counts, parts = ext.split_by_owner(
        *(ids, starts.contiguous(), world, rows, order if wants_order else None),
        *(None if wants_all else bags, lengths),
    )
    total = sum(parts)
    return Split(rows, counts, order, bags[:total], lengths[:total], parts)


def _split_by_torch(
    ids: Tensor, starts: Tensor, world: int, dtype: torch.dtype, *, wants_all: bool = False
) -> Split:
    owners = ids % world
    order = torch.argsort(owners, stable=True)
    count = len(starts) - 1
    bag_of_id = torch.repeat_interleave(starts.diff(), output_size=len(ids))
    pairs, lengths = torch.unique_consecutive(
        owners[order] * count + bag_of_id[order], return_counts=True
    )
    parts = torch.bincount(pairs.div(max(count, 1), rounding_mode="floor"), minlength=world)
    rows = ids[order].div(world, rounding_mode="floor").to(dtype)
    counts = torch.bincount(owners, minlength=world)
    if wants_all:
        whole = torch.zeros(world * count, dtype=torch.int32)
        whole[pairs] = lengths.int()
        return Split(rows, counts.tolist(), order, pairs[:0], whole, [count] * world)
    which = pairs % max(count, 1)
    return Split(rows, counts.tolist(), order, which, lengths.int(), parts.tolist())


def split_singles(ids: Tensor, world: int, dtype: torch.dtype) -> Split:
    """The same for ids that are bags of their own.

    Example:
        >>> split_singles(torch.tensor([5, 4, 2]), 2, torch.int64).rows
        tensor([2, 1, 2])
    """
    return split(ids, torch.arange(len(ids) + 1), world, dtype)


def distinct(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Each id once, and which of these every id is.

    Args:
        ids: rows of a table.
        rows: how many the table has.

    Example:
        >>> found, which = distinct(torch.tensor([5, 3, 5]), 10)
        >>> torch.equal(found[which], torch.tensor([5, 3, 5])), len(found)
        (True, 2)
    """
    ids = ids.long().contiguous()
    if ext is None:
        found, which = torch.unique(ids, return_inverse=True)
        return found, which
    found, which = torch.empty_like(ids), torch.empty_like(ids)
    return found[: ext.distinct(ids, rows, found, which)], which


def added_up(values: Tensor, which: Tensor, count: int) -> Tensor:
    """The sums of rows that are copies of the same; of halves, rounded once.

    Args:
        values: a row for each copy.
        which: of what.
        count: how many sums there are.

    Example:
        >>> added_up(torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([1, 0, 1]), 2).tolist()
        [[2.0], [4.0]]
    """
    wide = values.float() if values.dtype in HALVES else values
    sums = wide.new_zeros(count, *wide.shape[1:])
    return sums.index_add_(0, which, wide).to(values.dtype)


def owner_of(ids: Tensor, world: int) -> Tensor:
    """The rank that owns each id: the upper half of its public hash, modulo the number of ranks.

    Args:
        ids: int64.
        world: how many ranks there are.

    Example:
        >>> from sparsestep.nn.vocabulary.id_table import public_hash
        >>> ids = [0, 1, -1, 2**62 + 3]
        >>> owner_of(torch.tensor(ids), 3).tolist() == [(public_hash(i) >> 32) % 3 for i in ids]
        True
    """
    if world == 1:
        return torch.zeros_like(ids)
    bits = (ids ^ _shifted(ids, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shifted(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return _shifted(bits ^ _shifted(bits, 31), 32) % world


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros from the left."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
