"""Lookups: ids to the owners of rows, rows back to who asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep.distributed import answers
from sparsestep.distributed._handshake import Doing, Lines
from sparsestep.distributed._table import Table
from sparsestep.distributed.ahead import Sent
from sparsestep.distributed.collectives import joined, shares
from sparsestep.distributed.ledger import Answer, Ledger, Ticket
from sparsestep.distributed.requests import Request
from sparsestep.distributed.sending import (
    NUMBERS,
    Asked,
    is_sent,
    numbers_of,
    rows_bytes,
    send_ids,
    sent_bytes,
)
from sparsestep.grads.compact import compact
from sparsestep.grads.exchange import Pending
from sparsestep.grads.indexed import HALVES
from sparsestep.nn.lookup import first_derivative, unshared


def look_up(
    ledger: Ledger,
    first: Table,
    prepare: Callable[[], Sequence[Request]],
    ahead: Sent | None = None,
) -> list[Tensor]:
    """Look up what this rank asks for, in as many tables as it asks; all ranks at once.

    Args:
        ledger: of the ranks.
        first: the table that messages name.
        prepare: says what is asked for. What it raises, all ranks are told.
        ahead: that, where its ids have been sent already.
    """
    wire = ledger.wire
    line = ledger.line(Doing.LOOK_UP, first.index)
    room = torch.zeros(wire.world, ledger.room, dtype=torch.int64)
    asked: Sequence[Request] = []
    error: BaseException | None = None
    try:
        asked = list(prepare()) if ahead is None else ahead.asked
        count = NUMBERS * len(asked)
        room[:, :count] = numbers_of(asked)
        line.largest = max(sent_bytes(asked, row) for row in room[:, :count].tolist())
        line.back = max(_bytes_back(asked, rank) for rank in range(wire.world))
        line.count, line.payload = len(asked), int(torch.is_grad_enabled())
        line.ahead = 0 if ahead is None else ahead.turn
    except BaseException as raised:
        error = raised
    lines = ledger.agree(line, room, error)
    read: Callable[[], list[Asked | None]]
    if ahead is not None and set(lines["ahead"]) == {ahead.turn}:
        read = partial(list, ahead.incoming)
    else:
        read = send_ids(wire, asked, lines.room, max(lines["largest"]))
    tickets = [Ticket(ledger.turn + n, each) for n, each in enumerate(asked)]
    ledger.turn += len(asked)
    answer = partial(_answer, ledger, asked, tickets, wants_grad=any(lines["payload"]))
    rows_found = _send_rows(ledger, asked, lines, lambda: answer(read()))
    weights = [each.table.weight for each in asked]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        ledger.alive.update({ticket.index: ticket for ticket in tickets})
        for ticket in tickets:
            _expect(ticket)
        rows_found = list(_Exchanged.apply(tickets, rows_found, *weights))
    return [each.finish(found) for each, found in zip(asked, rows_found, strict=True)]


def _bytes_back(asked: Sequence[Request], rank: int) -> int:
    """How many bytes of rows come from a rank."""
    return sum(each.table.row_bytes * each.bags[rank] for each in asked if is_sent(each))


def _answer(
    ledger: Ledger,
    asked: Sequence[Request],
    tickets: Sequence[Ticket],
    incoming: Sequence[Asked | None],
    *,
    wants_grad: bool,
) -> list[tuple[Asked | None, Tensor]]:
    """Look up what this rank is asked for; of copies, what it asks for itself."""
    tables = [each.table for each in asked]
    mine = [one if theirs is None else theirs for one, theirs in zip(asked, incoming, strict=True)]
    found = answers.look_up(tables, mine, wants_grad=wants_grad)
    for looked, ticket, theirs in zip(found, tickets, incoming, strict=True):
        if wants_grad and ticket.table.weight.requires_grad:
            if theirs is None:
                ticket.parts = looked.parts
            parts, bags = (None, []) if theirs is None else (looked.parts, theirs.bags)
            ledger.answers[ticket.index] = Answer(ticket.table, parts, bags)
    return [(theirs, looked.rows) for theirs, looked in zip(incoming, found, strict=True)]


def _send_rows(
    ledger: Ledger,
    asked: Sequence[Request],
    lines: Lines,
    answer: Callable[[], list[tuple[Asked | None, Tensor]]],
) -> list[Tensor]:
    """Send rows to who asked for them; those that this rank has asked for, of each table."""
    world = ledger.wire.world
    looked_up: list[Tensor] = []

    def outgoing() -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in range(world)]
        for theirs, rows in answer():
            looked_up.append(rows)
            if theirs is not None:
                for rank, part in shares(rows, theirs.bags):
                    found[rank].append(part)
        return found

    sizes = [_bytes_back(asked, rank) for rank in range(world)]
    lengths = [rows_bytes(asked, row) for row in lines.room]
    readers = ledger.wire.send(outgoing, sizes, max(lines["back"]), lengths)
    found = []
    for each, rows in zip(asked, looked_up, strict=True):
        if not is_sent(each):
            found.append(rows)
            continue
        table = each.table
        pieces = [
            reader.take(count * table.dim, table.weight.dtype)
            for reader, count in zip(readers, each.bags, strict=True)
        ]
        whole = _total(pieces) if each.is_summed else joined(pieces)
        whole = whole.view(-1, table.dim)
        found.append(whole if each.which is None else whole.index_select(0, each.which))
    return found


def _total(pieces: Sequence[Tensor]) -> Tensor:
    """The sum of what all ranks have sent, in their order; of halves, rounded once."""
    first, second, *others = pieces
    is_half = first.dtype in HALVES
    total = torch.add(first.float() if is_half else first, second)
    for each in others:
        total += each
    return total.to(first.dtype)


def _expect(ticket: Ticket) -> None:
    """Let a weight have a gradient that has nothing yet.

    Whoever reads gradients, as a GradScaler does, then does so on all ranks, also on those whose
    loss leaves the table out.
    """
    weight = ticket.table.weight
    if weight.requires_grad and weight.grad is None:
        part: Any = Pending(None, weight.detach()[:0])
        weight.grad = compact([part], weight.shape, weight)


class _Exchanged(torch.autograd.Function):
    """Rows that have come; called with the weights, whose gradients are then still to be sent."""

    @staticmethod
    def forward(
        ctx: Any, tickets: Sequence[Ticket], rows: Sequence[Tensor], *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.tickets = tickets
        # No views of what has come: of such, autograd lets nobody write to.
        return tuple(each.detach() for each in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return first_derivative(_pending, ctx, *grads)


def _pending(ctx: Any, *grads: Any) -> Any:
    found: list[Any] = []
    for ticket, grad, wanted in zip(ctx.tickets, grads, ctx.needs_input_grad[2:], strict=True):
        if grad is None or not wanted:
            found.append(None)
            continue
        part: Any = Pending(ticket, unshared(grad))
        found.append(compact([part], ticket.table.weight.shape, grad))
    return None, None, *found
