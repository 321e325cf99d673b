"""The harness of ``python -m benchmarks``: turns, sets, threads."""

from __future__ import annotations

import gc
import math

import pytest
import torch

from benchmarks.__main__ import chosen
from benchmarks.harness import race as harness
from benchmarks.harness.cases import case
from benchmarks.harness.contestants import TorchSparseAdam
from benchmarks.harness.limit import Limit
from benchmarks.harness.results import Timing


class Recorder:
    def __init__(self, name: str, calls: list[tuple[str, int | None]]) -> None:
        self.name, self.calls = name, calls

    def before(self, number: int) -> None:
        assert not gc.isenabled()
        self.calls.append((self.name, number))

    def step(self) -> None:
        self.calls.append((self.name, None))


@pytest.mark.parametrize(("seconds", "counted"), [(1e-9, 16), (1e9, 200)])
def test_contestants_take_turns_and_rotate_the_sets(seconds: float, counted: int) -> None:
    calls: list[tuple[str, int | None]] = []
    done: list[float] = []
    names = ("a", "b", "c")
    times = harness.race([Recorder(name, calls) for name in names], seconds, done.append)
    assert [len(each) for each in times] == [counted] * 3
    assert calls == [
        call
        for number in range(8 + counted)
        for turn, name in enumerate(names)
        for call in ((name, (number + 3 * turn) % 8), (name, None))
    ]
    assert done == sorted(done)
    assert len(done) == 8 + counted
    assert done[7] == 0
    assert done[-1] == 1
    assert gc.isenabled()


def test_a_race_of_so_many_rounds() -> None:
    calls: list[tuple[str, int | None]] = []
    times = harness.race([Recorder("a", calls)], math.inf, most=3)
    assert [len(each) for each in times] == [3]
    assert len(calls) == 2 * (8 + 3)


def test_threads_are_restored() -> None:
    before = torch.get_num_threads()
    made = case(100, 16, 10, "uniform", threads=before + 1)
    result = harness.measure(made, "threads", [TorchSparseAdam], seconds=0.001)
    assert result.threads == before + 1
    assert torch.get_num_threads() == before


def test_timings() -> None:
    names = [TorchSparseAdam.name, Limit.name, "another"]
    found = harness.timings(names, [[8.0, 9.0, 7.0], [1.0, 1.0, 2.0], [4.0, 2.0, 3.0]])
    assert [timing.contestant for timing in found] == [Limit.name, "another", names[0]]
    assert found[1] == Timing("another", 3.0, 2.5, 3.5, 3, 8 / 3, 1 / 3)
    assert found[0].of_limit == 1
    assert found[2].times_torch == 1


def test_chosen() -> None:
    def names(**options: list[str]) -> list[str]:
        return [each.name for each in chosen(**{"only": [], "without": [], **options})]

    assert len(names()) == len(harness.CONTESTANTS) == 8
    assert names(only=["REFER"]) == ["torch SparseAdam", "sparsestep reference", "limit"]
    assert names(only=["fbgemm", "dgl"], without=["torch", "limit"]) == [
        *("FBGEMM Adagrad", "DGL SparseAdam")
    ]
