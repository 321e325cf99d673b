"""A vocabulary that ranks share: each owns the ids that a hash gives it, and rows of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import Doing
from sparsestep.distributed._packing import owner_of
from sparsestep.distributed._table import Table as ShardedTable
from sparsestep.distributed.collectives import joined
from sparsestep.distributed.modules import table_of
from sparsestep.distributed.owning import SEED_BITS, OwnsIds
from sparsestep.errors import InputError, sentence
from sparsestep.nn.grow import AnyOptimizer, Init, Table
from sparsestep.nn.interop import outside_graphs
from sparsestep.nn.vocabulary.attach import Attached
from sparsestep.nn.vocabulary.id_table import Evict
from sparsestep.nn.vocabulary.vocabulary import Vocabulary as LocalVocabulary
from sparsestep.nn.vocabulary.vocabulary import flat_ids

_ID_BYTES = 8


class Vocabulary(OwnsIds):
    """A :class:`sparsestep.nn.Vocabulary` for a table that is sharded by rows.

    A hash of an id decides which rank owns it, now and for ever. The owner keeps its count, and
    gives it one of the rows that lie there. So no rank has to know all ids, and a row that changes
    hands begins anew where it lies. Each rank decides about its own rows as one process does about
    all, with a share of the rows and a share of the ids: ``admit`` and ``evict`` mean what they do
    there, rank by rank.

    A lookup is something that all ranks do together, like that of a sharded table. A rank without
    data looks up an empty tensor. Owners count the ids of a call in the order of ranks, so the same
    calls give the same rows.

    As a part of a model it is saved and loaded with it, by any number of ranks: see
    :func:`sparsestep.distributed.save`. ``state_dict()`` has what this rank owns.

    Args:
        table: an ``nn.Embedding`` or ``nn.EmbeddingBag`` that ``shard`` has divided by rows. Its
            rows are given away: to each rank those that it has.
        optimizers: those of this library that train it.
        admit: how often an id has to be seen to get a row of its own.
        evict: ``None``, ``"lru"`` or ``"lfu"``: whose row a new id takes over.
        shared: on each rank, the number of rows for ids without a row of their own.
        init: fills a tensor of new rows in place; by default from a normal distribution.

    Attributes:
        rows: number of rows of the table.
        local: what this rank owns. Its rows are numbers of this rank's part.

    Raises:
        InputError: the table is not sharded by rows, or none of an optimizer's.

    Example:
        >>> import sparsestep
        >>> table = torch.nn.Embedding(1000, 16)
        >>> plan = sparsestep.distributed.shard(table, plan="rows")  # here of one process
        >>> optimizer = sparsestep.Adam(table.parameters())
        >>> vocabulary = sparsestep.distributed.Vocabulary(table, optimizer, evict="lru")
        >>> rows = vocabulary(torch.tensor([[10**18, -7], [-7, 42]]))
        >>> rows
        tensor([[1, 2],
                [2, 3]])
        >>> table(rows).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        table: Table,
        *optimizers: AnyOptimizer,
        admit: int = 1,
        evict: Evict = None,
        shared: int = 1,
        init: Init | None = None,
    ) -> None:
        super().__init__()
        sharded = _dealt(table)
        self.rows: int = sharded.rows
        self._exchange = vars(table)["_exchange"]
        self._table = sharded
        self._wire = wire = sharded.wire
        self._given = {}
        fewest = self.rows // wire.world
        if isinstance(shared, int) and shared > fewest:
            contract = f"Vocabulary: shared must be at most the rows of a rank, {fewest}"
            raise InputError(sentence(contract, shared))
        here = len(range(wire.rank, self.rows, wire.world))
        self.local: LocalVocabulary = LocalVocabulary(here, admit=admit, evict=evict, shared=shared)
        self._shared = shared * wire.world
        # It is what new values are drawn from: rows of different ranks do not begin alike.
        self.local._handed_over = wire.rank << SEED_BITS
        self.attach(table, *optimizers, init=init)

    @outside_graphs
    def forward(self, ids: Tensor) -> Tensor:
        """The row of each id; all ranks look up theirs at the same time.

        Args:
            ids: integers of any value and shape, on any device.

        Returns:
            Rows of the table, int64, in the shape of the ids and on their device.

        Raises:
            InputError: these are no ids, on this rank or on another; nothing was changed anywhere.
        """
        # A rank that stops in the middle of an exchange keeps the others waiting.
        return uninterrupted(partial(self._look_up_together, ids))

    def _look_up_together(self, ids: Tensor) -> Tensor:
        wire = self._wire
        error: BaseException | None = None
        flat = order = torch.empty(0, dtype=torch.int64)
        counts = torch.zeros(wire.world, dtype=torch.int64)
        try:
            flat = flat_ids(ids)
            owners = owner_of(flat, wire.world)
            order, counts = owners.argsort(stable=True), owners.bincount(minlength=wire.world)
        except BaseException as raised:
            error = raised
        asked: list[int] = counts.tolist()
        lines = self._exchange.begin(Doing.IDS, self._table, counts, error, _ID_BYTES * max(asked))
        come, largest = [room[0] for room in lines.room], max(lines["largest"])
        bytes_asked, bytes_come = _bytes_of(asked), _bytes_of(come)
        sent = wire.send(
            lambda: [[each] for each in flat[order].split(asked)],
            sizes=bytes_come,
            largest=largest,
            lengths=bytes_asked,
        )

        def read() -> Tensor:
            return joined([each.take(n, torch.int64) for each, n in zip(sent, come, strict=True)])

        back = wire.send(
            lambda: [[each] for each in self._look_up(read).split(come)],
            sizes=bytes_asked,
            largest=largest,
            lengths=bytes_come,
        )
        rows = torch.empty_like(flat)
        rows[order] = joined(
            [
                each.take(n, torch.int64) * wire.world + rank
                for rank, (each, n) in enumerate(zip(back, asked, strict=True))
            ]
        )
        return rows.view(ids.shape).to(ids.device)

    def _look_up(self, read: Callable[[], Tensor]) -> Tensor:
        """The rows here of ids that this rank owns; nothing changes before all ranks agree.

        Args:
            read: returns the ids.
        """
        is_agreed = False

        def agree(error: BaseException | None) -> None:
            nonlocal is_agreed
            is_agreed = True
            self._exchange.begin(Doing.IDS, self._table, None, error)

        try:
            return self.local._look_up(read(), agree)
        except BaseException as error:
            if not is_agreed:  # the other ranks still wait for this one
                agree(error)
            raise

    def attach(self, table: Table, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
        """Initialize the rows of another table anew, too, when they go to another id.

        Args:
            table: sharded by rows in the same call of ``shard``, with at least as many rows.
            optimizers: those of this library that train it.
            init: fills a tensor of new rows in place; by default from a normal distribution.

        Raises:
            InputError: the table does not fit, or is none of an optimizer's.
        """
        sharded = self._checked("Vocabulary.attach", table)
        padding = sharded.padding
        if padding is not None and self._shared <= padding < self.rows:
            contract = f"Vocabulary.attach: padding_idx must be one of {self._shared} shared rows"
            raise InputError(sentence(contract, padding, "Use padding_idx=0"))
        assert sharded.local is not None
        self.local._attach(Attached(sharded.local, optimizers, init, is_part=True))
        self._given[id(sharded.local)] = table, sharded

    def _checked(self, who: str, table: Any) -> ShardedTable:
        sharded = _dealt(table)
        if vars(table)["_exchange"] is not self._exchange or sharded.rows < self.rows:
            contract = f"{who}: a table must be sharded with the first, {self.rows} rows"
            raise InputError(sentence(contract, f"another with {sharded.rows}"))
        return sharded

    def __reduce_ex__(self, protocol: Any) -> Any:
        contract = "a vocabulary that ranks share cannot be copied or pickled"
        remedy = "Make it a part of the model, and use sparsestep.distributed.save"
        raise InputError(sentence(contract, "an attempt to", remedy))


def _bytes_of(counts: list[int]) -> list[int]:
    return [_ID_BYTES * count for count in counts]


def _dealt(module: Any) -> ShardedTable:
    """The table that a module is; raises if ranks do not share it by rows."""
    table = table_of(module) if isinstance(module, nn.Module) else None
    if table is None or table.kind != "rows":
        contract = "Vocabulary: its table must be sharded by rows"
        got = f"a {type(module).__name__}" if table is None else f"{table.kind!r}"
        remedy = "Call sparsestep.distributed.shard(model, plan='rows') first"
        raise InputError(sentence(contract, got, remedy))
    return table
