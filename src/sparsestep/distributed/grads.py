"""Arrivals: gradients to the owners of rows, all that are pending at once.

Each rank says which lookups it has a gradient of, and sends the gradients of the rows that it was
sent. An owner knows what it has answered: it runs the backward of its own lookup. Of copies, every
rank sends all others the rows that it has summed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from sparsestep.distributed._handshake import Doing, Facts, Lines
from sparsestep.distributed._packing import added_up
from sparsestep.distributed._table import Table
from sparsestep.distributed.collectives import joined, shares
from sparsestep.distributed.ledger import Answer, Ledger, Ticket
from sparsestep.distributed.sending import NUMBERS
from sparsestep.grads.compact import (
    CompactGrad,
    compact,
    parts_of,
    positions_of,
)
from sparsestep.grads.dedup import summed
from sparsestep.grads.exchange import Pending, read_otherwise, source_of
from sparsestep.grads.indexed import IndexedGrad


class _Sent(NamedTuple):
    """A gradient that this rank sends: to the owners, or of a copy to all."""

    ticket: Ticket
    values: Tensor
    positions: Tensor | None = None  # of a copy

    def bytes_for(self, rank: int) -> int:
        """What another rank gets of it."""
        if self.positions is None:
            return self.ticket.bags[rank] * self.ticket.table.row_bytes
        return self.positions.nbytes + self.values.nbytes


class _Said(NamedTuple):
    """What a rank says of a gradient that it sends: whose it is; of a copy, how many entries."""

    ticket: int
    entries: int = -1
    block: int = 0

    def bytes_of(self, answer: Answer, rank: int) -> int:
        """What this rank gets of it from another."""
        if self.entries < 0:
            return answer.bags[rank] * answer.table.row_bytes
        return self.entries * (8 + self.block * answer.table.weight.dtype.itemsize)


class Arrival:
    """The gradients of one exchange, which this rank may still give back.

    Attributes:
        error: why this rank could not use what has come. The others have to be told.
    """

    def __init__(self, tables: Sequence[Table]) -> None:
        self.error: BaseException | None = None
        self._before = [
            (weight, weight.grad, _attributes(weight.grad))
            for weight in {id(table.weight): table.weight for table in tables}.values()
        ]

    def undo(self) -> None:
        """Let weights have the gradients that they had before."""
        for weight, grad, attributes in self._before:
            weight.grad = grad
            if grad is not None:
                vars(grad).update(attributes)


def _attributes(grad: Tensor | None) -> dict[str, Any]:
    if not isinstance(grad, CompactGrad):
        return {}
    names = ("_parts", "_materialized", "arrived_from", "is_divided")
    return {name: getattr(grad, name) for name in names}


def exchange_grads(ledger: Ledger, facts: Facts, error: BaseException | None = None) -> Arrival:
    """Exchange all gradients that are pending; all ranks at once.

    Args:
        ledger: of the ranks.
        facts: what must be the same on all ranks.
        error: why this rank refuses.

    Returns:
        What was done. Ranks have to agree on it before anybody uses the gradients.
    """
    wire, tables = ledger.wire, ledger.tables
    line, room = ledger.line(Doing.ARRIVAL), None
    sent: list[_Sent] = []
    numbers = torch.empty(0, dtype=torch.int64)
    lengths = [0] * wire.world
    frozen = ", ".join(repr(t.name) for t in tables if not t.weight.requires_grad) or "none"
    try:
        sent = _collected(tables)
        numbers = torch.tensor([n for each in sent for n in _said(each)], dtype=torch.int64)
        lengths = [sum(each.bytes_for(rank) for each in sent) for rank in range(wire.world)]
        line.payload, line.largest = len(sent), max(lengths)
        room = torch.zeros(wire.world, ledger.room, dtype=torch.int64)
        if len(numbers) <= ledger.room:
            room[:, : len(numbers)] = numbers
    except BaseException as raised:
        error = error or raised
    lines = ledger.agree(line, room, error, {**facts, "frozen tables": frozen})
    pieces: Callable[[], dict[tuple[int, int], _Piece]] = dict
    theirs: list[list[_Said]] = []
    if any(lines["payload"]):
        theirs = _listed(ledger, lines, numbers)
        pieces = _exchanged(ledger, sent, theirs, max(lines["largest"]), lengths)
    arrival = Arrival(tables)
    try:
        parts = _parts(ledger, theirs, pieces())
        for index, new in parts.items():
            _give(tables[index], new)
        for table in tables:
            _settle(table.weight)
    except BaseException as raised:
        arrival.error = raised
    return arrival


def _parts(
    ledger: Ledger,
    theirs: Sequence[Sequence[_Said]],
    pieces: Mapping[tuple[int, int], _Piece],
) -> dict[int, list[IndexedGrad]]:
    """What has come, as parts of the gradients of tables, by their index."""
    parts: dict[int, list[IndexedGrad]] = {}
    # In the order of the first rank that has any: where all ranks run the same, that of all.
    for index in dict.fromkeys(each.ticket for said in theirs for each in said):
        answer = ledger.answers[index]
        arrived = [pieces.get((rank, index)) for rank in range(ledger.wire.world)]
        new = _of_all(answer.table, arrived) if answer.parts is None else _part(answer, arrived)
        parts.setdefault(answer.table.index, []).extend(new)
    return parts


def _collected(tables: Sequence[Table]) -> list[_Sent]:
    """What this rank has to send, in the order in which backward came across it."""
    found: list[_Sent] = []
    for weight in {id(table.weight): table.weight for table in tables}.values():
        values: dict[Ticket, Tensor] = {}
        for ticket, rows in _pending_in(weight.grad):
            if ticket is None:  # it was expected, and has not come
                continue
            values[ticket] = values[ticket] + rows if ticket in values else rows
        for ticket, rows in values.items():
            if ticket.table.kind == "copy":
                found.append(_of_copy(ticket, rows))
                continue
            if ticket.which is not None:
                rows = added_up(rows, ticket.which, sum(ticket.bags))
            found.append(_Sent(ticket, rows))
    return found


def _pending_in(grad: Tensor | None) -> list[Pending]:
    """The parts of a gradient that are still to be sent."""
    parts = grad._parts if isinstance(grad, CompactGrad) else ()
    return [part for part in parts if isinstance(part, Pending)]


def _arrived_in(grad: Tensor) -> list[IndexedGrad]:
    """The other parts of a gradient."""
    parts = parts_of(grad) or ()
    return [part for part in parts if not isinstance(part, Pending)]


def _of_copy(ticket: Ticket, rows: Tensor) -> _Sent:
    """What the others get of a copy's gradient: sums, or every entry where their order matters."""
    assert ticket.parts is not None
    weight = ticket.table.weight
    (touched,) = ticket.parts(rows)
    if ticket.table.order == "global":
        touched = touched.expanded()
        values = touched.values.reshape(-1, touched.slot_size)
        return _Sent(ticket, values.contiguous(), positions_of(touched).contiguous())
    positions, sums = summed(touched)
    assert positions is not None
    return _Sent(ticket, sums.to(weight.dtype), positions)


def _said(sent: _Sent) -> _Said:
    if sent.positions is None:
        return _Said(sent.ticket.index)
    return _Said(sent.ticket.index, sent.positions.numel(), sent.values.shape[1])


def _listed(ledger: Ledger, lines: Lines, mine: Tensor) -> list[list[_Said]]:
    """What each rank sends. Where that was more than there was room for, it is sent now."""
    counts = [NUMBERS * count for count in lines["payload"]]
    found = [row[:count] for row, count in zip(lines.room, counts, strict=True)]
    if max(counts) > ledger.room:
        sizes = [8 * count for count in counts]
        readers = ledger.wire.send([[mine]] * len(sizes), sizes, max(sizes))
        error: BaseException | None = None
        try:
            found = [
                reader.take(count, torch.int64).tolist()
                for reader, count in zip(readers, counts, strict=True)
            ]
        except BaseException as raised:
            error = raised
        ledger.wire.check(error)  # who cannot read them does not know how much comes next
    return [[_Said(*row[n : n + NUMBERS]) for n in range(0, len(row), NUMBERS)] for row in found]


class _Piece(NamedTuple):
    """What one rank has sent of a gradient."""

    values: Tensor
    positions: Tensor | None


def _exchanged(
    ledger: Ledger,
    sent: Sequence[_Sent],
    theirs: Sequence[Sequence[_Said]],
    largest: int,
    lengths: Sequence[int],
) -> Callable[[], dict[tuple[int, int], _Piece]]:
    """Send values to where they belong; a function that reads what has come, by rank and ticket."""
    answers = ledger.answers

    def outgoing() -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in theirs]
        for each in sent:
            if each.positions is not None:
                for tensors in found:
                    tensors += [each.positions, each.values]
            elif each.ticket.is_summed:  # the gradient of a sum is that of all that was summed
                for tensors in found:
                    tensors.append(each.values)
            else:
                for rank, part in shares(each.values, each.ticket.bags):
                    found[rank].append(part)
        return found

    def read() -> dict[tuple[int, int], _Piece]:
        found: dict[tuple[int, int], _Piece] = {}
        for rank, reader in enumerate(readers):
            for ticket, entries, block in theirs[rank]:
                answer = answers[ticket]
                dtype, dim, positions = answer.table.weight.dtype, answer.table.dim, None
                if entries >= 0:
                    positions, dim = reader.take(entries, torch.int64), block
                count = answer.bags[rank] if entries < 0 else entries
                values = reader.take(count * dim, dtype).view(count, dim)
                found[rank, ticket] = _Piece(values, positions)
        return found

    sizes = [
        sum(said.bytes_of(answers[said.ticket], rank) for said in some)
        for rank, some in enumerate(theirs)
    ]
    readers = ledger.wire.send(outgoing, sizes, largest, lengths)
    return read


def _part(answer: Answer, arrived: Sequence[_Piece | None]) -> Sequence[IndexedGrad]:
    """What the gradients of the rows that an owner has answered with are for its weight."""
    assert answer.parts is not None
    table = answer.table
    if not table.is_here:
        return []
    values = [
        table.weight.new_zeros(count, table.dim) if piece is None else piece.values
        for piece, count in zip(arrived, answer.bags, strict=True)
    ]
    parts = answer.parts(_reduced(table, values))
    if None not in arrived:
        return parts
    # A rank that left the lookup out of its loss touches nothing with it, not even with zeros.
    counts = torch.tensor(answer.bags)
    present = torch.tensor([piece is not None for piece in arrived]).repeat_interleave(counts)
    return [_only(part, present, table.dim) for part in parts]


def _only(part: IndexedGrad, present: Tensor, dim: int) -> IndexedGrad:
    """The entries of a part that come from some rows of the output's gradient."""
    positions, source = positions_of(part), part.value_index
    if source is None:
        source = torch.arange(len(positions))
    inside = present[source * part.slot_size // dim].nonzero().squeeze(1)
    scale = None if part.scale is None else part.scale[inside]
    return part._replace(indices=positions[inside], value_index=source[inside], scale=scale)


def _of_all(table: Table, arrived: Sequence[_Piece | None]) -> list[IndexedGrad]:
    """What all ranks have sent of a copy's gradient, in their order."""
    pieces: list[Any] = [piece for piece in arrived if piece is not None]
    values = _reduced(table, [piece.values for piece in pieces])
    block = values.shape[1]
    positions = joined([piece.positions for piece in pieces])
    table.bring_up_to_date(positions * block // table.dim)
    slots = table.rows * table.dim // block if block else table.rows
    return [IndexedGrad(positions, values, slots, block)]


def _reduced(table: Table, pieces: Sequence[Tensor]) -> Tensor:
    """Values of all ranks put together, divided for their mean."""
    world = table.wire.world
    if table.reduce != "mean" or world == 1:
        return joined(pieces)
    # Others may still hold a piece that this rank has sent itself: it is not written to.
    values = pieces[0].new_empty(sum(map(len, pieces)), *pieces[0].shape[1:])
    for piece, part in zip(pieces, values.split(list(map(len, pieces))), strict=True):
        torch.div(piece, world, out=part)
    return values


def _give(table: Table, new: Sequence[IndexedGrad]) -> None:
    """Let a weight have its gradient; a rank that has no row of a table gets none."""
    weight, grad = table.weight, table.weight.grad
    if grad is not None and not grad.is_sparse:
        raise read_otherwise()
    parts = [*([] if grad is None else _arrived_in(grad)), *new]
    if isinstance(grad, CompactGrad) and not grad.is_materialized:
        grad._parts = tuple(parts)  # whoever holds on to it sees it arrive
    else:
        grad = compact(parts, weight.shape, weight)
    source = source_of(weight)
    assert source is not None
    grad.arrived_from, grad.is_divided = ref(source), source.is_divided(weight)
    weight.grad = grad if table.is_here else None


def _settle(weight: Tensor) -> None:
    """Take away what was expected and did not come from anybody."""
    grad = weight.grad
    if isinstance(grad, CompactGrad) and grad.is_pending:
        grad._parts = tuple(_arrived_in(grad))
        if not grad._parts and grad.arrived_from is None:
            weight.grad = None
