"""``python -m benchmarks`` as a command: results, picture, table, options."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.__main__ import main
from benchmarks.harness import figure as picture
from benchmarks.harness import race as harness
from benchmarks.harness import report as screen
from benchmarks.harness import results
from benchmarks.harness.cases import Case, case
from benchmarks.harness.contestants import Native, TorchDenseAdam, TorchSparseAdam
from benchmarks.harness.limit import Limit
from benchmarks.harness.results import CaseResult, Refusal, Report
from sparsestep import _native

TINY = ["--scale", "100000", "--seconds", "0.001", "--threads", "1"]


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


def test_there_is_no_mean_of_what_was_disturbed(capsys: pytest.CaptureFixture[str]) -> None:
    quiet = made_up(100)
    wide = [replace(each, upper_ms=each.median_ms * 1.4) for each in quiet.timings]
    assert not quiet.is_disturbed
    screen.Screen().summarise("lookups", [quiet, replace(quiet, timings=wide)])
    shown = " ".join(capsys.readouterr().out.split())
    assert "geometric" not in shown
    assert "no mean: the machine was disturbed; wait and run again" in shown
    assert shown.count("(disturbed)") == 1


def test_bars_without_unicode() -> None:
    table = screen.case_table(made_up(), plain=True)
    assert all("█" not in str(cell) for column in table.columns for cell in column.cells)


def test_a_tiny_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "WIDEST_SPREAD", float("inf"))
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
    monkeypatch.setattr(_native, "ext", None)
    monkeypatch.setattr(results, "WIDEST_SPREAD", float("inf"))
    assert main([*TINY, "--suite", "small"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("- sparsestep, limit: installed without the C++ core.") == 2
    assert re.search(r"^sparsestep +- +- +- +- *$", printed, re.MULTILINE)
    assert re.search(r"^geometric mean +- +- *$", printed, re.MULTILINE)


def test_nobody_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(_native, "ext", None)
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
    assert re.search(f"benchmarks: error: .*{complaint}", said)
    assert list(tmp_path.iterdir()) == []
