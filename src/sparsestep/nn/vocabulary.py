"""Vocabulary: from ids of any value to the rows of a table, while ids never stop coming."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from sparsestep._process import fork_safe_lock, uninterrupted
from sparsestep._torch import cat
from sparsestep.errors import InputError, memory_errors, message, usable
from sparsestep.memory.mapped_file import RowWrites, about_to_write, mapped_files, written
from sparsestep.memory.tensors import INTEGER_DTYPES, check_writable, memory_of
from sparsestep.nn.graph import can_be_traced, rows_in_graph
from sparsestep.nn.grow import (
    AnyOptimizer,
    Init,
    Table,
    as_rule_optimizers,
    do_nothing,
    initialize_rows,
    prepare_grow,
    restoring_rng,
    weight_of,
)
from sparsestep.nn.id_table import (
    STATE_NAMES,
    Claim,
    Evict,
    IdTable,
    IdTableSnapshot,
    LostClaimError,
    Options,
    pack_state,
    unpack_state,
)
from sparsestep.nn.interop import replaced_in_graphs
from sparsestep.nn.strings import hash_strings, listed
from sparsestep.optim.optimizer import RuleOptimizer

Found = TypeVar("Found")


class Attached:
    """A table whose rows a vocabulary assigns; ``is_part`` if it is a shard."""

    def __init__(
        self,
        table: Table,
        optimizers: tuple[Any, ...],
        init: Init | None,
        *,
        is_part: bool = False,
    ) -> None:
        who = "Vocabulary.attach"
        weight = weight_of(who, table, is_part=is_part)
        self.table = table
        self._is_part = is_part
        self.optimizers: list[RuleOptimizer] = as_rule_optimizers(who, weight, optimizers)
        self.init: Init = nn.init.normal_ if init is None else init
        with usable(f"{who}: init must fill a tensor of rows in place"):
            self._new_values(weight, 1, 0)

    def check(self, rows: int, shared: int) -> None:
        """Refuse a table with fewer rows, or with a padding row outside of the shared ones."""
        have, padding = self.table.num_embeddings, self.table.padding_idx
        if have < rows:
            requirement = f"Vocabulary.attach: a table must have a row for each of {rows}"
            raise InputError(message(requirement, f"{have} rows"))
        if padding is not None and shared <= padding < rows:
            requirement = f"Vocabulary.attach: padding_idx must be one of the {shared} shared rows"
            remedy = "Use padding_idx=0, and ids without a row of their own count as padding"
            raise InputError(message(requirement, padding, remedy))

    def progress(self) -> list[tuple[int, int]]:
        """Changes with every step of every optimizer."""
        return [(each.iterations, each.updates) for each in self.optimizers]

    def prepare(self, rows: Tensor, seed: int, writes: RowWrites) -> Callable[[], None]:
        """Add the reset of rows and their state to ``writes``: everything that can raise.

        Without rows, table and optimizers are checked. Returns what to call after the commit.
        """
        weight = weight_of("Vocabulary", self.table, is_part=self._is_part)
        memory = memory_of(weight)
        check_writable("the weight of a table", memory)
        for optimizer in self.optimizers:
            optimizer.prepare_forget(weight, rows, writes, is_overwritten=True)
        if not rows.numel():
            return do_nothing
        if mapped_files:
            about_to_write(weight, (), rows)
        writes.add(memory.detach(), rows, self._new_values(weight, rows.numel(), seed))
        return partial(self._note_written, weight)

    def _new_values(self, weight: Tensor, count: int, seed: int) -> Tensor:
        values = torch.empty(count, *weight.shape[1:], dtype=weight.dtype, device="cpu")
        return initialize_rows(values, self.init, seed)

    def _note_written(self, weight: Tensor) -> None:
        increment_version([weight])
        for optimizer in self.optimizers:
            deferred = optimizer.deferred.get(id(weight))
            if deferred is not None:
                deferred.note_write(memory_of(weight))
        if mapped_files:
            written([weight])


class PreparedLookup:
    """A lookup of which everything that can raise is done; nothing has changed yet.

    ``write`` may be undone until ``finish``. The lock of the vocabulary is held until then.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        ids: Tensor,
        strings: Sequence[str] | None = None,
        *,
        can_undo: bool = False,
    ) -> None:
        self._vocabulary, self._known = vocabulary, vocabulary.id_table
        self._known_strings = vocabulary.strings or []
        self._strings: list[tuple[int, str | None]] = []  # of rows that go to other ids
        self._claim: Claim | None = None
        self._writes, self._notes = RowWrites(can_undo=can_undo), list[Callable[[], None]]()
        self._changed: dict[str, Any] = {}
        self.rows: Tensor  # of each id
        if not vocabulary.training or not ids.numel():
            self.rows = self._known.find(ids)[0]
            return
        now, progress = vocabulary.next_time()
        claim = self._claim = self._known.claim(ids, now)
        self.rows = claim.rows
        attached, seed = vocabulary.attached, vocabulary.num_reused
        for each in attached if claim.without else ():
            each.check(vocabulary.rows, vocabulary.options.shared)
            self._notes.append(each.prepare(claim.taken, seed, self._writes))
        if vocabulary.strings is not None and claim.without:
            self._strings = [(row, None) for row in claim.taken.tolist()]
            if strings is not None:
                first, pairs = (
                    vocabulary.options.shared,
                    zip(claim.rows.tolist(), strings, strict=True),
                )
                self._strings = [(row, string) for row, string in pairs if row >= first]
        self._changed = {
            "now": now,
            "progress": progress,
            "num_reused": seed + (claim.taken.numel() if attached else 0),
            "taken_over": claim.taken,
        }

    def write(self) -> None:
        """Reset the rows that go to other ids."""
        self._writes.commit()
        self._note()

    def undo(self) -> None:
        """Restore what ``write`` has reset, if it was called."""
        if self._writes.undo():
            self._note()

    def check(self) -> None:
        """Raise if ``finish`` would."""
        if self._claim is not None:
            self._known.check(self._claim)

    def finish(self) -> None:
        """Count the ids, and assign rows to new ones."""
        if self._claim is not None:
            self._known.commit(self._claim)
            vars(self._vocabulary).update(self._changed)
            for row, string in self._strings:
                self._known_strings[row] = string

    def _note(self) -> None:
        for note in self._notes:
            note()


def prepare_lookups(
    vocabularies: Sequence[Vocabulary | None], ids: Sequence[Tensor], *, can_undo: bool = False
) -> tuple[list[Tensor], list[PreparedLookup]]:
    """Prepare lookups of flat ids, together where several are in the same vocabulary.

    Returns the rows of each; without a vocabulary, the ids are rows. The caller holds the locks.
    """
    rows, prepared = list(ids), []
    for vocabulary in dict.fromkeys(vocabularies):
        if vocabulary is None:
            continue
        numbers = [n for n, each in enumerate(vocabularies) if each is vocabulary]
        found = PreparedLookup(vocabulary, cat([ids[n] for n in numbers]), can_undo=can_undo)
        prepared.append(found)
        for n, each in zip(numbers, found.rows.split([len(ids[n]) for n in numbers]), strict=True):
            rows[n] = each
    return rows, prepared


def do_lookups(prepare: Callable[[], tuple[Found, Sequence[PreparedLookup]]]) -> Found:
    """Prepare lookups, then do all of them, or none if it raises. The caller holds the locks."""
    found, prepared = prepare()
    try:
        uninterrupted(partial(_commit, prepared))
    except LostClaimError:  # maybe to a signal handler, which has saved a checkpoint

        def repeat() -> Found:
            found, prepared = prepare()
            _commit(prepared)
            return found

        return uninterrupted(repeat)
    return found


def _commit(prepared: Sequence[PreparedLookup]) -> None:
    for each in prepared:
        each.check()
    for each in prepared:
        each.finish()
        each.write()


STRINGS = "strings"  # in a state dict
_MOST_ROWS = 2**31 - 1
_MOST_ADMIT = 2**16 - 1


class Vocabulary(nn.Module):
    """Maps ids of any value to the rows of a table, and assigns rows as new ids appear.

    An id gets its own row once it has been seen ``admit`` times; until then it shares row 0 with
    all other ids without a row. In training mode, a lookup counts ids and assigns rows. After
    ``eval()`` a lookup changes nothing.

    When all rows are taken, a new id shares row 0 (``evict=None``), or takes over the row of the
    least recently seen id (``"lru"``) or of the least frequently seen one (``"lfu"``; among
    several, the least recent). Counts for ``"lfu"`` are halved whenever 16 ids per row were seen,
    so that ids which were popular long ago do not stay forever. When a row goes to another id,
    tables that you have named with ``attach`` reinitialize it, and their optimizers forget its
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
        keep_strings: whether calls get strings, as ``hash_strings`` does, and each row remembers
            its string.

    Attributes:
        rows: number of rows.
        strings: the string of each row, ``None`` for rows without one; or ``None``.
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
        >>> vocabulary.eval()(torch.tensor([42, 43]))  # 43 is unknown
        tensor([3, 0])

        >>> colors = sparsestep.nn.Vocabulary(4, keep_strings=True)
        >>> rows = colors(["red", "green", "red"])
        >>> [colors.strings[row] for row in rows.tolist()]
        ['red', 'green', 'red']
    """

    _not_copied: ClassVar = ("id_table", "lock", "attached", "progress", "taken_over", "graph_key")

    def __init__(
        self,
        rows: int,
        *,
        admit: int = 1,
        evict: Evict = None,
        shared: int = 1,
        keep_strings: bool = False,
    ) -> None:
        _check_number("rows", rows, 1, _MOST_ROWS)
        _check_number("admit", admit, 1, _MOST_ADMIT)
        _check_number("shared", shared, 1, rows)
        if evict not in (None, "lru", "lfu"):
            raise InputError(
                f"Vocabulary: {message('evict must be None, lru or lfu', repr(evict))}"
            )
        super().__init__()
        self.options: Options = Options(rows, shared, admit, evict)
        self.now: int = 0  # passes as ids are seen
        self.num_reused: int = 0  # rows that went to another id; the seed of new values
        self.strings: list[str | None] | None = [None] * rows if keep_strings else None
        self._prepare()

    def _prepare(self) -> None:
        """Create the members that are neither pickled nor copied."""
        self.id_table: IdTable = IdTable(self.options)
        self.lock: threading.RLock = fork_safe_lock()
        self.attached: list[Attached] = []
        self.progress: list[Any] = []
        self.taken_over: Tensor = torch.empty(0, dtype=torch.int64, device="cpu")
        self.graph_key: Tensor | None = None

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.options.rows

    @property
    def used(self) -> int:
        """Number of rows in use, the shared ones included."""
        with self.lock:
            return self.id_table.used

    def extra_repr(self) -> str:
        """Describe the options."""
        options = self.options
        more = f", shared={options.shared}" if options.shared > 1 else ""
        return f"{options.rows}, admit={options.admit}, evict={options.evict!r}{more}"

    def as_dict(self) -> dict[int, int]:
        """The row of each id that has one of its own."""
        with self.lock:
            saved = self.id_table.save()
        first = self.options.shared
        ids = saved.ids[first : saved.used].tolist()
        return dict(zip(ids, range(first, saved.used), strict=True))

    def export(self, table: Table) -> tuple[nn.Embedding, dict[int, int]]:
        """A plain embedding with the rows that are in use, and the row of each id.

        Args:
            table: a table of this vocabulary.

        Returns:
            A copy, ``torch.nn.Embedding``, and a dict; ids that are not in it have row 0 (with
            several shared rows, any of them).

        Example:
            >>> import torch, sparsestep
            >>> vocabulary, table = sparsestep.nn.Vocabulary(1000), torch.nn.Embedding(1000, 4)
            >>> rows = vocabulary(torch.tensor([10**18, -7]))
            >>> vocabulary.export(table)
            (Embedding(3, 4), {1000000000000000000: 1, -7: 2})
        """
        weight = weight_of("Vocabulary.export", table)
        with self.lock:
            found = self.as_dict()
            values = weight.detach()[: self.options.shared + len(found)].clone()
        return nn.Embedding.from_pretrained(values, freeze=False), found

    def merge(self, other: Vocabulary) -> Tensor:
        """Add the ids of another vocabulary; ids that are new here get free rows.

        Counts are added up. No id loses its row, so there must be enough free rows.

        Args:
            other: the other vocabulary; it is not changed.

        Returns:
            For each row in use there, the row of its id here; so
            ``table.weight.data[rows] = other_table.weight.data[: len(rows)]`` merges tables.

        Raises:
            InputError: there are too few free rows; nothing has changed.

        Example:
            >>> import torch, sparsestep
            >>> first, second = sparsestep.nn.Vocabulary(10), sparsestep.nn.Vocabulary(10)
            >>> first(torch.tensor([5, 6])), second(torch.tensor([6, 7]))
            (tensor([1, 2]), tensor([1, 2]))
            >>> first.merge(second), first.as_dict()
            (tensor([0, 2, 3]), {5: 1, 6: 2, 7: 3})
        """
        if not isinstance(other, Vocabulary) or other.options.shared != self.options.shared:
            requirement = "Vocabulary.merge: other must be a Vocabulary with as many shared rows"
            raise InputError(message(requirement, other))
        with other.lock, memory_errors():
            theirs = other.id_table.save()
        with self.lock, memory_errors():
            merged, rows = self.prepare_merge(theirs)
            strings = self.strings
            if strings is not None and other.strings is not None:
                strings = list(strings)
                for row, string in zip(rows.tolist(), other.strings, strict=False):
                    strings[row] = string or strings[row]
            self._change(id_table=merged, strings=strings)
        return rows

    def prepare_merge(self, theirs: IdTableSnapshot) -> tuple[IdTable, Tensor]:
        """Return the merged id table, and the rows of the other vocabulary's ids in it."""
        return self.id_table.merged(theirs, self.now)

    # Lookups

    @replaced_in_graphs
    def forward(self, ids: Tensor | Iterable[str]) -> Tensor:
        """The row of each id.

        Args:
            ids: integers of any value and shape, on any device; with ``keep_strings`` also strings,
                as ``hash_strings`` takes them.

        Returns:
            Rows, int64, in the shape of the ids and on their device.

        Raises:
            InputError: the ids are not integers, or an attached table or optimizer does not fit its
                rows.

        Whatever it raises, also ``MemoryError``, ``KeyboardInterrupt`` and what ``init`` raises:
        ids, tables and optimizers are as before, or as after the whole lookup. Torch's random
        numbers are not affected.
        """
        with memory_errors():
            strings: list[str] | None = None
            if self.strings is not None and not isinstance(ids, Tensor):
                strings = listed(ids)
                ids = hash_strings(strings)
            flat, given = flat_ids(ids), cast("Tensor", ids)

            def prepare() -> tuple[Tensor, list[PreparedLookup]]:
                found = PreparedLookup(self, flat, strings)
                return found.rows.view(given.shape).to(given.device), [found]

            with self.lock:
                return do_lookups(prepare)

    def fits_graph(self, ids: Tensor | Iterable[str]) -> bool:
        """Whether a graph of torch.compile can have this lookup."""
        return can_be_traced() and isinstance(ids, Tensor) and not ids.is_nested

    def forward_in_graph(self, ids: Tensor) -> Tensor:
        """Look up as an operation of a graph."""
        return rows_in_graph(self, ids)

    def find(self, ids: Tensor) -> Tensor:
        """The row of each id (int64 of one dim, on the CPU), without counting it."""
        with self.lock:
            return self.id_table.find(ids)[0]

    def next_time(self) -> tuple[int, list[Any]]:
        """Time passes with each call; with attached tables, with each step of all optimizers."""
        progress = [each for attached in self.attached for each in attached.progress()]
        before = self.progress
        if (
            not progress
            or len(before) != len(progress)
            or all(a != b for a, b in zip(before, progress, strict=True))
        ):
            return self.now + 1, progress
        return self.now, before

    # Tables

    def attach(self, table: Table, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
        """Reinitialize the rows of a table when they go to another id.

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
        self.attach_table(Attached(table, optimizers, init))

    def attach_table(self, attached: Attached) -> None:
        """Add a table, or replace how it is initialized."""
        attached.check(self.rows, self.options.shared)
        with self.lock:
            others = [each for each in self.attached if each.table is not attached.table]
            self.attached = [*others, attached]

    def grow(self, rows: int) -> None:
        """Add rows, here and to all attached tables: see ``sparsestep.nn.grow``.

        Args:
            rows: the new number of rows.

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
        with self.lock, memory_errors(), restoring_rng() as keep_rng:
            commit = self.prepare_grow(rows)
            tables = [
                prepare_grow(each.table, rows, tuple(each.optimizers), each.init)
                for each in self.attached
                if each.table.num_embeddings < rows
            ]
            uninterrupted(lambda: [work() for work in (*tables, commit, keep_rng)])

    def prepare_grow(self, rows: int) -> Callable[[], None]:
        """Prepare more rows, without those of tables; returns the commit."""
        _check_number("rows", rows, self.rows, _MOST_ROWS)
        options = replace(self.options, rows=rows)
        larger = self.id_table.with_rows(options, self.now)
        strings = self.strings and [*self.strings, *[None] * (rows - self.rows)]
        return partial(self._change, options=options, id_table=larger, strings=strings)

    # Checkpoints and copies

    def __getstate__(self) -> dict[str, Any]:
        with self.lock:
            state = {k: v for k, v in vars(self).items() if k not in self._not_copied}
            return {**state, "saved": self.id_table.save()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = state.pop("saved")
        super().__setstate__(state)
        self._prepare()
        self.id_table.load(saved, self.now)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        with self.lock:
            found = pack_state(self.id_table.save(), self.now, self.num_reused)
            strings = self.strings and list(self.strings)
        for name, tensor in found.items():
            destination[prefix + name] = tensor
        if strings is not None:
            destination[prefix + STRINGS] = strings

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        names = [*STATE_NAMES, *([] if self.strings is None else [STRINGS])]
        missing = [prefix + name for name in names if prefix + name not in state_dict]
        missing_keys += missing
        if missing:
            return
        found = {name: state_dict[prefix + name] for name in STATE_NAMES}
        strings = state_dict[prefix + STRINGS] if self.strings is not None else None
        try:
            with memory_errors():
                saved, now, num_reused = unpack_state(self.options, found)
            if strings is not None and not _are_strings(strings, self.rows):
                requirement = f"strings must be a list of {self.rows} str or None"
                raise InputError(message(requirement, type(strings).__name__))
        except InputError as error:
            error_msgs.append(f"Vocabulary {prefix.rstrip('.')!r}: {error}")
            return
        with self.lock:
            self.prepare_restore(saved, now, num_reused, strings)()

    def prepare_restore(
        self,
        saved: IdTableSnapshot,
        now: int,
        num_reused: int,
        strings: Sequence[str | None] | None = None,
    ) -> Callable[[], None]:
        """Return a call that replaces everything by what ``unpack_state`` has found."""
        with memory_errors():
            ids = IdTable(self.options)
            ids.load(saved, now)
            if self.strings is not None:
                strings = [None] * self.rows if strings is None else list(strings)
        changed = {"id_table": ids, "now": now, "num_reused": num_reused, "progress": []}
        return partial(self._change, **changed, strings=strings)

    def _change(self, **attributes: Any) -> None:
        """Set attributes in one step that no signal handler can interrupt."""
        vars(self).update(attributes)


def _are_strings(found: Any, count: int) -> bool:
    return (
        isinstance(found, list)
        and len(found) == count
        and all(each is None or isinstance(each, str) for each in found)
    )


def flat_ids(ids: Any) -> Tensor:
    """Return ids as int64 of one dim on the CPU. Raises if they are not integers."""
    if not isinstance(ids, Tensor) or ids.dtype not in INTEGER_DTYPES:
        got = f"{ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        remedy = "sparsestep.nn.hash_strings makes ids of strings"
        requirement = "Vocabulary: ids must be integers, in a tensor"
        raise InputError(message(requirement, got, remedy))
    if ids.layout is not torch.strided or ids.is_meta:
        got = "a meta tensor" if ids.is_meta else f"layout {ids.layout}"
        raise InputError(message("Vocabulary: ids must be a strided tensor", got))
    return ids.detach().to("cpu", torch.int64).reshape(-1).contiguous()


def _check_number(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        requirement = f"Vocabulary: {name} must be a whole number in [{least}, {most}]"
        raise InputError(message(requirement, repr(value)))
