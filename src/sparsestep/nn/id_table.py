"""IdTable: which row each id has, its options, and its snapshots."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

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
    """The options of a vocabulary."""

    rows: int
    shared: int  # the first rows, for ids without a row of their own
    admit: int  # how often an id has to be seen to get a row
    evict: Evict

    @property
    def candidates(self) -> int:
        """The number of ids without a row that are counted: the most recent ones."""
        return self.rows - self.shared if self.admit > 1 else 0


class IdTableSnapshot(NamedTuple):
    """Everything that an IdTable knows."""

    ids: Tensor  # of each row in use
    counts: Tensor  # how often it was seen
    seen: Tensor  # when it was seen last
    candidate_ids: Tensor  # ids that are counted and have no row, the most recent one at the end
    candidate_counts: Tensor
    used: int  # rows, the shared ones included
    candidates: int
    sightings: int  # ids seen since counts were last halved

    @classmethod
    def room(cls, options: Options, used: int, candidates: int, sightings: int) -> IdTableSnapshot:
        """Zeros, to be filled in."""
        sizes = [options.rows] * 3 + [options.candidates] * 2
        zeros = [torch.zeros(size, dtype=torch.int64, device="cpu") for size in sizes]
        return cls._make([*zeros, used, candidates, sightings])


class Claim(NamedTuple):
    """A lookup in training, before it is committed."""

    rows: Tensor  # of each id, a shared one if it has none
    without: int  # the number of ids that had no row before
    taken: Tensor  # rows that go to another id, in order
    number: int  # identifies the claim


class LostClaimError(InputError):
    """There was another call since a claim, which abandoned it."""


_EVICTIONS: tuple[Evict, ...] = (None, "lru", "lfu")


class IdTable:
    """Ids with rows, and ids that are counted until they get one: ``native/core/vocabulary.h``.

    ``find`` changes nothing. ``claim`` counts ids, assigns rows to new ones and evicts others,
    provisionally: it has no effect until ``commit``, and none at all if it is abandoned.

    Example:
        >>> table = IdTable(Options(rows=3, shared=1, admit=1, evict="lru"))
        >>> for now, batch in enumerate(([10**18, -5], [-5, 7]), 1):
        ...     claim = table.claim(torch.tensor(batch), now)
        ...     table.commit(claim)
        ...     print(claim.rows.tolist(), claim.taken.tolist())
        [1, 2] []
        [2, 1] [1]
    """

    def __init__(self, options: Options) -> None:
        if ext is None:
            requirement = "Vocabulary needs the compiled extension of sparsestep"
            remedy = "Install a wheel, or build with a C++ compiler and without SPARSESTEP_PURE=1"
            raise InputError(message(requirement, "an installation without it", remedy))
        self._options = options
        # The row of an id does not depend on the keys, only how long it takes to find it.
        keys = (secrets.randbits(64), secrets.randbits(64))
        self._core = ext.vocabulary(
            options.rows,
            options.shared,
            options.admit,
            options.candidates,
            _EVICTIONS.index(options.evict),
            _FADES_AFTER * options.rows,
            keys,
        )

    @property
    def used(self) -> int:
        """The number of rows in use, the shared ones included."""
        return self._core.sizes()[0]

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""
        return self._core.bytes()

    def find(self, ids: Tensor) -> tuple[Tensor, int]:
        """Return the row of each id, a shared one if it has none, and how many have none."""
        rows = torch.empty_like(ids)
        return rows, self._core.find(ids, rows, torch.get_num_threads())

    def claim(self, ids: Tensor, now: int) -> Claim:
        """Count ids and assign rows to new ones, provisionally; those seen ``now`` keep theirs."""
        rows, taken = torch.empty_like(ids), torch.empty_like(ids)
        threads = torch.get_num_threads()
        without, count, number = self._core.claim(ids, rows, now, taken, threads)
        return Claim(rows, without, taken[:count], number)

    def check(self, claim: Claim) -> None:
        """Raise if there was another call since a claim."""
        if not self._core.is_pending(claim.number):
            requirement = "Vocabulary: init must not use the vocabulary whose rows it initializes"
            raise LostClaimError(message(requirement, "a call from init"))

    def commit(self, claim: Claim) -> None:
        """Make a claim final. Raises, changing nothing, if there was another call since."""
        self.check(claim)
        self._core.commit()

    def save(self) -> IdTableSnapshot:
        """Return a snapshot."""
        saved = IdTableSnapshot.room(self._options, *self._core.sizes())
        self._core.save(*saved[:5])
        return saved

    def load(self, saved: IdTableSnapshot, now: int) -> bool:
        """Replace everything; false, and nothing has changed, if an id occurs twice."""
        return self._core.load(*saved, now)

    def with_rows(self, options: Options, now: int) -> IdTable:
        """Return a copy with more rows."""
        saved, larger = self.save(), IdTable(options)
        room = IdTableSnapshot.room(options, *saved[5:])
        for new, old in zip(room[:5], saved[:5], strict=True):
            new[: len(old)] = old
        larger.load(room, now)
        return larger

    def merged(self, theirs: IdTableSnapshot, now: int) -> tuple[IdTable, Tensor]:
        """Return a copy with the ids of another table, new ones as seen ``now``; and its rows."""
        saved, options, first = self.save(), self._options, self._options.shared
        ids, counts = theirs.ids[first : theirs.used], theirs.counts[first : theirs.used]
        rows, new = self.find(ids)
        if new > options.rows - saved.used:
            requirement = f"Vocabulary.merge: there must be {new} free rows"
            raise InputError(message(requirement, options.rows - saved.used, "Call grow() first"))
        is_new = rows < first
        rows[is_new] = torch.arange(saved.used, saved.used + new, device="cpu")
        saved.ids[rows] = ids
        saved.counts[rows] = (saved.counts[rows] + counts).clamp_(max=2**32 - 1)
        saved.seen[rows[is_new]] = now
        stay = ~torch.isin(saved.candidate_ids, ids)  # others have a row now
        stay[saved.candidates :] = False
        candidates = int(stay.sum())
        for each in (saved.candidate_ids, saved.candidate_counts):
            each[:candidates] = each[stay]
            each[candidates:] = 0
        merged = IdTable(options)
        merged.load(saved._replace(used=saved.used + new, candidates=candidates), now)
        return merged, cat([torch.arange(first, device="cpu"), rows])


_TENSORS = ("ids", "counts", "seen", "candidate_ids", "candidate_counts")
STATE_NAMES: tuple[str, ...] = (*_TENSORS, "numbers")


def pack_state(saved: IdTableSnapshot, now: int, num_reused: int) -> dict[str, Tensor]:
    """Return the entries of a state dict; ``num_reused`` rows have gone to another id."""
    found = {name: getattr(saved, name) for name in _TENSORS}
    numbers = [saved.used, saved.candidates, saved.sightings, now, num_reused]
    return {**found, "numbers": torch.tensor(numbers, dtype=torch.int64, device="cpu")}


def unpack_state(options: Options, found: Mapping[str, Any]) -> tuple[IdTableSnapshot, int, int]:
    """Return the arguments of ``pack_state``. Raises InputError if they do not fit the options."""
    wanted = IdTableSnapshot.room(options, 0, 0, 0)
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
    used, candidates, sightings, now, num_reused = found["numbers"].tolist()
    ids, counts, seen, few, times = (found[name].to("cpu").contiguous() for name in _TENSORS)
    saved = IdTableSnapshot(ids, counts, seen, few, times, used, candidates, sightings)
    requirement = "must be a state_dict() of a Vocabulary"
    if not (
        options.shared <= used <= options.rows
        and 0 <= candidates <= options.candidates
        and 0 <= now < 2**32
        and min(sightings, num_reused) >= 0
    ):
        raise InputError(message(requirement, f"numbers {found['numbers'].tolist()}"))
    if any(bool(((each < 0) | (each >= 2**32)).any()) for each in (counts, seen, times)):
        raise InputError(message(requirement, "counts out of range"))
    known = cat([ids[options.shared : used], few[:candidates]])
    if known.unique().numel() != known.numel():
        raise InputError(message(requirement, "a duplicate id"))
    return saved, now, num_reused
