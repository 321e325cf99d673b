"""Which table goes where, and what that costs."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from sparsestep.distributed._table import Kind, Table, part_here
from sparsestep.distributed.requests import LENGTHS, LONG
from sparsestep.errors import InputError, message

KINDS: tuple[Kind, ...] = ("tables", "rows", "copy")
# On all ranks together, a table that is copied must not have more: each rank sends every other what
# it has touched of it.
_TINY_BYTES = 256 << 10
# Of sizes and numbers of ranks: what is larger is a mistake, and takes forever to add up.
_MOST = 1 << 62
_MOST_RANKS_AT_ALL = 1 << 20
# For each table that is whole on one rank, there must not be more: each of them asks that one.
_MOST_RANKS = 8


@dataclass(frozen=True)
class Placement:
    """Where a table is.

    Attributes:
        name: the name of the table.
        rows: its number of rows.
        dim: the length of a row.
        item: the number of bytes of an element.
        kind: ``"tables"``, ``"rows"`` or ``"copy"``.
        owner: the rank that holds it, for ``"tables"``.
        why: why it is there.

    Example:
        >>> Placement("user", rows=1000, dim=16, item=4, kind="copy").size
        64000
    """

    name: str
    rows: int
    dim: int
    item: int
    kind: Kind = "tables"
    owner: int = 0
    why: str = "your plan"

    def __post_init__(self) -> None:
        name: Any = self.name
        if not isinstance(name, str):
            requirement = "Placement: name must be a string"
            raise InputError(message(requirement, f"a {type(name).__name__}"))
        if self.kind not in KINDS:
            requirement = f"Placement: kind must be one of {', '.join(KINDS)}"
            raise InputError(message(requirement, repr(self.kind)))
        for field, least in (("rows", 0), ("dim", 0), ("item", 1), ("owner", 0)):
            _check_whole("Placement", field, getattr(self, field), least)

    @property
    def size(self) -> int:
        """Bytes of the whole table."""
        return self.rows * self.dim * self.item

    def rows_on(self, rank: int, world: int) -> int:
        """The number of rows on a rank.

        Example:
            >>> table = Placement("user", rows=10, dim=4, item=4, kind="rows")
            >>> [table.rows_on(rank, 3) for rank in range(3)]
            [4, 3, 3]
        """
        _check_rank("Placement.rows_on", rank, world)
        if self.kind == "copy":
            return self.rows
        if self.kind == "tables":
            return self.rows if rank == self.owner else 0
        return len(range(rank, self.rows, world))

    def bytes_per_step(self, world: int, batch: int, length: float = 1.0) -> int:
        """The bytes that a rank sends in a step, on average, if all ids of its batch differ.

        Args:
            world: the number of ranks.
            batch: the number of bags that each rank looks up.
            length: the number of ids of every bag.

        Example:
            >>> table = Placement("user", rows=1000, dim=16, item=4, kind="tables")
            >>> table.bytes_per_step(world=2, batch=256)
            16896
        """
        who = "Placement.bytes_per_step"
        _check_whole(who, "world", world, 1, _MOST_RANKS_AT_ALL)
        _check_whole(who, "batch", batch, 0)
        _check_length(f"{who}: length", length)
        away = (world - 1) / world  # of what is asked for, as much is elsewhere
        ids, row = batch * length, self.dim * self.item
        if self.kind == "copy":
            return round(min(ids, self.rows) * (world - 1) * (8 + row))
        bags: float = batch
        lengths = 0.0
        if self.kind == "rows" and length > 1:  # a bag has parts on several ranks
            share = 1 if length >= LONG * world else 1 - (1 - 1 / world) ** length
            bags = batch * world * share
            lengths = LENGTHS.itemsize * bags
        # Ids and gradients go, and rows to those who ask this rank.
        return round(away * (4 * ids + lengths + 2 * bags * row))

    def bytes_sent_by(self, rank: int, world: int, batch: int, length: float = 1.0) -> int:
        """The bytes that one rank sends in a step; the owner of a whole table sends the most.

        Args:
            rank: the rank.
            world: the number of ranks.
            batch: the number of bags that each rank looks up.
            length: the number of ids of a bag.

        Example:
            >>> table = Placement("user", rows=1000, dim=16, item=4, kind="tables", owner=1)
            >>> [table.bytes_sent_by(rank, world=3, batch=256) for rank in range(3)]
            [17408, 32768, 17408]
        """
        _check_rank("Placement.bytes_sent_by", rank, world)
        if self.kind != "tables":
            return self.bytes_per_step(world, batch, length)
        rows = batch * self.dim * self.item
        if rank == self.owner:
            return rows * (world - 1)
        return rows + round(4 * batch * length)


class Plan:
    """Where each table is; print it for an overview.

    Attributes:
        placements: one for each table.
        world: the number of ranks.
        batch: the number of bags that each rank looks up in a step, to compute the bytes sent.
        lengths: the number of ids of a bag, by table name; 1 by default.

    Raises:
        InputError: an argument is of the wrong kind.

    Example:
        >>> import torch, sparsestep
        >>> tables = {"user": (100_000, 16), "country": (200, 8)}
        >>> model = sparsestep.nn.EmbeddingBagCollection(tables)
        >>> plan = sparsestep.distributed.shard(model, plan={"user": "rows"})
        >>> print(plan.for_batch(4096))
        table             rows  dim  kind    where   bytes/rank  wire/step  why
        tables.user     100000   16  rows    dealt       6.4 MB        0 B  your plan
        tables.country     200    8  tables  rank 0      6.4 kB        0 B  there is one rank
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        world: int,
        batch: int = 1024,
        lengths: Mapping[str, float] | None = None,
        tables: Sequence[Table] = (),
    ) -> None:
        given: Any = placements
        if not isinstance(given, Sequence) or not all(isinstance(p, Placement) for p in given):
            requirement = "Plan: placements must be a list of Placement"
            raise InputError(message(requirement, f"a {type(given).__name__}"))
        self.placements: tuple[Placement, ...] = tuple(placements)
        _check_whole("Plan", "world", world, 1, _MOST_RANKS_AT_ALL)
        _check_whole("Plan", "batch", batch, 0)
        self.world: int = world
        self.batch: int = batch
        self.lengths: dict[str, float] = self._lengths("Plan", lengths)
        self._tables: tuple[Table, ...] = tuple(tables)

    def __getitem__(self, name: str) -> Placement:
        return self.placements[_found(name, [each.name for each in self.placements], "plan")]

    def for_batch(self, batch: int, lengths: float | Mapping[str, float] | None = None) -> Plan:
        """The same plan, with the bytes that are sent for other batches.

        Args:
            batch: the number of bags that each rank looks up in a step.
            lengths: the number of ids of a bag, for all tables or by table name.

        Example:
            >>> plan = Plan([Placement("user", 1000, 16, 4, "rows")], world=2)
            >>> plan.bytes_sent_by(0), plan.for_batch(512, 20).bytes_sent_by(0)
            (67584, 88064)
        """
        _check_whole("Plan.for_batch", "batch", batch, 0)
        known = self._lengths("Plan.for_batch", lengths)
        return Plan(self.placements, self.world, batch, known, self._tables)

    def _lengths(self, who: str, lengths: Any) -> dict[str, float]:
        """The number of ids of a bag, by table name."""
        names = [each.name for each in self.placements]
        if lengths is None:
            return {}
        if not isinstance(lengths, Mapping):
            _check_length(f"{who}: lengths, for all tables or by table name,", lengths)
            return dict.fromkeys(names, lengths)
        for name, length in lengths.items():
            _check_length(f"{who}: the length for {name!r}", length)
        return {names[_found(name, names, who)]: length for name, length in lengths.items()}

    def local(self, name: str, tensor: Tensor) -> Tensor:
        """Select this rank's part of a tensor that has one entry per row of a table.

        For example a mask for the optimizer, or initial values.

        Args:
            name: the name of the table.
            tensor: a tensor with one entry per row of the whole table.

        Example:
            >>> import torch, sparsestep
            >>> table = torch.nn.Embedding(3, 2)
            >>> plan = sparsestep.distributed.shard(table, plan="rows")
            >>> plan.local("", torch.tensor([True, False, True]))
            tensor([ True, False,  True])
        """
        index = _found(name, [table.name for table in self._tables], "Plan.local")
        table = self._tables[index]
        given: Any = tensor
        if not isinstance(given, Tensor) or not given.dim():
            requirement = f"Plan.local: it must be a tensor with {table.rows} rows"
            raise InputError(message(requirement, f"a {type(given).__name__}"))
        if len(tensor) != table.rows:
            requirement = f"Plan.local: a tensor for {table.name!r} must have {table.rows} rows"
            raise InputError(message(requirement, len(tensor)))
        return part_here(table, tensor)

    def bytes_on(self, rank: int) -> int:
        """The bytes of all tables on a rank."""
        _check_rank("Plan.bytes_on", rank, self.world)
        return sum(p.rows_on(rank, self.world) * p.dim * p.item for p in self.placements)

    def bytes_sent_by(self, rank: int) -> int:
        """The bytes that a rank sends in a step."""
        _check_rank("Plan.bytes_sent_by", rank, self.world)
        of = (rank, self.world, self.batch)
        return sum(p.bytes_sent_by(*of, self.lengths.get(p.name, 1.0)) for p in self.placements)

    def __str__(self) -> str:
        heads = ["table", "rows", "dim", "kind", "where", "bytes/rank", "wire/step", "why"]
        lines = [heads, *(self._line(each) for each in self.placements)]
        widths = [max(len(line[n]) for line in lines) for n in range(len(heads))]
        right = {1, 2, 5, 6}
        text = [
            "  ".join(
                cell.rjust(width) if n in right else cell.ljust(width)
                for n, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        ]
        return "\n".join(text)

    def __repr__(self) -> str:
        return str(self)

    def _line(self, each: Placement) -> list[str]:
        where = {"tables": f"rank {each.owner}", "rows": "dealt", "copy": "every rank"}[each.kind]
        most = max(each.rows_on(rank, self.world) for rank in range(self.world))
        wire = each.bytes_per_step(self.world, self.batch, self.lengths.get(each.name, 1.0))
        size, sent = shown(most * each.dim * each.item), shown(wire)
        name = each.name or "(the model)"
        return [name, str(each.rows), str(each.dim), each.kind, where, size, sent, each.why]


def shown(size: float) -> str:
    """Bytes, for people.

    Example:
        >>> shown(6_400_000), shown(12)
        ('6.4 MB', '12 B')
    """
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def placed(
    tables: Sequence[Placement], world: int, plan: str | Mapping[str, str]
) -> list[Placement]:
    """Where tables go: as the plan says, and by size where it says nothing.

    A table that is larger than the share of a rank is dealt by rows. The others stay whole, the
    largest first, each on the rank that has the least; tiny ones are copied. Where there are many
    more ranks than such tables, these are dealt as well: all ranks would wait for a few.

    Example:
        >>> sizes = [Placement(n, r, 16, 4) for n, r in (("a", 10**6), ("b", 10**5), ("c", 100))]
        >>> [each.kind for each in placed(sizes, 4, "auto")]
        ['rows', 'tables', 'copy']
    """
    asked = _asked(tables, plan)
    share = sum(each.size for each in tables) / world
    found = [_chosen(each, asked.get(each.name), share, world) for each in tables]
    whole = sum(each.kind == "tables" for each in found)
    if world > _MOST_RANKS * whole:
        found = [
            replace(each, kind="rows", why="few tables for so many ranks")
            if each.kind == "tables" and each.name not in asked
            else each
            for each in found
        ]
    load = [0] * world
    for index in sorted(range(len(found)), key=lambda n: (-found[n].size, n)):
        if found[index].kind == "tables":
            owner = min(range(world), key=lambda rank: (load[rank], rank))
            load[owner] += found[index].size
            found[index] = replace(found[index], owner=owner)
    return found


def _chosen(each: Placement, kind: Kind | None, share: float, world: int) -> Placement:
    if kind is not None:
        return replace(each, kind=kind)
    if world == 1:
        return replace(each, kind="tables", why="there is one rank")
    if each.size * world <= _TINY_BYTES:
        return replace(each, kind="copy", why="it is tiny")
    if each.size > share:
        return replace(each, kind="rows", why="larger than a rank's share")
    return replace(each, kind="tables", why="it fits a rank")


def _asked(tables: Sequence[Placement], plan: str | Mapping[str, str]) -> dict[str, Kind]:
    requirement = (
        "shard: plan must be 'auto', one of tables, rows, copy, or a dict of these by table"
    )
    names = [each.name for each in tables]
    if isinstance(plan, str):
        kind = _kind(plan, requirement, repr(plan))
        return {} if kind is None else dict.fromkeys(names, kind)
    given: Any = plan
    if not isinstance(given, Mapping):
        raise InputError(message(requirement, f"a {type(given).__name__}"))
    found: dict[str, Kind] = {}
    for name, asked in given.items():
        index = _found(name, names, "shard: plan")
        kind = _kind(asked, requirement, f"{asked!r} for {name!r}")
        if kind is not None:
            found[names[index]] = kind
    return found


def _kind(asked: object, requirement: str, got: str) -> Kind | None:
    """The kind that a plan names; ``None`` for ``"auto"``."""
    if isinstance(asked, str):
        if asked == "auto":
            return None
        for kind in KINDS:
            if asked == kind:
                return kind
        close = difflib.get_close_matches(asked, ("auto", *KINDS), n=1)
        raise InputError(message(requirement, got, f"Use {close[0]!r}" if close else ""))
    raise InputError(message(requirement, got))


def _check_whole(who: str, name: str, value: object, least: int, most: int = _MOST) -> None:
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not least <= value <= most:  # type: ignore[operator]
        limits = f"in [{least}, {most}]" if most < _MOST else f"at least {least}"
        raise InputError(message(f"{who}: {name} must be a whole number, {limits}", repr(value)))


def _check_rank(who: str, rank: object, world: int) -> None:
    _check_whole(who, "world", world, 1, _MOST_RANKS_AT_ALL)
    _check_whole(who, "rank", rank, 0, world - 1)


def _check_length(what: str, value: object) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST:  # type: ignore[operator]
        raise InputError(message(f"{what} must be a number of ids, at least 0", repr(value)))


def _found(name: object, names: Sequence[str], who: str) -> int:
    """The index of a table, by its name or the last word of it."""
    if isinstance(name, str) and name in names:
        return names.index(name)
    short = [n for n, each in enumerate(names) if each.rpartition(".")[2] == name]
    if len(short) == 1:
        return short[0]
    requirement = f"{who}: a table's name must be one of {', '.join(map(repr, names))}"
    raise InputError(message(requirement, repr(name)))
