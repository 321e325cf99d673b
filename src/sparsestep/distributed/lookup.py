"""The sharded forward: ids to the owners of rows, rows back to the ranks that asked.

An owner gets bags of its own row numbers and returns a row for each. A bag of a table that is whole
on one rank goes there; of round-robin rows, each owner gets the part of a bag whose rows it has. If
bags have one id, each id is requested once, however often it occurs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._torch import cat
from sparsestep.distributed._handshake import ExchangeKind, PeerStatus
from sparsestep.distributed._packing import (
    BufferReader,
    concat,
    read_all,
    split_by_owner,
    split_by_rank,
    unique_ids,
)
from sparsestep.distributed._table import (
    NUM_COUNTS,
    LookupHandle,
    RowGradFn,
    ServedLookup,
    ShardedTable,
    TableGroup,
    offsets_of,
)
from sparsestep.distributed.collectives import Caught, Collectives
from sparsestep.distributed.placement import BROADCAST_BAG_FACTOR, LENGTH_DTYPE
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

# Requests


@dataclass(slots=True)
class LookupRequest:
    """One rank's request to one table, sorted by the owners of its ids."""

    table: ShardedTable
    ids: Tensor  # as their owners number them
    ids_per_rank: list[int]
    length: int  # ids of each bag, at least one; 0: see `lengths`
    lengths: Tensor | None  # ids of each bag, int32
    bags_per_rank: list[int]
    per_sample_weights: Tensor | None
    combine: Callable[[Tensor], Tensor]  # makes the output of the rows, recorded by autograd
    is_partial: bool = False  # every rank gets its part of all bags, and their rows are summed
    inverse: Tensor | None = None  # for each row of the output, the index of the requested one

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


def _request_rows(table: ShardedTable, ids: Tensor, weights: Tensor | None) -> LookupRequest:
    """One id for each row of the output."""
    placement, world_size = table.placement, table.collectives.world_size
    inverse = None
    may_dedup = table.order == "fast" and table.mode != "max" and not table.scale_grad_by_freq
    if may_dedup and weights is None and placement.is_sharded and world_size > 1:
        ids, inverse = unique_ids(ids, table.rows)
    counts = placement.counts_to_owner(len(ids), world_size)
    if table.row_stride > 1:
        split = split_by_owner(ids, None, world_size, table.id_dtype)
        ids, counts, order = split.rows, split.ids_per_rank, split.order
        position = torch.empty_like(order)
        position[order] = torch.arange(len(position))
        weights = None if weights is None else weights[order]
        inverse = position if inverse is None else position[inverse]
    return LookupRequest(table, ids, counts, 1, None, counts, weights, _identity, inverse=inverse)


def _identity(rows: Tensor) -> Tensor:
    return rows


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
    counts = [placement.counts_to_owner(n, world_size) for n in (len(ids), bags.num_bags)]
    return LookupRequest(table, ids, counts[0], length, lengths, counts[1], weights, average)


def _request_partial_bags(
    table: ShardedTable, bags: Lookup, average: Callable[[Tensor], Tensor]
) -> LookupRequest:
    """Each owner gets its part of a bag. Of long bags, nearly every owner has a part of each."""
    weights, world_size, count = (
        bags.per_sample_weights,
        table.collectives.world_size,
        bags.num_bags,
    )
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
        summed = rows.float() if rows.dtype in HALF_DTYPES else rows
        total = summed.new_zeros(count, table.dim).index_add(0, split.bags, summed)
        return average(total.to(rows.dtype))

    return LookupRequest(
        table,
        split.rows,
        split.ids_per_rank,
        length=0,
        lengths=split.lengths,
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
    bags_per_rank: list[int]


class PrefetchedIds(NamedTuple):
    """A lookup whose ids have been sent in advance."""

    sequence: int  # the same on all ranks, at least 1
    requests: list[LookupRequest]
    incoming: list[IncomingLookup | None]


def id_counts(requests: Sequence[LookupRequest]) -> Tensor:
    """A row for each rank: per table its ids and bags, and whether there are weights."""
    counts = torch.tensor([_table_counts(each) for each in requests], dtype=torch.int64)
    return counts.movedim(2, 0).flatten(1)


def _table_counts(request: LookupRequest) -> list[list[int]]:
    world_size = request.table.collectives.world_size
    if not request.is_sent:
        return [[0] * world_size] * NUM_COUNTS
    # A negative number of bags is the length of each.
    bags = [-request.length] * world_size if request.length else request.bags_per_rank
    has_weights = int(request.per_sample_weights is not None)
    return [request.ids_per_rank, bags, [has_weights] * world_size]


def _counts_by_table(
    requests: Sequence[LookupRequest], counts: Sequence[int]
) -> Iterator[tuple[LookupRequest, int, int, int]]:
    """Each request with the ids, bags and weights that a rank has announced for it."""
    for n, request in enumerate(requests):
        ids, bags, has_weights = counts[NUM_COUNTS * n : NUM_COUNTS * (n + 1)]
        yield request, ids, bags, has_weights


def request_nbytes(requests: Sequence[LookupRequest], counts: Sequence[int]) -> int:
    """Bytes that a rank sends another, by its announced counts."""
    total = 0
    for request, ids, bags, has_weights in _counts_by_table(requests, counts):
        table = request.table
        weight_bytes = table.weight.dtype.itemsize if has_weights else 0
        id_bytes = table.id_dtype.itemsize + weight_bytes
        total += ids * id_bytes + max(bags, 0) * LENGTH_DTYPE.itemsize
    return total


def _reply_nbytes(requests: Sequence[LookupRequest], counts: Sequence[int]) -> int:
    """Bytes of rows that go back to the requester, by its announced counts."""
    return sum(
        _num_bags(ids, bags) * request.table.row_bytes
        for request, ids, bags, _ in _counts_by_table(requests, counts)
        if request.is_sent
    )


def _num_bags(ids: int, bags: int) -> int:
    return ids // -bags if bags < 0 else bags


def exchange_ids(
    collectives: Collectives,
    requests: Sequence[LookupRequest],
    own_counts: Sequence[Sequence[int]],
    counts: Sequence[Sequence[int]],
    max_bytes: int,
) -> Callable[[], list[IncomingLookup | None]]:
    """Send ids to their owners, as many as ``own_counts`` says; ``counts`` are those of the others.

    Returns a function that reads the requests of all ranks, per table; ``None`` for replicated
    ones. Other ranks wait for the rows, so an error must be reported to them.
    """

    def outgoing() -> list[list[Tensor]]:
        messages: list[list[Tensor]] = [[] for _ in counts]
        for each in requests:
            for piece, dtype, per_rank in _sections(each) if each.is_sent else ():
                for rank, slice_ in split_by_rank(piece, per_rank):
                    is_own = rank == collectives.rank
                    messages[rank].append(slice_ if is_own else slice_.to(dtype))
        return messages

    def read() -> list[IncomingLookup | None]:
        found: list[IncomingLookup | None] = []
        for n, each in enumerate(requests):
            of_table = [row[NUM_COUNTS * n : NUM_COUNTS * (n + 1)] for row in counts]
            found.append(_unpack_ids(each.table, readers, of_table) if each.is_sent else None)
        return found

    incoming_sizes = [request_nbytes(requests, row) for row in counts]
    outgoing_sizes = [request_nbytes(requests, row) for row in own_counts]
    readers = collectives.all_to_all(outgoing, incoming_sizes, max_bytes, outgoing_sizes)
    return read


def _sections(request: LookupRequest) -> Iterator[tuple[Tensor, torch.dtype, list[int]]]:
    """Each tensor of a request, its dtype on the wire, and how much goes to each rank."""
    yield request.ids, request.table.id_dtype, request.ids_per_rank
    if request.lengths is not None:
        yield request.lengths, LENGTH_DTYPE, request.bags_per_rank
    weights = request.per_sample_weights
    if weights is not None:
        yield weights.detach(), weights.dtype, request.ids_per_rank


def _unpack_ids(
    table: ShardedTable, readers: Sequence[BufferReader], counts: Sequence[Sequence[int]]
) -> IncomingLookup:
    # A rank that requests nothing has bags of any length.
    bag_lengths = {-bags for num_ids, bags, _ in counts if num_ids or bags > 0} or {1}
    length = max(bag_lengths.pop(), 0) if len(bag_lengths) == 1 else 0
    has_any_weights = any(has_weights for _, _, has_weights in counts)
    ids, lengths, weights, bags_per_rank = [], [], [], []
    dtype = table.weight.dtype
    for reader, (num_ids, bags, has_weights) in zip(readers, counts, strict=True):
        ids.append(reader.read(num_ids, table.id_dtype))
        bags_per_rank.append(_num_bags(num_ids, bags))
        if bags >= 0:
            lengths.append(reader.read(bags, LENGTH_DTYPE))
        elif not length:
            lengths.append(torch.full((bags_per_rank[-1],), -bags, dtype=LENGTH_DTYPE))
        if has_weights:
            weights.append(reader.read(num_ids, dtype))
        elif has_any_weights:
            weights.append(torch.ones(num_ids, dtype=dtype))
    return IncomingLookup(
        concat(ids, table.id_dtype),
        length,
        None if length else concat(lengths),
        concat(weights) if has_any_weights else None,
        bags_per_rank,
    )


# The owner's side: read local rows, and map their gradients to the weight


class LocalRows(NamedTuple):
    """The result of a lookup on this rank's shard."""

    rows: Tensor  # one for each bag
    grad_fn: RowGradFn  # may be called repeatedly, and does not keep the rows


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
        if table.is_plain_read and any(each.bags_per_rank) and not has_padding:
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

    return LocalRows(found.output, grad_fn)


def _serve_with_module(
    table: ShardedTable, request: LookupRequest | IncomingLookup, *, needs_grad: bool
) -> LocalRows:
    """By the local module: if it has hooks or a ``max_norm``, or the core declines."""
    if not table.has_rows:
        return LocalRows(table.weight.detach(), lambda grad: [])
    if table.is_plain_read and not any(request.bags_per_rank):
        empty, shape = torch.empty(0, dtype=torch.int64), table.weight.shape
        return LocalRows(table.weight.detach()[:0], lambda grad: [grad_of_ids(shape, empty, grad)])
    # This rank may be in inference mode while others train.
    with torch.inference_mode(False), torch.set_grad_enabled(needs_grad):
        ids, lengths = request.ids.to(torch.int64, copy=True), request.lengths  # may be overwritten
        if lengths is None and request.length > 1:
            lengths = torch.full((sum(request.bags_per_rank),), request.length)
        output = table.lookup(ids, lengths, _detached_copy(request.per_sample_weights))
    return LocalRows(output.detach(), partial(_backward_through_module, output, table.weight))


def _detached_copy(weights: Tensor | None) -> Tensor | None:
    """A copy: the caller may overwrite its weights."""
    return None if weights is None else weights.detach().clone()


def _backward_through_module(output: Tensor, weight: Tensor, rows: Tensor) -> Sequence[IndexedGrad]:
    """The module's own gradient. The graph stays, for as long as more may come."""
    grad: Any
    (grad,) = torch.autograd.grad(output, weight, rows, retain_graph=True)
    parts: Sequence[IndexedGrad] = grad.parts
    return parts


# The whole lookup


def sharded_lookup(
    group: TableGroup,
    first: ShardedTable,
    make_requests: Callable[[], Sequence[LookupRequest]],
    prefetched: PrefetchedIds | None = None,
) -> list[Tensor]:
    """Look up rows in one or more tables; all ranks call it together.

    What ``make_requests`` raises on one rank, all ranks raise; messages name the ``first`` table.
    """
    collectives = group.collectives
    status, counts = group.status(ExchangeKind.LOOKUP, first), group.new_counts()
    requests: Sequence[LookupRequest] = []
    own_counts: list[list[int]] = []
    with Caught() as caught:
        requests = list(make_requests()) if prefetched is None else prefetched.requests
        rows_of_counts = id_counts(requests)
        own_counts = rows_of_counts.tolist()
        counts[:, : rows_of_counts.shape[1]] = rows_of_counts
        status.max_bytes = max(request_nbytes(requests, row) for row in own_counts)
        status.max_reply_bytes = max(_reply_nbytes(requests, row) for row in own_counts)
        status.num_tables, status.value = len(requests), int(torch.is_grad_enabled())
        status.prefetched = 0 if prefetched is None else prefetched.sequence
    peers = group.handshake(status, counts, caught.error)
    read: Callable[[], list[IncomingLookup | None]]
    if prefetched is not None and set(peers["prefetched"]) == {prefetched.sequence}:
        read = partial(list, prefetched.incoming)
    else:
        max_bytes = max(peers["max_bytes"])
        read = exchange_ids(collectives, requests, own_counts, peers.counts, max_bytes)
    handles = [
        LookupHandle(group.sequence + n, r.table, r.bags_per_rank, r.is_partial, r.inverse)
        for n, r in enumerate(requests)
    ]
    group.sequence += len(requests)
    serve = partial(_serve, group, requests, handles, needs_grad=any(peers["value"]))
    rows = _return_rows(group, requests, own_counts, peers, lambda: serve(read()))
    weights = [each.table.weight for each in requests]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        group.pending.update({handle.sequence: handle for handle in handles})
        for handle in handles:
            _set_placeholder_grad(handle.table.weight)
        rows = list(_ShardedLookupFunction.apply(handles, rows, *weights))
    return [each.combine(found) for each, found in zip(requests, rows, strict=True)]


def _serve(
    group: TableGroup,
    requests: Sequence[LookupRequest],
    handles: Sequence[LookupHandle],
    incoming: Sequence[IncomingLookup | None],
    *,
    needs_grad: bool,
) -> list[tuple[IncomingLookup | None, Tensor]]:
    """Look up the rows that ranks request of this one; of replicated tables, its own."""
    tables = [each.table for each in requests]
    local = [
        own if theirs is None else theirs for own, theirs in zip(requests, incoming, strict=True)
    ]
    found = serve_lookups(tables, local, needs_grad=needs_grad)
    for each, handle, theirs in zip(found, handles, incoming, strict=True):
        if needs_grad and handle.table.weight.requires_grad:
            if theirs is None:
                handle.grad_fn = each.grad_fn
                served = ServedLookup(handle.table, None, [])
            else:
                served = ServedLookup(handle.table, each.grad_fn, theirs.bags_per_rank)
            group.served[handle.sequence] = served
    return [(theirs, each.rows) for theirs, each in zip(incoming, found, strict=True)]


def _return_rows(
    group: TableGroup,
    requests: Sequence[LookupRequest],
    own_counts: Sequence[Sequence[int]],
    peers: PeerStatus,
    serve: Callable[[], list[tuple[IncomingLookup | None, Tensor]]],
) -> list[Tensor]:
    """Send rows to the ranks that requested them; return the rows that this rank requested."""
    world_size = group.collectives.world_size
    local_rows: list[Tensor] = []

    def outgoing() -> list[list[Tensor]]:
        messages: list[list[Tensor]] = [[] for _ in range(world_size)]
        for theirs, rows in serve():
            local_rows.append(rows)
            if theirs is not None:
                for rank, slice_ in split_by_rank(rows, theirs.bags_per_rank):
                    messages[rank].append(slice_)
        return messages

    incoming_sizes = [_reply_nbytes(requests, row) for row in own_counts]
    outgoing_sizes = [_reply_nbytes(requests, row) for row in peers.counts]
    max_bytes = max(peers["max_reply_bytes"])
    readers = group.collectives.all_to_all(outgoing, incoming_sizes, max_bytes, outgoing_sizes)
    found = []
    for each, own in zip(requests, local_rows, strict=True):
        if not each.is_sent:
            found.append(own)
            continue
        table = each.table
        sizes = [count * table.dim for count in each.bags_per_rank]
        pieces = read_all(readers, sizes, table.weight.dtype)
        rows = _sum_partial_bags(pieces) if each.is_partial else concat(pieces)
        rows = rows.view(-1, table.dim)
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


def _set_placeholder_grad(weight: Tensor) -> None:
    """Set an empty gradient, so that code that reads ``.grad`` exchanges on every rank.

    A GradScaler, for example, then does so on the ranks whose loss leaves the table out, too.
    """
    if weight.requires_grad and weight.grad is None:
        placeholder: Any = PendingGrad(None, weight.detach()[:0])
        weight.grad = CompactGrad.of([placeholder], weight.shape, weight)


class _ShardedLookupFunction(torch.autograd.Function):
    """Rows that have come; the gradients of the weights are pending until they are exchanged."""

    @staticmethod
    def forward(
        ctx: Any, handles: Sequence[LookupHandle], rows: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.handles = handles
        # Detach: autograd forbids in-place writes to views that a custom Function returns.
        return tuple(each.detach() for each in rows)

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
