"""Requests of a lookup: ids, sorted by the owners of their rows, and how they are sent.

A bag of a table that is whole on one rank goes there; of round-robin rows, each owner gets the part
of a bag whose rows it has. If bags have one id, each id is requested once, however often it occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import cat, stack
from sparsestep.distributed._table import NUM_COUNTS, ShardedTable
from sparsestep.distributed.collectives import Collectives, Messages, Sections
from sparsestep.distributed.placement import BROADCAST_BAG_FACTOR, LENGTH_DTYPE, hash_owner
from sparsestep.memory.tensors import HALF_DTYPES
from sparsestep.nn.id_table import IdTable, Options
from sparsestep.nn.lookup import Lookup, bag_lookup, check_ids, check_lookup, lookup_error
from sparsestep.nn.vocabulary import Vocabulary, flat_ids

# Ids, split by owner and without duplicates; rows of duplicates, summed


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


# The requests of one rank


@dataclass(slots=True)
class LookupRequest:
    """One rank's request to one table, sorted by the owners of its ids."""

    table: ShardedTable
    ids: Tensor  # as their owners number them
    ids_per_rank: Tensor
    length: int  # ids of each bag, at least one; 0: see `lengths`
    lengths: Tensor | None  # ids of each bag, int32
    num_bags: int
    bags_per_rank: Tensor
    per_sample_weights: Tensor | None
    combine: Callable[[Tensor], Tensor] = lambda rows: rows  # rows to output; autograd records it
    is_partial: bool = False  # every rank gets its part of all bags, and their rows are summed
    inverse: Tensor | None = None  # for each row of the output, the index of the requested one
    # Of the ids that this rank owns; ids are of any value then, and owned by their hash.
    vocabulary: Vocabulary | None = None

    @property
    def id_dtype(self) -> torch.dtype:
        """The dtype of ids on the wire."""
        return self.table.id_dtype if self.vocabulary is None else torch.int64

    def prefetch(self, ids: Tensor) -> None:
        """Have the system begin to read the rows of ids that this rank owns."""
        self.table.prefetch(ids if self.vocabulary is None else self.vocabulary.find(ids))

    @property
    def is_sent(self) -> bool:
        """Whether other ranks have rows of the table."""
        return self.table.placement.is_sharded


def lookup_request(
    table: ShardedTable, ids: Any, offsets: Any = None, per_sample_weights: Any = None
) -> LookupRequest:
    """The request of a call; raises if its arguments are invalid."""
    if not table.is_bag:
        check_ids(table.spec, table.spec.weight, ids)
        shape, dim = ids.shape, table.dim
        request = _request_rows(table, ids.reshape(-1), None)
        request.combine = lambda rows: rows.reshape(*shape, dim)
        return request
    bags = check_lookup(bag_lookup(table.spec, ids, offsets, per_sample_weights))
    if (
        bags.per_sample_weights is not None
        and bags.per_sample_weights.requires_grad
        and torch.is_grad_enabled()
    ):
        requirement = "per_sample_weights of a sharded table must not require a gradient"
        raise lookup_error(table.spec, requirement, "requires_grad=True", "Call detach() on them")
    if bags.bag_length == 1 and table.placement.is_sharded:
        return _request_rows(table, bags.flat_ids, bags.per_sample_weights)
    return _request_bags(table, bags)


def dynamic_request(
    table: ShardedTable,
    vocabulary: Vocabulary,
    ids: Any,
    offsets: Any = None,
    per_sample_weights: Any = None,
) -> LookupRequest:
    """The request of a call with ids of any value, which go to their owners as they are."""
    flat, world_size = flat_ids(ids), table.collectives.world_size
    options, numbers = vocabulary.options, torch.arange(len(flat))
    # May an id be sent once, however often it occurs? Not if that decides about rows.
    if table.order == "fast" and options.admit == 1 and options.evict != "lfu":
        flat, numbers = distinct_ids(flat)
    # Numbers in place of ids, in a table of which each owner has every one.
    numbered = copy(table)
    numbered.spec = copy(table.spec)
    numbered.set_num_rows(max(1, len(flat)) * world_size)
    numbers = numbers * world_size + hash_owner(flat, world_size)[numbers]
    request = lookup_request(numbered, numbers.view(ids.shape), offsets, per_sample_weights)
    request.table, request.ids, request.vocabulary = table, flat[request.ids.long()], vocabulary
    return request


def lookup_requests(calls: Sequence[tuple[ShardedTable, Any, Any, Any]]) -> list[LookupRequest]:
    """The requests of calls with ids, offsets and weights; raises if an argument is invalid."""
    world_size = calls[0][0].collectives.world_size if calls else 1
    is_plain = world_size > 1 and all(
        table.merges_ids and offsets is None and weights is None and _is_column(ids)
        for table, ids, offsets, weights in calls
    )
    if is_plain and ext is not None:
        counts = torch.empty(len(calls), world_size, dtype=torch.int64)
        # The owner of a whole table, or -1: its rows are on all ranks.
        asked = [
            (ids.contiguous(), table.rows, getattr(table.placement, "owner", -1))
            for table, ids, _, _ in calls
        ]
        found = ext.request_rows(asked, world_size, counts)
        if found is not None:
            return [
                LookupRequest(table, rows, mine, 1, None, len(rows), mine, None, inverse=inverse)
                for (table, *_), mine, (rows, inverse) in zip(
                    calls, counts.unbind(), found, strict=True
                )
            ]
    return [lookup_request(*each) for each in calls]


def _is_column(ids: Any) -> bool:
    return type(ids) is Tensor and ids.dim() == 2 and ids.shape[1] == 1


def _request_rows(table: ShardedTable, ids: Tensor, weights: Tensor | None) -> LookupRequest:
    """One id for each row of the output."""
    placement, world_size = table.placement, table.collectives.world_size
    inverse = None
    if table.merges_ids and weights is None and world_size > 1:
        ids, inverse = unique_ids(ids, table.rows)
    if table.row_stride > 1:
        split = split_by_owner(ids, None, world_size, table.id_dtype)
        ids, counts, order = split.rows, split.ids_per_rank, split.order
        position = torch.empty_like(order)
        position[order] = torch.arange(len(position))
        weights = None if weights is None else weights[order]
        inverse = position if inverse is None else position[inverse]
    else:
        counts = placement.counts_to_owner(len(ids), world_size)
    return LookupRequest(table, ids, counts, 1, None, len(ids), counts, weights, inverse=inverse)


def _request_bags(table: ShardedTable, bags: Lookup) -> LookupRequest:
    placement, world_size = table.placement, table.collectives.world_size
    scale = _mean_scale(table, bags) if table.mode == "mean" else None

    def average(total: Tensor) -> Tensor:
        return total if scale is None else total * scale

    if table.row_stride > 1:
        return _request_partial_bags(table, bags, average)
    length = max(bags.bag_length, 0)
    lengths = None if length else _bag_offsets(bags).diff().to(LENGTH_DTYPE)
    ids, weights = bags.flat_ids, bags.per_sample_weights
    num_ids, num_bags = (
        placement.counts_to_owner(n, world_size) for n in (len(ids), bags.num_bags)
    )
    return LookupRequest(
        table, ids, num_ids, length, lengths, bags.num_bags, num_bags, weights, average
    )


def _request_partial_bags(
    table: ShardedTable, bags: Lookup, average: Callable[[Tensor], Tensor]
) -> LookupRequest:
    """Each owner gets its part of a bag. Of long bags, nearly every owner has a part of each."""
    weights, count = bags.per_sample_weights, bags.num_bags
    world_size = table.collectives.world_size
    to_all_ranks = len(bags.flat_ids) >= BROADCAST_BAG_FACTOR * world_size * count
    split = split_by_owner(
        bags.flat_ids,
        _bag_offsets(bags),
        world_size,
        table.id_dtype,
        needs_order=weights is not None,
        to_all_ranks=to_all_ranks,
    )

    def sum_parts(rows: Tensor) -> Tensor:
        return average(sum_duplicates(rows, split.bags, count))

    return LookupRequest(
        table,
        split.rows,
        split.ids_per_rank,
        length=0,
        lengths=split.lengths,
        num_bags=len(split.lengths),
        bags_per_rank=split.parts_per_rank,
        per_sample_weights=None if weights is None else weights[split.order],
        combine=average if to_all_ranks else sum_parts,
        is_partial=to_all_ranks,
    )


def _bag_offsets(bags: Lookup) -> Tensor:
    """Where each bag begins, and where the last one ends."""
    if bags.offsets is None:
        return torch.arange(bags.num_bags + 1) * bags.bag_length
    offsets = bags.offsets.long()
    end = offsets.new_full((1,), bags.ids.numel())
    return offsets if bags.include_last_offset else cat([offsets, end])


def _mean_scale(table: ShardedTable, bags: Lookup) -> Tensor:
    """Factors that turn sums of bags into means; padding does not count."""
    if table.padding_idx is None and bags.bag_length > 0:
        sizes = torch.full((1,), bags.bag_length)
    else:
        sizes = _bag_offsets(bags).diff()
    if table.padding_idx is not None:
        bag = torch.repeat_interleave(sizes, output_size=len(bags.flat_ids))
        sizes = torch.bincount(bag[bags.flat_ids != table.padding_idx], minlength=bags.num_bags)
    return sizes.clamp(min=1).to(table.weight.dtype).reciprocal().unsqueeze(1)


# Ids to owners


class IncomingLookup(NamedTuple):
    """The requests of all ranks to this one in a table, in the order of ranks."""

    ids: Tensor  # local rows
    length: int  # ids of each bag, at least one; 0: see `lengths`
    lengths: Tensor | None
    per_sample_weights: Tensor | None
    num_bags: int
    bags_per_rank: Tensor


class TableRequests(NamedTuple):
    """The requests of a lookup, and those of other ranks if ids have been sent in advance."""

    requests: Sequence[LookupRequest]
    prefetched: int = 0  # at least 1, and the same on all ranks; 0: ids have not been sent
    incoming: Sequence[IncomingLookup | None] = ()
    reply_bytes: Tensor | None = None  # of the rows that each rank gets, by table


def id_counts(requests: Sequence[LookupRequest]) -> Tensor:
    """For each rank and table: its ids and bags, and whether there are weights."""
    # A negative number of bags is the length of each.
    lengths = torch.tensor([[-each.length] for each in requests])
    has_weights = torch.tensor([[each.per_sample_weights is not None] for each in requests])
    ids = stack([each.ids_per_rank for each in requests])
    bags = torch.where(lengths < 0, lengths, stack([each.bags_per_rank for each in requests]))
    counts = stack([ids, bags, has_weights.expand_as(ids).long()])
    is_sent = torch.tensor([[each.is_sent] for each in requests])
    return (counts * is_sent).permute(2, 1, 0).contiguous()


class LookupSizes:
    """The bytes of a lookup, by the counts that ranks have announced."""

    def __init__(
        self, requests: Sequence[LookupRequest], counts: Tensor, like: LookupSizes | None = None
    ) -> None:
        self.item_bytes: tuple[Tensor, ...] = (
            _item_bytes(requests) if like is None else like.item_bytes
        )
        id_bytes, weight_bytes, row_bytes = self.item_bytes
        self.ids, bags, self.has_weights = counts.unbind(2)
        self.bag_lengths = -bags  # not positive: bags differ, and their lengths are sent
        self.num_bags = torch.where(bags < 0, self.ids // self.bag_lengths.clamp(min=1), bags)
        sections = [
            self.ids * id_bytes,
            bags.clamp(min=0) * LENGTH_DTYPE.itemsize,
            self.ids * self.has_weights * weight_bytes,
        ]
        # To the owner, three sections for each table, and one back: a row for each rank.
        self.request = stack(sections).permute(1, 2, 0).flatten(1).contiguous()
        self.reply = (self.num_bags * row_bytes).contiguous()


def _item_bytes(requests: Sequence[LookupRequest]) -> tuple[Tensor, ...]:
    """By table, the bytes of an id, of a weight and of a row."""
    ids = [each.id_dtype.itemsize for each in requests]
    weights = [each.table.weight.dtype.itemsize for each in requests]
    return tuple(torch.tensor([ids, weights, [each.table.wire_bytes for each in requests]]))


def exchange_ids(
    collectives: Collectives,
    requests: Sequence[LookupRequest],
    outgoing: LookupSizes,
    incoming: LookupSizes,
    max_bytes: int,
) -> Callable[[], list[IncomingLookup | None]]:
    """Send ids to their owners.

    Returns a function that reads the requests of all ranks, per table; ``None`` for replicated
    ones. Other ranks wait for the rows, so an error must be reported to them.
    """
    sizes = outgoing.request, incoming.request
    messages = collectives.all_to_all(lambda: id_sections(requests), *sizes, max_bytes)
    return partial(read_ids, requests, messages, incoming)


def id_sections(requests: Sequence[LookupRequest]) -> Sections:
    """The ids of requests, the lengths of bags and the weights, as they are sent."""
    found: Sections = []
    for each in requests:
        ids, weights = each.ids, each.per_sample_weights
        if not each.is_sent:
            found += [None] * NUM_COUNTS
            continue
        if each.table.collectives.world_size > 1:
            ids = ids.to(each.id_dtype)
        weights = None if weights is None else weights.detach().contiguous()
        found += ids.contiguous(), each.lengths, weights
    return found


def read_ids(
    requests: Sequence[LookupRequest], messages: Messages, sizes: LookupSizes
) -> list[IncomingLookup | None]:
    dtypes = [(each.id_dtype, LENGTH_DTYPE, each.table.weight.dtype) for each in requests]
    sections = iter(messages.read([dtype for some in dtypes for dtype in some]))
    totals = sizes.num_bags.sum(0).tolist()
    # A rank that requests nothing has bags of any length.
    is_any = (sizes.ids == 0) & (sizes.num_bags == 0)
    longest = sizes.bag_lengths.masked_fill(is_any, _ANY_LENGTH[0]).amax(0)
    shortest = sizes.bag_lengths.masked_fill(is_any, _ANY_LENGTH[1]).amin(0)
    common = torch.where(longest == shortest, longest.clamp(min=0), 0)
    lengths: list[int] = common.masked_fill(is_any.all(0), 1).tolist()
    has_some_weights = sizes.has_weights.any(0).tolist()
    has_all_weights = sizes.has_weights.all(0).tolist()
    found: list[IncomingLookup | None] = []
    for n, request in enumerate(requests):
        ids, bag_lengths, weights = next(sections), next(sections), next(sections)
        if not request.is_sent:
            found.append(None)
            continue
        bags_per_rank = sizes.num_bags[:, n]
        if not lengths[n] and len(bag_lengths) < totals[n]:
            given = sizes.bag_lengths[:, n].to(LENGTH_DTYPE)
            bag_lengths = _fill(given, given <= 0, bags_per_rank, bag_lengths)
        if has_some_weights[n] and not has_all_weights[n]:
            has_weights = sizes.has_weights[:, n]
            ones = torch.ones_like(has_weights, dtype=weights.dtype)
            weights = _fill(ones, has_weights > 0, sizes.ids[:, n], weights)
        found.append(
            IncomingLookup(
                ids,
                lengths[n],
                None if lengths[n] else bag_lengths,
                weights if has_some_weights[n] else None,
                totals[n],
                bags_per_rank,
            )
        )
    return found


_ANY_LENGTH = -(1 << 62), 1 << 62


def _fill(values: Tensor, is_given: Tensor, counts: Tensor, given: Tensor) -> Tensor:
    """Each rank's value as often as ``counts`` says, or what it has given."""
    whole = values.repeat_interleave(counts)
    whole[is_given.repeat_interleave(counts)] = given
    return whole
