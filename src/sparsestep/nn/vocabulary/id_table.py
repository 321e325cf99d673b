"""Which row each id has: the interface, and an implementation without the core.

The core (``native_ids``) gives the same rows for the same calls. ``find`` changes nothing.
``claim`` counts ids, assigns rows to new ones and evicts others, provisionally: nobody sees it
until ``commit``, and an abandoned claim is as if it had never been made.
"""

from __future__ import annotations

import heapq
import secrets
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import cat
from sparsestep.errors import InputError, message

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


class Claim(NamedTuple):
    """A lookup in training, before it is committed.

    Attributes:
        rows: the row of each id, a shared one if it has none.
        without: how many ids had no row before.
        taken: rows that go to another id, in order.
        number: identifies the claim.
    """

    rows: Tensor
    without: int
    taken: Tensor
    number: int


class Ids(Protocol):
    """Ids that have rows, and those that are counted until they do."""

    @property
    def used(self) -> int:
        """How many rows are in use, the shared ones included."""
        ...

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """The row of each id, a shared one where it has none, and how many have none."""
        ...

    def claim(self, ids: Tensor, now: int) -> Claim:
        """Count ids and assign rows to new ones, provisionally.

        Args:
            ids: all that were seen, int64 of one dim.
            now: the time. Ids that were seen at this time keep their rows.
        """
        ...

    def commit(self, claim: Claim) -> None:
        """Make a claim final. Raises, changing nothing, if there was another call since."""
        ...

    def save(self) -> Saved:
        """All that is known."""
        ...

    def load(self, saved: Saved, now: int) -> bool:
        """Replace everything; false, and nothing has changed, if an id occurs twice."""
        ...


def check_is_pending(is_pending: bool) -> None:
    """Refuse to commit a claim if the vocabulary was used after it was made."""
    if not is_pending:
        requirement = "Vocabulary: init must not use the vocabulary whose rows it initializes"
        raise InputError(message(requirement, "a call from init"))


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
        """See ``Ids``."""
        shared, found, without = self._options.shared, [], 0
        for each in ids.tolist():
            row = self._row_of.get(each, -1)
            if row < 0:
                without += 1
                row = 0 if shared == 1 else public_hash(each) % shared
            found.append(row)
        return torch.tensor(found, dtype=torch.int64, device="cpu"), without

    def claim(self, ids: Tensor, now: int) -> Claim:
        """See ``Ids``."""
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
        """See ``Ids``."""
        changes = self._pending if claim.number == self._claims else None
        check_is_pending(changes is not None)
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


_EVICTIONS: tuple[Evict, ...] = (None, "lru", "lfu")


def new_ids(options: Options) -> Ids:
    """One that has seen nothing."""
    return PlainIds(options) if ext is None else NativeIds(options)


class NativeIds:
    """In the core: see ``native/core/vocabulary.h``."""

    def __init__(self, options: Options) -> None:
        assert ext is not None
        self._options = options
        # What row an id has does not depend on the keys, only how long it takes to find it.
        keys = (secrets.randbits(64), secrets.randbits(64))
        self._core = ext.vocabulary(
            options.rows,
            options.shared,
            options.admit,
            options.candidates,
            _EVICTIONS.index(options.evict),
            options.fades_after,
            keys,
        )

    @property
    def used(self) -> int:
        """See ``Ids``."""
        return self._core.sizes()[0]

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """See ``Ids``."""
        rows = torch.empty_like(ids)
        return rows, self._core.find(ids, rows, torch.get_num_threads())

    def claim(self, ids: Tensor, now: int) -> Claim:
        """See ``Ids``."""
        rows, taken = torch.empty_like(ids), torch.empty_like(ids)
        threads = torch.get_num_threads()
        without, count, number = self._core.claim(ids, rows, now, taken, threads)
        return Claim(rows, without, taken[:count], number)

    def commit(self, claim: Claim) -> None:
        """See ``Ids``."""
        check_is_pending(self._core.commit(claim.number))

    def save(self) -> Saved:
        """See ``Ids``."""
        saved = Saved.room(self._options, *self._core.sizes())
        self._core.save(*saved[:5])
        return saved

    def load(self, saved: Saved, now: int) -> bool:
        """See ``Ids``."""
        return self._core.load(*saved, now)


_TENSORS = Saved._fields[:5]
NAMES: tuple[str, ...] = (*_TENSORS, "numbers")


def write(saved: Saved, now: int, handed_over: int) -> dict[str, Tensor]:
    """What a checkpoint has.

    Args:
        saved: what is known.
        now: the time.
        handed_over: how many rows have changed hands.
    """
    found = {name: getattr(saved, name) for name in _TENSORS}
    numbers = [saved.used, saved.candidates, saved.sightings, now, handed_over]
    return {**found, "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu")}


def read(options: Options, found: Mapping[str, Any]) -> tuple[Saved, int, int]:
    """What ``write`` has written, for a vocabulary with these options.

    Raises:
        InputError: it is for another one, or nothing that ``write`` has written.
    """
    wanted = Saved.room(options, 0, 0, 0)
    shapes = {name: getattr(wanted, name).shape for name in _TENSORS}
    for name, shape in {**shapes, "numbers": torch.Size([5])}.items():
        tensor = found[name]
        is_fit = isinstance(tensor, Tensor) and tensor.shape == shape
        if not is_fit or tensor.dtype != torch.int64:
            got = type(tensor).__name__
            if isinstance(tensor, Tensor):
                got = f"{tensor.dtype} of shape {tuple(tensor.shape)}"
            requirement = f"{name} must be torch.int64 of shape {tuple(shape)}"
            raise InputError(message(requirement, got, "Make it with the same rows and admit"))
    used, candidates, sightings, now, handed_over = found["numbers"].tolist()
    ids, counts, seen, few, times = (found[name].to("cpu").contiguous() for name in _TENSORS)
    saved = Saved(ids, counts, seen, few, times, used, candidates, sightings)
    requirement = "it must be what state_dict() has written"
    if not (
        options.shared <= used <= options.rows
        and 0 <= candidates <= options.candidates
        and 0 <= now < 2**32
        and min(sightings, handed_over) >= 0
    ):
        raise InputError(message(requirement, f"numbers {found['numbers'].tolist()}"))
    if any(bool(((each < 0) | (each >= 2**32)).any()) for each in (counts, seen, times)):
        raise InputError(message(requirement, "counts that are none"))
    known = cat([ids[options.shared : used], few[:candidates]])
    if known.unique().numel() != known.numel():
        raise InputError(message(requirement, "an id that comes twice"))
    return saved, now, handed_over


def with_room(saved: Saved, options: Options) -> Saved:
    """The same for a vocabulary that has more rows."""
    room = Saved.room(options, saved.used, saved.candidates, saved.sightings)
    for new, old in zip(room[:5], saved[:5], strict=True):
        new[: len(old)] = old
    return room


def merged(saved: Saved, theirs: Saved, options: Options, now: int) -> tuple[Saved, Tensor]:
    """The same with the ids of another vocabulary; also which row each of its rows has here.

    Args:
        saved: what is known.
        theirs: what the other one knows.
        options: of the first.
        now: when ids that are new here count as seen.

    Raises:
        InputError: there are too few free rows.
    """
    first = options.shared
    ids = theirs.ids[first : theirs.used]
    known, order = saved.ids[first : saved.used].sort()
    places = torch.searchsorted(known, ids).clamp_(max=max(0, len(known) - 1))
    is_known = torch.zeros(len(ids), dtype=torch.bool, device="cpu")
    rows = torch.zeros(len(ids), dtype=torch.int64, device="cpu")
    if len(known):
        is_known = known[places] == ids
        rows = order[places] + first
    new = int((~is_known).sum())
    if new > options.rows - saved.used:
        requirement = f"Vocabulary.merge: there must be {new} free rows"
        raise InputError(message(requirement, options.rows - saved.used, "Call grow() first"))
    rows[~is_known] = torch.arange(saved.used, saved.used + new, device="cpu")
    saved.ids[rows] = ids
    saved.counts[rows] = (saved.counts[rows] + theirs.counts[first : theirs.used]).clamp_(
        max=2**32 - 1
    )
    saved.seen[rows[~is_known]] = now
    candidates = _without(saved, ids)
    shared = torch.arange(first, device="cpu")
    return candidates._replace(used=saved.used + new), cat([shared, rows])


def _without(saved: Saved, ids: Tensor) -> Saved:
    """The same without candidates that are among these ids."""
    stay = ~torch.isin(saved.candidate_ids, ids)
    stay[saved.candidates :] = False
    count = int(stay.sum())
    pairs = [torch.zeros_like(saved.candidate_ids) for _ in range(2)]
    for new, old in zip(pairs, (saved.candidate_ids, saved.candidate_counts), strict=True):
        new[:count] = old[stay]
    return saved._replace(candidate_ids=pairs[0], candidate_counts=pairs[1], candidates=count)
