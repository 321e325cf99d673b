"""The benchmarks: every contestant does the same work, and results are kept."""

from __future__ import annotations

import gc
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import custom_rules, training_iterations
from benchmarks.__main__ import main
from benchmarks.harness import figure, limit, race, report, results, workload
from benchmarks.harness.cases import SUITES, Case, Formula, Program, case, formula, program
from benchmarks.harness.contestants import (
    DglSparseAdam,
    FbgemmAdagrad,
    Native,
    OptimizerContestant,
    Reference,
    TorchSparseAdam,
    tensors,
)
from benchmarks.harness.limit import Limit
from benchmarks.harness.results import CaseResult, Refusal, Report
from benchmarks.harness.workload import SETS, Unavailable, Workload
from sparsestep import SparseAdam, _native
from tests.table import VARIANTS, Variant

needs_limit = pytest.mark.skipif(
    _native.ext is None or limit.limit_module is None, reason="make bench builds the limit"
)
TINY = ["--scale", "100000", "--seconds", "0.001", "--threads", "1"]
DECAY = ("weight_decay", "decoupled_weight_decay")  # not part of a rule: the limit has none

# One variant for each rule of the core.
RULES: dict[str, Variant] = {}
for each in VARIANTS:
    without = {name: value for name, value in each.options.items() if name not in DECAY}
    RULES.setdefault(each.rule.name, Variant(each.cls, without))


# The limit


def compare_with_the_limit(made: Workload, variant: Variant) -> None:
    ours = Native(made, variant.cls, **variant.options)
    least = Limit(made, variant.cls, **variant.options)
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
@pytest.mark.parametrize(
    "made",
    [
        case(500, 16, 3000, "zipf"),
        case(10_000, 64, 4096, "half"),
        case(100, 32, 50, "uniform", tables=3),
    ],
    ids=lambda made: made.name,
)
@pytest.mark.parametrize("threads", [1, 2])
def test_the_limit_computes_what_sparsestep_computes(made: Case, threads: int) -> None:
    with race.threads(threads):
        compare_with_the_limit(Workload(made), Variant(SparseAdam, {}))


@needs_limit
@pytest.mark.parametrize("name", RULES)
def test_the_limit_of_every_rule(name: str) -> None:
    compare_with_the_limit(Workload(case(500, 32, 3000, "zipf")), RULES[name])


@needs_limit
def test_every_rule_of_the_core_has_a_limit() -> None:
    assert _native.ext is not None
    assert limit.limit_module is not None
    assert _native.ext.rules().keys() == set(limit.limit_module.rules()) == RULES.keys()


def test_the_schedule_of_the_limit() -> None:
    positions = case(100, 16, 400, "zipf").positions(0)
    slots, offsets, entries, shares = limit.plan(positions, threads=3, rows=3)
    seen = list(dict.fromkeys(positions.tolist()))
    assert slots.tolist() == seen
    for number, (begin, end) in enumerate(pairwise(offsets.tolist())):
        expected = (positions == seen[number]).nonzero().flatten().tolist()
        assert entries[begin:end].tolist() == expected
    weights = [int(offsets[end]) + 3 * end for end in (0, *shares)]
    parts = [after - before for before, after in pairwise(weights)]
    assert shares[-1] == len(seen)
    assert max(parts) - min(parts) <= 2 * (int(offsets.diff().max()) + 3)


@needs_limit
@pytest.mark.parametrize("threads", [1, 3])
def test_the_limit_of_lookups_sums_the_rows_of_bags(threads: int) -> None:
    assert limit.limit_module is not None
    table, ids, sums = torch.randn(50, 64), torch.randint(50, (7, 5)), torch.empty(7, 64)
    limit.limit_module.look_up(limit.addresses(ids, table, sums), 64, 5, 7, threads, 0)
    torch.testing.assert_close(sums, torch.nn.functional.embedding_bag(ids, table, mode="sum"))


@needs_limit
def test_contestants_share_one_table_if_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_OWN_TABLE_BYTES", 100)
    shared = Workload(case(100, 16, 10, "uniform"))
    theirs, ours = TorchSparseAdam(shared), Native(shared)
    reference, least = Reference(shared), Limit(shared)
    assert theirs.params is ours.params is reference.params is least.params
    [(exp_avg, _)] = shared.states["sparse_adam"]
    for contestant in (least, reference, ours):
        before = exp_avg.clone()
        contestant.before(1)
        contestant.step()
        assert not torch.equal(exp_avg, before)


# Cases and the race


@pytest.mark.parametrize("distribution", ["uniform", "zipf", "half", "distinct"])
def test_distributions(distribution: str) -> None:
    made = case(1000, 16, 600, distribution)
    positions = made.positions(seed=3)
    assert 0 <= int(positions.min()) <= int(positions.max()) < 1000
    assert torch.equal(positions, made.positions(seed=3))
    assert not torch.equal(positions, made.positions(seed=4))
    counts = positions.bincount(minlength=1000).sort(descending=True).values
    most = {
        "uniform": range(1, 8),
        "zipf": range(40, 200),
        "half": [300],
        "distinct": [1],
    }
    assert int(counts[0]) in most[distribution]


def test_every_case_can_be_scaled() -> None:
    for each in (each for cases in SUITES.values() for each in cases):
        smaller = each.scaled(1000)
        assert smaller.rows == max(2, int(each.rows / 1000))
        assert smaller.positions(0).shape == (smaller.lookups,)
        assert f"{smaller.lookups:,}" in smaller.name


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
    times = race.race([Recorder(name, calls) for name in "abc"], seconds)
    assert [len(each) for each in times] == [counted] * 3
    assert calls == [
        call
        for number in range(8 + counted)
        for turn, name in enumerate("abc")
        for call in ((name, (number + 3 * turn) % 8), (name, None))
    ]
    assert gc.isenabled()


def test_contestants_that_cannot_take_part(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(1000, 16, 10, "uniform")
    for peer in (FbgemmAdagrad, DglSparseAdam):
        with pytest.raises(Unavailable, match=r"not installed|does not run here"):
            peer(Workload(made))
    monkeypatch.setattr(limit, "limit_module", None)
    with pytest.raises(Unavailable, match=r"run make bench|without the C\+\+ core"):
        Limit(Workload(made))
    free = workload._RESERVE_BYTES + 4 * made.table_bytes
    monkeypatch.setattr(workload, "available_memory", lambda: free)
    result = race.measure(made, "peers", [TorchSparseAdam, Reference], seconds=0.001)
    assert [timing.contestant for timing in result.timings] == [TorchSparseAdam.name]
    assert result.unavailable == [Refusal(Reference.name, "needs 0.0 GB, but only 0.0 GB are free")]


# Results


def made_up(lookups: int = 100) -> CaseResult:
    times = [[0.05 * lookups] * 3, [0.004 * lookups] * 3, [0.003 * lookups] * 3]
    timings = race.timings([TorchSparseAdam.name, Native.name, Limit.name], times)
    skipped = [Refusal("FBGEMM Adagrad", "not installed")]
    return CaseResult("lookups", case(1000, 16, lookups, "uniform"), 1, 90, False, timings, skipped)


def test_json_round_trip() -> None:
    made = results.new_report(scale=2.0, seconds=3.0)
    rule = replace(made_up(), case=SUITES["rules"][0])
    iteration = replace(made_up(), case=SUITES["programs"][0])
    made.cases.extend([made_up(), rule, iteration])
    assert Report.from_json(made.to_json()) == made


def test_published_results_can_be_read() -> None:
    folder = Path(figure.__file__).parents[1] / "results"
    for name in ("peers", "shapes", "lookups", "rows", "peers-with-fbgemm-and-dgl"):
        assert Report.from_json((folder / f"{name}.json").read_text()).cases


def test_the_figure_has_the_same_bytes_for_the_same_results(tmp_path: Path) -> None:
    paths = [tmp_path / "one.svg", tmp_path / "two.svg"]
    for path in paths:
        figure.draw(path, [made_up(2**power) for power in (20, 8, 12)])
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_text().count("stroke-dasharray: ") == 1  # the limit


def test_a_disturbed_machine_has_no_mean(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = made_up(100)
    wide = [replace(each, upper_ms=each.median_ms * 1.4) for each in quiet.timings]
    screen = report.Screen()
    screen.summarise("lookups", [quiet])
    assert re.search(r"geometric mean +12.5x +0.75", capsys.readouterr().out)
    screen.summarise("lookups", [quiet, replace(quiet, timings=wide)])
    shown = capsys.readouterr().out
    assert "geometric" not in shown
    assert "no mean: the machine was disturbed" in shown


# The command


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    arguments = ["--suite", "lookups", "--only", "sparsestep", "--json", str(out)]
    before = torch.get_num_threads()
    assert main([*TINY, *arguments, "--svg", str(svg)]) == 0
    assert torch.get_num_threads() == before
    assert "divided by 100000" in capsys.readouterr().out
    made = Report.from_json(out.read_text())
    assert [result.suite for result in made.cases] == ["lookups"] * 7
    for result in made.cases:
        names = [each.contestant for each in (*result.timings, *result.unavailable)]
        expected = ["limit", "sparsestep", "sparsestep reference", "torch SparseAdam"]
        assert sorted(names) == expected
        assert all(timing.rounds >= 16 for timing in result.timings)
    assert "<svg" in svg.read_text()


def test_an_interrupted_run_keeps_its_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    measure = race.measure

    def interrupt_the_second(*arguments: Any) -> CaseResult:
        if out.exists():
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(race, "measure", interrupt_the_second)
    assert main([*TINY, "--suite", "small", "--json", str(out)]) == 130
    assert len(Report.from_json(out.read_text()).cases) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--suite huge", "it must be one of peers, large, .*, all. Got 'huge'."),
        ("--only jax", "it must be a part of one of these: torch SparseAdam, .*. Got 'jax'."),
        ("--without a --without limit", "must leave a contestant. Got none."),
        ("--svg out.svg", "--svg must come with --suite lookups, which it draws. Got peers."),
    ],
)
def test_bad_options(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main([*TINY, *arguments.split()])
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert re.search(f"benchmarks: error: .*{message}", capsys.readouterr().err)


# Claims


@needs_limit
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("rule", custom_rules.FORMULAS)
def test_all_contestants_of_a_rule_move_alike(rule: str) -> None:
    made = formula(rule, 50, 16, 20, "zipf")
    names, racers, skipped = custom_rules.make_contestants(made, Workload(made))
    assert not skipped
    assert names[:2] == ["sparsestep", "sparsestep.rule"]
    found = []
    for racer in racers[:3]:
        assert isinstance(racer, OptimizerContestant)
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


def test_the_suites_have_every_rule_and_model() -> None:
    rules = {each.rule for each in SUITES["rules"] if isinstance(each, Formula)}
    assert rules == custom_rules.FORMULAS.keys()
    models = {each.kind for each in SUITES["programs"] if isinstance(each, Program)}
    assert models == training_iterations.MODELS.keys()


@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("kind", training_iterations.MODELS)
def test_all_contestants_train_the_same_model(kind: str) -> None:
    tables, length = {"dlrm": (3, 4), "node2vec": (1, 7), "transe": (1, 18)}[kind]
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
