"""The sharded forward: ids to the owners of rows, rows back to the ranks that asked.

An owner gets bags of its own row numbers, looks them up with the ordinary modules, and returns a
row for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import ExchangeKind
from sparsestep.distributed._requests import (
    IncomingLookup,
    LookupRequest,
    LookupSizes,
    TableRequests,
    exchange_ids,
    id_counts,
    id_sections,
    read_ids,
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
from sparsestep.distributed.collectives import Caught, Collectives, Messages, Payload, Sections
from sparsestep.engines.base import certain
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.exchange import PendingGrad
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.memory.tensors import HALF_DTYPES
from sparsestep.nn import lookup
from sparsestep.nn.lookup import Lookup, LookupResult, first_derivative, grad_of_ids, unshared
from sparsestep.nn.vocabulary import PreparedLookup, prepare_lookups

# The owner's side: read local rows, and map their gradients to the weight


# A row for each bag; the function may be called repeatedly, and does not keep the rows.
LocalRows: TypeAlias = tuple[Tensor, RowGradFn]


def serve_lookups(
    requests: Sequence[LookupRequest],
    incoming: Sequence[IncomingLookup | None],
    *,
    needs_grad: bool,
) -> list[LocalRows]:
    """Look up the rows that ranks request of this one; of replicated tables, its own.

    All tables are looked up by one call of the core where it can.
    """
    pairs: list[tuple[ShardedTable, LookupRequest | IncomingLookup]] = [
        (own.table, theirs or own) for own, theirs in zip(requests, incoming, strict=True)
    ]
    core_lookups: dict[int, Lookup] = {}
    for n, (table, each) in enumerate(pairs):
        table.prefetch(each.ids)
        # With weights, padding has one, too, but no gradient.
        has_padding = each.per_sample_weights is not None and table.local_padding_idx >= 0
        if table.is_plain_read and each.num_bags and not has_padding:
            core_lookups[n] = _core_lookup(table, each, needs_grad=needs_grad)
    found = lookup.look_up(list(core_lookups.values())) or ()
    done = dict(zip(core_lookups, found, strict=False))
    return [
        _from_core(table, each, done[n])
        if n in done
        else _serve_with_module(table, each, needs_grad=needs_grad)
        for n, (table, each) in enumerate(pairs)
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

    def grad_fn(rows: Tensor) -> Sequence[IndexedGrad]:
        """The module's own gradient. The graph stays, for as long as more may come."""
        grad: Any
        (grad,) = torch.autograd.grad(output, table.weight, rows, retain_graph=True)
        parts: Sequence[IndexedGrad] = grad.parts
        return parts

    return output.detach(), grad_fn


def _detached_copy(weights: Tensor | None) -> Tensor | None:
    """A copy: the caller may overwrite its weights."""
    return None if weights is None else weights.detach().clone()


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

    def look_up_together() -> list[Tensor]:
        exchange = _LookupExchange(group, first, make_requests, operation)
        return exchange.exchange_rows(exchange.exchange_ids())

    # A rank that stops in the middle of an exchange keeps the others waiting.
    return uninterrupted(look_up_together)


class _LookupExchange:
    """One lookup of all ranks: a handshake, ids to owners, rows back.

    Ids come with the handshake if there is room. Ids that were prefetched are not sent again, and
    their rows come with the handshake.
    """

    def __init__(
        self,
        group: TableGroup,
        first: ShardedTable,
        make_requests: Callable[[], TableRequests],
        operation: ExchangeKind,
    ) -> None:
        """Shake hands; raises on all ranks if ``make_requests`` raises on one."""
        self._group, self._status = group, group.status(operation, first)
        self._requests: Sequence[LookupRequest] = []
        self._prefetched: Sequence[IncomingLookup | None] = []  # requests of all ranks
        self._early: list[LocalRows] = []  # their rows, looked up before the handshake
        self._payload: Payload | None = None
        counts = group.new_counts()
        with Caught() as caught:
            self._prepare(make_requests(), counts)
        self._peers = group.handshake(self._status, counts, caught.error, payload=self._payload)
        self._theirs = certain(self._peer_sizes)

    def _prepare(self, made: TableRequests, counts: Tensor) -> None:
        """Announce the requests of this rank, and make the payload of the handshake."""
        status, requests = self._status, made.requests
        self._requests, self._prefetched = requests, made.incoming
        own_counts = id_counts(requests)
        counts[:, : NUM_COUNTS * len(requests)] = own_counts.flatten(1)
        self._own = own = LookupSizes(requests, own_counts)
        if made.reply_bytes is None:
            self._payload, status.payload = Payload(id_sections(requests), own.request), _IDS
        elif all(each.table.is_plain_read and each.vocabulary is None for each in requests):
            self._early = serve_lookups(requests, made.incoming, needs_grad=True)
            sections = _row_sections(made.incoming, self._early, requests)
            self._payload, status.payload = Payload(sections, made.reply_bytes), _ROWS
        status.prefetched, status.num_tables = made.prefetched, len(requests)
        status.max_bytes = int(own.request.sum(1).max())
        status.max_reply_bytes = int(own.reply.sum(1).max())
        status.value = int(torch.is_grad_enabled())

    def _peer_sizes(self) -> LookupSizes:
        requests = self._requests
        counts = self._peers.counts[:, : NUM_COUNTS * len(requests)]
        return LookupSizes(requests, counts.unflatten(1, (len(requests), NUM_COUNTS)), self._own)

    def _payloads(self, what: int) -> Callable[[Payload, Tensor], Messages] | None:
        """Reads the payloads of all ranks; ``None`` unless all have sent this one."""
        return self._peers.messages if set(self._peers["payload"]) == {what} else None

    def exchange_ids(self) -> Callable[[], Sequence[IncomingLookup | None]]:
        """Send ids to their owners, unless all ranks have prefetched these.

        Returns a function that reads the requests of all ranks.
        """
        group, status, peers, requests = self._group, self._status, self._peers, self._requests
        own, theirs = self._own, self._theirs
        if status.prefetched and set(peers["prefetched"]) == {status.prefetched}:
            self._expect(theirs.reply, own.reply, max(peers["max_reply_bytes"]))
            return lambda: self._prefetched
        self._early = []
        max_bytes = max(peers["max_bytes"])
        if (payloads := self._payloads(_IDS)) is None:
            read = exchange_ids(group.collectives, requests, own, theirs, max_bytes)
        else:
            assert self._payload is not None
            read = partial(read_ids, requests, payloads(self._payload, theirs.request), theirs)
        self._expect(own.request, theirs.request, max_bytes)
        return read

    def _expect(self, outgoing: Tensor, incoming: Tensor, max_bytes: int) -> None:
        """Make room for this many bytes with the status of the next lookup."""
        sent, received = certain(lambda: (outgoing.sum(1), incoming.sum(1)))
        self._group.expect(sent, received, max_bytes)

    def exchange_rows(self, read: Callable[[], Sequence[IncomingLookup | None]]) -> list[Tensor]:
        """Look up the rows that ranks request of this one, and send them."""
        group, requests, needs_grad = self._group, self._requests, any(self._peers["value"])
        handles = [
            LookupHandle(group.sequence + n, r.table, r.num_bags, r.bags_per_rank, r.inverse)
            for n, r in enumerate(requests)
        ]
        group.sequence += len(handles)
        translation = _Translation(group.collectives, requests)
        local: list[LocalRows] = []

        def outgoing() -> Sections:
            found = translation.rows_of(read())
            local[:] = self._early or serve_lookups(requests, found, needs_grad=needs_grad)
            if needs_grad:
                _keep_served(group, handles, found, local)
            return _row_sections(found, local, requests)

        weights = [each.table.weight for each in requests]
        has_grad = torch.is_grad_enabled() and any(weight.requires_grad for weight in weights)

        def look_up() -> list[Tensor]:
            rows: Sequence[Tensor] = _read_rows(requests, self._send_rows(outgoing), local)
            if has_grad:
                group.pending.update({handle.sequence: handle for handle in handles})
                rows = list(_ShardedLookupFunction.apply(handles, rows, *weights))
            return [each.combine(found) for each, found in zip(requests, rows, strict=True)]

        found = translation.run(look_up)
        for weight in weights if has_grad else ():
            _set_placeholder_grad(weight)
        return found

    def _send_rows(self, outgoing: Callable[[], Sections]) -> Messages:
        """Send rows, unless they have come with the handshake."""
        theirs, own, peers = self._theirs, self._own, self._peers
        payloads = self._payloads(_ROWS) if self._early else None
        if payloads is not None:
            return payloads(Payload(outgoing(), theirs.reply), own.reply)
        max_bytes = max(peers["max_reply_bytes"])
        return self._group.collectives.all_to_all(outgoing, theirs.reply, own.reply, max_bytes)


def _keep_served(
    group: TableGroup,
    handles: Sequence[LookupHandle],
    incoming: Sequence[IncomingLookup | None],
    local: Sequence[LocalRows],
) -> None:
    """Keep what the gradients of served lookups need."""
    for (_, grad_fn), handle, theirs in zip(local, handles, incoming, strict=True):
        table = handle.table
        if not table.weight.requires_grad:
            continue
        served = ServedLookup(table, None, handle.bags_per_rank)
        if theirs is None:
            handle.grad_fn = grad_fn
        else:
            served = ServedLookup(table, grad_fn, theirs.bags_per_rank)
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
    total = torch.add(first.float() if first.dtype in HALF_DTYPES else first, second)
    for each in others:
        total += each
    return total.to(first.dtype)


def _set_placeholder_grad(weight: Tensor) -> None:
    """Set an empty gradient, so that code that reads ``.grad`` exchanges on every rank.

    A GradScaler, for example, then does so on the ranks whose loss leaves the table out, too.
    """
    if weight.requires_grad and weight.grad is None:
        placeholder: Any = PendingGrad(None, torch.empty(0, dtype=weight.dtype))
        weight.grad = CompactGrad.of([placeholder], weight.shape, weight)


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
    @first_derivative
    def backward(ctx: Any, *grads: Any) -> Any:
        found: list[Any] = []
        are_needed = ctx.needs_input_grad[2:]
        for handle, grad, is_needed in zip(ctx.handles, grads, are_needed, strict=True):
            if grad is None or not is_needed:
                found.append(None)
                continue
            pending: Any = PendingGrad(handle, unshared(grad))
            found.append(CompactGrad.of([pending], handle.table.weight.shape, grad))
        return None, None, *found
