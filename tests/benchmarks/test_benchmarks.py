"""The benchmarks: every contestant does the same work, and results are kept."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import custom_rules, training_iterations
from benchmarks.__main__ import main
from benchmarks.harness import figure, limit, race, report, workload
from benchmarks.harness.cases import SUITES, case, formula, program
from benchmarks.harness.contestants import (
    DglSparseAdam,
    FbgemmAdagrad,
    Native,
    Reference,
    TorchSparseAdam,
    tensors,
)
from benchmarks.harness.limit import Limit
from benchmarks.harness.results import CaseResult, Refusal, Report
from benchmarks.harness.workload import SETS, Unavailable, Workload
from sparsestep import _native
from tests.table import VARIANTS, Variant

needs_limit = pytest.mark.skipif(
    _native.ext is None or limit.limit_module is None, reason="make bench builds the limit"
)
quiet = pytest.mark.filterwarnings("ignore:Sparse invariant checks")
TINY = ["--scale", "100000", "--seconds", "0.001", "--threads", "1"]
DECAY = ("weight_decay", "decoupled_weight_decay")  # not part of a rule: the limit has none

# One variant for each rule of the core.
RULES: dict[str, Variant] = {}
for each in VARIANTS:
    without = {name: value for name, value in each.options.items() if name not in DECAY}
    RULES.setdefault(each.rule.name, Variant(each.cls, without))


# What is compared


@needs_limit
@pytest.mark.parametrize("name", RULES)
def test_the_limit_computes_what_sparsestep_computes(name: str) -> None:
    assert _native.ext.rules().keys() == set(limit.limit_module.rules()) == RULES.keys()
    variant, made = RULES[name], Workload(case(100, 32, 3000, "zipf", tables=3))
    ours, least = (kind(made, variant.cls, **variant.options) for kind in (Native, Limit))
    with race.threads(2):
        for number in range(SETS):
            for contestant in (ours, least):
                contestant.before(number)
                contestant.step()
    start = workload.fill(torch.empty(made.case.rows, made.case.dim))
    states = tensors(variant.rule, ours.optimizer, ours.params)
    for one, other, expected, state in zip(
        ours.params, least.params, states, least._states, strict=True
    ):
        assert one.data_ptr() != other.data_ptr()
        assert not torch.equal(one, start)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)
        torch.testing.assert_close(expected, state, rtol=1e-5, atol=1e-6)


@needs_limit
def test_the_limit_of_lookups_sums_the_rows_of_bags() -> None:
    table, ids, sums = torch.randn(50, 64), torch.randint(50, (7, 5)), torch.empty(7, 64)
    limit.limit_module.look_up(limit.addresses(ids, table, sums), 64, 5, 7, 3, 0)
    torch.testing.assert_close(sums, torch.nn.functional.embedding_bag(ids, table, mode="sum"))


@needs_limit
@quiet
@pytest.mark.parametrize("rule", custom_rules.FORMULAS)
def test_all_contestants_of_a_rule_move_alike(rule: str) -> None:
    made = formula(rule, 50, 16, 20, "zipf")
    _, racers, skipped = custom_rules.make_contestants(made, Workload(made))
    assert not skipped
    found = []
    for racer in racers[:3]:
        for group in racer.optimizer.param_groups:
            group["lr"] = 0.01
        for number in range(3):
            racer.before(number)
            racer.step()
        found.append(racer.params[0].detach())
    native, custom, theirs = found
    # SparseAdam adds eps elsewhere; the sign of a value near zero may differ.
    assert torch.allclose(native, custom, rtol=1e-5, atol=1e-6)
    assert float((native - theirs).abs().max()) < 1e-3


@quiet
@pytest.mark.parametrize("kind", training_iterations.MODELS)
def test_all_contestants_train_the_same_model(kind: str) -> None:
    shapes = {"node2vec": (1, 7), "transe": (1, 18)}
    tables, length = shapes.get(kind, (3, 4))
    small = program(kind, 60, 8, 40, "zipf", tables, length=length)
    racers = training_iterations.make_contestants(small)
    before = [p.detach().clone() for p in racers[0].model.parameters()]
    for step in range(4):
        for racer in racers:
            racer.before(step)
            racer.step()
    plain, *others = ([p.detach() for p in racer.model.parameters()] for racer in racers)
    assert not any(torch.equal(*pair) for pair in zip(plain, before, strict=True))
    for each in others:
        for ours, theirs in zip(each, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# How it is measured


class Recorder:
    def __init__(self, name: str, calls: list[tuple[str, int | None]]) -> None:
        self.name, self.calls = name, calls

    def before(self, number: int) -> None:
        self.calls.append((self.name, number))

    def step(self) -> None:
        self.calls.append((self.name, None))


def test_contestants_take_turns_and_rotate_the_sets() -> None:
    calls: list[tuple[str, int | None]] = []
    times = race.race([Recorder(name, calls) for name in "abc"], 1e-9)
    assert [len(each) for each in times] == [16] * 3
    assert calls == [
        call
        for number in range(8 + 16)
        for turn, name in enumerate("abc")
        for call in ((name, (number + 3 * turn) % 8), (name, None))
    ]


def test_contestants_that_cannot_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(1000, 16, 10, "uniform")
    monkeypatch.setattr(limit, "limit_module", None)
    for peer in (FbgemmAdagrad, DglSparseAdam, Limit):
        with pytest.raises(Unavailable):
            peer(Workload(made))
    free = workload._RESERVE_BYTES + 4 * made.table_bytes
    monkeypatch.setattr(workload, "available_memory", lambda: free)
    result = race.measure(made, "peers", [TorchSparseAdam, Reference], seconds=0.001)
    assert [timing.contestant for timing in result.timings] == [TorchSparseAdam.name]
    assert [refusal.contestant for refusal in result.unavailable] == [Reference.name]


# Results


def made_up(lookups: int = 100) -> CaseResult:
    times = [[0.05 * lookups] * 3, [0.004 * lookups] * 3, [0.003 * lookups] * 3]
    timings = race.timings([TorchSparseAdam.name, Native.name, Limit.name], times)
    skipped = [Refusal("FBGEMM Adagrad", "not installed")]
    return CaseResult("lookups", case(1000, 16, lookups, "uniform"), 1, 90, False, timings, skipped)


def test_a_disturbed_machine_has_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    calm = made_up(100)
    wide = [replace(each, upper_ms=each.median_ms * 1.4) for each in calm.timings]
    screen = report.Screen()
    screen.summarise("lookups", [calm])
    assert re.search(r"geometric mean +12.5x +0.75", capsys.readouterr().out)
    screen.summarise("lookups", [calm, replace(calm, timings=wide)])
    assert "geometric" not in capsys.readouterr().out


def test_a_tiny_run_and_an_interrupted_one(tmp_path: Path, monkeypatch) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--suite", "lookups", "--only", "sparsestep", "--json", str(out)]
    assert main([*TINY, *arguments, "--svg", str(svg)]) == 0
    made = Report.from_json(out.read_text())
    others = [replace(made.cases[0], case=SUITES[name][0]) for name in ("rules", "programs")]
    more = replace(made, cases=[*made.cases, *others])
    assert Report.from_json(more.to_json()) == more
    published = Path(figure.__file__).parents[1] / "results" / "peers.json"
    assert Report.from_json(published.read_text()).cases
    assert [result.suite for result in made.cases] == ["lookups"] * 7
    for result in made.cases:
        names = [each.contestant for each in (*result.timings, *result.unavailable)]
        expected = ["limit", "sparsestep", "sparsestep reference", "torch SparseAdam"]
        assert sorted(names) == expected
        assert all(timing.rounds >= 16 for timing in result.timings)
    assert "<svg" in svg.read_text()
    part, measure = tmp_path / "part.json", race.measure

    def interrupt_the_second(*arguments):
        if part.exists():
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(race, "measure", interrupt_the_second)
    assert main([*TINY, "--suite", "small", "--json", str(part)]) == 130
    assert len(Report.from_json(part.read_text()).cases) == 1
