"""Gradients to the owners of rows, all pending ones at once; the norm over all ranks.

Each rank says which lookups it has a gradient of, and sends the gradients of the rows that it was
sent. An owner runs the backward of the lookup that it has served. Of a replicated table, every rank
sends all others the rows that it has summed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from sparsestep.distributed._handshake import ExchangeKind, Facts, PeerStatus
from sparsestep.distributed._packing import concat, read_all, split_by_rank, sum_duplicates
from sparsestep.distributed._table import (
    NUM_COUNTS,
    LookupHandle,
    ServedLookup,
    ShardedTable,
    TableGroup,
)
from sparsestep.distributed.collectives import Caught, Collectives
from sparsestep.errors import InputError, message
from sparsestep.grads import dedup
from sparsestep.grads.compact import CompactGrad, parts_of
from sparsestep.grads.exchange import PendingGrad, dense_grad_error, register, source_of
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
    def exchange_grads(self, facts: Facts, error: BaseException | None = None) -> ExchangedGrads:
        """Exchange all pending gradients; ranks have to agree before any of them uses these."""
        world_size, tables = self.collectives.world_size, self.tables
        status, counts = self.status(ExchangeKind.EXCHANGE_GRADS), None
        outgoing: list[OutgoingGrad] = []
        headers = torch.empty(0, dtype=torch.int64)
        sizes = [0] * world_size
        frozen = ", ".join(repr(t.name) for t in tables if not t.weight.requires_grad) or "none"
        with Caught(error) as caught:
            outgoing = collect_pending(tables)
            numbers = [number for each in outgoing for number in each.header()]
            headers = torch.tensor(numbers, dtype=torch.int64)
            sizes = [sum(each.nbytes_for(rank) for each in outgoing) for rank in range(world_size)]
            status.value, status.max_bytes = len(outgoing), max(sizes)
            counts = self.new_counts()
            if len(headers) <= self.num_counts:
                counts[:, : len(headers)] = headers
        peers = self.handshake(status, counts, caught.error, {**facts, "frozen tables": frozen})
        read: Callable[[], dict[tuple[int, int], ReceivedGrad]] = dict
        announced: list[list[GradHeader]] = []
        if any(peers["value"]):
            announced = _all_headers(self, peers, headers)
            read = _send_grads(self, outgoing, announced, max(peers["max_bytes"]), sizes)
        exchanged = ExchangedGrads(tables)
        with exchanged:
            for index, grads in _received_grads(self, announced, read()).items():
                _assign_grad(tables[index], grads)
            for weight in _weights(tables):
                _remove_placeholder(weight)
        return exchanged

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if one has an error."""
        self.collectives.check(error)

    @property
    def is_lost(self) -> bool:
        """Whether an exchange failed half-way: other ranks cannot be reached any more."""
        return self.collectives.is_lost

    def name_of(self, param: Tensor) -> str | None:
        """The name of the table that has a parameter, if it is one of these."""
        table = self._by_weight.get(id(param))
        return None if table is None else repr(table.name) if table.name else "the table"

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
        if not order > 0:
            requirement = "clip_grad_norm_: with sharded tables norm_type must be greater than 0"
            raise InputError(message(requirement, order))
        status = self.status(ExchangeKind.NORM)
        status.value = int(norm.double().view(torch.int64))  # its bits
        values = self.handshake(status, None)["value"]
        norms = torch.tensor(values).view(torch.float64)
        if math.isinf(order):
            return norms.max()
        total: Tensor = torch.linalg.vector_norm(norms, order)
        return total


class OutgoingGrad(NamedTuple):
    """A gradient that this rank sends: to the owners, or of a replicated table to all."""

    handle: LookupHandle
    values: Tensor
    indices: Tensor | None = None  # of a replicated table

    def nbytes_for(self, rank: int) -> int:
        """Bytes that another rank gets."""
        if self.indices is None:
            return self.handle.bags_per_rank[rank] * self.handle.table.row_bytes
        return self.indices.nbytes + self.values.nbytes

    def header(self) -> GradHeader:
        """Its announcement."""
        if self.indices is None:
            return GradHeader(self.handle.sequence)
        return GradHeader(self.handle.sequence, self.indices.numel(), self.values.shape[1])


class GradHeader(NamedTuple):
    """The announcement of a gradient."""

    sequence: int  # of the lookup
    entries: int = -1  # of a replicated table
    slot_size: int = 0

    def nbytes_from(self, served: ServedLookup, rank: int) -> int:
        """Bytes that this rank gets from another."""
        if self.entries < 0:
            return served.bags_per_rank[rank] * served.table.row_bytes
        return self.entries * (8 + self.slot_size * served.table.weight.dtype.itemsize)


class ReceivedGrad(NamedTuple):
    """One rank's part of a gradient."""

    values: Tensor
    indices: Tensor | None


class ExchangedGrads(Caught):
    """The gradients of one exchange, which this rank may still give back.

    Attributes:
        error: why this rank could not use the received gradients. Other ranks must be told.
    """

    def __init__(self, tables: Sequence[ShardedTable]) -> None:
        super().__init__()
        self._before = [
            (weight, weight.grad, _snapshot(weight.grad)) for weight in _weights(tables)
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


def _snapshot(grad: Tensor | None) -> dict[str, Any]:
    return grad.snapshot() if isinstance(grad, CompactGrad) else {}


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
            if handle.grad_fn is not None:
                found.append(_replicated_grad(handle, handle.grad_fn, rows))
                continue
            if handle.inverse is not None:
                rows = sum_duplicates(rows, handle.inverse, sum(handle.bags_per_rank))
            found.append(OutgoingGrad(handle, rows))
    return found


def _pending_parts(grad: Tensor | None) -> list[PendingGrad]:
    parts = grad.parts if isinstance(grad, CompactGrad) else ()
    return [part for part in parts if isinstance(part, PendingGrad)]


def _exchanged_parts(grad: Tensor) -> list[IndexedGrad]:
    parts = parts_of(grad) or ()
    return [part for part in parts if not isinstance(part, PendingGrad)]


def _replicated_grad(handle: LookupHandle, grad_fn: Any, rows: Tensor) -> OutgoingGrad:
    """Sums per row, or every entry if the order of summation matters."""
    table = handle.table
    (grad,) = grad_fn(rows)
    if table.order == "global":
        grad = grad.materialize_values()
        values = grad.values.reshape(-1, grad.slot_size)
        return OutgoingGrad(handle, values.contiguous(), grad.flat_indices.contiguous())
    indices, sums = dedup.sum_duplicates(grad)
    assert indices is not None
    return OutgoingGrad(handle, sums.to(table.weight.dtype), indices)


def _all_headers(group: TableGroup, peers: PeerStatus, mine: Tensor) -> list[list[GradHeader]]:
    """The headers of each rank. They are sent now if the handshake had no room for them."""
    sizes = [NUM_COUNTS * count for count in peers["value"]]
    found = [row[:size] for row, size in zip(peers.counts, sizes, strict=True)]
    if max(sizes) > group.num_counts:
        nbytes = [8 * size for size in sizes]
        readers = group.collectives.all_to_all([[mine]] * len(nbytes), nbytes, max(nbytes))
        with Caught() as caught:
            found = [each.tolist() for each in read_all(readers, sizes, torch.int64)]
        # Without headers, a rank does not know how much comes next.
        group.collectives.check(caught.error)
    return [
        [GradHeader(*row[n : n + NUM_COUNTS]) for n in range(0, len(row), NUM_COUNTS)]
        for row in found
    ]


def _send_grads(
    group: TableGroup,
    outgoing: Sequence[OutgoingGrad],
    announced: Sequence[Sequence[GradHeader]],
    max_bytes: int,
    outgoing_sizes: Sequence[int],
) -> Callable[[], dict[tuple[int, int], ReceivedGrad]]:
    """Send gradients; return a function that reads the received ones, by rank and lookup."""
    served = group.served

    def messages() -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in announced]
        for each in outgoing:
            if each.indices is not None:
                for tensors in found:
                    tensors += [each.indices, each.values]
            elif each.handle.is_partial:  # the gradient of a sum is that of every summand
                for tensors in found:
                    tensors.append(each.values)
            else:
                for rank, slice_ in split_by_rank(each.values, each.handle.bags_per_rank):
                    found[rank].append(slice_)
        return found

    def read() -> dict[tuple[int, int], ReceivedGrad]:
        found: dict[tuple[int, int], ReceivedGrad] = {}
        for rank, reader in enumerate(readers):
            for sequence, entries, slot_size in announced[rank]:
                table, indices = served[sequence].table, None
                if entries < 0:
                    count, dim = served[sequence].bags_per_rank[rank], table.dim
                else:
                    count, dim = entries, slot_size
                    indices = reader.read(entries, torch.int64)
                values = reader.read(count * dim, table.weight.dtype).view(count, dim)
                found[rank, sequence] = ReceivedGrad(values, indices)
        return found

    incoming_sizes = [
        sum(header.nbytes_from(served[header.sequence], rank) for header in headers)
        for rank, headers in enumerate(announced)
    ]
    readers = group.collectives.all_to_all(messages, incoming_sizes, max_bytes, outgoing_sizes)
    return read


def _received_grads(
    group: TableGroup,
    announced: Sequence[Sequence[GradHeader]],
    received: Mapping[tuple[int, int], ReceivedGrad],
) -> dict[int, list[IndexedGrad]]:
    found: dict[int, list[IndexedGrad]] = {}
    # In the order of the first rank that has any: where all ranks run the same, that of all.
    for sequence in dict.fromkeys(each.sequence for headers in announced for each in headers):
        served = group.served[sequence]
        of_ranks = [received.get((rank, sequence)) for rank in range(len(announced))]
        merge = _owner_grad if served.grad_fn is not None else _merge_replicated
        found.setdefault(served.table.index, []).extend(merge(served, of_ranks))
    return found


def _owner_grad(
    served: ServedLookup, received: Sequence[ReceivedGrad | None]
) -> Sequence[IndexedGrad]:
    """Run the backward of a served lookup."""
    assert served.grad_fn is not None
    table, bags_per_rank = served.table, served.bags_per_rank
    if not table.has_rows:
        return []
    values = [
        table.weight.new_zeros(count, table.dim) if each is None else each.values
        for each, count in zip(received, bags_per_rank, strict=True)
    ]
    parts = served.grad_fn(_concat_and_average(table, values))
    if None not in received:
        return parts
    # A rank whose loss does not use this lookup contributes no entries, not even zeros.
    is_present = torch.tensor([each is not None for each in received])
    present = is_present.repeat_interleave(torch.tensor(bags_per_rank))
    return [_drop_absent_ranks(part, present, table.dim) for part in parts]


def _drop_absent_ranks(part: IndexedGrad, present: Tensor, dim: int) -> IndexedGrad:
    indices, value_index = part.flat_indices, part.value_index
    if value_index is None:
        value_index = torch.arange(len(indices))
    inside = present[value_index * part.slot_size // dim].nonzero().squeeze(1)
    scale = None if part.scale is None else part.scale[inside]
    return part._replace(indices=indices[inside], value_index=value_index[inside], scale=scale)


def _merge_replicated(
    served: ServedLookup, received: Sequence[ReceivedGrad | None]
) -> Sequence[IndexedGrad]:
    """The entries of all ranks, in their order."""
    table = served.table
    pieces: list[Any] = [each for each in received if each is not None]
    values = _concat_and_average(table, [each.values for each in pieces])
    slot_size = values.shape[1]
    indices = concat([each.indices for each in pieces])
    table.catch_up(indices * slot_size // table.dim)
    num_slots = table.rows * table.dim // slot_size if slot_size else table.rows
    return [IndexedGrad(indices, values, num_slots, slot_size)]


def _concat_and_average(table: ShardedTable, pieces: Sequence[Tensor]) -> Tensor:
    world_size = table.collectives.world_size
    if table.reduce != "mean" or world_size == 1:
        return concat(pieces)
    # Not in place: the gradient that this rank has sent itself may still be in use.
    values = pieces[0].new_empty(sum(map(len, pieces)), *pieces[0].shape[1:])
    for piece, target in zip(pieces, values.split(list(map(len, pieces))), strict=True):
        torch.div(piece, world_size, out=target)
    return values


def _assign_grad(table: ShardedTable, new: Sequence[IndexedGrad]) -> None:
    """Set the gradient of a weight; a rank without rows of the table gets none."""
    weight, grad = table.weight, table.weight.grad
    if grad is not None and not grad.is_sparse:
        raise dense_grad_error()
    parts = [*([] if grad is None else _exchanged_parts(grad)), *new]
    if isinstance(grad, CompactGrad) and not grad.is_materialized:
        grad.replace_parts(parts)  # in place: existing references to the gradient see the result
    else:
        grad = CompactGrad.of(parts, weight.shape, weight)
    source = source_of(weight)
    assert source is not None
    grad.source, grad.is_sharded = ref(source), source.is_sharded(weight)
    weight.grad = grad if table.has_rows else None


def _remove_placeholder(weight: Tensor) -> None:
    grad = weight.grad
    if isinstance(grad, CompactGrad) and grad.has_pending_parts:
        grad.replace_parts(_exchanged_parts(grad))
        if not grad.parts and grad.source is None:
            weight.grad = None
