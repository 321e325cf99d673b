"""How the parts of a sharded tensor are stored, and read back by any number of ranks.

Of ``"rows"`` a rank has rows ``rank, rank + world, …``: one column of ``[rows / world, world, …]``.
That is a DTensor that is sharded along dim 1, and read from front to back it is the whole in order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.distributed._table import Table
from sparsestep.distributed.collectives import Wire


def as_stored(table: Table | None, tensor: Tensor, *, copy: bool = False) -> Any:
    """What is stored of a tensor; ``None`` where another rank stores it.

    Args:
        table: whose weight it is, or whose state; ``None`` of a parameter that is not sharded.
        tensor: the part that is here.
        copy: with memory of its own.
    """
    if table is not None and table.kind == "tables" and tensor.dim() and not table.is_here:
        return None
    stored = tensor.detach().clone() if copy else tensor.detach()
    if table is None or not tensor.dim() or table.wire.world == 1 or table.kind != "rows":
        return stored
    return in_columns(table.wire, stored)


def in_columns(wire: Wire, tensor: Tensor) -> Any:
    """What is stored of a tensor that is a column of the whole; all ranks have equally long ones.

    Args:
        wire: the ranks, of which there are several.
        tensor: the part that is here.
    """
    return _distributed(wire, tensor.unsqueeze(1), 1, wire.world)


def _distributed(wire: Wire, local: Tensor, dim: int, size: int) -> Any:
    """A DTensor of which this is the part along a dim, where the whole has that size."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert wire.group is not None
    shape = torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]])
    mesh = DeviceMesh.from_group(wire.group, "cpu")
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
    )


class Wanted(NamedTuple):
    """What is to be read into, and what makes the part that is here of it."""

    target: Any
    finish: Callable[[], Tensor]


class Stored(NamedTuple):
    """What a checkpoint says of a tensor.

    Attributes:
        shape: as it was stored.
        dtype: as it was stored.
        rows: how many it has in all, where it is a table's; 0 otherwise.
        lanes: among how many ranks these were dealt; 0 where they were not.
    """

    shape: torch.Size
    dtype: torch.dtype
    rows: int = 0
    lanes: int = 0

    @property
    def is_dealt(self) -> bool:
        """Whether it was stored in columns, and so has a dim more."""
        return bool(self.lanes and self.shape)


def wanted(table: Table | None, stored: Stored) -> Wanted | None:
    """How a rank reads its part of a tensor; ``None`` where it has none.

    Args:
        table: whose weight or state it is; ``None`` of a parameter that is not sharded.
        stored: what there is to read.
    """
    shape, is_dealt = stored.shape, stored.is_dealt
    if table is not None and not table.is_here:
        return None
    if table is None or not shape or table.kind != "rows" or table.wire.world == 1:
        whole = torch.empty(shape, dtype=stored.dtype)
        return Wanted(whole, lambda: in_order(whole, stored))
    if is_dealt and stored.lanes == table.wire.world:
        return column_of(table.wire, stored)
    # Other numbers of ranks: each reads a block, and they deal them out.
    block = block_of(table.wire, stored)
    return Wanted(block.target, lambda: _dealt(table, block.rows, block.per))


def column_of(wire: Wire, stored: Stored) -> Wanted:
    """How a rank reads its column of what was stored by as many ranks."""
    column = torch.empty(stored.shape[0], 1, *stored.shape[2:], dtype=stored.dtype)
    return Wanted(_distributed(wire, column, 1, wire.world), lambda: column.squeeze(1))


class Block(NamedTuple):
    """Consecutive rows of what was stored, of which each rank reads some.

    Attributes:
        target: what is read into.
        rows: the same, one row of the whole after the other.
        first: which row of the whole is the first.
        per: how many a rank has, but for the last ones.
    """

    target: Any
    rows: Tensor
    first: int
    per: int


def block_of(wire: Wire, stored: Stored) -> Block:
    """How a rank reads its block."""
    shape, lanes = stored.shape, stored.lanes if stored.is_dealt else 1
    per = -(-shape[0] // wire.world)
    count = max(0, min(per, shape[0] - per * wire.rank))
    block = torch.empty(count, *shape[1:], dtype=stored.dtype)
    target = block if wire.world == 1 else _distributed(wire, block, 0, shape[0])
    rows = block.flatten(0, 1) if stored.is_dealt else block
    return Block(target, rows, per * lanes * wire.rank, per * lanes)


def gathered(wire: Wire, block: Block, wanted: Tensor) -> Tensor:
    """Rows of the whole, by their numbers, from the ranks that have read them.

    Args:
        wire: the ranks.
        block: what this one has read.
        wanted: numbers of rows of the whole; zeros are found for those below 0.

    Example:
        >>> stored = Stored(torch.Size([3]), torch.int64)
        >>> block = block_of(Wire(None), stored)
        >>> block.target.copy_(torch.tensor([5, 6, 7]))
        tensor([5, 6, 7])
        >>> gathered(Wire(None), block, torch.tensor([2, -1, 0]))
        tensor([7, 0, 5])
    """
    places = (wanted >= 0).nonzero().squeeze(1)
    numbers, rest = wanted[places], block.rows.shape[1:]
    asked = wire.deal(numbers, numbers // max(1, block.per))
    answers = [[block.rows[each - block.first]] for each in asked.pieces]
    size = rest.numel() * block.rows.dtype.itemsize
    counts = asked.counts
    readers = wire.send(answers, [count * size for count in counts], asked.most * size)
    found = block.rows.new_zeros(len(wanted), *rest)
    for reader, count, order in zip(readers, counts, asked.order.split(counts), strict=True):
        piece = reader.take(count * rest.numel(), found.dtype)
        found[places[order]] = piece.view(count, *rest)
    return found


def in_order(tensor: Tensor, stored: Stored) -> Tensor:
    """The whole, of what was read.

    Example:
        >>> columns = torch.tensor([[0, 1], [2, 0]])
        >>> in_order(columns, Stored(columns.shape, columns.dtype, rows=3, lanes=2))
        tensor([0, 1, 2])
    """
    return tensor.flatten(0, 1)[: stored.rows].clone() if stored.is_dealt else tensor


def _dealt(table: Table, block: Tensor, per: int) -> Tensor:
    """Deal out rows of which each rank has a block of so many; those that belong here."""
    wire, rest = table.wire, block.shape[1:]
    world, rank = wire.world, wire.rank

    def rows_of(source: int, owner: int) -> range:
        begin, end = min(source * per, table.rows), min((source + 1) * per, table.rows)
        return range(begin + (owner - begin) % world, end, world)

    size = block.dtype.itemsize * rest.numel()
    outgoing = []
    for owner in range(world):
        mine = rows_of(rank, owner)
        outgoing.append([block[mine.start - rank * per :: world][: len(mine)].contiguous()])
    counts = [len(rows_of(source, rank)) for source in range(world)]
    largest = max(len(rows_of(a, b)) for a in range(world) for b in range(world)) * size
    readers = wire.send(outgoing, [count * size for count in counts], largest)
    found = block.new_zeros(-(-table.rows // world), *rest)
    begin = 0
    for reader, count in zip(readers, counts, strict=True):
        piece = reader.take(count * rest.numel(), block.dtype)
        found[begin : begin + count] = piece.view(count, *rest)
        begin += count
    return found
