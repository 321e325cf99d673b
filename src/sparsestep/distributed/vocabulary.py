"""Vocabulary: ids of any value, owned by the rank that their hash selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep._torch import cat, stack
from sparsestep.distributed._handshake import ExchangeKind
from sparsestep.distributed._requests import TableRequests, dynamic_request
from sparsestep.distributed._table import ShardedTable, TableGroup
from sparsestep.distributed.collectives import Caught, Collectives, Sections
from sparsestep.distributed.lookup import sharded_lookup
from sparsestep.distributed.placement import ByRow, check_int, hash_owner
from sparsestep.engines.base import certain, finish
from sparsestep.errors import InputError, message
from sparsestep.nn.grow import AnyOptimizer, Init, Spare, Table, initialize_rows, prepare_grow
from sparsestep.nn.id_table import Evict, IdTable, IdTableSnapshot
from sparsestep.nn.interop import excluded_from_compile
from sparsestep.nn.vocabulary import Attached
from sparsestep.nn.vocabulary import Vocabulary as LocalVocabulary

# Seeds of new rows carry the rank in their upper bits, so ranks draw different values.
RANK_SHIFT = 40
_ID_BYTES = 8
_SHARED = -1  # in place of a digest: the other vocabulary is shared by ranks, too


class Vocabulary(nn.Module):
    """A :class:`sparsestep.nn.Vocabulary` for a table that is sharded by rows.

    A hash of an id decides which rank owns it. The owner counts the id and assigns it one of its
    own rows, so no rank has to know all ids. ``admit`` and ``evict`` mean the same as in
    ``sparsestep.nn.Vocabulary``, rank by rank: each rank has its share of the rows and of the ids.

    All ranks look up ids together, as with a sharded table. A rank without data looks up an empty
    tensor. Owners count the ids of a call in the order of ranks, so the same calls give the same
    rows.

    As part of a model it is saved and loaded with it, by any number of ranks: see
    :func:`sparsestep.distributed.save`. ``state_dict()`` has the ids that this rank owns.

    Args:
        table: an ``nn.Embedding`` or ``nn.EmbeddingBag`` that is sharded by rows.
        optimizers: the optimizers of this library that train it.
        admit: how often an id has to be seen to get a row of its own.
        evict: ``None``, ``"lru"`` or ``"lfu"``: whose row a new id takes over.
        shared: on each rank, the number of rows for ids without a row of their own.
        init: fills a tensor of new rows in place; by default from a normal distribution.
        rows: number of rows, of all ranks together; by default those of the table.

    Attributes:
        rows: number of rows.
        local: the vocabulary of this rank's ids and local rows.

    Raises:
        InputError: the table is not sharded by rows, or an optimizer does not train it.

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
        rows: int | None = None,
    ) -> None:
        super().__init__()
        sharded = _require_row_sharded(table)
        self.rows: int = sharded.rows if rows is None else rows
        check_int("Vocabulary", "rows", self.rows, 1, sharded.rows)
        self._group: TableGroup = vars(table)["sharding"]
        self._table: ShardedTable = sharded
        self.collectives: Collectives = sharded.collectives
        self._sharded_tables: dict[int, tuple[Table, ShardedTable]] = {}  # by local module
        ranks = self.collectives
        fewest = self.rows // ranks.world_size
        if isinstance(shared, int) and shared > fewest:
            requirement = f"Vocabulary: shared must be at most the rows of a rank, {fewest}"
            raise InputError(message(requirement, shared))
        here = len(range(ranks.rank, self.rows, ranks.world_size))
        self.local: LocalVocabulary = LocalVocabulary(here, admit=admit, evict=evict, shared=shared)
        self._shared = shared * ranks.world_size
        # Seed of new rows; differs by rank.
        self.local.num_reused = ranks.rank << RANK_SHIFT
        self.attach(table, *optimizers, init=init)

    @excluded_from_compile
    def forward(self, ids: Tensor) -> Tensor:
        """The row of each id; all ranks look up theirs at the same time.

        Args:
            ids: integers of any value and shape, on any device.

        Returns:
            Rows of the table, int64, in the shape of the ids and on their device.

        Raises:
            InputError: ids are invalid, on this rank or on another. Nothing has changed.
        """
        numbers = _RowNumbers(self._table)

        def make_requests() -> TableRequests:
            return TableRequests([dynamic_request(numbers, self.local, ids)])

        kind = ExchangeKind.VOCABULARY_LOOKUP
        (rows,) = sharded_lookup(self._group, self._table, make_requests, kind)
        return rows.squeeze(-1).to(ids.device)

    def attach(self, table: Table, *optimizers: AnyOptimizer, init: Init | None = None) -> None:
        """Reset the rows of another table, too, when they go to another id.

        Args:
            table: sharded by rows in the same call of ``shard``, with at least as many rows.
            optimizers: the optimizers of this library that train it.
            init: fills a tensor of new rows in place; by default from a normal distribution.

        Raises:
            InputError: the table does not fit, or an optimizer does not train it.
        """
        sharded = self._check_table("Vocabulary.attach", table)
        padding = sharded.padding_idx
        if padding is not None and self._shared <= padding < self.rows:
            requirement = (
                f"Vocabulary.attach: padding_idx must be one of {self._shared} shared rows"
            )
            raise InputError(message(requirement, padding, "Use padding_idx=0"))
        assert sharded.local is not None
        self.local.attach_table(Attached(sharded.local, optimizers, init, is_part=True))
        self._sharded_tables[id(sharded.local)] = table, sharded

    def _check_table(self, who: str, table: Any) -> ShardedTable:
        sharded = _require_row_sharded(table)
        if vars(table)["sharding"] is not self._group or sharded.rows < self.rows:
            requirement = f"{who}: a table must be sharded with the first, {self.rows} rows"
            raise InputError(message(requirement, f"another with {sharded.rows}"))
        return sharded

    @property
    def used(self) -> int:
        """How many rows of this rank are in use, the shared ones included."""
        return self.local.used

    @property
    def taken_over(self) -> Tensor:
        """Rows of this rank that went to another id in the latest call."""
        return self._global_rows(self.local.taken_over)

    def as_dict(self) -> dict[int, int]:
        """The row of each id that this rank owns and that has one of its own."""
        world_size, rank = self.collectives.world_size, self.collectives.rank
        return {each: row * world_size + rank for each, row in self.local.as_dict().items()}

    def grow(self, rows: int) -> None:
        """Add rows, to all attached tables, too; all ranks call it.

        Each rank gets its share of the new rows. Weights stay the same parameters and keep their
        state, as with ``sparsestep.nn.grow``. New rows are initialized by ``init``, on each rank
        with random numbers of its own. Call it between steps, after ``zero_grad()``.

        Args:
            rows: the new number of rows; the same on all ranks.

        Raises:
            InputError: a table cannot grow, on this rank or on another, or ranks pass different
                numbers. Nothing has changed on any rank.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(3, 2)
            >>> plan = sparsestep.distributed.shard(table, plan="rows")  # here of one process
            >>> vocabulary = sparsestep.distributed.Vocabulary(table)
            >>> vocabulary(torch.tensor([7, 8, 9])), vocabulary.grow(5)
            (tensor([1, 2, 0]), None)
            >>> vocabulary(torch.tensor([7, 8, 9])), table.num_embeddings
            (tensor([1, 2, 3]), 5)
        """
        uninterrupted(partial(self._grow_together, rows))

    def _grow_together(self, rows: int) -> None:
        commits: list[Callable[[], object]] = []
        with self.local.lock:
            with Caught() as caught:
                commits = self._prepare_grow(rows)
            number = rows if caught.error is None else 0
            requirement = "Vocabulary.grow: all ranks must name the same number of rows"
            self.exchange_number(ExchangeKind.GROW, number, caught.error, requirement)
            finish(commits)

    def _prepare_grow(self, rows: int) -> list[Callable[[], object]]:
        """Everything that can raise; the returned functions commit, and cannot fail."""
        check_int("Vocabulary.grow", "rows", rows, self.rows)
        ranks, local = self.collectives, self.local
        there = len(range(ranks.rank, rows, ranks.world_size))
        longest = -(-rows // ranks.world_size)
        commits: list[Callable[[], object]] = [local.prepare_grow(there)]
        for each in local.attached:
            module, table = self._sharded_tables[id(each.table)]
            if table.rows >= rows:
                continue
            here = len(range(ranks.rank, table.rows, ranks.world_size))
            spare = Spare(len(table.weight) - here, longest - there)
            init = partial(initialize_rows, init=each.init, seed=local.num_reused)
            optimizers = tuple(each.optimizers)
            commits.append(prepare_grow(each.table, longest, optimizers, init, spare))
            commits.append(partial(_commit_table_grow, module, table, rows))
        commits.append(partial(self._commit_grow, rows, local.num_reused + there - local.rows))
        return commits

    def _commit_grow(self, rows: int, num_reused: int) -> None:
        self.rows, self.local.num_reused = rows, num_reused

    def merge(self, other: Vocabulary | LocalVocabulary) -> Tensor:
        """Add the ids of another vocabulary; ids that are new here get free rows of their owners.

        All ranks call it. Counts are added up. No id loses its row, so every owner must have
        enough free rows.

        Args:
            other: a vocabulary of the same ranks, or an ordinary one, the same on all ranks. It is
                not changed.

        Returns:
            For each row in use there, the row of its id here. For a vocabulary of the same ranks,
            these are the rows of this rank, and ``table.weight.data[rows // world_size] =
            other_table.weight.data[: len(rows)]`` merges tables. For an ordinary one, the result is
            the same on all ranks; its shared rows go to those of rank 0.

        Raises:
            InputError: there are too few free rows, on this rank or on another, or ranks pass
                different vocabularies. Nothing has changed on any rank.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(10, 2)
            >>> plan = sparsestep.distributed.shard(table, plan="rows")  # here of one process
            >>> vocabulary = sparsestep.distributed.Vocabulary(table)
            >>> today = sparsestep.nn.Vocabulary(10)
            >>> vocabulary(torch.tensor([5, 6])), today(torch.tensor([6, 7]))
            (tensor([1, 2]), tensor([1, 2]))
            >>> vocabulary.merge(today), vocabulary.as_dict()
            (tensor([0, 2, 3]), {5: 1, 6: 2, 7: 3})
        """
        return uninterrupted(partial(self._merge_together, other))

    def _merge_together(self, other: Vocabulary | LocalVocabulary) -> Tensor:
        is_shared = isinstance(other, Vocabulary)
        merged: tuple[IdTable, Tensor] | None = None
        theirs, which = None, _SHARED
        with self.local.lock:
            with Caught() as caught:
                theirs = owned = self._snapshot_of(other)
                if not is_shared:
                    which = _digest(theirs)
                    owned = _owned_entries(theirs, self.collectives, self.local.options.shared)
                merged = self.local.prepare_merge(owned)
            requirement = "Vocabulary.merge: all ranks must pass the same vocabulary"
            self.exchange_number(ExchangeKind.MERGE, which, caught.error, requirement)
            assert merged is not None
            assert theirs is not None
            own_rows = merged[1]
            rows = certain(lambda: self._global_rows(own_rows))
            with caught:
                if not is_shared:
                    rows = self._gather_rows(theirs, rows)
            self.collectives.check(caught.error)
            self.local.id_table = merged[0]
        return rows

    def _snapshot_of(self, other: Any) -> IdTableSnapshot:
        """The ids of another vocabulary; raises if it cannot be merged with this one."""
        shared, ranks = self.local.options.shared, self.collectives
        local = other.local if isinstance(other, Vocabulary) else other
        if not isinstance(local, LocalVocabulary) or local.options.shared != shared:
            requirement = "Vocabulary.merge: other must be a Vocabulary with as many shared rows"
            raise InputError(message(requirement, other))
        if isinstance(other, Vocabulary):
            theirs = other.collectives
            if (theirs.rank, theirs.world_size) != (ranks.rank, ranks.world_size):
                requirement = "Vocabulary.merge: the same ranks must share both vocabularies"
                got = f"rank {theirs.rank} of {theirs.world_size}"
                raise InputError(message(requirement, got))
        with local.lock:
            return local.id_table.save()

    def _gather_rows(self, theirs: IdTableSnapshot, rows: Tensor) -> Tensor:
        """The rows of all ids of an ordinary vocabulary, of which each rank knows its own."""
        ranks, shared = self.collectives, self.local.options.shared
        # No rank may leave the others in the exchange.
        owners = certain(lambda: hash_owner(theirs.ids[shared : theirs.used], ranks.world_size))
        counts = certain(lambda: owners.bincount(minlength=ranks.world_size))
        gathered = ranks.all_gather(certain(lambda: rows[shared:]), counts)
        found = torch.empty_like(owners)
        found[owners.argsort(stable=True)] = gathered
        return cat([torch.arange(shared) * ranks.world_size, found])

    def export(self, table: Table) -> tuple[nn.Embedding, dict[int, int]] | None:
        """A plain embedding with the rows of all ranks that are in use, and the row of each id.

        All ranks call it. Only rank 0 gets the result, and needs memory for all rows.

        Args:
            table: a table of this vocabulary.

        Returns:
            On rank 0 a copy, ``torch.nn.Embedding``, and a dict; ids that are not in it have row 0
            (or any of the first ``shared * world_size``, which are the shared ones of all ranks).
            On other ranks ``None``.

        Raises:
            InputError: the table does not fit, on this rank or on another.

        Example:
            >>> import sparsestep
            >>> table = torch.nn.Embedding(1000, 4)
            >>> plan = sparsestep.distributed.shard(table, plan="rows")  # here of one process
            >>> vocabulary = sparsestep.distributed.Vocabulary(table)
            >>> rows = vocabulary(torch.tensor([10**18, -7]))
            >>> vocabulary.export(table)
            (Embedding(3, 4), {1000000000000000000: 1, -7: 2})
        """
        return uninterrupted(partial(self._export_together, table))

    def _export_together(self, table: Table) -> tuple[nn.Embedding, dict[int, int]] | None:
        ranks, shared, sharded = self.collectives, self.local.options.shared, self._table
        with Caught() as caught:
            sharded = self._check_table("Vocabulary.export", table)
        size = torch.tensor([_ID_BYTES, sharded.dim * sharded.weight.itemsize])

        def outgoing() -> Sections:
            saved = self.local.id_table.save()
            return [saved.ids[: saved.used], sharded.weight.detach()[: saved.used].contiguous()]

        with self.local.lock:
            mine = self.used
            used = self.exchange_number(ExchangeKind.EXPORT, mine, caught.error, "", sharded)
            incoming = torch.tensor(used).unsqueeze(1) * (size if ranks.rank == 0 else 0 * size)
            lengths = torch.zeros_like(incoming)
            lengths[0] = mine * size
            max_bytes = max(used) * int(size.sum())
            messages = ranks.all_to_all(outgoing, lengths, incoming, max_bytes)
        if ranks.rank != 0:
            return None
        ids, rows = messages.read([torch.int64, sharded.weight.dtype])
        numbers = [torch.arange(n) * ranks.world_size + rank for rank, n in enumerate(used)]
        order = cat(numbers).argsort()
        first = shared * ranks.world_size
        found = ids[order][first:].tolist()
        whole = rows.view(-1, sharded.dim)[order]
        plain = nn.Embedding.from_pretrained(whole, freeze=False)
        return plain, dict(zip(found, range(first, first + len(found)), strict=True))

    def _global_rows(self, rows: Tensor) -> Tensor:
        return rows * self.collectives.world_size + self.collectives.rank

    def exchange_number(
        self,
        operation: ExchangeKind,
        number: int,
        error: BaseException | None,
        requirement: str = "",
        table: ShardedTable | None = None,
    ) -> list[int]:
        """The numbers of all ranks, which are equal if there is a ``requirement``."""
        counts = certain(lambda: torch.full((self.collectives.world_size,), number))
        peers = self._group.exchange_counts(operation, table or self._table, counts, error)
        numbers: list[int] = certain(lambda: peers.counts[:, 0].tolist())
        if requirement and len(set(numbers)) > 1:
            got = numbers if operation is ExchangeKind.GROW else "different ones"
            raise InputError(message(requirement, got))
        return numbers

    def __reduce_ex__(self, protocol: Any) -> Any:
        requirement = "a vocabulary that ranks share cannot be copied or pickled"
        remedy = "Make it a part of the model, and use sparsestep.distributed.save"
        raise InputError(message(requirement, "an attempt to", remedy))


class _RowNumbers(ShardedTable):
    """A table whose rows are their own numbers: what a lookup of ids alone returns."""

    is_plain_read = False

    def __init__(self, table: ShardedTable) -> None:
        vars(self).update(vars(table))
        self.weight: Tensor = torch.empty(0, 1, dtype=torch.int64)
        self.dim, self.is_bag, self.codec = 1, False, None
        self.order = "global"  # all ids are counted

    def prefetch(self, rows: Tensor) -> None:
        """Nothing is read."""

    def lookup(self, ids: Tensor, lengths: Any = None, weights: Any = None) -> Tensor:
        return (ids * self.row_stride + self.collectives.rank).unsqueeze(1)


def _commit_table_grow(module: Table, table: ShardedTable, rows: int) -> None:
    module.num_embeddings = rows
    table.set_num_rows(rows)


def share_vocabulary(vocabulary: Any, tables: Sequence[Table]) -> None:
    """Turn an ordinary vocabulary without ids into one that ranks share; the object stays.

    Ranks rely on it, so it succeeds: a call that fails for want of memory is repeated.
    """
    attributes = certain(partial(_shared_attributes, vocabulary, tables))
    certain(partial(object.__setattr__, vocabulary, "__dict__", attributes))
    certain(partial(object.__setattr__, vocabulary, "__class__", Vocabulary))


def _shared_attributes(vocabulary: Any, tables: Sequence[Table]) -> dict[str, Any]:
    options, (first, *others) = vocabulary.options, tables
    shared = Vocabulary(
        first, admit=options.admit, evict=options.evict, shared=options.shared, rows=options.rows
    )
    for table in others:
        shared.attach(table)
    shared.train(vocabulary.training)
    return dict(vars(shared))


def _owned_entries(theirs: IdTableSnapshot, ranks: Collectives, shared: int) -> IdTableSnapshot:
    ids = theirs.ids[shared : theirs.used]
    mine = (hash_owner(ids, ranks.world_size) == ranks.rank).nonzero().squeeze(1) + shared
    rows = cat([torch.arange(shared), mine])
    return theirs._replace(ids=theirs.ids[rows], counts=theirs.counts[rows], used=len(rows))


def _digest(saved: IdTableSnapshot) -> int:
    """Non-negative digest of ids, rows and counts."""
    pairs = stack([saved.ids, saved.counts]).t()[: saved.used].contiguous()
    places = torch.arange(1, len(pairs) + 1).unsqueeze(1)
    bits = (pairs ^ (pairs >> 29)) * 0x1F83D9ABFB41BD6B + places
    bits = (bits ^ (bits >> 32)) * places
    return int(bits.sum()) & (2**62 - 1)


def _require_row_sharded(module: Any) -> ShardedTable:
    """The table of a module; raises if it is not sharded by rows."""
    table: ShardedTable | None = getattr(module, "sharded_table", None)
    if table is None or not isinstance(table.placement, ByRow):
        requirement = "Vocabulary: its table must be sharded by rows"
        got = f"a {type(module).__name__}" if table is None else f"{table.placement.kind!r}"
        remedy = "Call sparsestep.distributed.shard(model, plan='rows') first"
        raise InputError(message(requirement, got, remedy))
    return table
