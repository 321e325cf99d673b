"""Lookups: ids to the owners of rows, rows back to who asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.distributed.agreement import Doing
from sparsestep.distributed.ledger import NUMBERS, Answer, Ledger, Ticket
from sparsestep.distributed.requests import Request
from sparsestep.distributed.table import Table
from sparsestep.distributed.wire import Reader
from sparsestep.gradients.arriving import Pending
from sparsestep.gradients.compact import compact
from sparsestep.nn.parts import first_derivative, unshared
from sparsestep.surroundings import cat


def look_up(ledger: Ledger, first: Table, prepare: Callable[[], Sequence[Request]]) -> list[Tensor]:
    """Look up what this rank asks for, in as many tables as it asks; all ranks at once.

    Args:
        ledger: of the ranks.
        first: the table that messages name.
        prepare: says what is asked for. What it raises, all ranks are told.
    """
    line = ledger.line(Doing.LOOK_UP, first.index)
    room = torch.zeros(ledger.wire.world, ledger.room, dtype=torch.int64)
    asked: list[Request] = []
    error: Exception | None = None
    try:
        asked = list(prepare())
        numbers = torch.tensor([_numbers(each) for each in asked], dtype=torch.int64)
        room[:, : NUMBERS * len(asked)] = numbers.movedim(2, 0).flatten(1)
        rows = room[:, : NUMBERS * len(asked)].tolist()
        line.largest = max(sum(_bytes(asked, row)) for row in rows)
        line.back = max(
            sum(each.table.row_bytes * each.bags[rank] for each in asked if _is_sent(each))
            for rank in range(ledger.wire.world)
        )
        line.count, line.payload = len(asked), int(torch.is_grad_enabled())
    except Exception as raised:
        error = raised
    lines = ledger.agree(line, room, error)
    incoming = _send_ids(ledger, asked, lines.room, max(lines["largest"]))
    tickets = [Ticket(ledger.turn + n, each.table, each.bags) for n, each in enumerate(asked)]
    ledger.turn += len(asked)
    answers = _answer(ledger, asked, tickets, incoming, wants_grad=any(lines["payload"]))
    rows_found = _send_rows(ledger, asked, incoming, answers, max(lines["back"]))
    weights = [each.table.weight for each in asked]
    if torch.is_grad_enabled() and any(weight.requires_grad for weight in weights):
        ledger.alive.update({ticket.index: ticket for ticket in tickets})
        for ticket in tickets:
            _expect(ticket)
        rows_found = list(_Exchanged.apply(tickets, rows_found, *weights))
    return [each.finish(found) for each, found in zip(asked, rows_found, strict=True)]


def _is_sent(request: Request) -> bool:
    return request.table.kind != "copy"


def _numbers(request: Request) -> list[list[int]]:
    """For each rank: how many ids and bags it gets, and whether there are factors."""
    world = request.table.wire.world
    if not _is_sent(request):
        return [[0] * world] * NUMBERS
    bags = [-1] * world if request.lengths is None else request.bags  # -1: one id each
    return [request.counts, bags, [int(request.factors is not None)] * world]


def _bytes(asked: Sequence[Request], row: Sequence[int]) -> Iterator[int]:
    """How many bytes a rank sends another for each table, from what it has said."""
    for n, request in enumerate(asked):
        table = request.table
        ids, bags, has_factors = row[NUMBERS * n : NUMBERS * (n + 1)]
        of_factors = table.weight.dtype.itemsize if has_factors else 0
        yield ids * (table.id_dtype.itemsize + of_factors) + max(bags, 0) * 8


class _Asked(NamedTuple):
    """What all ranks ask of this one in a table, one after the other."""

    ids: Tensor
    lengths: Tensor | None
    factors: Tensor | None
    bags: list[int]  # of each rank


def _send_ids(
    ledger: Ledger, asked: Sequence[Request], room: Sequence[Sequence[int]], largest: int
) -> list[_Asked | None]:
    """Send ids to their owners; what this rank is asked for, in each table."""
    outgoing: list[list[Tensor]] = [[] for _ in room]
    for each in filter(_is_sent, asked):
        for piece, counts in _pieces(each):
            for tensors, part in zip(outgoing, piece.split(counts), strict=True):
                tensors.append(part)
    sizes = [sum(_bytes(asked, row)) for row in room]
    readers = [Reader(message) for message in ledger.wire.send(outgoing, sizes, largest)]
    found: list[_Asked | None] = []
    for n, each in enumerate(asked):
        said = [row[NUMBERS * n : NUMBERS * (n + 1)] for row in room]
        found.append(_read(each.table, readers, said) if _is_sent(each) else None)
    return found


def _pieces(request: Request) -> Iterator[tuple[Tensor, list[int]]]:
    """What is sent, and how much of it to each rank."""
    yield request.ids.to(request.table.id_dtype), request.counts
    if request.lengths is not None:
        yield request.lengths, request.bags
    if request.factors is not None:
        yield request.factors.detach(), request.counts


def _read(table: Table, readers: Sequence[Reader], said: Sequence[Sequence[int]]) -> _Asked:
    ids, lengths, factors, bags = [], [], [], []
    for reader, (count, some, has_factors) in zip(readers, said, strict=True):
        ids.append(reader.take(count, table.id_dtype))
        is_single = some < 0
        bags.append(count if is_single else some)
        ones = torch.ones(count, dtype=torch.int64) if is_single else None
        lengths.append(reader.take(some, torch.int64) if ones is None else ones)
        dtype = table.weight.dtype
        given = reader.take(count, dtype) if has_factors else torch.ones(count, dtype=dtype)
        factors.append(given)
    is_all_single = all(some < 0 for _, some, _ in said)
    has_any_factors = any(has_factors for _, _, has_factors in said)
    return _Asked(
        cat(ids),
        None if is_all_single else cat(lengths),
        cat(factors) if has_any_factors else None,
        bags,
    )


def _answer(
    ledger: Ledger,
    asked: Sequence[Request],
    tickets: Sequence[Ticket],
    incoming: Sequence[_Asked | None],
    *,
    wants_grad: bool,
) -> list[Tensor]:
    """Look up what this rank is asked for; of copies, what it asks for itself."""
    found = []
    for each, ticket, theirs in zip(asked, tickets, incoming, strict=True):
        table = each.table
        if theirs is None:
            rows = table.look_up(each.ids, each.lengths, each.factors)
            ticket.found = rows if rows.requires_grad else None
        else:
            with torch.set_grad_enabled(wants_grad):
                rows = table.look_up(theirs.ids, theirs.lengths, theirs.factors)
        if wants_grad and table.weight.requires_grad:
            graph, bags = (None, []) if theirs is None else (rows, theirs.bags)
            ledger.answers[ticket.index] = Answer(table, graph, bags)
        found.append(rows.detach())
    return found


def _send_rows(
    ledger: Ledger,
    asked: Sequence[Request],
    incoming: Sequence[_Asked | None],
    answers: Sequence[Tensor],
    largest: int,
) -> list[Tensor]:
    """Send rows to who asked for them; those that this rank has asked for, of each table."""
    world = ledger.wire.world
    outgoing: list[list[Tensor]] = [[] for _ in range(world)]
    for theirs, rows in zip(incoming, answers, strict=True):
        if theirs is not None:
            for tensors, part in zip(outgoing, rows.split(theirs.bags), strict=True):
                tensors.append(part)
    sizes = [
        sum(each.table.row_bytes * each.bags[rank] for each in asked if _is_sent(each))
        for rank in range(world)
    ]
    readers = [Reader(message) for message in ledger.wire.send(outgoing, sizes, largest)]
    found = []
    for each, rows in zip(asked, answers, strict=True):
        if not _is_sent(each):
            found.append(rows)
            continue
        table = each.table
        pieces = [
            reader.take(count * table.dim, table.weight.dtype)
            for reader, count in zip(readers, each.bags, strict=True)
        ]
        found.append(cat(pieces).view(sum(each.bags), table.dim))
    return found


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
        return tuple(rows)

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
