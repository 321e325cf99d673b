"""Stored tensors and vocabularies, read by any number of ranks.

Of round-robin rows, a rank has rows ``rank, rank + world_size, …``: one column of
``[rows / world_size, world_size, …]``. That is a DTensor sharded along dim 1; read from front to
back, it is the whole table in order.

If another number of ranks loads a vocabulary, each rank reads a block of it and sends the ids to
their new owners. An owner then knows for each of its rows which of the stored ones it continues.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsestep._torch import cat, stack
from sparsestep.distributed._table import ShardedTable
from sparsestep.distributed.collectives import Caught, Collectives
from sparsestep.distributed.placement import hash_owner
from sparsestep.distributed.vocabulary import RANK_SHIFT, Vocabulary
from sparsestep.errors import InputError, message
from sparsestep.nn.grow import Init, initialize_rows
from sparsestep.nn.id_table import STATE_NAMES, IdTableSnapshot, Options, pack_state, unpack_state
from sparsestep.nn.vocabulary import STRINGS
from sparsestep.nn.vocabulary import Vocabulary as LocalVocabulary
from sparsestep.optim.state import fill_value

NEW_ROW = -1  # marks a row that is initialized, not loaded
_PADDING_ROW = -2  # beyond the table: all ranks have equally many
_ROWS = ("ids", "counts", "seen")
_CANDIDATES = ("candidate_ids", "candidate_counts")


# Tensors


class StoredTensor(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    rows: int = 0  # of the whole table; 0: not of a table
    num_columns: int = 0  # ranks that round-robin rows were assigned to; 0: none

    @property
    def has_columns(self) -> bool:
        """Whether it was stored in columns, and so has one more dim."""
        return bool(self.num_columns and self.shape)

    def check(self) -> None:
        """Raise if it does not have the rows of its table."""
        rows, num_columns = self.rows, self.num_columns
        wanted = (-(-rows // num_columns), num_columns) if num_columns else (rows,)
        if self.shape and self.shape[: len(wanted)] != wanted:
            raise ValueError(f"a tensor of shape {tuple(self.shape)} in a table of {rows} rows")


class ReadTarget(NamedTuple):
    """Buffer to load into, and the function that turns it into the local shard."""

    target: Any
    finish: Callable[[], Tensor]
    is_collective: bool = False  # all ranks call `finish` together


def to_stored(table: ShardedTable | None, tensor: Tensor, *, copy: bool = False) -> Any:
    """This rank's part of a weight or its state; ``None`` if another rank stores it."""
    if table is not None and tensor.dim() and not table.has_rows:
        return None
    stored = tensor.detach().clone() if copy else tensor.detach()
    if table is None or not tensor.dim() or table.row_stride == 1:
        return stored
    return column_dtensor(table.collectives, stored)


def column_dtensor(ranks: Collectives, tensor: Tensor) -> Any:
    """This rank's column of a DTensor; all ranks have equally long ones."""
    return _dtensor(ranks, tensor.unsqueeze(1), 1, ranks.world_size)


def _dtensor(ranks: Collectives, local: Tensor, dim: int, size: int) -> Any:
    """A DTensor that is sharded along a dim, of which the whole has that size."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard

    assert ranks.group is not None
    shape = torch.Size([*local.shape[:dim], size, *local.shape[dim + 1 :]])
    mesh = DeviceMesh.from_group(ranks.group, "cpu")
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=shape, stride=stride
    )


def _row_ranks(table: ShardedTable | None) -> Collectives:
    """The ranks that have different rows of a table; this rank alone if it reads all rows."""
    if table is None or table.row_stride == 1:
        return Collectives(None)
    return table.collectives


def read_target(table: ShardedTable | None, stored: StoredTensor) -> ReadTarget:
    """The target of this rank's shard of a tensor, of which it has rows."""
    ranks = _row_ranks(table)
    if not stored.shape or ranks.world_size == 1:
        whole = torch.empty(stored.shape, dtype=stored.dtype)
        return ReadTarget(
            whole,
            lambda: whole.flatten(0, 1)[: stored.rows].clone() if stored.has_columns else whole,
        )
    if stored.num_columns == ranks.world_size:
        return column_target(ranks, stored)
    block = block_target(ranks, stored)
    assert table is not None
    rows = table.rows
    return ReadTarget(
        block.target, lambda: gather_rows(ranks, block, _local_rows(ranks, rows)), True
    )


def column_target(ranks: Collectives, stored: StoredTensor) -> ReadTarget:
    column = torch.empty(stored.shape[0], 1, *stored.shape[2:], dtype=stored.dtype)
    return ReadTarget(_dtensor(ranks, column, 1, ranks.world_size), lambda: column.squeeze(1))


class RowBlock(NamedTuple):
    """Consecutive rows of a stored tensor, which this rank reads."""

    target: Any  # buffer to load into
    rows: Tensor  # the same, one row of the whole after the other
    first: int  # number of the first row
    per_rank: int  # rows of every rank but the last ones


def block_target(ranks: Collectives, stored: StoredTensor) -> RowBlock:
    shape, num_columns = stored.shape, stored.num_columns if stored.has_columns else 1
    per_rank = -(-shape[0] // ranks.world_size)
    count = max(0, min(per_rank, shape[0] - per_rank * ranks.rank))
    block = torch.empty(count, *shape[1:], dtype=stored.dtype)
    target = block if ranks.world_size == 1 else _dtensor(ranks, block, 0, shape[0])
    rows = block.flatten(0, 1) if stored.has_columns else block
    per_rank *= num_columns
    return RowBlock(target, rows, per_rank * ranks.rank, per_rank)


def gather_rows(ranks: Collectives, block: RowBlock, numbers: Tensor) -> Tensor:
    """Rows of the whole, by number, from the ranks that read them; zeros for negative numbers."""
    places = (numbers >= 0).nonzero().squeeze(1)
    wanted, rows = numbers[places], block.rows
    requests = ranks.scatter_rows(wanted, wanted // max(1, block.per_rank))
    received = ranks.exchange_rows(
        lambda: rows[requests.rows - block.first],
        requests.incoming_counts,
        requests.outgoing_counts,
        requests.max_count,
        rows[:0],
    )
    found = rows.new_zeros(len(numbers), *rows.shape[1:])
    found[places[requests.order]] = received
    return found


def _local_rows(ranks: Collectives, rows: int) -> Tensor:
    """The numbers of this rank's rows. All ranks have equally many: some end with a padding row."""
    numbers = torch.full((-(-rows // ranks.world_size),), _PADDING_ROW)
    mine = torch.arange(ranks.rank, rows, ranks.world_size)
    numbers[: len(mine)] = mine
    return numbers


# Ids that get new owners


class VocabularyLayout(NamedTuple):
    rows: int  # in all
    num_columns: int  # ranks that had them
    shared: int  # rows of each rank for ids without a row of their own
    admit: int
    tables: dict[str, int | None]  # its parameters by name, each with the padding row


class VocabularyBlock(NamedTuple):
    """One rank's block of a stored vocabulary."""

    numbers: Tensor  # `numbers` of the state dict, a column for each rank that has saved
    first: int  # number of the first row that was read
    rows: Tensor  # id, count and time of each row from there on
    first_candidate: int  # the same for ids without a row; one of each rank in turn
    candidates: Tensor  # id and count of each


class ReassignedIds(NamedTuple):
    """The ids of this rank after they have got their new owners."""

    saved: IdTableSnapshot  # ids and rows of this rank
    now: int
    seed: int  # of the next new rows
    source: Tensor  # for each row of this rank the stored one that it continues, or NEW_ROW

    @property
    def num_new_rows(self) -> int:
        return int((self.source == NEW_ROW).sum())


def reassign_ids(
    ranks: Collectives, layout: VocabularyLayout, block: VocabularyBlock, options: Options
) -> ReassignedIds:
    """Send ids to their new owners, which assign rows to them.

    Rows are assigned in the order of those that ids had. Counts and ages are kept: time continues
    from that of the rank where it was latest. If an owner has too few rows, ids lose theirs in the
    order in which ``evict`` would take them.
    """
    used, _, sightings, times, seeds = block.numbers
    now = int(times.max())
    entries = _exchange_entries(ranks, layout, block, now)
    with Caught() as caught:
        entries = _evict_overflow(entries, layout, options)
    counts = ranks.check(caught.error, len(entries))
    candidates = _exchange_candidates(ranks, layout, block)
    candidates = candidates[max(0, len(candidates) - options.candidates) :]
    total = int(sightings.sum()) * options.rows // layout.rows
    saved = IdTableSnapshot.room(options, options.shared + len(entries), len(candidates), total)
    mine = slice(options.shared, saved.used)
    saved.ids[mine], saved.counts[mine], saved.seen[mine], rows = entries.unbind(1)
    saved.candidate_ids[: len(candidates)] = candidates[:, 0]
    saved.candidate_counts[: len(candidates)] = candidates[:, 1]
    num_columns = layout.num_columns
    shared = torch.arange(options.shared) * num_columns + ranks.rank % num_columns
    free = _assign_free_rows(ranks, layout, used, counts)
    seed = (ranks.rank << RANK_SHIFT) + int((seeds % (1 << RANK_SHIFT)).max())
    return ReassignedIds(saved, now, seed, cat([shared, rows, free]))


def _exchange_entries(
    ranks: Collectives, layout: VocabularyLayout, block: VocabularyBlock, now: int
) -> Tensor:
    """Id, count, time and stored row of all ids that this rank comes to own, by that row."""
    numbers = torch.arange(block.first, block.first + len(block.rows))
    column, row = numbers % layout.num_columns, numbers // layout.num_columns
    used, times = block.numbers[0], block.numbers[3]
    in_use = (row >= layout.shared) & (row < used[column])
    ids, counts, seen = block.rows[in_use].unbind(1)
    seen = now - (times[column[in_use]] - seen)  # the same age as on its rank
    entries = stack([ids, counts, seen, numbers[in_use]]).t().contiguous()
    return ranks.scatter_rows(entries, hash_owner(ids, ranks.world_size)).rows


def _evict_overflow(entries: Tensor, layout: VocabularyLayout, options: Options) -> Tensor:
    """The entries that get a row: all, or those that ``evict`` would take last."""
    room = options.rows - options.shared
    if len(entries) <= room:
        return entries
    if options.evict is None:
        requirement = (
            f"load: a rank must have a row for each of the {len(entries)} ids that it owns"
        )
        remedy = f"Use evict='lru', or load with {layout.num_columns} ranks and call grow() first"
        raise InputError(message(requirement, f"{room} rows and evict=None", remedy))
    order = entries[:, 2].argsort(stable=True)
    if options.evict == "lfu":
        order = order[entries[order, 1].argsort(stable=True)]
    return entries[order[-room:].sort().values] if room else entries[:0]


def _exchange_candidates(
    ranks: Collectives, layout: VocabularyLayout, block: VocabularyBlock
) -> Tensor:
    """Id and count of ids that are counted without a row, the one seen last at the end.

    Their times are not known, only their order on each rank. So the last ones of all ranks are
    compared with each other, then those before them.
    """
    first, num_columns = block.first_candidate, layout.num_columns
    numbers = torch.arange(first, first + len(block.candidates))
    column, place = numbers % num_columns, numbers // num_columns
    num_later = block.numbers[1][column] - 1 - place
    is_one = num_later >= 0
    ids, counts = block.candidates[is_one].unbind(1)
    order = num_later[is_one] * num_columns + num_columns - 1 - column[is_one]
    entries = stack([ids, counts, order]).t().contiguous()
    found = ranks.scatter_rows(entries, hash_owner(ids, ranks.world_size)).rows
    return found[found[:, 2].argsort(descending=True), :2]


def _assign_free_rows(
    ranks: Collectives, layout: VocabularyLayout, used: Tensor, counts: list[int]
) -> Tensor:
    """For each local row without an id, a stored one that had no id, or ``NEW_ROW``.

    Free rows have the table's initial values. All are numbered, rank by rank, and the local rows
    continue the stored rows with the same numbers.
    """
    world_size, num_columns = ranks.world_size, layout.num_columns
    here = [len(range(rank, layout.rows, world_size)) for rank in range(world_size)]
    room = [rows - layout.shared - n for rows, n in zip(here, counts, strict=True)]
    first = sum(room[: ranks.rank])
    numbers = torch.arange(first, first + room[ranks.rank])
    there = torch.tensor([len(range(n, layout.rows, num_columns)) for n in range(num_columns)])
    ends = (there - used).cumsum(0)
    column = torch.searchsorted(ends, numbers, right=True).clamp_(max=num_columns - 1)
    # From the end of a rank's free rows, so that the number of rows in use is not needed.
    row = there[column] - (ends[column] - numbers)
    return torch.where(numbers < ends[-1], row * num_columns + column, NEW_ROW)


class RowRemap(NamedTuple):
    """How the rows of a table follow the ids of a vocabulary."""

    source: Tensor  # for each row of the vocabulary on this rank, the stored one that it continues
    world_size: int  # ranks that share the vocabulary
    values: Tensor  # of new rows
    padding: int | None  # row of the table that is loaded as it is

    def read_target(
        self, table: ShardedTable | None, stored: StoredTensor, initial: float | None
    ) -> ReadTarget:
        """The target of this rank's shard; ``initial`` fills new rows of state."""
        ranks = _row_ranks(table)
        rows = stored.rows or stored.shape[0]
        block = block_target(ranks, stored)

        def finish() -> Tensor:
            numbers = _local_rows(ranks, rows)
            source = self._source_rows(numbers)
            found = gather_rows(ranks, block, source)
            is_new = (source == NEW_ROW).nonzero().squeeze(1)
            if initial is not None:
                found[source < 0] = torch.tensor(
                    fill_value(found.dtype, initial), dtype=found.dtype
                )
            else:
                index = (self.source == NEW_ROW).cumsum(0) - 1
                found[is_new] = self.values[index[numbers[is_new] // self.world_size]]
            return found

        return ReadTarget(block.target, finish, is_collective=True)

    def _source_rows(self, numbers: Tensor) -> Tensor:
        """The stored row of each row; the same one if the vocabulary does not have it."""
        found, places = numbers.clone(), numbers // self.world_size
        has_id = (numbers >= 0) & (places < len(self.source))
        found[has_id] = self.source[places[has_id]]
        if self.padding is not None:
            found[numbers == self.padding] = self.padding
        return found


# Vocabularies of a model


class ModelVocabulary:
    """A vocabulary of a model: an ordinary one is that of this process alone."""

    def __init__(self, name: str, module: LocalVocabulary | Vocabulary) -> None:
        self.name: str = name
        self.rows: int = module.rows  # in all
        if isinstance(module, Vocabulary):
            self.collectives: Collectives = module.collectives
            self.local: LocalVocabulary = module.local
        else:
            self.collectives = Collectives(None)
            self.local = module
        prefix = join_key(name, "local." if self.local is not module else "")
        # In the state dict.
        self.keys: set[str] = {prefix + field for field in (*STATE_NAMES, STRINGS)}

    def layout(self, tables: dict[str, int | None]) -> VocabularyLayout:
        options, world_size = self.local.options, self.collectives.world_size
        return VocabularyLayout(self.rows, world_size, options.shared, options.admit, tables)

    def entries(self) -> dict[str, Any]:
        local, world_size = self.local, self.collectives.world_size
        max_rows = -(-self.rows // world_size)
        with local.lock:
            found = pack_state(local.id_table.save(), local.now, local.num_reused)
        stored: dict[str, Any] = {}
        for field, tensor in found.items():
            if not tensor.numel():  # ids without a row are not counted
                continue
            if world_size > 1:
                if field != "numbers" and local.rows < max_rows:  # ranks store equally many
                    tensor = cat([tensor, tensor.new_zeros(max_rows - local.rows)])
                tensor = column_dtensor(self.collectives, tensor)
            stored[f"model.{join_key(self.name, field)}"] = tensor
        return stored

    def check(self, layout: VocabularyLayout) -> None:
        options = self.local.options
        ours = (self.rows, options.shared, options.admit > 1)
        if ours != (layout.rows, layout.shared, layout.admit > 1):
            there = f"rows={layout.rows}, shared={layout.shared}, admit={layout.admit}"
            requirement = (
                f"load: the vocabulary {self.name!r} must be that of the checkpoint, {there}"
            )
            got = f"rows={self.rows}, shared={options.shared}, admit={options.admit}"
            raise InputError(message(requirement, got))


def find_vocabularies(model: nn.Module) -> dict[str, ModelVocabulary]:
    found: dict[str, ModelVocabulary] = {}
    parts: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Vocabulary):
            parts.add(join_key(name, "local"))
        if isinstance(module, LocalVocabulary | Vocabulary) and name not in parts:
            found[name] = ModelVocabulary(name, module)
    return found


class VocabularyReader:
    """Reads a vocabulary from a checkpoint, into ``entries`` first; ``reassign`` follows."""

    def __init__(
        self,
        name: str,
        ranks: Collectives,
        options: Options,
        layout: VocabularyLayout,
        stored: Mapping[str, StoredTensor],
    ) -> None:
        self.name: str = name
        self._ranks, self._options, self._layout = ranks, options, layout
        self.is_resharded: bool = layout.num_columns != ranks.world_size
        self._targets: dict[str, ReadTarget] = {}
        self._blocks: dict[str, RowBlock] = {}
        self.entries: dict[str, Any] = {}
        num_columns = layout.num_columns if layout.num_columns > 1 else 0
        for field in STATE_NAMES:
            key = f"model.{join_key(name, field)}"
            if key in stored:
                tensor = stored[key]._replace(num_columns=num_columns)
                self.entries[key] = self._target(field, tensor)
        self.found: tuple[IdTableSnapshot, int, int] | None = None
        self.remaps: dict[str, RowRemap] = {}  # of each table, unless all rows stay on their ranks

    def _target(self, field: str, stored: StoredTensor) -> Any:
        if self.is_resharded and field != "numbers":
            self._blocks[field] = block_target(self._ranks, stored)
            return self._blocks[field].target
        if self.is_resharded or self._ranks.world_size == 1:
            whole = torch.empty(stored.shape, dtype=stored.dtype)
            self._targets[field] = ReadTarget(whole, lambda: whole)
        else:
            self._targets[field] = column_target(self._ranks, stored)
        return self._targets[field].target

    def reassign(
        self,
        weights: Mapping[str, StoredTensor],  # whose rows follow
        inits: Mapping[str, Init],  # of their new rows, if known
        paddings: Mapping[str, int | None],
    ) -> None:
        """Assign ids to their new owners. Collective: if one rank fails, all raise."""
        ids = self._reassigned() if self.is_resharded else None
        with Caught() as caught:
            if ids is None:
                self.found = self._read_same_ranks()
            else:
                written = pack_state(ids.saved, ids.now, ids.seed + ids.num_new_rows)
                self.found = unpack_state(self._options, written)
                for name, stored in weights.items():
                    shape = stored.shape[2 if stored.has_columns else 1 :]
                    rows = torch.empty(ids.num_new_rows, *shape, dtype=stored.dtype)
                    values = initialize_rows(rows, inits.get(name, nn.init.normal_), ids.seed)
                    remap = RowRemap(ids.source, self._ranks.world_size, values, paddings.get(name))
                    self.remaps[name] = remap
        self._ranks.check(caught.error)

    def state_dict(self) -> dict[str, Tensor]:
        assert self.found is not None
        found = pack_state(*self.found)
        return {join_key(self.name, field): tensor for field, tensor in found.items()}

    def _read_same_ranks(self) -> tuple[IdTableSnapshot, int, int]:
        written = pack_state(IdTableSnapshot.room(self._options, 0, 0, 0), 0, 0)
        for field, target in self._targets.items():
            written[field] = target.finish()[: len(written[field])]
        return unpack_state(self._options, written)

    def _reassigned(self) -> ReassignedIds:
        numbers = self._targets["numbers"].finish().view(-1, self._layout.num_columns)
        block = VocabularyBlock(numbers, *self._read_block(_ROWS), *self._read_block(_CANDIDATES))
        return reassign_ids(self._ranks, self._layout, block, self._options)

    def _read_block(self, fields: Sequence[str]) -> tuple[int, Tensor]:
        """The number of the first row that was read, and the fields of each row."""
        blocks = [self._blocks[field] for field in fields if field in self._blocks]
        if not blocks:
            return 0, torch.empty(0, len(fields), dtype=torch.int64)
        return blocks[0].first, stack([block.rows for block in blocks]).T


def join_key(name: str, field: str) -> str:
    return f"{name}.{field}" if name else field
