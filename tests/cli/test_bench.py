from __future__ import annotations

import gc
import json
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsestep.cli import main
from sparsestep.cli.bench import chosen, harness, limit, picture, results, screen, workload
from sparsestep.cli.bench.cases import SUITES, Case, case
from sparsestep.cli.bench.contestants import Native, Reference, TorchDenseAdam, TorchSparseAdam
from sparsestep.cli.bench.limit import Limit
from sparsestep.cli.bench.peers import DglSparseAdam, FbgemmAdagrad
from sparsestep.cli.bench.results import CaseResult, Refusal, Report, Timing
from sparsestep.cli.bench.workload import SETS, Unavailable, Workload
from sparsestep.engines import native

needs_core = pytest.mark.skipif(native.core is None, reason="installed without the C++ core")

TINY = ["bench", "--scale", "100000", "--seconds", "0.001", "--threads", "1"]


# Cases


@pytest.mark.parametrize("distribution", ["uniform", "zipf", "half", "distinct"])
def test_positions(distribution: str) -> None:
    made = case(1000, 16, 600, distribution)
    positions = made.positions(seed=3)
    assert positions.dtype == torch.int64
    assert positions.shape == (600,)
    assert 0 <= int(positions.min()) <= int(positions.max()) < 1000
    assert torch.equal(positions, made.positions(seed=3))
    assert not torch.equal(positions, made.positions(seed=4))


def test_uniform_lookups_are_spread_evenly() -> None:
    counts = case(10, 16, 10_000, "uniform").positions(seed=0).bincount(minlength=10)
    assert counts.min() > 850
    assert counts.max() < 1150


def test_zipf_lookups_are_skewed_and_scattered() -> None:
    made = case(10_000, 16, 50_000, "zipf")
    popular = made.positions(seed=0).bincount(minlength=10_000).topk(100)
    weights = torch.arange(1.0, 10_001, dtype=torch.float64) ** -1.05
    expected = 50_000 * weights / weights.sum()
    assert popular.values[0] == pytest.approx(float(expected[0]), rel=0.05)
    assert popular.values.sum() == pytest.approx(float(expected[:100].sum()), rel=0.05)
    assert popular.indices.double().std() > 2000  # not all at one end of the table
    # Another batch has the same popular rows.
    other = made.positions(seed=1).bincount(minlength=10_000).topk(100)
    assert torch.equal(popular.indices[:3], other.indices[:3])


@pytest.mark.parametrize("lookups", [1, 2, 1000, 1001])
def test_half_has_exactly_half(lookups: int) -> None:
    counts = case(50, 16, lookups, "half").positions(seed=0).bincount(minlength=50)
    assert counts[25] == lookups // 2
    assert counts.sum() == lookups


def test_distinct_rows_are_distinct() -> None:
    positions = case(1000, 16, 450, "distinct").positions(seed=0)
    assert len(positions.unique()) == 450


def test_suites() -> None:
    assert list(SUITES) == [
        *("peers", "large", "small", "lookups", "rows", "density", "skew", "threads")
    ]
    assert [each.lookups for each in SUITES["lookups"]] == [
        2**n for n in (8, 10, 12, 14, 16, 18, 20)
    ]
    density = [each.lookups / each.rows for each in SUITES["density"]]
    assert density == [0.01, 0.05, 0.1, 0.25, 0.45]
    assert [each.threads for each in SUITES["threads"]] == [1, None]
    for cases in SUITES.values():
        assert len({each.name for each in cases}) == len(cases)


@pytest.mark.parametrize("scale", [1, 2.5, 1000, 1_000_000])
def test_every_case_can_be_scaled(scale: float) -> None:
    for each in (each for cases in SUITES.values() for each in cases):
        smaller = each.scaled(scale)
        assert smaller.rows == max(2, int(each.rows / scale))
        assert smaller.lookups == max(1, int(each.lookups / scale))
        assert f"{smaller.lookups:,}" in smaller.name
        assert replace(smaller, name="", rows=0, lookups=0) == replace(
            each, name="", rows=0, lookups=0
        )
        if scale >= 1000:
            assert smaller.positions(0).shape == (smaller.lookups,)


# Workload and contestants


def test_sets_differ_and_share_memory_with_their_tensors() -> None:
    sets = workload.gradient_sets(case(100, 16, 10, "uniform", tables=2))
    assert len(sets) == SETS
    assert len({tuple(g.positions.tolist()) for batch in sets for g in batch}) == 2 * SETS
    assert len({g.values.data_ptr() for batch in sets for g in batch}) == 2 * SETS
    for gradient in sets[0]:
        assert not gradient.coo.is_coalesced()
        assert gradient.coo._values().data_ptr() == gradient.values.data_ptr()


def test_large_gradients_share_values_but_not_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_VALUE_BYTES", 3 * 4 * 10 * 16)
    sets = workload.gradient_sets(case(100, 16, 10, "uniform"))
    assert len({batch[0].values.data_ptr() for batch in sets}) == 3
    assert len({tuple(batch[0].positions.tolist()) for batch in sets}) == SETS


@needs_core
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
    with harness.threads(threads):
        shared = Workload(made)
        ours, least = Native(shared), Limit(shared)
        for number in range(SETS):
            for contestant in (ours, least):
                contestant.before(number)
                contestant.step()
    start = workload.fill(torch.empty(made.rows, made.dim))
    for one, other in zip(ours.params, least.params, strict=True):
        assert one.data_ptr() != other.data_ptr()
        assert not torch.equal(one, start)
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6)


def test_plan_of_the_limit() -> None:
    positions = case(100, 16, 400, "zipf").positions(0)
    slots, offsets, entries, shares = limit.plan(positions, threads=3)
    seen = list(dict.fromkeys(positions.tolist()))
    assert slots.tolist() == seen
    for place, slot in enumerate(seen):
        its = entries[offsets[place] : offsets[place + 1]].tolist()
        assert its == (positions == slot).nonzero().flatten().tolist()
    assert len(shares) == 3
    assert list(shares) == sorted(shares)
    assert shares[-1] == len(seen)
    weights = [int(offsets[end]) + 3 * end for end in (0, *shares)]
    parts = [after - before for before, after in pairwise(weights)]
    heaviest = int((offsets[1:] - offsets[:-1]).max()) + 3
    assert max(parts) - min(parts) <= 2 * heaviest


@needs_core
def test_contestants_share_one_table_where_it_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workload, "_OWN_TABLE_BYTES", 100)
    made = case(100, 16, 10, "uniform")
    shared = Workload(made)
    theirs, ours = TorchSparseAdam(shared), Native(shared)
    reference, least = Reference(shared), Limit(shared)
    assert theirs.params is ours.params is reference.params is least.params
    assert shared.moments is not None
    [(exp_avg, _)] = shared.moments
    assert bool((exp_avg != 0).any())
    for optimizer in (ours.optimizer, reference.optimizer):
        [state] = optimizer.state.values()
        assert state["exp_avg"] is exp_avg
    for contestant in (least, reference):
        before = exp_avg.clone()
        contestant.before(1)
        contestant.step()
        assert not torch.equal(exp_avg, before)
    result = harness.measure(made, "large", [TorchSparseAdam, Native], seconds=0.001)
    assert result.shared
    assert "one table for all" in screen.headline(result)


def test_what_memory_does_not_hold_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made = case(1000, 16, 10, "uniform")
    free = workload._RESERVE_BYTES + 4 * made.table_bytes
    monkeypatch.setattr(workload, "available_memory", lambda: free)
    result = harness.measure(made, "peers", [TorchSparseAdam, Reference], seconds=0.001)
    assert [timing.contestant for timing in result.timings] == [TorchSparseAdam.name]
    assert result.unavailable == [Refusal(Reference.name, "needs 0.0 GB, and 0.0 GB are left")]


def test_available_memory(tmp_path: Path) -> None:
    source = tmp_path / "meminfo"
    source.write_text("MemTotal: 24 kB\nMemAvailable:   12 kB\n")
    assert workload.available_memory(source) == 12 * 1024
    assert workload.available_memory(tmp_path / "missing") == float("inf")


def test_refusals() -> None:
    huge = SimpleNamespace(case=case(10_000_000, 16, 1, "uniform"))
    with pytest.raises(Unavailable, match="over 100 million elements"):
        TorchDenseAdam(huge)  # type: ignore[arg-type]
    for peer in (FbgemmAdagrad, DglSparseAdam):
        with pytest.raises(Unavailable, match="not installed"):
            peer(Workload(case(100, 16, 10, "uniform")))


@needs_core
def test_the_limit_refuses_odd_dims() -> None:
    with pytest.raises(Unavailable, match="multiples of 16"):
        Limit(Workload(case(100, 20, 10, "uniform")))


def summed(made: Workload, number: int) -> list[Tensor]:
    return [gradient.coo.to_dense() for gradient in made.sets[number]]


def install(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> None:
    for name, contents in modules.items():
        module = ModuleType(name.replace("__", "."))
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, module.__name__, module)


def test_fbgemm_gets_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tables(torch.nn.Module):
        """As documented: specs, then (ids, offsets) table by table, to [batch, sum of dims]."""

        def __init__(self, specs: list[tuple[int, int, str, str]], **options: Any) -> None:
            super().__init__()
            assert {spec[2:] for spec in specs} == {("host", "cpu")}
            assert options["optimizer"] == "adagrad"
            sizes = [spec[:2] for spec in specs]
            self.weights = torch.nn.ParameterList([torch.empty(size) for size in sizes])

        def split_embedding_weights(self) -> list[Tensor]:
            return list(self.weights)

        def forward(self, ids: Tensor, offsets: Tensor) -> Tensor:
            assert torch.equal(offsets, torch.arange(len(ids) + 1))
            parts = ids.view(len(self.weights), -1)
            return torch.cat([w[p] for w, p in zip(self.weights, parts, strict=True)], dim=1)

    install(
        monkeypatch,
        fbgemm_gpu={},
        fbgemm_gpu__split_table_batched_embeddings_ops_training={
            "SplitTableBatchedEmbeddingBagsCodegen": Tables,
            "ComputeDevice": SimpleNamespace(CPU="cpu"),
        },
        fbgemm_gpu__split_table_batched_embeddings_ops_common={
            "EmbeddingLocation": SimpleNamespace(HOST="host"),
            "PoolingMode": SimpleNamespace(SUM="sum"),
        },
        fbgemm_gpu__split_embedding_configs={
            "EmbOptimType": SimpleNamespace(EXACT_ADAGRAD="adagrad")
        },
    )
    made = Workload(case(50, 16, 20, "zipf", tables=2))
    contestant = FbgemmAdagrad(made)
    contestant._tables.zero_grad()
    contestant.before(3)
    contestant.step()
    for weight, expected in zip(contestant._tables.weights, summed(made, 3), strict=True):
        torch.testing.assert_close(weight.grad, expected)


def test_dgl_gets_the_same_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    class NodeEmbedding:
        """As documented: a call returns a leaf, which is traced until the next step."""

        def __init__(
            self, rows: int, dim: int, name: str, init_func: Callable[..., Tensor]
        ) -> None:
            self.name, self.weight = name, init_func(torch.empty(rows, dim))
            self.trace: list[tuple[Tensor, Tensor]] = []

        def __call__(self, ids: Tensor) -> Tensor:
            rows = self.weight[ids].requires_grad_()
            self.trace.append((ids, rows))
            return rows

    class SparseAdam:
        def __init__(self, embeddings: list[NodeEmbedding], lr: float) -> None:
            assert len({each.name for each in embeddings}) == len(embeddings)
            self.embeddings = embeddings
            self.clean = False

        def zero_grad(self) -> None:
            self.clean = True

        def step(self) -> None:
            assert self.clean
            self.clean = False
            self.seen = []
            for each in self.embeddings:
                [(ids, rows)] = each.trace
                assert rows.grad is not None
                self.seen.append(torch.zeros_like(each.weight).index_add_(0, ids, rows.grad))
                each.trace = []

    install(
        monkeypatch,
        dgl={},
        dgl__nn={"NodeEmbedding": NodeEmbedding},
        dgl__optim={"SparseAdam": SparseAdam},
    )
    made = Workload(case(50, 16, 20, "zipf", tables=2))
    contestant = DglSparseAdam(made)
    contestant.before(3)
    contestant.step()
    for seen, expected in zip(contestant._optimizer.seen, summed(made, 3), strict=True):
        torch.testing.assert_close(seen, expected)


def test_a_peer_that_breaks_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, dgl={}, dgl__nn={}, dgl__optim={})
    with pytest.raises(Unavailable, match=r"does not run here \(.*NodeEmbedding"):
        DglSparseAdam(Workload(case(50, 16, 20, "zipf")))


# Harness


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


# Results


def made_up(lookups: int = 100, threads: int = 1) -> CaseResult:
    timings = harness.timings(
        [TorchSparseAdam.name, Native.name, Limit.name, TorchDenseAdam.name],
        [[0.05 * lookups] * 3, [0.004 * lookups] * 3, [0.003 * lookups] * 3, [50.0] * 3],
    )
    refusals = [Refusal("FBGEMM Adagrad", "not installed"), Refusal("DGL", "not installed")]
    measured = case(1000, 16, lookups, "uniform")
    return CaseResult("lookups", measured, threads, 90, False, timings, refusals)


def test_json_round_trip() -> None:
    report = results.new_report(scale=2.0, seconds=3.0)
    report.cases.append(made_up())
    text = report.to_json()
    assert Report.from_json(text) == report
    data = json.loads(text)
    assert list(data) == [
        *("machine", "versions", "instruction_set", "commit", "date", "scale", "seconds", "cases")
    ]
    assert list(data["machine"]) == ["cpu", "cores", "threads", "platform", "huge_pages"]
    assert {"python", "torch", "sparsestep"} <= set(data["versions"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", data["date"])
    [found] = data["cases"]
    assert list(found) == [
        *("suite", "case", "threads", "unique", "shared", "timings", "unavailable")
    ]
    assert {*found["case"]} == {*Case.__dataclass_fields__}
    assert list(found["timings"][0]) == [
        *("contestant", "median_ms", "lower_ms", "upper_ms", "rounds", "times_torch", "of_limit")
    ]


def test_commit(tmp_path: Path) -> None:
    assert results.commit(tmp_path) is None
    assert results.commit(tmp_path / "missing") is None


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "picture.svg"
    picture.draw(path, [made_up(2**power) for power in (20, 8, 12)])
    text = path.read_text()
    assert "<svg" in text
    assert "#ffffff" in text  # the background
    assert text.count("stroke-dasharray: ") == 1  # the limit
    assert len(text) < 100_000
    first = path.read_bytes()
    picture.draw(path, [made_up(2**power) for power in (20, 8, 12)])
    assert path.read_bytes() == first


def test_labels_keep_their_order_and_distance() -> None:
    wanted = [0.9, 0.1, 0.12, 0.11, 0.88, 0.5]
    placed = picture.spread_out(wanted, gap=0.05)
    order = sorted(range(6), key=lambda index: wanted[index])
    gaps = [placed[b] - placed[a] for a, b in pairwise(order)]
    assert min(gaps) > 0.05 - 1e-9
    assert placed[5] == 0.5


# The command


def test_a_table_is_80_columns_wide(capsys: pytest.CaptureFixture[str]) -> None:
    shown = screen.Screen()
    shown.show(made_up())
    shown.summarise("lookups", [made_up(100), made_up(400, threads=2)])
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    [headline] = [line for line in lines if line.startswith("1,000 x 16, 100 uniform, 1 thread;")]
    assert "rows touched: 90" in headline
    rows = [line.split() for line in lines[4:]]
    assert rows[0] == ["limit", "16.7x", "1.00", "0.300", "±0%", "█" * 14]
    assert rows[1][:4] == ["sparsestep", "12.5x", "0.75", "0.400"]
    assert [row[0] for row in rows[:6]] == [
        *("limit", "sparsestep", "torch", "torch", "FBGEMM", "DGL")
    ]
    assert rows[4][2:] == ["-"] * 4
    assert "- FBGEMM Adagrad, DGL: not installed." in lines
    assert rows[-3] == ["1,000", "x", "16,", "400", "uniform,", "2", "threads", "12.5x", "0.75"]
    assert rows[-1] == ["geometric", "mean", "12.5x", "0.75"]


def test_bars_without_unicode() -> None:
    table = screen.case_table(made_up(), plain=True)
    assert all("█" not in str(cell) for column in table.columns for cell in column.cells)


def test_a_tiny_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    before = torch.get_num_threads()
    arguments = ["--suite", "small", "--suite", "lookups", "--only", "sparsestep"]
    assert main([*TINY, *arguments, "--json", str(out), "--svg", str(svg)]) == 0
    printed, progress = capsys.readouterr()
    assert progress == ""  # not a terminal
    assert "divided by 100000" in printed
    assert "small: sparsestep in short" in printed
    assert printed.count("geometric mean") == 2
    assert torch.get_num_threads() == before
    report = Report.from_json(out.read_text())
    assert report.scale == 100_000
    assert report.machine.threads == 1
    assert [result.suite for result in report.cases] == ["small"] * 2 + ["lookups"] * 7
    for result in report.cases:
        names = {each.contestant for each in result.timings}
        names |= {each.contestant for each in result.unavailable}
        assert names == {*("torch SparseAdam", "sparsestep", "sparsestep reference", "limit")}
        for timing in result.timings:
            assert 0 < timing.lower_ms <= timing.median_ms <= timing.upper_ms
            assert timing.rounds >= 16
    assert "<svg" in svg.read_text()


def test_unavailable_contestants_are_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "core", None)
    assert main([*TINY, "--suite", "small"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("- sparsestep, limit: installed without the C++ core.") == 2
    assert re.search(r"^sparsestep +- +- +- +- *$", printed, re.MULTILINE)
    assert re.search(r"^geometric mean +- +- *$", printed, re.MULTILINE)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(native, "core", None)
    assert main([*TINY, "--suite", "skew", "--only", "limit", "--without", "torch"]) == 0
    assert "- limit: installed without the C++ core." in capsys.readouterr().out


def test_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.json"
    measure = harness.measure

    def twice(*arguments: Any) -> CaseResult:
        if out.exists():
            raise KeyboardInterrupt
        return measure(*arguments)

    monkeypatch.setattr(harness, "measure", twice)
    assert main([*TINY, "--suite", "small", "--json", str(out)]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert len(Report.from_json(out.read_text()).cases) == 1


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--suite", "huge"], "it must be one of peers, large, .*, all. Got 'huge'."),
        (["--only", "jax"], "it must be a part of one of these: torch SparseAdam, .*. Got 'jax'."),
        (["--without", ""], "it must be a part of one of these: .*. Got ''."),
        (["--without", "a", "--without", "limit"], "must leave a contestant. Got none."),
        (["--seconds", "0"], r"it must be a number from 0.001 to 86,400. Got '0'."),
        (["--seconds", "nan"], "Got 'nan'."),
        (["--threads", "0"], "it must be a whole number from 1 to 1024. Got '0'."),
        (["--scale", "0.5"], r"it must be a number from 1 to 1e\+06. Got '0.5'."),
        (["--json", "out.txt"], "its name must end in .json. Got 'out.txt'."),
        (["--json", "missing/out.json"], "it must be a file that can be written"),
        (["--svg", "out.svg"], "--svg must come with --suite lookups, which it draws. Got peers."),
    ],
)
def test_bad_options(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code: Any = main([*TINY, *arguments])  # what is not refused must stay tiny
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    printed, said = capsys.readouterr()
    assert printed == ""
    assert re.search(f"sparsestep bench: error: .*{complaint}", said)
    assert list(tmp_path.iterdir()) == []
