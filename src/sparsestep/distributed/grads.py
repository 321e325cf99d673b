"""Gradients to the owners of rows, all pending ones at once; the norm over all ranks.

Each rank says which lookups it has a gradient of, and sends the gradients of the rows that it was
sent. An owner runs the backward of the lookup that it has served. Of a replicated table, every rank
sends all others the rows that it has summed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from weakref import ref

import torch
from torch import Tensor

from sparsestep._torch import stack
from sparsestep.distributed._handshake import ExchangeKind, Facts, PeerStatus
from sparsestep.distributed._requests import sum_all_duplicates
from sparsestep.distributed._table import (
    NUM_COUNTS,
    LookupHandle,
    ServedLookup,
    ShardedTable,
    TableGroup,
)
from sparsestep.distributed.collectives import Caught, Collectives, Messages, Payload, Sections
from sparsestep.distributed.placement import table_label
from sparsestep.engines.base import certain
from sparsestep.grads import dedup
from sparsestep.grads.compact import CompactGrad, parts_of
from sparsestep.grads.exchange import PendingGrad, dense_grad_error, register
from sparsestep.grads.indexed import IndexedGrad


class ShardedGradSource(TableGroup):
    """The tables of one ``shard()`` call, as the source of their gradients."""

    def __init__(
        self, collectives: Collectives, tables: Sequence[ShardedTable], max_tables: int
    ) -> None:
        super().__init__(collectives, tables, max_tables)
        self._by_weight: dict[int, ShardedTable] = {}  # the first one, if several share it
        for table in tables:
            self._by_weight.setdefault(id(table.weight), table)
            register(table.weight, self)

    @torch.no_grad()
    def skip_exchange(self) -> ExchangedGrads | None:
        """Remove placeholders if this rank has no gradient to send; ``None`` if it has."""
        weights = _weights(self.tables)
        if any(part.handle is not None for each in weights for part in _pending_parts(each.grad)):
            return None
        skipped = ExchangedGrads(self.tables)
        for weight in weights:
            _remove_placeholder(weight)
        return skipped

    @torch.no_grad()
    def exchange_grads(
        self,
        facts: Facts,
        error: BaseException | None = None,
        skipped: ExchangedGrads | None = None,
    ) -> ExchangedGrads:
        """Exchange all pending gradients; ranks have to agree before any of them uses these."""
        world_size, tables = self.collectives.world_size, self.tables
        status, counts = self.status(ExchangeKind.EXCHANGE_GRADS), None
        outgoing = OutgoingGrads([], [])
        headers = torch.empty(0, dtype=torch.int64)
        payload: Payload | None = None
        frozen = ", ".join(table_label(t.name) for t in tables if not t.weight.requires_grad)
        with Caught(error) as caught:
            outgoing = OutgoingGrads.of(collect_pending(tables))
            numbers = [number for each in outgoing.grads for number in each.header()]
            headers = torch.tensor(numbers, dtype=torch.int64)
            status.value, counts = len(outgoing.grads), self.new_counts()
            payload = outgoing.payload(sorted(outgoing.numbers()), world_size)
            status.max_bytes = int(payload.sizes.sum(1).max())
            if len(headers) <= self.num_counts:
                counts[:, : len(headers)], status.payload = headers, 1
        facts = {**facts, "frozen tables": frozen or "none"}
        peers = self.handshake(status, counts, caught.error, facts, payload)
        sent = received = certain(lambda: torch.zeros(world_size, dtype=torch.int64))
        read: Callable[[], list[ReceivedGrad]] = list
        if any(peers["value"]):
            read, sent, received = self._transfer(peers, outgoing, headers, payload)
        self.expect(sent, received, max(peers["max_bytes"]))
        if skipped is not None and not any(peers["value"]):
            skipped.is_agreed = True
            return skipped
        exchanged = ExchangedGrads(tables)
        with exchanged:
            for index, grads in _received_grads(self, read()).items():
                _assign_grad(self, tables[index], grads)
            for weight in _weights(tables):
                _remove_placeholder(weight)
        return exchanged

    def _transfer(
        self, peers: PeerStatus, outgoing: OutgoingGrads, headers: Tensor, payload: Payload | None
    ) -> tuple[Callable[[], list[ReceivedGrad]], Tensor, Tensor]:
        """Send gradients, unless they have come with the handshake.

        Returns a function that reads those of all ranks, and the bytes to and from each.
        """
        world_size = self.collectives.world_size
        announced = _all_headers(self, peers, headers)
        mine = payload
        # A message has sections for the gradients of all ranks.
        if mine is None or list(announced.served) != sorted(outgoing.numbers()):
            mine = certain(lambda: outgoing.payload(list(announced.served), world_size))
        if peers.messages is not None and all(peers["payload"]):
            messages = peers.messages(mine, announced.sizes)
        else:
            messages = self.collectives.all_to_all(
                lambda: mine.sections, mine.sizes, announced.sizes, max(peers["max_bytes"])
            )
        sent, received = certain(lambda: (mine.sizes.sum(1), announced.sizes.sum(1)))
        return partial(_read_grads, announced, messages), sent, received

    def agree(self, error: BaseException | None, value: Tensor | None = None) -> Tensor:
        """The values of all ranks; raises on every rank if one has an error."""
        bits = certain(lambda: 0 if value is None else _bits(value))
        found = self.collectives.check(error, bits)
        return certain(lambda: torch.tensor(found).view(torch.float64))

    @property
    def is_lost(self) -> bool:
        """Whether an exchange failed half-way: other ranks cannot be reached any more."""
        return self.collectives.is_lost

    def name_of(self, param: Tensor) -> str | None:
        """The name of the table that has a parameter, if it is one of these."""
        table = self._by_weight.get(id(param))
        return None if table is None else table_label(table.name)

    def is_sharded(self, param: Tensor) -> bool:
        """Whether other ranks have other rows of a parameter."""
        table = self._by_weight.get(id(param))
        return table is not None and table.placement.is_sharded and self.collectives.world_size > 1

    def row_layout(self, param: Tensor) -> tuple[int, int]:
        """Row stride and offset of this rank's shard."""
        table = self._by_weight.get(id(param))
        stride = 1 if table is None else table.row_stride
        return (stride, self.collectives.rank) if stride > 1 else (1, 0)

    def all_ranks_norm(self, norm: Tensor, order: float) -> Tensor:
        """Norm over all ranks, bit-identical on every rank."""
        status = self.status(ExchangeKind.NORM)
        status.value = _bits(norm)
        values = self.handshake(status, None)["value"]
        norms = torch.tensor(values).view(torch.float64)
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total


def _bits(value: Tensor) -> int:
    """A number as an integer that ranks can exchange."""
    return int(value.double().view(torch.int64))


class OutgoingGrad(NamedTuple):
    """A gradient that this rank sends: to the owners, or of a replicated table to all."""

    handle: LookupHandle
    values: Tensor
    indices: Tensor | None = None  # of a replicated table

    def header(self) -> tuple[int, int, int]:
        """The number of the lookup; of a replicated table, those of entries and their elements."""
        if self.indices is None:
            return self.handle.sequence, -1, 0
        return self.handle.sequence, self.indices.numel(), self.values.shape[1]


class OutgoingGrads(NamedTuple):
    """All gradients that this rank sends, and their indices and values as they are sent."""

    grads: list[OutgoingGrad]
    sections: Sections

    @classmethod
    def of(cls, grads: list[OutgoingGrad]) -> OutgoingGrads:
        """Encode gradients."""
        sections: Sections = []
        for each in grads:
            sections += each.indices, each.handle.table.encode(each.values, is_grad=True)
        return cls(grads, sections)

    def numbers(self) -> dict[int, int]:
        """The index of the gradient of each lookup, by its sequence number."""
        return {each.handle.sequence: n for n, each in enumerate(self.grads)}

    def payload(self, sequences: Sequence[int], world_size: int) -> Payload:
        """The message, with sections for each of several lookups in this order."""
        numbers, some = self.numbers(), Sections()
        sizes = torch.zeros(len(sequences), 2, world_size, dtype=torch.int64)
        for sequence in sequences:
            n = numbers.get(sequence)
            some += (None, None) if n is None else self.sections[2 * n : 2 * n + 2]
        if self.grads:
            mine = [n for n, each in enumerate(sequences) if each in numbers]
            order = [numbers[each] for each in sequences if each in numbers]
            sizes[mine] = _section_sizes(self.grads, world_size)[order]
        return Payload(some, sizes.flatten(0, 1).t().contiguous())


class AnnouncedGrads(NamedTuple):
    """The gradients of all ranks, in the order of lookups."""

    served: dict[int, ServedLookup]  # by sequence
    sizes: Tensor  # bytes of indices and values from each rank
    is_present: Tensor  # for each lookup, which ranks have a gradient of it
    slot_sizes: list[int]  # of replicated tables
    order: list[int]  # in which gradients are assigned


class ReceivedGrad(NamedTuple):
    """A gradient, of all ranks in their order."""

    served: ServedLookup
    values: Tensor  # flat
    indices: Tensor  # of a replicated table
    is_present: Tensor | None  # which ranks have one; None: all
    slot_size: int  # of a replicated table


class ExchangedGrads(Caught):
    """The gradients of one exchange, which this rank may still give back.

    If it could not use them, other ranks must be told of the ``error``.
    """

    def __init__(self, tables: Sequence[ShardedTable]) -> None:
        super().__init__()
        self.is_agreed: bool = False
        grads = [(weight, weight.grad) for weight in _weights(tables)]
        self._before = [
            (w, g, g.snapshot() if isinstance(g, CompactGrad) else {}) for w, g in grads
        ]

    def undo(self) -> None:
        """Restore the gradients that weights had before."""
        for weight, grad, attributes in self._before:
            weight.grad = grad
            if isinstance(grad, CompactGrad):
                grad.restore(attributes)


def _weights(tables: Sequence[ShardedTable]) -> list[Tensor]:
    """Each weight once: tables may share one."""
    return list({id(table.weight): table.weight for table in tables}.values())


def collect_pending(tables: Sequence[ShardedTable]) -> list[OutgoingGrad]:
    """The gradients that this rank sends, in the order of backward."""
    found: list[OutgoingGrad] = []
    for weight in _weights(tables):
        values: dict[LookupHandle, Tensor] = {}
        for handle, rows in _pending_parts(weight.grad):
            if handle is None:  # a placeholder that no backward has filled
                continue
            values[handle] = values[handle] + rows if handle in values else rows
        for handle, rows in values.items():
            is_copy = handle.grad_fn is not None
            found.append(_replicated_grad(handle, rows) if is_copy else OutgoingGrad(handle, rows))
    requests = [
        (n, (each.values, each.handle.inverse, each.handle.num_bags))
        for n, each in enumerate(found)
        if each.handle.inverse is not None and each.indices is None
    ]
    sums = sum_all_duplicates([request for _, request in requests])
    for (n, _), summed in zip(requests, sums, strict=True):
        found[n] = found[n]._replace(values=summed)
    return found


def _pending_parts(grad: Tensor | None) -> list[PendingGrad]:
    parts = grad.parts if isinstance(grad, CompactGrad) else ()
    return [part for part in parts if isinstance(part, PendingGrad)]


def _exchanged_parts(grad: Tensor) -> list[IndexedGrad]:
    parts = parts_of(grad) or ()
    return [part for part in parts if not isinstance(part, PendingGrad)]


def _replicated_grad(handle: LookupHandle, rows: Tensor) -> OutgoingGrad:
    """Sums per row, or every entry if the order of summation matters."""
    table = handle.table
    assert handle.grad_fn is not None
    (grad,) = handle.grad_fn(rows)
    if table.order == "global":
        grad = grad.materialize_values()
        values = grad.values.reshape(-1, grad.slot_size)
        return OutgoingGrad(handle, values.contiguous(), grad.flat_indices.contiguous())
    indices, sums = dedup.sum_duplicates(grad)
    assert indices is not None
    return OutgoingGrad(handle, sums.to(table.weight.dtype), indices)


def _section_sizes(outgoing: Sequence[OutgoingGrad], world_size: int) -> Tensor:
    """Bytes of the indices and values of each gradient that each rank gets."""
    bags = stack([each.handle.bags_per_rank for each in outgoing])
    row_bytes = torch.tensor([[each.handle.table.wire_bytes] for each in outgoing])
    # Of a replicated table, all ranks get everything; of a sharded one, no indices.
    copies = [each.indices is not None for each in outgoing]
    nbytes = [[0 if e.indices is None else e.indices.nbytes, e.values.nbytes] for e in outgoing]
    sizes = torch.tensor(nbytes).unsqueeze(2).repeat(1, 1, world_size)
    sizes[:, 1] = torch.where(torch.tensor(copies).unsqueeze(1), sizes[:, 1], bags * row_bytes)
    return sizes


def _all_headers(group: TableGroup, peers: PeerStatus, mine: Tensor) -> AnnouncedGrads:
    """The headers of all ranks. They are sent now if the handshake had no room for them."""
    num_headers = certain(lambda: torch.tensor(peers["value"]))
    most = max(peers["value"])
    if most * NUM_COUNTS > group.num_counts:
        sizes = certain(lambda: num_headers * NUM_COUNTS)
        with Caught() as caught:
            numbers = group.collectives.all_gather(mine, sizes)
        # Without headers, a rank does not know how much comes next.
        group.collectives.check(caught.error)
    else:
        counts = certain(lambda: peers.counts.unflatten(1, (-1, NUM_COUNTS))[:, :most])
        numbers = certain(lambda: counts[torch.arange(most) < num_headers.unsqueeze(1)])
    return certain(lambda: _announced_grads(group, num_headers, numbers.view(-1, NUM_COUNTS)))


def _announced_grads(group: TableGroup, num_headers: Tensor, headers: Tensor) -> AnnouncedGrads:
    """Read the headers of all ranks, one rank's after another."""
    sequences, entries, slot_sizes = headers.unbind(1)
    ranks = torch.arange(len(num_headers)).repeat_interleave(num_headers)
    found, lookup, order = _lookups_of(sequences, num_headers)
    served = {sequence: group.served[sequence] for sequence in found.tolist()}
    row_bytes = stack([each.bags_per_rank for each in served.values()])
    row_bytes *= torch.tensor([[each.table.wire_bytes] for each in served.values()])
    itemsize = torch.tensor([each.table.weight.dtype.itemsize for each in served.values()])
    sizes = torch.zeros(len(num_headers), len(served), 2, dtype=torch.int64)
    sizes[ranks, lookup, 0] = entries.clamp(min=0) * sequences.itemsize
    of_copies = entries * slot_sizes * itemsize[lookup]
    sizes[ranks, lookup, 1] = torch.where(entries < 0, row_bytes[lookup, ranks], of_copies)
    is_present = torch.zeros(len(served), len(num_headers), dtype=torch.bool)
    is_present[lookup, ranks] = True
    slot_sizes = torch.zeros_like(found).scatter_reduce(0, lookup, slot_sizes, "amax")
    return AnnouncedGrads(served, sizes.flatten(1), is_present, slot_sizes.tolist(), order)


def _lookups_of(sequences: Tensor, num_headers: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """Distinct lookups, ascending; the one of each header, and the order in which they came.

    The order is that of the first rank that has any: where all ranks run the same, that of all.
    """
    first = sequences[: int(num_headers[0])]
    is_same = torch.equal(sequences, first.repeat(len(num_headers)))
    found, lookup = (first if is_same else sequences).unique(return_inverse=True)
    order = list(dict.fromkeys(lookup.tolist()))
    return found, lookup.repeat(len(num_headers)) if is_same else lookup, order


def _read_grads(announced: AnnouncedGrads, messages: Messages) -> list[ReceivedGrad]:
    dtypes = [(torch.int64, each.table.wire_dtype) for each in announced.served.values()]
    tensors = messages.read([dtype for pair in dtypes for dtype in pair])
    served, is_complete = list(announced.served.values()), announced.is_present.all(1).tolist()
    return [
        ReceivedGrad(
            served[n],
            values=served[n].table.decode(tensors[2 * n + 1]),
            indices=tensors[2 * n],
            is_present=None if is_complete[n] else announced.is_present[n],
            slot_size=announced.slot_sizes[n],
        )
        for n in announced.order
    ]


def _received_grads(
    group: TableGroup, received: Sequence[ReceivedGrad]
) -> dict[int, list[IndexedGrad]]:
    found: dict[int, list[IndexedGrad]] = {}
    for each in received:
        table = each.served.table
        parts = found.setdefault(table.index, [])
        if table.has_rows:
            if table.reduce == "mean" and group.collectives.world_size > 1:
                each.values.div_(group.collectives.world_size)
            parts += _merge_replicated(each) if each.served.grad_fn is None else _owner_grad(each)
    return found


def _owner_grad(received: ReceivedGrad) -> Sequence[IndexedGrad]:
    """Run the backward of a served lookup."""
    served, values, is_present = received.served, received.values, received.is_present
    table, bags_per_rank = served.table, served.bags_per_rank
    assert served.grad_fn is not None
    if is_present is None:
        return served.grad_fn(values.view(int(bags_per_rank.sum()), table.dim))
    # A rank whose loss does not use this lookup contributes no entries, not even zeros.
    present = is_present.repeat_interleave(bags_per_rank)
    whole = values.new_zeros(len(present), table.dim)
    whole[present] = values.view(int(present.sum()), table.dim)
    return [_drop_absent_ranks(part, present, table.dim) for part in served.grad_fn(whole)]


def _drop_absent_ranks(part: IndexedGrad, present: Tensor, dim: int) -> IndexedGrad:
    indices, value_index = part.flat_indices, part.value_index
    if value_index is None:
        value_index = torch.arange(len(indices))
    inside = present[value_index * part.slot_size // dim].nonzero().squeeze(1)
    scale = None if part.scale is None else part.scale[inside]
    return part._replace(indices=indices[inside], value_index=value_index[inside], scale=scale)


def _merge_replicated(received: ReceivedGrad) -> Sequence[IndexedGrad]:
    """The entries of all ranks, in their order."""
    table, indices, slot_size = received.served.table, received.indices, received.slot_size
    values = received.values.view(len(indices), slot_size)
    table.catch_up(indices * slot_size // table.dim)
    num_slots = table.rows * table.dim // slot_size if slot_size else table.rows
    return [IndexedGrad(indices, values, num_slots, slot_size)]


def _assign_grad(
    source: ShardedGradSource, table: ShardedTable, new: Sequence[IndexedGrad]
) -> None:
    """Set the gradient of a weight; a rank without rows of the table gets none."""
    weight, grad = table.weight, table.weight.grad
    if grad is not None and not grad.is_sparse:
        raise dense_grad_error()
    parts = [*([] if grad is None else _exchanged_parts(grad)), *new]
    if isinstance(grad, CompactGrad) and not grad.is_materialized:
        grad.replace_parts(parts)  # in place: existing references to the gradient see the result
    else:
        grad = CompactGrad.of(parts, weight.shape, weight)
    grad.source, grad.is_sharded = ref(source), source.is_sharded(weight)
    weight.grad = grad if table.has_rows else None


def _remove_placeholder(weight: Tensor) -> None:
    grad = weight.grad
    if isinstance(grad, CompactGrad) and grad.has_pending_parts:
        grad.replace_parts(_exchanged_parts(grad))
        if not grad.parts and grad.source is None:
            weight.grad = None
