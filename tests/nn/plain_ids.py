"""IdTable in Python's dicts and lists: the oracle of large vocabularies."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from dataclasses import dataclass

import torch
from torch import Tensor

from sparsestep.nn.vocabulary.id_table import Claim, IdTableSnapshot, Options, splitmix64


@dataclass
class _Changes:
    """What a claim of ``PlainIds`` changes once it is committed.

    Attributes:
        now: the time of the claim.
        sightings: how many ids were seen.
        used: rows in use afterwards.
        counts: the count of each row that was seen.
        ids: the new id of each row that was assigned.
        candidates: the count of each candidate that was seen, in order; ``None`` if it no longer
            is one.
    """

    now: int
    sightings: int
    used: int
    counts: dict[int, int]
    ids: dict[int, int]
    candidates: dict[int, int | None]


class PlainIds:
    """Ids in Python's dicts and lists.

    A claim only collects changes. The queue of rows to evict is the exception: it is rebuilt if a
    claim was abandoned.

    Example:
        >>> ids = PlainIds(Options(rows=3, shared=1, admit=1, evict="lru"))
        >>> for now, batch in enumerate(([10**18, -5], [-5, 7])):
        ...     claim = ids.claim(torch.tensor(batch), now)
        ...     ids.commit(claim)
        ...     print(claim.rows.tolist(), claim.taken.tolist())
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
        # A key for each row, which is at most that of the row by now.
        self._queue: list[tuple[int, int, int]] = []
        self._held: list[tuple[int, int, int]] = []  # of rows seen at this time
        self._latest = -1
        self._claims = 0
        self._pending: _Changes | None = None

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """See ``IdTable``."""
        shared, found, without = self._options.shared, [], 0
        for each in ids.tolist():
            row = self._row_of.get(each, -1)
            if row < 0:
                without += 1
                row = 0 if shared == 1 else splitmix64(each) % shared
            found.append(row)
        return torch.tensor(found, dtype=torch.int64, device="cpu"), without

    def claim(self, ids: Tensor, now: int) -> Claim:
        """See ``IdTable``."""
        if self._pending is not None:
            self._arrange()
        self._claims += 1
        rows, without = self.find(ids)
        changes = _Changes(now, len(ids), self.used, {}, {}, {})
        self._pending = changes
        for row in rows.tolist():
            if row >= self._options.shared:
                changes.counts[row] = changes.counts.get(row, self._counts[row]) + 1
        if now != self._latest:
            self._latest = now
            self._release()
        taken = self._admit(ids.tolist(), rows, changes)
        changed_hands = torch.tensor(taken, dtype=torch.int64, device="cpu")
        return Claim(rows, without, changed_hands, self._claims)

    def _admit(self, listed: list[int], rows: Tensor, changes: _Changes) -> list[int]:
        """Assign rows to new ids, and fill them in; the rows that were taken from others."""
        new: dict[int, int] = {}
        for each in listed:
            if each not in self._row_of:
                new[each] = new.get(each, 0) + 1
        taken: list[int] = []
        assigned: dict[int, int] = {}
        candidates = _Candidates(self._candidates, changes.candidates, self._options.candidates)
        for each, times in new.items():
            count = times + candidates.count_of(each)
            row = self._free_row(changes, taken) if count >= self._options.admit else None
            if row is None:
                candidates.remember(each, count)
                continue
            candidates.remove(each)
            changes.counts[row], changes.ids[row], assigned[each] = count, each, row
        for index, each in enumerate(listed):
            if each in assigned:
                rows[index] = assigned[each]
        return taken

    def commit(self, claim: Claim) -> None:
        """See ``IdTable``."""
        changes = self._pending if claim.number == self._claims else None
        assert changes is not None
        for row, count in changes.counts.items():
            self._counts[row], self._seen[row] = count, changes.now
        for row in changes.ids:
            if row < self.used:
                del self._row_of[self._ids[row]]
        for row, each in changes.ids.items():
            self._ids[row], self._row_of[each] = each, row
            heapq.heappush(self._queue, self._key(row))
        for each, among in changes.candidates.items():
            self._candidates.pop(each, None)
            if among is not None:
                self._candidates[each] = among
        self.used = changes.used
        self._fade(changes.sightings)
        self._pending = None

    def _key(self, row: int, changes: _Changes | None = None) -> tuple[int, int, int]:
        count, seen = self._counts[row], self._seen[row]
        if changes is not None and row in changes.counts:
            count, seen = changes.counts[row], changes.now
        return count if self._options.evict == "lfu" else 0, seen, row

    def _free_row(self, changes: _Changes, taken: list[int]) -> int | None:
        if changes.used < self._options.rows:
            changes.used += 1
            return changes.used - 1
        if self._options.evict is None:
            return None
        while self._queue:
            key = heapq.heappop(self._queue)
            now = self._key(key[2], changes)
            if key != now:
                heapq.heappush(self._queue, now)
            elif now[1] == changes.now:
                self._held.append(key)
            else:
                taken.append(key[2])
                return key[2]
        return None

    def _release(self) -> None:
        for key in self._held:
            heapq.heappush(self._queue, key)
        self._held.clear()

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
        self._pending = None

    def save(self) -> IdTableSnapshot:
        """See ``IdTable``."""
        saved = IdTableSnapshot.room(
            self._options, self.used, len(self._candidates), self._sightings
        )
        found = zip(saved[:3], (self._ids, self._counts, self._seen), strict=True)
        for tensor, numbers in found:
            tensor.copy_(torch.tensor(numbers, dtype=torch.int64, device="cpu"))
        for place, (each, count) in enumerate(self._candidates.items()):
            saved.candidate_ids[place], saved.candidate_counts[place] = each, count
        return saved

    def load(self, saved: IdTableSnapshot, now: int) -> bool:
        """See ``IdTable``."""
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
        self._claims += 1
        self._arrange()
        return True


class _Candidates:
    """Candidates with the changes of a claim.

    Args:
        known: their counts, the one seen last at the end; not changed.
        changed: see ``_Changes``; filled in.
        room: how many there may be.
    """

    def __init__(
        self, known: OrderedDict[int, int], changed: dict[int, int | None], room: int
    ) -> None:
        self._known, self._changed, self._room = known, changed, room
        self._oldest = iter(known)
        self._size = len(known)
        self._of_this_claim = 0

    def count_of(self, each: int) -> int:
        """How often an id was seen; 0 if it is not a candidate."""
        return (self._changed[each] if each in self._changed else self._known.get(each)) or 0

    def remove(self, each: int) -> None:
        """It is no longer one, if it was."""
        if self.count_of(each):
            self._changed[each] = None
            self._size -= 1

    def remember(self, each: int, count: int) -> None:
        """Set a count, in the place of the candidate that was not seen for longest."""
        if not self.count_of(each):
            if self._size == self._room:
                if self._of_this_claim >= self._size:
                    return
                self.remove(next(old for old in self._oldest if old not in self._changed))
            self._size += 1
        self._changed.pop(each, None)
        self._changed[each] = min(count, (1 << 16) - 1)
        self._of_this_claim += 1
