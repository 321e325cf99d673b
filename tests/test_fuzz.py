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
from tests.fuzz.__main__ import Tally, outcomes
from tests.fuzz.cases import Outcome, training
from tests.fuzz.findings import check_refusal
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


def plant(monkeypatch: pytest.MonkeyPatch, *, before: bool) -> None:
    """An optimizer that moves one element too much, before its step or after it."""
    right = RuleOptimizer.step

    def step(self: RuleOptimizer, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        if before and isinstance(first, torch.nn.Parameter) and first.numel():
            first.data.reshape(-1)[:1] += 1
        loss = right(self, closure)
        if not before and first.numel():
            first.data[(0,) * first.dim()] += 1
        return loss

    step.hooked = True  # type: ignore[attr-defined]
    monkeypatch.setattr(RuleOptimizer, "step", step)


def findings(*, garbage: bool) -> set[str]:
    found = set()
    for seed in range(25):
        try:
            training(SeededSource(seed), lambda text: None, by_hand=False, garbage=garbage)
        except FindingError as error:
            found.add(error.kind)
    return found


def test_a_wrong_step_is_found(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, before=False)
    found = findings(garbage=False)
    assert "wrong numbers" in found
    assert "untouched entries changed" in found


def test_half_a_step_is_found(monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch, before=True)
    monkeypatch.setattr(spoiling, "_WAYS", {spoiling.bad_gradient: 1})
    assert "a refusal changed something" in findings(garbage=True)


@pytest.mark.parametrize(
    ("error", "is_fine"),
    [
        (sparsestep.InputError("lr must be at least 0. Got -1."), True),
        (TypeError("__init__() got an unexpected keyword argument 'x'"), True),
        (sparsestep.InputError(""), False),
        (sparsestep.InputError("two\nlines"), False),
        (KeyError("step"), False),
        (TypeError("take(): incompatible function arguments"), False),
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
    while seed == 60:
        pass
    if seed == 70:
        threading.Event().wait()
    return Outcome(seed, "mine", "odd" if seed % 50 == 7 else "")


def test_a_crash_and_a_hang_are_reported_with_their_seeds_and_nothing_is_lost():
    tally = Tally()
    seen = {}
    batches = iter([list(range(50)), list(range(50, 120))])
    for outcome in outcomes(batches, misbehaving, 2, timeout=1):
        tally.add(outcome)
        seen[outcome.seed] = outcome
    assert sorted(seen) == list(range(120))
    assert seen[3].finding == "crash, exit code -6"
    assert seen[60].finding.startswith("hang")
    assert seen[70].finding.startswith("hang")
    assert {seed for seed, each in seen.items() if each.finding == "odd"} == {7, 57, 107}
    assert (tally.cases, tally.kinds["mine"], tally.kinds["process"]) == (120, 117, 3)
    assert "    3 x mine: odd" in tally.report()
