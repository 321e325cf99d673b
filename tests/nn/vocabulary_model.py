"""The plainest vocabulary: what the documentation says, in dicts and without a thought for speed.

``python -m tests.nn.vocabulary_model --operations 100_000_000`` compares it with the real one for
as long as you like; the tests do so in small.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from typing import Any

import torch

from sparsestep.nn.vocabulary.id_table import IdTable, Options, splitmix64
from tests.nn.plain_ids import PlainIds


class Model:
    """A vocabulary.

    Attributes:
        row_of: the row of each id that has one.
        count: how often the id of a row was seen.
        seen: when it was last.
        candidates: how often ids without a row were seen; the one seen last at the end.
    """

    def __init__(self, options: Options) -> None:
        self.options = options
        self.row_of: dict[int, int] = {}
        self.id_of: dict[int, int] = {}
        self.count: dict[int, int] = {}
        self.seen: dict[int, int] = {}
        self.candidates: dict[int, int] = {}
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
        of_this_call: set[int] = set()
        for each, times in new.items():
            count = times + self.candidates.get(each, 0)
            row = self._row_for(each, now, taken) if count >= self.options.admit else None
            if row is None:
                self._remember(each, count, of_this_call)
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

    def _remember(self, each: int, count: int, of_this_call: set[int]) -> None:
        known = self.candidates.pop(each, None) is not None
        if not known and len(self.candidates) == self.options.candidates:
            oldest = next(iter(self.candidates), None)
            if oldest is None or oldest in of_this_call:
                return
            del self.candidates[oldest]
        self.candidates[each] = count
        of_this_call.add(each)


class Faster(Model):
    """``PlainIds``, for vocabularies too large for the plainest."""

    def __init__(self, options: Options) -> None:
        super().__init__(options)
        self._ids = PlainIds(options)

    def find(self, ids: list[int]) -> list[int]:
        found: list[int] = self._ids.find(torch.tensor(ids, dtype=torch.int64))[0].tolist()
        return found

    def see(self, ids: list[int], now: int) -> list[int]:
        given = torch.tensor(ids, dtype=torch.int64)
        claim = self._ids.claim(given, now)
        self._ids.commit(claim)
        taken: list[int] = claim.taken.tolist()
        return taken


def compare(
    real: IdTable, model: Model, ids: list[int], now: int, *, learns: bool, undone: bool = False
) -> bool:
    """One call of both; whether they agree.

    Args:
        real: of the library.
        model: the plainest.
        ids: what is looked up.
        now: the time.
        learns: whether ids are counted.
        undone: two claims are abandoned before, the second at a later time.
    """
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


def reloaded(real: IdTable, options: Options, now: int) -> IdTable:
    """The same from what it saves."""
    other = IdTable(options)
    assert other.load(real.save(), now)
    return other


def run(operations: int, seed: int) -> None:
    """Compare until so many ids were looked up; raises at the first difference."""
    chance, done = random.Random(seed), 0
    while done < operations:
        rows = chance.choice([2, 5, 40, 300, 3000])
        options = Options(
            rows,
            chance.randint(1, min(3, rows)),
            chance.choice([1, 1, 2, 3, 7]),
            chance.choice([None, "lru", "lfu"]),
        )
        real, now = IdTable(options), 1
        model = Model(options) if rows < 100 else Faster(options)
        pool = [chance.getrandbits(64) - 2**63 for _ in range(chance.choice([2, 3, 10]) * rows)]
        skew = chance.choice([1.0, 2.0, 4.0])
        for _ in range(200):
            size = chance.choice([0, 1, 8, 8, rows // 2, rows])
            ids = [pool[int(len(pool) * chance.random() ** skew)] for _ in range(size)]
            learns, undone = chance.random() < 0.9, chance.random() < 0.1
            if not compare(real, model, ids, now, learns=learns, undone=undone):
                raise AssertionError(f"seed {seed}, {options}, after {done} operations")
            now += chance.random() < 0.7
            done += size
            if chance.random() < 0.01:
                real = reloaded(real, options, now)
        print(f"\r{done:,} operations, no difference", end="", flush=True)
    print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--operations", type=lambda text: int(text.replace("_", "")), default=10**6)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    sys.exit(run(given.operations, given.seed))
