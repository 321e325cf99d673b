"""What ranks that share tables do together: lookups, arrivals of gradients, norms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from sparsestep.distributed import grads as arrivals
from sparsestep.distributed import lookup as lookups
from sparsestep.distributed._handshake import Doing, Facts, Lines
from sparsestep.distributed._table import Table
from sparsestep.distributed.ahead import Sent
from sparsestep.distributed.collectives import Wire
from sparsestep.distributed.ledger import Ledger
from sparsestep.distributed.requests import Request
from sparsestep.engines.finishing import certain
from sparsestep.errors import InputError, message
from sparsestep.grads import exchange as arriving

_numbers = itertools.count()


class Exchange:
    """The source of the gradients of tables that were sharded together.

    Attributes:
        index: in the order in which exchanges were made.
        wire: the ranks.
        tables: the tables.
    """

    def __init__(self, wire: Wire, tables: Sequence[Table], most: int) -> None:
        self.index: int = next(_numbers)
        self.wire: Wire = wire
        self.tables: Sequence[Table] = tables
        self._ledger = Ledger(wire, tables, most)
        self._dealt = {id(t.weight) for t in tables if t.kind == "rows"}
        self._divided = {id(t.weight) for t in tables if t.kind != "copy" and wire.world > 1}
        self._names: dict[int, str] = {}
        for table in tables:
            self._names.setdefault(
                id(table.weight), repr(table.name) if table.name else "the table"
            )
            arriving.register(table.weight, self)

    def look_up(
        self, first: Table, prepare: Callable[[], Sequence[Request]], ahead: Sent | None = None
    ) -> list[Tensor]:
        """Look up what this rank asks for; see ``lookups.look_up``."""
        return lookups.look_up(self._ledger, first, prepare, ahead)

    def begin(
        self,
        doing: Doing,
        table: Table,
        counts: Tensor | None = None,
        error: BaseException | None = None,
        largest: int = 0,
    ) -> Lines:
        """Begin an exchange that is no lookup of a table; raises on all ranks where one refuses.

        Args:
            doing: what it is for.
            table: whose.
            counts: a number for each rank.
            error: why this rank refuses.
            largest: the most bytes that this rank will send another.
        """
        line, room = self._ledger.line(doing, table.index), None
        line.largest = largest
        if counts is not None:
            room = certain(self._ledger.zeros)
            room[:, 0] = counts
        return self._ledger.agree(line, room, error)

    @torch.no_grad()
    def exchange_grads(self, facts: Facts, error: BaseException | None = None) -> arrivals.Arrival:
        """Exchange all gradients that are pending; see ``arrivals.exchange_grads``."""
        return arrivals.exchange_grads(self._ledger, facts, error)

    def agree(self, error: BaseException | None) -> None:
        """Raise on every rank if one has an error."""
        self.wire.check(error)

    @property
    def is_lost(self) -> bool:
        """Whether an exchange failed half-way: other ranks cannot be reached any more."""
        return self.wire.is_lost

    def name_of(self, param: Tensor) -> str | None:
        """The name of the table that has a parameter, if it is one of these."""
        return self._names.get(id(param))

    def is_divided(self, param: Tensor) -> bool:
        """Whether other ranks have other rows of a parameter."""
        return id(param) in self._divided

    def dealt(self, param: Tensor) -> tuple[int, int]:
        """How many rows of the whole there are to each that is here, and which is the first."""
        return (self.wire.world, self.wire.rank) if id(param) in self._dealt else (1, 0)

    def total(self, value: Tensor, order: float) -> Tensor:
        """The norm of what all ranks have the norms of; the same bits on all of them."""
        if not order > 0:
            requirement = "clip_grad_norm_: with sharded tables norm_type must be greater than 0"
            raise InputError(message(requirement, order))
        line = self._ledger.line(Doing.NORM)
        line.payload = int(value.double().view(torch.int64))  # its bits
        everybody = torch.tensor(self._ledger.agree(line, None)["payload"]).view(torch.float64)
        if math.isinf(order):
            return everybody.max()
        total: Tensor = torch.linalg.vector_norm(everybody, order)
        return total
