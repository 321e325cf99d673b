"""Which lookups there were, and which of them may still get a gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsestep.distributed._handshake import Doing, Facts, Line, Lines, agree
from sparsestep.distributed._table import Table
from sparsestep.distributed.answers import Parts
from sparsestep.distributed.collectives import Wire
from sparsestep.distributed.requests import Request
from sparsestep.distributed.sending import NUMBERS
from sparsestep.engines.finishing import certain


class Ticket:
    """One lookup in one table, for the rank that asked. It lives as long as its gradient may come.

    Attributes:
        index: the same on all ranks.
        table: which table.
        bags: how many bags went to each rank.
        is_summed: whether all bags went to every rank, and rows that came back were summed.
        which: for each row of the output, which of those that came back it is; ``None``: its own.
        parts: of a copy, what its gradient is for the weight.
    """

    def __init__(self, index: int, asked: Request) -> None:
        self.index: int = index
        self.table: Table = asked.table
        self.bags: list[int] = asked.bags
        self.is_summed: bool = asked.is_summed
        self.which: Tensor | None = asked.which
        self.parts: Parts | None = None


@dataclass(slots=True)
class Answer:
    """One lookup in one table, for the ranks that answered.

    Attributes:
        table: which table.
        parts: what its gradient is for the weight; ``None`` of a copy, where each rank has its own.
        bags: how many of them went to each rank.
    """

    table: Table
    parts: Parts | None
    bags: list[int]


class Ledger:
    """What the ranks that share some tables know of each other's lookups.

    Attributes:
        wire: the ranks.
        tables: those that were sharded together.
        room: how many numbers a rank has for each other at the begin of an exchange.
        turn: how many lookups there were; the index of the next ticket.
        alive: the tickets of this rank whose gradient may still come.
        answers: what this rank has answered, by index of ticket.
    """

    def __init__(self, wire: Wire, tables: Sequence[Table], most: int) -> None:
        self.wire: Wire = wire
        self.tables: Sequence[Table] = tables
        self.room: int = NUMBERS * most
        self.turn: int = 0
        self.alive: WeakValueDictionary[int, Ticket] = WeakValueDictionary()
        self.answers: dict[int, Answer] = {}

    def line(self, doing: Doing, table: int = -1) -> Line:
        """What this rank says at the begin of an exchange."""
        return Line(doing, table, self.turn, min(self.alive, default=self.turn))

    def zeros(self) -> Tensor:
        """Numbers for each rank, as many as there is room for."""
        return torch.zeros(self.wire.world, self.room, dtype=torch.int64)

    def agree(
        self,
        line: Line,
        room: Tensor | None,
        error: BaseException | None = None,
        facts: Facts | None = None,
    ) -> Lines:
        """Begin an exchange, and drop answers whose gradient cannot come from any rank."""
        if room is None:
            room = certain(self.zeros)
        names = [table.name for table in self.tables]
        lines = agree(self.wire, line, room, names, error, facts)
        oldest = min(lines["oldest"])
        for index in [each for each in self.answers if each < oldest]:
            del self.answers[index]
        return lines
