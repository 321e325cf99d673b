"""Ids of a checkpoint that get other owners, and which stored rows they bring with them.

A rank that loads knows a part of what was stored. It sends each id to its new owner, which gives it
a row. From then on a rank knows for each of its rows which of the stored ones it continues.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsestep.distributed._packing import owner_of
from sparsestep.distributed._table import Table
from sparsestep.distributed.checkpoint.stored import Stored, Wanted, block_of, gathered
from sparsestep.distributed.collectives import Wire, joined
from sparsestep.distributed.owning import SEED_BITS
from sparsestep.errors import InputError, sentence
from sparsestep.nn.vocabulary.id_table import Options, Saved
from sparsestep.optim.state import in_dtype
from sparsestep.surroundings import stack

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
        contract = f"load: a rank must have a row for each of the {len(entries)} ids that it owns"
        remedy = f"Use evict='lru', or load with {layout.lanes} ranks and call grow() first"
        raise InputError(sentence(contract, f"{room} rows and evict=None", remedy))
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
