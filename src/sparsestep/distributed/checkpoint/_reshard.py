"""Vocabularies in checkpoints: a column for each rank, read back by any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn

from sparsestep._torch import cat, stack
from sparsestep.distributed._handshake import Doing
from sparsestep.distributed._packing import owner_of
from sparsestep.distributed._table import Table
from sparsestep.distributed.collectives import Wire, joined
from sparsestep.distributed.vocabulary import SEED_BITS, Vocabulary
from sparsestep.errors import InputError, message
from sparsestep.nn.grow import Init, drawn
from sparsestep.nn.vocabulary import id_table as saving
from sparsestep.nn.vocabulary.attach import Attached
from sparsestep.nn.vocabulary.id_table import Options, Saved
from sparsestep.nn.vocabulary.vocabulary import Vocabulary as LocalVocabulary
from sparsestep.optim.state import in_dtype


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


FRESH = -1  # instead of a stored row: one that begins anew
_NO_ROW = -2  # none of the table's: ranks have equally many

# Told what stands against it and a number; returns the numbers of all ranks, or raises on all.
Agree: TypeAlias = Callable[[Exception | None, int], list[int]]


class Layout(NamedTuple):
    """How a vocabulary was stored.

    Attributes:
        rows: how many there are in all.
        lanes: among how many ranks they were dealt.
        shared: how many of each rank's are for ids without a row of their own.
        admit: how often an id had to be seen.
        tables: the parameters whose rows it gives away, by name, each with the number of the row
            that does not count.
    """

    rows: int
    lanes: int
    shared: int
    admit: int
    tables: dict[str, int | None]


class Part(NamedTuple):
    """What a rank has read of a stored vocabulary.

    Attributes:
        numbers: what ``nn.saving`` has in ``numbers``, a column for each rank that has saved.
        first: the first row that was read, of the whole.
        rows: id, count and time of each row from there on.
        first_candidate: the same for ids that are counted without a row; one of each rank in turn.
        candidates: id and count of each.
    """

    numbers: Tensor
    first: int
    rows: Tensor
    first_candidate: int
    candidates: Tensor


class Moved(NamedTuple):
    """What a rank knows after ids have got their new owners.

    Attributes:
        saved: ids and rows of this rank.
        now: the time.
        seed: of the next rows that begin anew.
        source: for each row of this rank the stored one that it continues, or ``FRESH``.
    """

    saved: Saved
    now: int
    seed: int
    source: Tensor


def moved(wire: Wire, layout: Layout, part: Part, options: Options, agree: Agree) -> Moved:
    """Send ids to their new owners, and give rows to those that come.

    Rows are given in the order of those that ids had. How often ids were seen is kept, and how long
    ago: time goes on from that of the rank where it was latest. Where an owner has too few rows,
    ids lose theirs in the order in which its ``evict`` would take them.

    Args:
        wire: the ranks that load.
        layout: of what was stored.
        part: what this rank has read of it.
        options: of the vocabulary here.
        agree: called before rows are counted.
    """
    used, _, sightings, times, seeds = part.numbers
    now = int(times.max())
    entries = _entries(wire, layout, part, now)
    error: Exception | None = None
    try:
        entries = _kept(entries, layout, options)
    except InputError as raised:
        error = raised
    counts = agree(error, len(entries))
    candidates = _candidates(wire, layout, part)
    candidates = candidates[max(0, len(candidates) - options.candidates) :]
    total = int(sightings.sum()) * options.rows // layout.rows
    saved = Saved.room(options, options.shared + len(entries), len(candidates), total)
    mine = slice(options.shared, saved.used)
    saved.ids[mine], saved.counts[mine], saved.seen[mine], rows = entries.unbind(1)
    saved.candidate_ids[: len(candidates)] = candidates[:, 0]
    saved.candidate_counts[: len(candidates)] = candidates[:, 1]
    shared = torch.arange(options.shared) * layout.lanes + wire.rank % layout.lanes
    free = _free_rows(wire, layout, used, counts)
    seed = (wire.rank << SEED_BITS) + int((seeds % (1 << SEED_BITS)).max())
    return Moved(saved, now, seed, joined([shared, rows, free]))


def _entries(wire: Wire, layout: Layout, part: Part, now: int) -> Tensor:
    """Id, count, time and stored row of all ids that this rank comes to own, by that row."""
    numbers = torch.arange(part.first, part.first + len(part.rows))
    lane, row = numbers % layout.lanes, numbers // layout.lanes
    used, times = part.numbers[0], part.numbers[3]
    in_use = (row >= layout.shared) & (row < used[lane])
    ids, counts, seen = part.rows[in_use].unbind(1)
    seen = now - (times[lane[in_use]] - seen)  # as long ago as it was for its rank
    entries = stack([ids, counts, seen, numbers[in_use]]).t().contiguous()
    return joined(wire.deal(entries, owner_of(ids, wire.world)).pieces)


def _kept(entries: Tensor, layout: Layout, options: Options) -> Tensor:
    """Those that have a row here: all, or the ones that ``evict`` would take last."""
    room = options.rows - options.shared
    if len(entries) <= room:
        return entries
    if options.evict is None:
        requirement = (
            f"load: a rank must have a row for each of the {len(entries)} ids that it owns"
        )
        remedy = f"Use evict='lru', or load with {layout.lanes} ranks and call grow() first"
        raise InputError(message(requirement, f"{room} rows and evict=None", remedy))
    order = entries[:, 2].argsort(stable=True)
    if options.evict == "lfu":
        order = order[entries[order, 1].argsort(stable=True)]
    return entries[order[-room:].sort().values] if room else entries[:0]


def _candidates(wire: Wire, layout: Layout, part: Part) -> Tensor:
    """Id and count of those that are counted without a row, the one seen last at the end.

    When they were seen is not known, only in which order on each rank. So those that came last are
    compared with each other, then those before them.
    """
    numbers = torch.arange(part.first_candidate, part.first_candidate + len(part.candidates))
    lane, place = numbers % layout.lanes, numbers // layout.lanes
    before = part.numbers[1][lane] - 1 - place  # how many came after it
    is_one = before >= 0
    ids, counts = part.candidates[is_one].unbind(1)
    order = before[is_one] * layout.lanes + layout.lanes - 1 - lane[is_one]
    entries = stack([ids, counts, order]).t().contiguous()
    found = joined(wire.deal(entries, owner_of(ids, wire.world)).pieces)
    return found[found[:, 2].argsort(descending=True), :2]


def _free_rows(wire: Wire, layout: Layout, used: Tensor, counts: list[int]) -> Tensor:
    """For each row here that no id has, a stored one that no id had, or ``FRESH``.

    Those have the values that the table was made with. All are numbered, rank by rank, and the rows
    here continue the ones with the same numbers.
    """
    here = [len(range(rank, layout.rows, wire.world)) for rank in range(wire.world)]
    room = [rows - layout.shared - n for rows, n in zip(here, counts, strict=True)]
    first = sum(room[: wire.rank])
    numbers = torch.arange(first, first + room[wire.rank])
    there = [len(range(lane, layout.rows, layout.lanes)) for lane in range(layout.lanes)]
    ends = (torch.tensor(there) - used).cumsum(0)
    lane = torch.searchsorted(ends, numbers, right=True).clamp_(max=layout.lanes - 1)
    # From the end of a rank's free rows, so that the number of those before it is not needed.
    row = torch.tensor(there)[lane] - (ends[lane] - numbers)
    return torch.where(numbers < ends[-1], row * layout.lanes + lane, FRESH)


class Move(NamedTuple):
    """How the rows of a table follow the ids of a vocabulary.

    Attributes:
        source: for each row of the vocabulary that this rank knows, which stored one it continues.
        world: among how many ranks the vocabulary is dealt now; 1 where each has the whole.
        values: the rows that begin anew.
        padding: the row of the table that does not count, and so stays what it is.
    """

    source: Tensor
    world: int
    values: Tensor
    padding: int | None

    def wanted(self, table: Table | None, stored: Stored, initial: float | None) -> Wanted | None:
        """How a rank reads its part of a weight or of its state; ``None`` where it has none.

        Args:
            table: which it is; ``None`` where it is not sharded.
            stored: what there is to read.
            initial: what state begins with; ``None`` for the weight.
        """
        if table is not None and not table.is_here:
            return None
        wire = table.wire if table is not None and table.kind == "rows" else Wire(None)
        rows = stored.rows or stored.shape[0]
        block = block_of(wire, stored)

        def finish() -> Tensor:
            numbers = torch.arange(wire.rank, rows, wire.world)
            source = torch.full((-(-rows // wire.world),), _NO_ROW)
            source[: len(numbers)] = self._stored_rows(numbers)
            found = gathered(wire, block, source)
            fresh = (source == FRESH).nonzero().squeeze(1)
            if initial is not None:
                found[source < 0] = torch.tensor(in_dtype(found.dtype, initial), dtype=found.dtype)
            else:
                which = (self.source == FRESH).cumsum(0) - 1
                found[fresh] = self.values[which[numbers[fresh] // self.world]]
            return found

        return Wanted(block.target, finish)

    def _stored_rows(self, numbers: Tensor) -> Tensor:
        """Which stored row a row continues: where the vocabulary does not know it, the same."""
        found, places = numbers.clone(), numbers // self.world
        known = places < len(self.source)
        found[known] = self.source[places[known]]
        if self.padding is not None:
            found[numbers == self.padding] = self.padding
        return found


_ROWS = ("ids", "counts", "seen")
_CANDIDATES = ("candidate_ids", "candidate_counts")


class Held:
    """A vocabulary of a model.

    Attributes:
        name: in checkpoints.
        wire: the ranks that share it; this process alone where it is an ordinary one.
        rows: how many it has in all.
        local: what this rank knows.
        keys: what its tensors are called in the state dict of the model.
    """

    def __init__(self, name: str, module: LocalVocabulary | Vocabulary) -> None:
        is_shared = isinstance(module, Vocabulary)
        self.name: str = name
        self.wire: Wire = module._wire if isinstance(module, Vocabulary) else Wire(None)
        self.rows: int = module.rows
        self.local: LocalVocabulary = module.local if isinstance(module, Vocabulary) else module
        prefix = _key(name, "local." if is_shared else "")
        self.keys: set[str] = {prefix + field for field in saving.NAMES}
        self._module = module

    @property
    def attached(self) -> Sequence[Attached]:
        """The tables whose rows it gives away."""
        return self.local._attached

    def layout(self, tables: dict[str, int | None]) -> Layout:
        """How it is stored.

        Args:
            tables: the names of what it gives rows of, with the row that does not count.
        """
        options = self.local._options
        return Layout(self.rows, self.wire.world, options.shared, options.admit, tables)

    def entries(self) -> dict[str, Any]:
        """What this rank stores, by name."""
        local, longest = self.local, -(-self.rows // self.wire.world)
        with local._lock:
            found = saving.write(local._ids.save(), local._now, local._handed_over)
        stored: dict[str, Any] = {}
        for field, tensor in found.items():
            if not tensor.numel():  # nobody counts ids without a row
                continue
            if self.wire.world > 1:
                if field != "numbers" and local.rows < longest:  # ranks store equally many
                    tensor = cat([tensor, tensor.new_zeros(longest - local.rows)])
                tensor = in_columns(self.wire, tensor)
            stored[f"model.{_key(self.name, field)}"] = tensor
        return stored

    def agree(self, error: Exception | None, number: int) -> list[int]:
        """Raise on all ranks where one refuses; the numbers of all."""
        module = self._module
        if not isinstance(module, Vocabulary):
            return alone(error, number)
        counts = torch.full((self.wire.world,), number)
        lines = module._exchange.begin(Doing.LOAD, module._table, counts, error)
        return [room[0] for room in lines.room]

    def check(self, layout: Layout) -> None:
        """Refuse what was stored of another vocabulary."""
        options = self.local._options
        ours = (self.rows, options.shared, options.admit > 1)
        if ours != (layout.rows, layout.shared, layout.admit > 1):
            there = f"rows={layout.rows}, shared={layout.shared}, admit={layout.admit}"
            requirement = (
                f"load: the vocabulary {self.name!r} must be that of the checkpoint, {there}"
            )
            got = f"rows={self.rows}, shared={options.shared}, admit={options.admit}"
            raise InputError(message(requirement, got))


def held_by(model: nn.Module) -> dict[str, Held]:
    """The vocabularies of a model, by name."""
    found: dict[str, Held] = {}
    parts: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Vocabulary):
            parts.add(_key(name, "local"))
        if isinstance(module, LocalVocabulary | Vocabulary) and name not in parts:
            found[name] = Held(name, module)
    return found


def alone(error: Exception | None, number: int) -> list[int]:
    """The agreement of one process."""
    if error is not None:
        raise error
    return [number]


class Restoring:
    """A vocabulary that is read from a checkpoint.

    Attributes:
        name: of the vocabulary.
        entries: what is to be read into; then ``settle`` knows what it was.
        found: what the vocabulary is to become.
        moves: for each table how its rows follow; empty where all rows stay where they are.
    """

    def __init__(
        self,
        name: str,
        wire: Wire,
        options: Options,
        layout: Layout,
        stored: Mapping[str, Stored],
        agree: Agree,
    ) -> None:
        self.name: str = name
        self._wire, self._options, self._layout, self._agree = wire, options, layout, agree
        self.is_moved: bool = layout.lanes != wire.world
        self._wanted: dict[str, Wanted] = {}
        self._blocks: dict[str, Block] = {}
        self.entries: dict[str, Any] = {}
        for field in saving.NAMES:
            key = f"model.{_key(name, field)}"
            if key in stored:
                lanes = layout.lanes if layout.lanes > 1 else 0
                self.entries[key] = self._target(field, stored[key]._replace(lanes=lanes))
        self.found: tuple[Saved, int, int] | None = None
        self.moves: dict[str, Move] = {}

    def _target(self, field: str, stored: Stored) -> Any:
        if self.is_moved and field != "numbers":
            self._blocks[field] = block_of(self._wire, stored)
            return self._blocks[field].target
        if self.is_moved or self._wire.world == 1:
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            self._wanted[field] = Wanted(whole, lambda: whole)
        else:
            self._wanted[field] = column_of(self._wire, stored)
        return self._wanted[field].target

    def settle(
        self,
        weights: Mapping[str, Stored],
        inits: Mapping[str, Init],
        paddings: Mapping[str, int | None],
    ) -> None:
        """Find out who owns what; all ranks do so together, and all raise where one refuses.

        Args:
            weights: the tables whose rows follow.
            inits: how rows of these begin, where it is known.
            paddings: which of their rows do not count.
        """
        error: Exception | None = None
        moved_to = self._moved() if self.is_moved else None
        try:
            self.found = self._as_it_was() if moved_to is None else self._become(moved_to)
            for name, stored in weights.items() if moved_to is not None else ():
                assert moved_to is not None
                init = inits.get(name, nn.init.normal_)
                values = self._fresh(moved_to, stored, init)
                source, world = moved_to.source, self._wire.world
                self.moves[name] = Move(source, world, values, paddings.get(name))
        except Exception as raised:
            error = raised
        self._agree(error, 0)

    def state_dict(self) -> dict[str, Tensor]:
        """What an ordinary vocabulary loads."""
        assert self.found is not None
        found = saving.write(*self.found)
        return {_key(self.name, field): tensor for field, tensor in found.items()}

    def _as_it_was(self) -> tuple[Saved, int, int]:
        room = saving.write(Saved.room(self._options, 0, 0, 0), 0, 0)
        for field, wanted in self._wanted.items():
            room[field] = wanted.finish()[: len(room[field])]
        return saving.read(self._options, room)

    def _become(self, moved_to: Moved) -> tuple[Saved, int, int]:
        handed_over = moved_to.seed + int((moved_to.source == FRESH).sum())
        found = saving.write(moved_to.saved, moved_to.now, handed_over)
        return saving.read(self._options, found)

    def _moved(self) -> Moved:
        numbers = self._wanted["numbers"].finish().view(-1, self._layout.lanes)
        first, rows = self._columns(_ROWS)
        first_candidate, candidates = self._columns(_CANDIDATES)
        part = Part(numbers, first, rows, first_candidate, candidates)
        return moved(self._wire, self._layout, part, self._options, self._agree)

    def _columns(self, fields: Sequence[str]) -> tuple[int, Tensor]:
        """The number of the first row that was read, and what was read of each row."""
        blocks = [self._blocks[field] for field in fields if field in self._blocks]
        if not blocks:
            return 0, torch.empty(0, len(fields), dtype=torch.int64)
        return blocks[0].first, stack([block.rows for block in blocks]).T

    @staticmethod
    def _fresh(moved_to: Moved, stored: Stored, init: Init) -> Tensor:
        count = int((moved_to.source == FRESH).sum())
        rest = stored.shape[2 if stored.is_dealt else 1 :]
        return drawn(torch.empty(count, *rest, dtype=stored.dtype), init, moved_to.seed)


def _key(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
