"""Which rank owns which rows of a table, and the bytes that ranks send for it."""

# ruff: noqa: D102 (the base class documents these methods)

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor, nn

from sparsestep.distributed.wire import WireFormat, row_bytes
from sparsestep.errors import InputError, message

PlacementKind: TypeAlias = Literal["tables", "rows", "copy"]
EmbeddingModule: TypeAlias = nn.Embedding | nn.EmbeddingBag

LENGTH_DTYPE = torch.int32  # of the lengths of bags on the wire
# Bags with at least this many ids per rank go to all ranks: with random ids, less than 2 % of the
# parts are empty.
BROADCAST_BAG_FACTOR = 4
# Larger sizes and numbers of ranks are mistakes, and sums over them would take forever.
_MAX_SIZE = 1 << 62
MAX_WORLD_SIZE = 1 << 20


@dataclass(frozen=True)
class Placement(ABC):
    """Where the rows of one table are.

    Attributes:
        name: the name of the table.
        rows: its number of rows.
        dim: the length of a row.
        item: the number of bytes of an element.
        kind: ``"tables"``, ``"rows"`` or ``"copy"``, as in ``shard(plan=...)``.
        why: the reason for this placement.
        wire: how rows are sent, as in ``shard(wire=...)``; copies are always sent unchanged.

    Example:
        >>> Replicated("user", rows=1000, dim=16, item=4).size
        64000
    """

    name: str
    rows: int
    dim: int
    item: int
    why: str = "your plan"
    wire: WireFormat | None = None
    kind: ClassVar[PlacementKind]
    is_sharded: ClassVar[bool] = True  # False: every rank has all rows

    def __post_init__(self) -> None:
        name: object = self.name
        if not isinstance(name, str):
            raise InputError(
                message("Placement: name must be a string", f"a {type(name).__name__}")
            )
        for field, least in (("rows", 0), ("dim", 0), ("item", 1)):
            check_int("Placement", field, getattr(self, field), least)

    @property
    def size(self) -> int:
        """Bytes of the whole table."""
        return self.rows * self.dim * self.item

    @property
    def wire_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return row_bytes(self.wire, self.dim, self.item)

    def rows_on(self, rank: int, world_size: int) -> int:
        """The number of rows on a rank.

        Example:
            >>> table = ByRow("user", rows=10, dim=4, item=4)
            >>> [table.rows_on(rank, 3) for rank in range(3)]
            [4, 3, 3]
        """
        check_rank("Placement.rows_on", rank, world_size)
        return self._rows_on(rank, world_size)

    def bytes_per_step(self, world_size: int, batch: int, length: float = 1.0) -> int:
        """The bytes that a rank sends in a step, on average, if all ids of its batch differ.

        Args:
            world_size: the number of ranks.
            batch: the number of bags that each rank looks up.
            length: the number of ids of every bag.

        Example:
            >>> table = ByTable("user", rows=1000, dim=16, item=4)
            >>> table.bytes_per_step(world_size=2, batch=256)
            16896
        """
        who = "Placement.bytes_per_step"
        check_int(who, "world_size", world_size, 1, MAX_WORLD_SIZE)
        check_int(who, "batch", batch, 0)
        check_length(f"{who}: length", length)
        return self._bytes_per_step(world_size, batch, length)

    def bytes_sent_by(self, rank: int, world_size: int, batch: int, length: float = 1.0) -> int:
        """The bytes that one rank sends in a step; the owner of a whole table sends the most.

        Args:
            rank: the rank.
            world_size: the number of ranks.
            batch: the number of bags that each rank looks up.
            length: the number of ids of a bag.

        Example:
            >>> table = ByTable("user", rows=1000, dim=16, item=4, owner=1)
            >>> [table.bytes_sent_by(rank, world_size=3, batch=256) for rank in range(3)]
            [17408, 32768, 17408]
        """
        who = "Placement.bytes_sent_by"
        check_rank(who, rank, world_size)
        check_int(who, "batch", batch, 0)
        check_length(f"{who}: length", length)
        return self._bytes_sent_by(rank, world_size, batch, length)

    def _bytes_sent_by(self, rank: int, world_size: int, batch: int, length: float) -> int:
        return self._bytes_per_step(world_size, batch, length)

    @abstractmethod
    def _rows_on(self, rank: int, world_size: int) -> int: ...

    @abstractmethod
    def _bytes_per_step(self, world_size: int, batch: int, length: float) -> int: ...

    @abstractmethod
    def describe(self) -> str:
        """Where the rows are, in words."""

    def extra_repr(self) -> str:
        """The placement in the ``repr`` of a sharded module."""
        return f"sharded={self.kind!r}"

    def check_supported(self, module: EmbeddingModule, who: str, world_size: int) -> None:
        """Raise if this placement does not support the options of a module."""
        return

    def has_rows(self, rank: int) -> bool:
        """Whether a rank has rows of the table."""
        return True

    def local_shard(self, whole: Tensor, rank: int, world_size: int) -> Tensor:
        """A rank's part of a tensor that has one entry per row of the table."""
        return whole

    def local_row(self, row: int, rank: int, world_size: int) -> int:
        """The local index of a row on a rank; -1 if another rank owns it."""
        return row if self.has_rows(rank) else -1

    def row_stride(self, world_size: int) -> int:
        """The distance in the table between adjacent rows of a rank."""
        return 1

    def counts_to_owner(self, count: int, world_size: int) -> Tensor:
        """The number of ids, or bags, for each rank if no bag is split."""
        return torch.full((world_size,), count)


@dataclass(frozen=True)
class ByTable(Placement):
    """The whole table on one rank.

    Attributes:
        owner: the rank.
    """

    kind: ClassVar[PlacementKind] = "tables"
    owner: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("Placement", "owner", self.owner, 0)

    def _bytes_sent_by(self, rank: int, world_size: int, batch: int, length: float) -> int:
        rows = batch * self.wire_bytes
        if rank == self.owner:
            return rows * (world_size - 1)
        return rows + round(4 * batch * length)

    def _rows_on(self, rank: int, world_size: int) -> int:
        return self.rows if rank == self.owner else 0

    def _bytes_per_step(self, world_size: int, batch: int, length: float) -> int:
        # Ids and gradients go to the owner, rows come back.
        remote_share = (world_size - 1) / world_size
        return round(remote_share * (4 * batch * length + 2 * batch * self.wire_bytes))

    def describe(self) -> str:
        return f"rank {self.owner}"

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, owner={self.owner}"

    def has_rows(self, rank: int) -> bool:
        return rank == self.owner

    def local_shard(self, whole: Tensor, rank: int, world_size: int) -> Tensor:
        return whole if rank == self.owner else whole.new_empty(0, *whole.shape[1:])

    def counts_to_owner(self, count: int, world_size: int) -> Tensor:
        counts = torch.zeros(world_size, dtype=torch.int64)
        counts[self.owner] = count
        return counts


@dataclass(frozen=True)
class ByRow(Placement):
    """Round-robin rows: row ``i`` is row ``i // world_size`` of rank ``i % world_size``."""

    kind: ClassVar[PlacementKind] = "rows"

    def _rows_on(self, rank: int, world_size: int) -> int:
        return len(range(rank, self.rows, world_size))

    def _bytes_per_step(self, world_size: int, batch: int, length: float) -> int:
        remote_share = (world_size - 1) / world_size
        bags, lengths = float(batch), 0.0
        if length > 1:  # a bag has parts on several ranks
            is_broadcast = length >= BROADCAST_BAG_FACTOR * world_size
            share = 1 if is_broadcast else 1 - (1 - 1 / world_size) ** length
            bags = batch * world_size * share
            lengths = LENGTH_DTYPE.itemsize * bags
        return round(remote_share * (4 * batch * length + lengths + 2 * bags * self.wire_bytes))

    def describe(self) -> str:
        return "round-robin"

    def check_supported(self, module: EmbeddingModule, who: str, world_size: int) -> None:
        if getattr(module, "mode", "sum") == "max":
            requirement = f"{who} has mode='max', for which a bag's rows must be on one rank"
            remedy = "Choose 'tables' or 'copy' for it"
            raise InputError(message(requirement, "'rows'", remedy))

    def local_shard(self, whole: Tensor, rank: int, world_size: int) -> Tensor:
        # All ranks have the same number of rows: on some, the last one is padding.
        shard = whole.new_zeros(-(-len(whole) // world_size), *whole.shape[1:])
        mine = whole[rank::world_size]
        shard[: len(mine)] = mine
        return shard

    def local_row(self, row: int, rank: int, world_size: int) -> int:
        return row // world_size if row % world_size == rank else -1

    def row_stride(self, world_size: int) -> int:
        return world_size


@dataclass(frozen=True)
class Replicated(Placement):
    """The whole table on every rank."""

    kind: ClassVar[PlacementKind] = "copy"
    is_sharded = False

    def _rows_on(self, rank: int, world_size: int) -> int:
        return self.rows

    def _bytes_per_step(self, world_size: int, batch: int, length: float) -> int:
        entries = min(batch * length, self.rows)
        return round(entries * (world_size - 1) * (8 + self.dim * self.item))

    def describe(self) -> str:
        return "every rank"

    def check_supported(self, module: EmbeddingModule, who: str, world_size: int) -> None:
        if world_size == 1:
            return
        if module.max_norm is not None:
            reason = "max_norm, which modifies rows during the lookup: it cannot be copied"
        elif module.scale_grad_by_freq:
            reason = "scale_grad_by_freq, which needs all ranks' ids in one place"
        else:
            return
        raise InputError(
            message(f"{who} has {reason}", "'copy'", "Choose 'tables' or 'rows' for it")
        )


PLACEMENTS: dict[str, type[Placement]] = {each.kind: each for each in (ByTable, ByRow, Replicated)}


def table_label(name: str) -> str:
    """The name of a table in a message; a model that is itself a table has none."""
    return repr(name) if name else "the table"


def check_int(who: str, name: str, value: object, least: int, most: int = _MAX_SIZE) -> None:
    """Raise unless an argument is an integer in a range."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not least <= value <= most:  # type: ignore[operator]
        limits = f"in [{least}, {most}]" if most < _MAX_SIZE else f"at least {least}"
        raise InputError(message(f"{who}: {name} must be a whole number, {limits}", repr(value)))


def check_rank(who: str, rank: object, world_size: int) -> None:
    """Raise unless a rank is in the range of the world size."""
    check_int(who, "world_size", world_size, 1, MAX_WORLD_SIZE)
    check_int(who, "rank", rank, 0, world_size - 1)


def check_length(what: str, value: object) -> None:
    """Raise unless a value is a valid length of bags."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MAX_SIZE:  # type: ignore[operator]
        raise InputError(message(f"{what} must be a number of ids, at least 0", repr(value)))


def hash_owner(ids: Tensor, world_size: int) -> Tensor:
    """The rank that owns each id of a vocabulary: splitmix64 of the id, modulo the ranks."""
    if world_size == 1:
        return torch.zeros_like(ids)
    bits = (ids ^ _shift_right_logical(ids, 30)) * (0xBF58476D1CE4E5B9 - 2**64)
    bits = (bits ^ _shift_right_logical(bits, 27)) * (0x94D049BB133111EB - 2**64)
    return _shift_right_logical(bits ^ _shift_right_logical(bits, 31), 32) % world_size


def _shift_right_logical(bits: Tensor, by: int) -> Tensor:
    return (bits >> by) & ((1 << (64 - by)) - 1)
