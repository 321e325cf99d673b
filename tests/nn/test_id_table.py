"""The id table of the core, against the plainest one: dicts, and no thought for speed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from sparsestep.nn.id_table import IdTable, Options


def splitmix64(number: int) -> int:
    """The finalizer of splitmix64, which spreads ids over shared rows, and n-grams over all."""
    bits = number & (1 << 64) - 1
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & (1 << 64) - 1
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & (1 << 64) - 1
    return bits ^ (bits >> 31)


class Model:
    """A vocabulary."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.row_of: dict[int, int] = {}
        self.id_of: dict[int, int] = {}
        self.count: dict[int, int] = {}  # how often the id of a row was seen
        self.seen: dict[int, int] = {}  # when it was seen last
        self.candidates: dict[int, int] = {}  # how often ids without a row were seen, in order
        self.sightings = 0

    def find(self, ids: list[int]) -> list[int]:
        shared = self.options.shared
        return [
            self.row_of[each] if each in self.row_of else splitmix64(each) % shared for each in ids
        ]

    def see(self, ids: list[int], now: int) -> list[int]:
        """Take note of ids; which rows changed hands."""
        taken: list[int] = []
        new: Counter[int] = Counter()
        for each in ids:
            if each in self.row_of:
                self.count[self.row_of[each]] += 1
                self.seen[self.row_of[each]] = now
            else:
                new[each] += 1
        seen_now: set[int] = set()
        for each, times in new.items():
            count = times + self.candidates.get(each, 0)
            row = self._row_for(each, now, taken) if count >= self.options.admit else None
            if row is None:
                self._remember(each, count, seen_now)
                continue
            self.candidates.pop(each, None)
            self.row_of[each], self.id_of[row] = row, each
            self.count[row], self.seen[row] = count, now
        self.sightings += len(ids)
        if self.options.evict == "lfu" and self.sightings >= 16 * self.options.rows:
            self.count = {row: count // 2 for row, count in self.count.items()}
            self.sightings = 0
        return taken

    def _row_for(self, each: int, now: int, taken: list[int]) -> int | None:
        used = self.options.shared + len(self.row_of)
        if used < self.options.rows:
            return used
        if self.options.evict is None:
            return None
        idle = [row for row in self.seen if self.seen[row] != now]
        if not idle:
            return None
        row = min(idle, key=self._rank)
        del self.row_of[self.id_of[row]]
        taken.append(row)
        return row

    def _rank(self, row: int) -> tuple[int, int, int]:
        count = self.count[row] if self.options.evict == "lfu" else 0
        return count, self.seen[row], row

    def _remember(self, each: int, count: int, seen_now: set[int]) -> None:
        known = self.candidates.pop(each, None) is not None
        if not known and len(self.candidates) == self.options.candidates:
            oldest = next(iter(self.candidates), None)
            if oldest is None or oldest in seen_now:
                return
            del self.candidates[oldest]
        self.candidates[each] = count
        seen_now.add(each)


def compare(
    real: IdTable, model: Model, ids: list[int], now: int, *, learns: bool, undone: bool = False
) -> bool:
    """Whether both agree on a call; ``undone``: after two claims that are abandoned."""
    given = torch.tensor(ids, dtype=torch.int64)
    rows, without = real.find(given)
    expected = model.find(ids)
    if rows.tolist() != expected or without != sum(row < model.options.shared for row in expected):
        return False
    if not learns:
        return True
    if undone:
        was = real.save()
        real.claim(given, now)
        real.claim(given, now + 1)
        if not all(map(_equal, was, real.save())) or real.find(given)[0].tolist() != expected:
            return False
    claim = real.claim(given, now)
    real.commit(claim)
    if claim.without != without or claim.taken.tolist() != model.see(ids, now):
        return False
    return claim.rows.tolist() == model.find(ids)


def _equal(left: Any, right: Any) -> bool:
    return torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


few_ids = st.sampled_from([0, 1, -1, 2**63 - 1, -(2**63), *range(100, 118)])


class AgainstTheModel(RuleBasedStateMachine):
    """Calls, steps, lookups that change nothing, checkpoints."""

    @initialize(
        rows=st.integers(1, 9),
        shared=st.integers(1, 3),
        admit=st.integers(1, 4),
        evict=st.sampled_from([None, "lru", "lfu"]),
    )
    def begin(self, rows: int, shared: int, admit: int, evict: Any):
        self.options = Options(rows, min(rows, shared), admit, evict)
        self.model = Model(self.options)
        self.real = IdTable(self.options)
        self.now = 1

    @rule(
        ids=st.lists(few_ids, max_size=14),
        learns=st.booleans(),
        undone=st.booleans(),
        steps=st.booleans(),
    )
    def look_up(self, ids: list[int], learns: bool, undone: bool, steps: bool):
        assert compare(self.real, self.model, ids, self.now, learns=learns, undone=undone)
        self.now += steps

    @rule()
    def save_and_load(self):
        saved, self.real = self.real.save(), IdTable(self.options)
        assert self.real.load(saved, self.now)

    @invariant()
    def all_is_saved(self):
        if not hasattr(self, "model"):
            return
        first, model = self.options.shared, self.model
        real = self.real
        saved = real.save()
        assert saved.used == real.used == first + len(model.row_of)
        found = {int(saved.ids[row]): row for row in range(first, saved.used)}
        assert found == model.row_of
        counts = saved.counts[first : saved.used].tolist()
        assert counts == [model.count[row] for row in range(first, saved.used)]
        pairs = torch.stack([saved.candidate_ids, saved.candidate_counts], dim=1)
        assert pairs[: saved.candidates].tolist() == list(map(list, model.candidates.items()))


TestAgainstTheModel = AgainstTheModel.TestCase
TestAgainstTheModel.settings = settings(max_examples=25, stateful_step_count=25)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_many_at_once_are_the_same_for_any_number_of_threads(threads: int):
    torch.set_num_threads(threads)
    options = Options(40_000, 1, 1, "lru")
    ids = torch.randperm(50_000, generator=torch.Generator().manual_seed(3)) * 2**40
    real = IdTable(options)
    claim = real.claim(ids, 1)
    assert claim.without == len(ids)
    real.commit(claim)
    rows = claim.rows
    assert rows.tolist() == [*range(1, 40_000), *(10_001 * [0])]
    again, without = real.find(ids)
    assert without == 10_001
    assert torch.equal(again, rows)
    before, both = real.save(), ids[:30_000].repeat(2)
    real.claim(both, 2)  # abandoned
    assert all(map(_equal, real.save(), before))
    real.commit(real.claim(both, 2))
    assert real.save().counts[rows[:30_000]].unique().tolist()[-1] == 3
