"""Which row each id has: what can be asked, and how it is done without the core.

The core (``native_ids``) gives the same rows for the same calls. Lookups change nothing (``find``),
or count ids that have a row while they are at it (``count``), which can be undone. Then others are
counted, get rows and lose them (``admit``), and nothing in that can fail half-way.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

Evict: TypeAlias = Literal["lru", "lfu"] | None

# With "lfu", counts are halved when so many ids were seen for each row.
_FADES_AFTER = 16


@dataclass(frozen=True)
class Options:
    """What a vocabulary is made with.

    Attributes:
        rows: how many there are.
        shared: how many of them, the first ones, are for ids that have none of their own.
        admit: how often an id has to be seen to get one.
        evict: who loses one to a new id when all are taken.
    """

    rows: int
    shared: int
    admit: int
    evict: Evict

    @property
    def candidates(self) -> int:
        """How many ids without a row are counted: of more, those seen last."""
        return self.rows - self.shared if self.admit > 1 else 0

    @property
    def fades_after(self) -> int:
        """How many ids are seen before counts are halved."""
        return _FADES_AFTER * self.rows


class Saved(NamedTuple):
    """All that is known, in tensors.

    Attributes:
        ids: of each row in use.
        counts: how often it was seen.
        seen: when it was last.
        candidate_ids: of those that are counted and have no row, the one seen last at the end.
        candidate_counts: how often each of them was seen.
        used: how many rows are in use, the shared ones included.
        candidates: how many are counted.
        sightings: since counts were last halved.
    """

    ids: Tensor
    counts: Tensor
    seen: Tensor
    candidate_ids: Tensor
    candidate_counts: Tensor
    used: int
    candidates: int
    sightings: int

    @classmethod
    def room(cls, options: Options, used: int, candidates: int, sightings: int) -> Saved:
        """Zeros, to be filled in."""
        ids, counts, seen = (_zeros(options.rows) for _ in range(3))
        candidate_ids, candidate_counts = (_zeros(options.candidates) for _ in range(2))
        return cls(
            *(ids, counts, seen, candidate_ids, candidate_counts), used, candidates, sightings
        )


def _zeros(count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int64, device="cpu")


class Counted(NamedTuple):
    """Ids that were looked up and counted.

    Attributes:
        rows: of each id, a shared one where it has none.
        without: how many have none.
        before: what has to be known to make it undone.
    """

    rows: Tensor
    without: int
    before: Tensor


class Ids(Protocol):
    """Ids that have rows, and those that are counted until they do."""

    @property
    def used(self) -> int:
        """How many rows are in use, the shared ones included."""
        ...

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """The row of each id, a shared one where it has none, and how many have none."""
        ...

    def count(self, ids: Tensor, now: int) -> Counted:
        """Look up ids; those that have a row were seen once more, at this time."""
        ...

    def uncount(self, counted: Counted) -> None:
        """Make that undone; it must have been the last call."""
        ...

    def admit(self, ids: Tensor, counted: Counted, now: int) -> Tensor:
        """Take note of ids that have no row.

        Args:
            ids: all that were seen.
            counted: what ``count`` gave for them; rows that are given to them now are filled in.
            now: the time. Whoever was seen at this time keeps its row.

        Returns:
            Rows that changed hands, in order.
        """
        ...

    def save(self) -> Saved:
        """All that is known."""
        ...

    def load(self, saved: Saved, now: int) -> bool:
        """Replace all that is known; false, and nothing done, where an id comes twice."""
        ...


class PlainIds:
    """In Python's dicts and lists.

    Example:
        >>> ids = PlainIds(Options(rows=3, shared=1, admit=1, evict="lru"))
        >>> for now, batch in enumerate(([10**18, -5], [-5, 7])):
        ...     counted = ids.count(torch.tensor(batch), now)
        ...     taken = ids.admit(torch.tensor(batch), counted, now)
        ...     print(counted.rows.tolist(), taken.tolist())
        [1, 2] []
        [2, 1] [1]
    """

    def __init__(self, options: Options) -> None:
        self._options = options
        self._row_of: dict[int, int] = {}
        self._ids, self._counts, self._seen = ([0] * options.rows for _ in range(3))
        self._candidates: OrderedDict[int, int] = OrderedDict()
        self.used: int = options.shared
        self._sightings = 0
        # A key for each row that may be smaller than what it has by now, but not larger.
        self._queue: list[tuple[int, int, int]] = []
        self._held: list[tuple[int, int, int]] = []  # those that may not lose it at this time
        self._latest = -1

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """See ``Ids``."""
        shared, found, without = self._options.shared, [], 0
        for each in ids.tolist():
            row = self._row_of.get(each, -1)
            if row < 0:
                without += 1
                row = 0 if shared == 1 else public_hash(each) % shared
            found.append(row)
        return torch.tensor(found, dtype=torch.int64, device="cpu"), without

    def count(self, ids: Tensor, now: int) -> Counted:
        """See ``Ids``."""
        rows, without = self.find(ids)
        before = torch.zeros(len(ids), 2, dtype=torch.int64, device="cpu")
        for place, row in enumerate(rows.tolist()):
            if row >= self._options.shared:
                before[place, 0], before[place, 1] = self._counts[row], self._seen[row]
                self._counts[row] += 1
                self._seen[row] = now
        return Counted(rows, without, before)

    def uncount(self, counted: Counted) -> None:
        """See ``Ids``."""
        pairs = list(zip(counted.rows.tolist(), counted.before.tolist(), strict=True))
        for row, before in reversed(pairs):  # an id that comes twice ends with its first
            if row >= self._options.shared:
                self._counts[row], self._seen[row] = before

    def admit(self, ids: Tensor, counted: Counted, now: int) -> Tensor:
        """See ``Ids``."""
        if now != self._latest:
            self._latest = now
            self._release()
        listed, rows = ids.tolist(), counted.rows
        new: dict[int, int] = {}
        for each in listed:
            if each not in self._row_of:
                new[each] = new.get(each, 0) + 1
        taken: list[int] = []
        of_this_call = 0  # candidates
        for each, times in new.items():
            count = times + self._candidates.get(each, 0)
            row = self._free_row(now, taken) if count >= self._options.admit else None
            if row is not None:
                self._candidates.pop(each, None)
                self._ids[row], self._counts[row], self._seen[row] = each, count, now
                self._row_of[each] = row
                heapq.heappush(self._queue, self._key(row))
            elif self._remember(each, count, of_this_call):
                of_this_call += 1
        for place, each in enumerate(listed):
            if each in new and each in self._row_of:
                rows[place] = self._row_of[each]
        self._fade(len(listed))
        return torch.tensor(taken, dtype=torch.int64, device="cpu")

    def _key(self, row: int) -> tuple[int, int, int]:
        count = self._counts[row] if self._options.evict == "lfu" else 0
        return count, self._seen[row], row

    def _free_row(self, now: int, taken: list[int]) -> int | None:
        if self.used < self._options.rows:
            self.used += 1
            return self.used - 1
        if self._options.evict is None:
            return None
        found = None
        while self._queue and found is None:
            key = heapq.heappop(self._queue)
            row = key[2]
            if key != self._key(row):
                heapq.heappush(self._queue, self._key(row))
            elif self._seen[row] == now:
                self._held.append(key)
            else:
                found = row
        if found is not None:
            del self._row_of[self._ids[found]]
            taken.append(found)
        return found

    def _release(self) -> None:
        for key in self._held:
            heapq.heappush(self._queue, key)
        self._held.clear()

    def _remember(self, each: int, count: int, counted: int) -> bool:
        """Count an id in the place of the one that was not seen for longest."""
        if each not in self._candidates and len(self._candidates) == self._options.candidates:
            if counted >= len(self._candidates):
                return False
            self._candidates.popitem(last=False)
        self._candidates[each] = min(count, (1 << 16) - 1)
        self._candidates.move_to_end(each)
        return True

    def _fade(self, sightings: int) -> None:
        self._sightings += sightings
        if self._options.evict == "lfu" and self._sightings >= self._options.fades_after:
            self._counts = [count // 2 for count in self._counts]
            self._sightings = 0
            self._arrange()

    def _arrange(self) -> None:
        self._queue = [self._key(row) for row in range(self._options.shared, self.used)]
        heapq.heapify(self._queue)
        self._held.clear()

    def save(self) -> Saved:
        """See ``Ids``."""
        saved = Saved.room(self._options, self.used, len(self._candidates), self._sightings)
        found = zip(saved[:3], (self._ids, self._counts, self._seen), strict=True)
        for tensor, numbers in found:
            tensor.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        for place, (each, count) in enumerate(self._candidates.items()):
            saved.candidate_ids[place], saved.candidate_counts[place] = each, count
        return saved

    def load(self, saved: Saved, now: int) -> bool:
        """See ``Ids``."""
        ids = saved.ids.tolist()
        row_of = {ids[row]: row for row in range(self._options.shared, saved.used)}
        counted = saved.candidate_counts[: saved.candidates].tolist()
        pairs = zip(saved.candidate_ids[: saved.candidates].tolist(), counted, strict=True)
        candidates = OrderedDict(pairs)
        count = saved.used - self._options.shared + saved.candidates
        if len(row_of.keys() | candidates.keys()) != count:
            return False
        self._row_of, self._ids, self._candidates = row_of, ids, candidates
        self._counts, self._seen = saved.counts.tolist(), saved.seen.tolist()
        self.used, self._sightings = saved.used, saved.sightings
        self._latest = now
        self._arrange()
        return True


def public_hash(number: int) -> int:
    """The finalizer of splitmix64, which decides which of several shared rows an id has.

    Example:
        >>> public_hash(1) == 0x5692161D100B05E5
        True
    """
    bits = number & (1 << 64) - 1
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
    return bits ^ (bits >> 31)
