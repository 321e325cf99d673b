"""Choose the placement of tables, and show its cost."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from sparsestep.distributed.placement import (
    MAX_WORLD_SIZE,
    PLACEMENTS,
    ByRow,
    ByTable,
    Placement,
    Replicated,
    check_int,
    check_length,
    check_rank,
)
from sparsestep.distributed.wire import WireFormat
from sparsestep.errors import InputError, message

if TYPE_CHECKING:
    from sparsestep.distributed._table import ShardedTable

# Largest replicated table, summed over ranks: every rank sends its gradient to every other.
_MAX_REPLICATED_BYTES = 256 << 10
# Ranks per table that is whole on one rank: all of them wait for that one.
_MAX_RANKS_PER_TABLE = 8


class TableSize(NamedTuple):
    """A table that has no placement yet."""

    name: str
    rows: int
    dim: int
    item: int  # bytes per element

    @property
    def size(self) -> int:
        """Bytes of the whole table."""
        return self.rows * self.dim * self.item


class Plan:
    """Where each table is; print it for an overview.

    Attributes:
        placements: one for each table.
        world_size: the number of ranks.
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
        table             rows  dim  kind    where        bytes/rank  wire/step  why
        tables.user     100000   16  rows    round-robin      6.4 MB        0 B  your plan
        tables.country     200    8  tables  rank 0           6.4 kB        0 B  single rank
    """

    def __init__(
        self,
        placements: Sequence[Placement],
        world_size: int,
        batch: int = 1024,
        lengths: float | Mapping[str, float] | None = None,
        tables: Sequence[ShardedTable] = (),
    ) -> None:
        given: Any = placements
        if not isinstance(given, Sequence) or not all(isinstance(p, Placement) for p in given):
            requirement = "Plan: placements must be a list of Placement"
            raise InputError(message(requirement, f"a {type(given).__name__}"))
        self.placements: tuple[Placement, ...] = tuple(placements)
        check_int("Plan", "world_size", world_size, 1, MAX_WORLD_SIZE)
        check_int("Plan", "batch", batch, 0)
        self.world_size: int = world_size
        self.batch: int = batch
        self.lengths: dict[str, float] = self._parse_lengths(lengths)
        self._tables: tuple[ShardedTable, ...] = tuple(tables)

    def __getitem__(self, name: str) -> Placement:
        return self.placements[resolve_name(name, [each.name for each in self.placements], "plan")]

    def for_batch(self, batch: int, lengths: float | Mapping[str, float] | None = None) -> Plan:
        """The same plan, with the bytes that are sent for other batches.

        Args:
            batch: the number of bags that each rank looks up in a step.
            lengths: the number of ids of a bag, for all tables or by table name.

        Example:
            >>> plan = Plan([ByRow("user", 1000, 16, 4)], world_size=2)
            >>> plan.bytes_sent_by(0), plan.for_batch(512, 20).bytes_sent_by(0)
            (67584, 88064)
        """
        return Plan(self.placements, self.world_size, batch, lengths, self._tables)

    def _parse_lengths(self, lengths: Any) -> dict[str, float]:
        names = [each.name for each in self.placements]
        if lengths is None:
            return {}
        if not isinstance(lengths, Mapping):
            check_length("Plan: lengths, for all tables or by table name,", lengths)
        found = by_table(lengths, names, "Plan")
        for name, length in found.items():
            check_length(f"Plan: the length for {name!r}", length)
        return found

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
        index = resolve_name(name, [table.name for table in self._tables], "Plan.local")
        table = self._tables[index]
        has_rows = isinstance(tensor, Tensor) and tensor.dim() > 0
        got = len(tensor) if has_rows else f"a {type(tensor).__name__}"
        if got != table.rows:
            requirement = f"Plan.local: a tensor for {table.name!r} must have {table.rows} rows"
            raise InputError(message(requirement, got))
        return table.local_shard(tensor)

    def bytes_on(self, rank: int) -> int:
        """The bytes of all tables on a rank."""
        check_rank("Plan.bytes_on", rank, self.world_size)
        return sum(p.rows_on(rank, self.world_size) * p.dim * p.item for p in self.placements)

    def bytes_sent_by(self, rank: int) -> int:
        """The bytes that a rank sends in a step."""
        check_rank("Plan.bytes_sent_by", rank, self.world_size)
        return sum(
            p.bytes_sent_by(rank, self.world_size, self.batch, self.lengths.get(p.name, 1.0))
            for p in self.placements
        )

    def most_bytes_sent(self) -> int:
        """The bytes that the busiest rank sends in a step.

        Example:
            >>> Plan([ByTable("user", 1000, 16, 4, owner=1)], 3, batch=256).most_bytes_sent()
            32768
        """
        # Ranks that own no whole table all send the same.
        owners = {each.owner for each in self.placements if isinstance(each, ByTable)}
        other = next((rank for rank in range(self.world_size) if rank not in owners), 0)
        return max(self.bytes_sent_by(rank) for rank in {*owners, other})

    def __str__(self) -> str:
        heads = ["table", "rows", "dim", "kind", "where", "bytes/rank", "wire/step", "why"]
        lines = [heads, *(self._table_row(each) for each in self.placements)]
        columns = []
        for n, cells in enumerate(zip(*lines, strict=True)):
            justify = str.rjust if n in (1, 2, 5, 6) else str.ljust
            width = max(map(len, cells))
            columns.append([justify(cell, width) for cell in cells])
        return "\n".join("  ".join(line).rstrip() for line in zip(*columns, strict=True))

    __repr__ = __str__

    def _table_row(self, each: Placement) -> list[str]:
        most = max(each.rows_on(rank, self.world_size) for rank in range(self.world_size))
        wire = each.bytes_per_step(self.world_size, self.batch, self.lengths.get(each.name, 1.0))
        size, sent = format_bytes(most * each.dim * each.item), format_bytes(wire)
        shape = [str(each.rows), str(each.dim)]
        name = each.name or "(the model)"
        return [name, *shape, each.kind, each.describe(), size, sent, each.why]


def format_bytes(size: float) -> str:
    """A number of bytes with its unit."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"


def choose_placements(
    tables: Sequence[TableSize],
    world_size: int,
    plan: str | Mapping[str, str],
    wire: WireFormat | None = None,
) -> list[Placement]:
    """Place tables as the plan says, and by size where it says nothing.

    The rows of a table that is larger than the share of a rank are assigned round-robin. Others
    stay whole, the largest first, each on the rank that has the least; small ones are replicated.
    With many more ranks than such tables, these are assigned by rows as well: all ranks would wait
    for a few.

    Example:
        >>> sizes = [TableSize(n, r, 16, 4) for n, r in (("a", 10**6), ("b", 10**5), ("c", 100))]
        >>> [each.kind for each in choose_placements(sizes, 4, "auto")]
        ['rows', 'tables', 'copy']
    """
    asked = _parse_plan(tables, plan)
    share = sum(each.size for each in tables) / world_size
    chosen = [
        (asked[each.name], "your plan") if each.name in asked else _choose(each, share, world_size)
        for each in tables
    ]
    whole = sum(cls is ByTable for cls, _ in chosen)
    load = [0] * world_size
    placements: dict[int, Placement] = {}
    for index in sorted(range(len(tables)), key=lambda n: -tables[n].size):
        table, (cls, why) = tables[index], chosen[index]
        owner: dict[str, Any] = {}
        if cls is ByTable and world_size > _MAX_RANKS_PER_TABLE * whole and table.name not in asked:
            cls, why = ByRow, "fewer tables than ranks"
        elif cls is ByTable:
            owner["owner"] = load.index(min(load))
            load[owner["owner"]] += table.size
        placements[index] = cls(*table, why=why, wire=wire, **owner)
    return [placements[index] for index in range(len(tables))]


def _choose(table: TableSize, share: float, world_size: int) -> tuple[type[Placement], str]:
    if world_size == 1:
        return ByTable, "single rank"
    if table.size * world_size <= _MAX_REPLICATED_BYTES:
        return Replicated, "small table"
    if table.size > share:
        return ByRow, "larger than a rank's share"
    return ByTable, "fits on one rank"


def _parse_plan(
    tables: Sequence[TableSize], plan: str | Mapping[str, str]
) -> dict[str, type[Placement]]:
    """The placements that a plan names."""
    requirement = (
        "shard: plan must be 'auto', one of tables, rows, copy, or a dict of these by table"
    )
    if not isinstance(plan, str | Mapping):
        raise InputError(message(requirement, f"a {type(plan).__name__}"))
    found = {}
    for name, asked in by_table(plan, [each.name for each in tables], "shard: plan").items():
        if not isinstance(asked, str) or asked not in ("auto", *PLACEMENTS):
            got = repr(asked) if isinstance(plan, str) else f"{asked!r} for {name!r}"
            close = difflib.get_close_matches(str(asked), ("auto", *PLACEMENTS), n=1)
            raise InputError(message(requirement, got, f"Use {close[0]!r}" if close else ""))
        if asked != "auto":
            found[name] = PLACEMENTS[asked]
    return found


def by_table(given: Any, names: Sequence[str], who: str) -> dict[str, Any]:
    """What is given for each table: the same for all of them, or by name."""
    if isinstance(given, Mapping):
        return {names[resolve_name(name, names, who)]: each for name, each in given.items()}
    return dict.fromkeys(names, given)


def resolve_name(name: object, names: Sequence[str], who: str) -> int:
    """The index of a table, by its name or the last part of it."""
    if isinstance(name, str) and name in names:
        return names.index(name)
    short = [n for n, each in enumerate(names) if each.rpartition(".")[2] == name]
    if len(short) == 1:
        return short[0]
    requirement = f"{who}: a table's name must be one of {', '.join(map(repr, names))}"
    raise InputError(message(requirement, repr(name)))
