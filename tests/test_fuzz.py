"""The fuzzer itself: it finds what is planted, tells it again, and survives it."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.fuzz import cases, spoiling
from tests.fuzz.__main__ import Tally, count
from tests.fuzz.cases import OPERATIONS, Outcome, program
from tests.fuzz.findings import check_refusal
from tests.fuzz.world import World
from tests.generate.source import SeededSource
from tests.oracle import FindingError

pytestmark = pytest.mark.filterwarnings("ignore")  # as in the fuzzer: garbage is warned of


def steps_of(seed: int) -> list[str]:
    told: list[str] = []
    cases.run(seed, told.append)
    return told


def test_a_case_depends_on_its_seed_alone(monkeypatch: pytest.MonkeyPatch):
    # Garbage may end this very process, where the library has a hole.
    monkeypatch.setattr(cases, "KINDS", cases.VALID)
    programs = [steps_of(seed) for seed in range(30)]
    assert [steps_of(seed) for seed in range(30)] == programs
    assert len({program[0].split(",")[0] for program in programs}) == len(cases.VALID)


@pytest.mark.parametrize(
    ("is_late", "expected"),
    [
        (True, {"wrong numbers", "untouched entries changed"}),
        (False, {"a refusal changed something"}),
    ],
)
def test_an_optimizer_that_writes_too_much_is_found(
    is_late: bool, expected: set[str], monkeypatch: pytest.MonkeyPatch
):
    """One element moves after the step, or before it, so that a refused step is half a step."""
    right = RuleOptimizer.step

    def step(self: RuleOptimizer, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        if not is_late and isinstance(first, torch.nn.Parameter) and first.numel():
            first.data.reshape(-1)[:1] += 1
        loss = right(self, closure)
        if is_late and first.numel():
            first.data[(0,) * first.dim()] += 1
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    monkeypatch.setattr(RuleOptimizer, "step", step)
    monkeypatch.setattr(spoiling, "_WAYS", {spoiling.bad_gradient: 1})
    found = set()
    for seed in range(25):
        try:
            world = World(SeededSource(seed), lambda text: None, by_hand=False)
            program(world, OPERATIONS, garbage=not is_late)
        except FindingError as error:
            found.add(error.kind)
    assert found >= expected


@pytest.mark.parametrize(
    ("error", "is_fine"),
    [
        (sparsestep.InputError("lr must be at least 0. Got -1."), True),
        (TypeError("__init__() got an unexpected keyword argument 'x'"), True),
        (sparsestep.InputError(""), False),
        (sparsestep.InputError("two\nlines"), False),
        (KeyError("step"), False),
        (RuntimeError("INTERNAL ASSERT FAILED"), False),
    ],
)
def test_what_a_refusal_is(error: Exception, is_fine: bool):
    if is_fine:
        check_refusal(error, "a test")
        return
    with pytest.raises(FindingError):
        check_refusal(error, "a test")


def misbehaving(seed: int) -> Outcome:
    """Crash, compute for ever, wait for ever, or find something odd."""
    if seed == 3:
        os.abort()
    while seed == 6:
        pass
    if seed == 9:
        threading.Event().wait()
    return Outcome("mine", "odd" if seed % 5 == 2 else "")


def test_a_crash_and_a_hang_are_reported_with_their_seeds_and_nothing_is_lost():
    tally = Tally()
    count(tally, iter([list(range(5)), list(range(5, 12))]), misbehaving, 2, timeout=0.3)
    assert (tally.cases, tally.kinds["mine"], tally.kinds["process"]) == (12, 9, 3)
    assert tally.findings["mine", "odd"] == [2, 7]
    assert tally.findings["process", "crash, exit code -6"] == [3]
    assert tally.findings["process", "hang, more than 0.3 s"] == [6, 9]
    assert "    2 x mine: odd, at 2, 7" in tally.report()
