"""Vocabulary: from ids of any value to the rows of a table, while ids never stop coming."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from sparsestep._process import uninterrupted
from sparsestep.errors import InputError, memory_errors, sentence
from sparsestep.memory.row_writes import RowWrites
from sparsestep.nn.grow import AnyOptimizer, Init, Table, do_nothing, prepare_growth, restoring_rng
from sparsestep.nn.interop import outside_graphs
from sparsestep.nn.vocabulary import saving
from sparsestep.nn.vocabulary.attach import Attached
from sparsestep.nn.vocabulary.id_table import Evict, Options
from sparsestep.nn.vocabulary.known import KnowsIds
from sparsestep.nn.vocabulary.native_ids import new_ids

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
Agree: TypeAlias = Callable[[Exception | None], object]
_MOST_ROWS = 2**31 - 1
_MOST_ADMIT = 2**16 - 1


class Vocabulary(KnowsIds):
    """Maps ids of any value to the rows of a table, and assigns rows as new ids appear.

    An id gets its own row once it has been seen ``admit`` times; until then it shares row 0 with
    all other ids without a row. In training mode, a lookup counts ids and assigns rows. After
    ``eval()`` a lookup changes nothing.

    When all rows are taken, a new id shares row 0 (``evict=None``), or takes over the row of the
    least recently seen id (``"lru"``) or of the least frequently seen one (``"lfu"``; among
    several, the least recent). Counts for ``"lfu"`` are halved whenever 16 ids per row were seen,
    so that ids which were popular long ago do not stay forever. When a row goes to another id,
    tables that you have named with ``attach`` initialize it anew, and their optimizers forget its
    state.

    A call counts ids in this order: those that have a row, then the others in order of appearance,
    each as often as it occurs. The ids of a call keep their rows until it returns; with ``attach``,
    until the next step, so that gradients reach the ids they belong to. Which row an id has depends
    on the previous calls and on nothing else.

    Args:
        rows: number of rows of the table, row 0 included; at most 2**31 - 1.
        admit: how often an id has to be seen to get its own row. As many ids without a row are
            counted as there are rows, namely the most recent ones.
        evict: ``None``, ``"lru"`` or ``"lfu"``.
        shared: number of rows, at the beginning, for ids without a row of their own; a hash of the
            id selects one.

    Attributes:
        rows: number of rows.
        taken_over: rows that went to another id in the latest call, in case you keep other data
            per row.

    Example:
        >>> import sparsestep
        >>> vocabulary = sparsestep.nn.Vocabulary(1000, evict="lru")
        >>> table = sparsestep.nn.Embedding(1000, 16)
        >>> optimizer = sparsestep.Adam(table.parameters())
        >>> vocabulary.attach(table, optimizer)
        >>> rows = vocabulary(torch.tensor([[10**18, -7], [-7, 42]]))
        >>> rows
        tensor([[1, 2],
                [2, 3]])
        >>> table(rows).sum().backward()
        >>> optimizer.step()
        >>> vocabulary.eval()(torch.tensor([42, 43]))  # nobody has seen 43
        tensor([3, 0])
    """

    def __init__(self, rows: int, *, admit: int = 1, evict: Evict = None, shared: int = 1) -> None:
        _check_number("rows", rows, 1, _MOST_ROWS)
        _check_number("admit", admit, 1, _MOST_ADMIT)
        _check_number("shared", shared, 1, rows)
        if evict not in (None, "lru", "lfu"):
            raise InputError(
                f"Vocabulary: {sentence('evict must be None, lru or lfu', repr(evict))}"
            )
        super().__init__(Options(rows, shared, admit, evict))

    def _prepare(self) -> None:
        super()._prepare()
        self._attached: list[Attached] = []
        self._progress: list[Any] = []
        self.taken_over: Tensor = torch.empty(0, dtype=torch.int64, device="cpu")

    # Lookups

    @outside_graphs
    def forward(self, ids: Tensor) -> Tensor:
        """The row of each id.

        Args:
            ids: integers of any value and shape, on any device; ``hash_strings`` makes them of
                strings.

        Returns:
            Rows, int64, in the shape of the ids and on their device.

        Raises:
            InputError: these are no ids, or an attached table or optimizer cannot work with its
                rows.

        Whatever it raises, also ``MemoryError``, ``KeyboardInterrupt`` and what ``init`` raises:
        ids, tables and optimizers are as before, or as after the whole lookup. Torch's random
        numbers are not affected.
        """
        with memory_errors():
            flat = flat_ids(ids)
        return self._look_up(flat, like=ids)

    def _look_up(
        self, ids: Tensor, agree: Agree | None = None, like: Tensor | None = None
    ) -> Tensor:
        """The row of each id. In training, ids are counted and get rows.

        Args:
            ids: int64 of one dim, on the CPU.
            agree: called before anything changes, with this lookup's error or ``None``; raises if
                the lookup must not happen.
            like: has the shape and the device of the result; by default, ``ids`` has.
        """
        error, rows, commit = None, ids, do_nothing
        with self._lock:
            try:
                with memory_errors():
                    rows, commit = self._prepare_look_up(ids)
                    if like is not None:
                        rows = rows.view(like.shape).to(like.device)
            except Exception as raised:
                error = raised
            if agree is not None:
                agree(error)
            if error is not None:
                raise error
            commit()
        return rows

    def _prepare_look_up(self, ids: Tensor) -> tuple[Tensor, Callable[[], None]]:
        """Everything that can raise: the row of each id, and what commits the lookup.

        A claim that is not committed, whatever the reason, has changed nothing.
        """
        if not self.training or not ids.numel():
            return self._ids.find(ids)[0], do_nothing
        now, progress = self._time()
        known, claim = self._ids, self._ids.claim(ids, now)
        writes, notes = RowWrites(), []
        count = claim.taken.numel() if self._attached else 0
        for attached in self._attached if claim.without else ():
            attached.check(self.rows, self._options.shared)
            notes.append(attached.prepare(claim.taken, self._handed_over, writes))
        changed = {
            "_now": now,
            "_progress": progress,
            "_handed_over": self._handed_over + count,
            "taken_over": claim.taken,
        }

        def commit() -> None:
            known.commit(claim)
            writes.commit()
            self._change(**changed)
            for note in notes:
                note()

        return claim.rows, partial(uninterrupted, commit)

    def _time(self) -> tuple[int, list[Any]]:
        """Passes with each call, or where tables are attached, with each step: their progress."""
        progress = [each for attached in self._attached for each in attached.progress()]
        before = self._progress
        if (
            not progress
            or len(before) != len(progress)
            or all(a != b for a, b in zip(before, progress, strict=True))
        ):
            return self._now + 1, progress
        return self._now, before

    # Tables

    def attach(self, table: Table, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
        """Initialize the rows of a table anew when they go to another id.

        The lookup that assigns the row initializes it and makes the optimizers forget its state,
        before anyone reads it. Several tables may share a vocabulary. Copies of a vocabulary, and
        loaded ones, are not attached to anything.

        Args:
            table: an ``nn.Embedding`` or ``nn.EmbeddingBag`` with at least as many rows.
            optimizers: those of this library that train it.
            init: fills a tensor of new rows in place; by default as the table's own constructor
                does, from a normal distribution.

        Raises:
            InputError: the table is too small, sharded, or none of an optimizer's.

        Example:
            >>> import sparsestep
            >>> vocabulary = sparsestep.nn.Vocabulary(3, evict="lru")
            >>> table = sparsestep.nn.Embedding(3, 2)
            >>> optimizer = sparsestep.SparseAdam(table.parameters())
            >>> vocabulary.attach(table, optimizer, init=torch.nn.init.zeros_)
            >>> for ids in ([5, 6], [6, 7]):  # 7 takes over the row of 5
            ...     table(vocabulary(torch.tensor(ids))).sum().backward()
            ...     optimizer.step()
            ...     optimizer.zero_grad()
            >>> vocabulary.as_dict(), vocabulary.taken_over
            ({7: 1, 6: 2}, tensor([1]))
        """
        self._attach(Attached(table, optimizers, init))

    def _attach(self, attached: Attached) -> None:
        attached.check(self.rows, self._options.shared)
        with self._lock:
            others = [each for each in self._attached if each.table is not attached.table]
            self._attached = [*others, attached]

    def grow(self, rows: int) -> None:
        """Have more rows, with all tables that are attached: see ``sparsestep.nn.grow``.

        Args:
            rows: how many there are to be.

        Example:
            >>> import sparsestep
            >>> vocabulary = sparsestep.nn.Vocabulary(2)
            >>> table = sparsestep.nn.Embedding(2, 4)
            >>> vocabulary.attach(table)
            >>> vocabulary(torch.tensor([7, 8])), vocabulary.grow(3), vocabulary(torch.tensor([8]))
            (tensor([1, 0]), None, tensor([2]))
            >>> table.num_embeddings
            3
        """
        with self._lock, memory_errors(), restoring_rng() as keep_rng:
            commit = self._prepare_to_grow(rows)
            tables = [
                prepare_growth(each.table, rows, tuple(each.optimizers), each.init)
                for each in self._attached
                if each.table.num_embeddings < rows
            ]
            uninterrupted(lambda: [work() for work in (*tables, commit, keep_rng)])

    def _prepare_to_grow(self, rows: int) -> Callable[[], None]:
        """Know the same with more rows, but for the tables: all that may raise.

        Returns:
            The rest, which cannot fail.
        """
        _check_number("rows", rows, self.rows, _MOST_ROWS)
        options = replace(self._options, rows=rows)
        larger = new_ids(options)
        larger.load(saving.with_room(self._ids.save(), options), self._now)

        return partial(self._change, _options=options, _ids=larger)


def flat_ids(ids: Any) -> Tensor:
    """Ids as int64 of one dim on the CPU; raises where they are none.

    Args:
        ids: as they were given.
    """
    if not isinstance(ids, Tensor) or ids.dtype not in _INTEGERS:
        got = f"{ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        remedy = "sparsestep.nn.hash_strings makes ids of strings"
        contract = "Vocabulary: ids must be integers, in a tensor"
        raise InputError(sentence(contract, got, remedy))
    if ids.layout is not torch.strided or ids.is_meta:
        got = "a meta tensor" if ids.is_meta else f"layout {ids.layout}"
        raise InputError(sentence("Vocabulary: ids must be a strided tensor", got))
    return ids.detach().to("cpu", torch.int64).reshape(-1).contiguous()


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        contract = f"Vocabulary: {name} must be a whole number in [{least}, {most}]"
        raise InputError(sentence(contract, repr(value)))
