"""The sharded forward: ids to the owners of rows, rows back to the ranks that asked.

An owner gets bags of its own row numbers and returns a row for each. A bag of a table that is whole
on one rank goes there; of round-robin rows, each owner gets the part of a bag whose rows it has. If
bags have one id, each id is requested once, however often it occurs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._process import uninterrupted
from sparsestep._torch import cat, stack
from sparsestep.distributed._handshake import ExchangeKind, PeerStatus
from sparsestep.distributed._table import (
    NUM_COUNTS,
    LookupHandle,
    RowGradFn,
    ServedLookup,
    ShardedTable,
    TableGroup,
    offsets_of,
)
from sparsestep.distributed.collectives import Caught, Collectives, Messages, Payload, Sections
from sparsestep.distributed.placement import (
    BROADCAST_BAG_FACTOR,
    LENGTH_DTYPE,
    distinct_ids,
    hash_owner,
    split_by_owner,
    unique_ids,
)
from sparsestep.engines.base import certain
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.exchange import PendingGrad
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory.tensors import HALF_DTYPES
from sparsestep.nn import lookup
from sparsestep.nn.lookup import (
    Lookup,
    LookupResult,
    bag_lookup,
    check_ids,
    check_lookup,
    first_derivative,
    grad_of_ids,
    lookup_error,
    unshared,
)
from sparsestep.nn.vocabulary import PreparedLookup, Vocabulary, flat_ids, prepare_lookups

# Requests


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
        asked = [(ids.contiguous(), table.rows, table.owner) for table, ids, _, _ in calls]
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

    def __init__(self, requests: Sequence[LookupRequest], counts: Tensor) -> None:
        self.ids, bags, self.has_weights = counts.unbind(2)
        self.bag_lengths = -bags  # not positive: bags differ, and their lengths are sent
        self.num_bags = torch.where(bags < 0, self.ids // self.bag_lengths.clamp(min=1), bags)
        tables = [each.table for each in requests]
        id_bytes = torch.tensor([each.id_dtype.itemsize for each in requests])
        weight_bytes = torch.tensor([table.weight.dtype.itemsize for table in tables])
        row_bytes = torch.tensor([table.wire_bytes for table in tables])
        sections = [
            self.ids * id_bytes,
            bags.clamp(min=0) * LENGTH_DTYPE.itemsize,
            self.ids * self.has_weights * weight_bytes,
        ]
        # To the owner, three sections for each table, and one back: a row for each rank.
        self.request = stack(sections).permute(1, 2, 0).flatten(1).contiguous()
        self.reply = (self.num_bags * row_bytes).contiguous()


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
    messages = collectives.all_to_all(lambda: _id_sections(requests), *sizes, max_bytes)
    return partial(_read_ids, requests, messages, incoming)


def _id_sections(requests: Sequence[LookupRequest]) -> Sections:
    return [section for each in requests for section in _sections(each)]


def _sections(request: LookupRequest) -> Sections:
    """The ids of a request, the lengths of bags and the weights, as they are sent."""
    if not request.is_sent:
        return [None] * NUM_COUNTS
    is_sent = request.table.collectives.world_size > 1
    ids = request.ids.to(request.id_dtype) if is_sent else request.ids
    weights = request.per_sample_weights
    return [
        ids.contiguous(),
        request.lengths,
        None if weights is None else weights.detach().contiguous(),
    ]


def _read_ids(
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


# The owner's side: read local rows, and map their gradients to the weight


# A row for each bag; the function may be called repeatedly, and does not keep the rows.
LocalRows: TypeAlias = tuple[Tensor, RowGradFn]


def serve_lookups(
    tables: Sequence[ShardedTable],
    requests: Sequence[LookupRequest | IncomingLookup],
    *,
    needs_grad: bool,
) -> list[LocalRows]:
    """Look up local rows, in all tables by one call of the core where it can."""
    core_lookups: list[Lookup] = []
    of_core: list[int] = []
    for n, (table, each) in enumerate(zip(tables, requests, strict=True)):
        # With weights, padding has one, too, but no gradient.
        has_padding = each.per_sample_weights is not None and table.local_padding_idx >= 0
        if table.is_plain_read and each.num_bags and not has_padding:
            core_lookups.append(_core_lookup(table, each, needs_grad=needs_grad))
            of_core.append(n)
    done = dict(zip(of_core, lookup.look_up(core_lookups) or (), strict=False))
    return [
        _from_core(table, each, done[n])
        if n in done
        else _serve_with_module(table, each, needs_grad=needs_grad)
        for n, (table, each) in enumerate(zip(tables, requests, strict=True))
    ]


def _core_lookup(
    table: ShardedTable, request: LookupRequest | IncomingLookup, *, needs_grad: bool
) -> Lookup:
    ids, padding, weights = request.ids, table.local_padding_idx, request.per_sample_weights
    weights = None if weights is None else weights.detach()
    offsets, mode = None, lookup.SUM
    if not table.is_bag or (request.length == 1 and padding < 0 and weights is None):
        mode = lookup.ROWS
    elif request.lengths is not None:
        offsets = offsets_of(request.lengths)
    else:
        ids = ids.view(-1, request.length)
        weights = None if weights is None else weights.view(-1, request.length)
    has_grad = needs_grad and table.weight.requires_grad
    return Lookup(table.weight, ids, offsets, True, weights, mode, padding, has_grad)


def _from_core(
    table: ShardedTable, request: LookupRequest | IncomingLookup, found: LookupResult
) -> LocalRows:
    indices, source = found.indices, found.value_index
    weights = _detached_copy(request.per_sample_weights)
    shape, scale_grad_by_freq = table.weight.shape, table.scale_grad_by_freq
    rows, dim = shape

    def grad_fn(grad: Tensor) -> list[IndexedGrad]:
        assert indices is not None
        if not scale_grad_by_freq:
            return [IndexedGrad(indices, grad, rows, dim, source, weights)]
        return [grad_of_ids(shape, indices, grad, source, weights, scale_grad_by_freq=True)]

    return found.output, grad_fn


def _serve_with_module(
    table: ShardedTable, request: LookupRequest | IncomingLookup, *, needs_grad: bool
) -> LocalRows:
    """By the local module: if it has hooks or a ``max_norm``, or the core declines."""
    if not table.has_rows:
        return table.weight.detach(), lambda grad: []
    if table.is_plain_read and not request.num_bags:
        empty, shape = torch.empty(0, dtype=torch.int64), table.weight.shape
        return table.weight.detach()[:0], lambda grad: [grad_of_ids(shape, empty, grad)]
    # This rank may be in inference mode while others train.
    with torch.inference_mode(False), torch.set_grad_enabled(needs_grad):
        ids, lengths = request.ids.to(torch.int64, copy=True), request.lengths  # may be overwritten
        if lengths is None and request.length > 1:
            lengths = torch.full((request.num_bags,), request.length)
        output = table.lookup(ids, lengths, _detached_copy(request.per_sample_weights))
    return output.detach(), partial(_backward_through_module, output, table.weight)


def _detached_copy(weights: Tensor | None) -> Tensor | None:
    """A copy: the caller may overwrite its weights."""
    return None if weights is None else weights.detach().clone()


def _backward_through_module(output: Tensor, weight: Tensor, rows: Tensor) -> Sequence[IndexedGrad]:
    """The module's own gradient. The graph stays, for as long as more may come."""
    grad: Any
    (grad,) = torch.autograd.grad(output, weight, rows, retain_graph=True)
    parts: Sequence[IndexedGrad] = grad.parts
    return parts


# The owner's side: rows for ids of any value


class _Translation:
    """What owners do to their vocabularies in one lookup: all of them, or none on any rank.

    Rows that go to other ids are reset before they are read. If the lookup then fails on any rank,
    every owner restores them.
    """

    def __init__(self, collectives: Collectives, requests: Sequence[LookupRequest]) -> None:
        self._ranks, self._vocabularies = collectives, [each.vocabulary for each in requests]
        self._prepared: list[PreparedLookup] = []

    def rows_of(self, incoming: Sequence[IncomingLookup | None]) -> Sequence[IncomingLookup | None]:
        """Requests with local rows in place of ids."""
        if all(each is None for each in self._vocabularies):
            return incoming
        none = torch.empty(0, dtype=torch.int64)
        ids = [none if each is None else each.ids for each in incoming]
        rows, self._prepared = prepare_lookups(self._vocabularies, ids, can_undo=True)
        for lookup_of_ids in self._prepared:
            lookup_of_ids.write()
        return [
            each if each is None or vocabulary is None else each._replace(ids=found)
            for each, vocabulary, found in zip(incoming, self._vocabularies, rows, strict=True)
        ]

    def run(self, look_up: Callable[[], list[Tensor]]) -> list[Tensor]:
        """Do the rest of a lookup, and commit it once it has succeeded on all ranks."""
        locks = [each.lock for each in dict.fromkeys(self._vocabularies) if each is not None]
        if not locks:
            return look_up()
        found: list[Tensor] = []
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            with Caught() as caught:
                found = look_up()
                for each in self._prepared:
                    each.check()
            try:
                if caught.error is not None and self._ranks.is_lost:
                    raise caught.error
                self._ranks.check(caught.error)
            except BaseException:
                for each in self._prepared:
                    each.undo()
                raise
            for each in self._prepared:
                each.finish()
        return found


# The whole lookup

_IDS, _ROWS = 1, 2  # what comes with the status


def sharded_lookup(
    group: TableGroup,
    first: ShardedTable,
    make_requests: Callable[[], TableRequests],
    operation: ExchangeKind = ExchangeKind.LOOKUP,
) -> list[Tensor]:
    """Look up rows in one or more tables; all ranks call it together.

    What ``make_requests`` raises on one rank, all ranks raise; messages name the ``first`` table.
    """
    # A rank that stops in the middle of an exchange keeps the others waiting.
    return uninterrupted(partial(_look_up_together, group, first, make_requests, operation))


def _look_up_together(
    group: TableGroup,
    first: ShardedTable,
    make_requests: Callable[[], TableRequests],
    operation: ExchangeKind,
) -> list[Tensor]:
    status, counts = group.status(operation, first), group.new_counts()
    requests: Sequence[LookupRequest] = []
    incoming: Sequence[IncomingLookup | None] = []
    early: list[LocalRows] = []
    payload: Payload | None = None
    with Caught() as caught:
        requests, status.prefetched, incoming, reply_bytes = make_requests()
        own_counts = id_counts(requests)
        counts[:, : NUM_COUNTS * len(requests)] = own_counts.flatten(1)
        own = LookupSizes(requests, own_counts)
        if reply_bytes is None:
            payload, status.payload = Payload(_id_sections(requests), own.request), _IDS
        elif all(each.table.is_plain_read and each.vocabulary is None for each in requests):
            early = _serve(requests, incoming, needs_grad=True)
            sections = _row_sections(incoming, early, requests)
            payload, status.payload = Payload(sections, reply_bytes), _ROWS
        status.max_bytes = int(own.request.sum(1).max())
        status.max_reply_bytes = int(own.reply.sum(1).max())
        status.num_tables, status.value = len(requests), int(torch.is_grad_enabled())
    peers = group.handshake(status, counts, caught.error, payload=payload)
    theirs = certain(partial(_peer_sizes, requests, peers))
    payloads = set(peers["payload"]) if peers.messages is not None else set()
    needs_grad = any(peers["value"])
    read: Callable[[], Sequence[IncomingLookup | None]] = partial(list, incoming)
    sizes, max_bytes = (theirs.reply, own.reply), max(peers["max_reply_bytes"])
    if not status.prefetched or set(peers["prefetched"]) != {status.prefetched}:
        early, sizes, max_bytes = [], (own.request, theirs.request), max(peers["max_bytes"])
        if payloads == {_IDS}:
            assert payload is not None
            assert peers.messages is not None
            read = partial(_read_ids, requests, peers.messages(payload, theirs.request), theirs)
        else:
            read = exchange_ids(group.collectives, requests, own, theirs, max_bytes)
        payloads.clear()
    sent, received = certain(lambda: [each.sum(1) for each in sizes])
    group.expect(sent, received, max_bytes)
    handles = [
        LookupHandle(
            group.sequence + n, r.table, r.num_bags, r.bags_per_rank, r.is_partial, r.inverse
        )
        for n, r in enumerate(requests)
    ]
    group.sequence += len(requests)
    local: list[LocalRows] = []
    translation = _Translation(group.collectives, requests)

    def outgoing() -> Sections:
        found = translation.rows_of(read())
        local[:] = early or _serve(requests, found, needs_grad=needs_grad)
        if needs_grad:
            _keep_served(group, handles, found, local)
        return _row_sections(found, local, requests)

    weights = [each.table.weight for each in requests]
    has_grad = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)

    def look_up() -> list[Tensor]:
        if payloads == {_ROWS}:
            sections = outgoing()
            assert peers.messages is not None
            messages = peers.messages(Payload(sections, theirs.reply), own.reply)
        else:
            most = max(peers["max_reply_bytes"])
            messages = group.collectives.all_to_all(outgoing, theirs.reply, own.reply, most)
        rows: Sequence[Tensor] = _read_rows(requests, messages, local)
        if has_grad:
            group.pending.update({handle.sequence: handle for handle in handles})
            rows = list(_ShardedLookupFunction.apply(handles, rows, *weights))
        return [each.combine(found) for each, found in zip(requests, rows, strict=True)]

    found = translation.run(look_up)
    for weight in weights if has_grad else ():
        _set_placeholder_grad(weight)
    return found


def _peer_sizes(requests: Sequence[LookupRequest], peers: PeerStatus) -> LookupSizes:
    counts = peers.counts[:, : NUM_COUNTS * len(requests)]
    return LookupSizes(requests, counts.unflatten(1, (len(requests), NUM_COUNTS)))


def _serve(
    requests: Sequence[LookupRequest],
    incoming: Sequence[IncomingLookup | None],
    *,
    needs_grad: bool,
) -> list[LocalRows]:
    """Look up the rows that ranks request of this one; of replicated tables, its own."""
    tables = [each.table for each in requests]
    local = [
        own if theirs is None else theirs for own, theirs in zip(requests, incoming, strict=True)
    ]
    for table, each in zip(tables, local, strict=True):
        table.prefetch(each.ids)
    return serve_lookups(tables, local, needs_grad=needs_grad)


def _keep_served(
    group: TableGroup,
    handles: Sequence[LookupHandle],
    incoming: Sequence[IncomingLookup | None],
    local: Sequence[LocalRows],
) -> None:
    """Keep what the gradients of served lookups need."""
    for (_, grad_fn), handle, theirs in zip(local, handles, incoming, strict=True):
        if not handle.table.weight.requires_grad:
            continue
        if theirs is None:
            handle.grad_fn = grad_fn
            served = ServedLookup(handle.table, None, handle.bags_per_rank)
        else:
            served = ServedLookup(handle.table, grad_fn, theirs.bags_per_rank)
        group.served[handle.sequence] = served


def _row_sections(
    incoming: Sequence[IncomingLookup | None],
    local: Sequence[LocalRows],
    requests: Sequence[LookupRequest],
) -> Sections:
    """The rows that ranks get, as they are sent."""
    return [
        None if theirs is None else each.table.encode(rows)
        for each, theirs, (rows, _) in zip(requests, incoming, local, strict=True)
    ]


def _read_rows(
    requests: Sequence[LookupRequest], messages: Messages, local: Sequence[LocalRows]
) -> list[Tensor]:
    """The rows that this rank has requested."""
    found = []
    received = messages.read([each.table.wire_dtype for each in requests])
    for each, (rows, _), flat in zip(requests, local, received, strict=True):
        if not each.is_sent:
            found.append(rows)
            continue
        flat = each.table.decode(flat)
        num_rows = each.num_bags
        if each.is_partial:
            world_size = each.table.collectives.world_size
            flat = _sum_partial_bags(flat.view(world_size, len(flat) // world_size).unbind())
            num_rows //= world_size
        rows = flat.view(num_rows, each.table.dim)
        found.append(rows if each.inverse is None else rows.index_select(0, each.inverse))
    return found


def _sum_partial_bags(pieces: Sequence[Tensor]) -> Tensor:
    """Sum over ranks, in their order; half precision is rounded once."""
    first, second, *others = pieces
    is_half = first.dtype in HALF_DTYPES
    total = torch.add(first.float() if is_half else first, second)
    for each in others:
        total += each
    return total.to(first.dtype)


@functools.cache
def _placeholder(dtype: torch.dtype) -> Any:
    return PendingGrad(None, torch.empty(0, dtype=dtype))


def _set_placeholder_grad(weight: Tensor) -> None:
    """Set an empty gradient, so that code that reads ``.grad`` exchanges on every rank.

    A GradScaler, for example, then does so on the ranks whose loss leaves the table out, too.
    """
    if weight.requires_grad and weight.grad is None:
        weight.grad = CompactGrad.of([_placeholder(weight.dtype)], weight.shape, weight)


class _ShardedLookupFunction(torch.autograd.Function):
    """Rows that have come; the gradients of the weights are pending until they are exchanged."""

    @staticmethod
    def forward(
        ctx: Any, handles: Sequence[LookupHandle], rows: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.handles = handles
        # Autograd forbids in-place writes to views that a custom Function returns.
        pairs = zip(handles, rows, strict=True)
        return tuple(each.detach() if handle.inverse is None else each for handle, each in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return first_derivative(_pending_grads, ctx, *grads)


def _pending_grads(ctx: Any, *grads: Any) -> Any:
    found: list[Any] = []
    for handle, grad, is_needed in zip(ctx.handles, grads, ctx.needs_input_grad[2:], strict=True):
        if grad is None or not is_needed:
            found.append(None)
            continue
        pending: Any = PendingGrad(handle, unshared(grad))
        found.append(CompactGrad.of([pending], handle.table.weight.shape, grad))
    return None, None, *found
