"""The command line: every command runs, explains itself, rejects bad options, survives a pipe."""

from __future__ import annotations

import json
import os
import platform
import re
import runpy
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
import torch
from torch.testing import assert_close

import sparsestep
from sparsestep import _native, cli
from sparsestep.cli import demo, info, plan, skipgram
from sparsestep.cli.skipgram import SkipgramDataset
from tests.processes import run_python

# Without the C++ core, training warns that it is slow.
pytestmark = pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

TINY = ["demo", "--words", "200", "--steps", "5", "--dim", "8", "--out"]


@pytest.fixture
def out(tmp_path: Path, monkeypatch: Patch) -> Path:
    """The picture of a demo whose standard library is three small files."""
    root = tmp_path / "library"
    root.mkdir()
    source = "def first(items, append):\n    append(items, len(items)); json.dump(open(path))\n"
    for number in range(3):
        (root / f"module{number}.py").write_text(f"{source}\nname_{number} = first\n")
    monkeypatch.setattr(skipgram, "stdlib_path", lambda: root)
    return tmp_path / "picture.png"


# Every command


def test_it_runs_as_a_module(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys, "argv", ["ignored", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("sparsestep", run_name="__main__")
    assert capsys.readouterr().out == f"sparsestep {sparsestep.__version__}\n"


def test_every_command_has_help_with_an_example(capsys: Captured) -> None:
    assert list(cli.COMMANDS) == ["demo", "info", "plan"]
    assert cli.main([]) == 0
    text = capsys.readouterr().out
    for name in cli.COMMANDS:
        assert f"sparsestep {name}" in text
        with pytest.raises(SystemExit, match="0"):
            cli.main([name, "--help"])
        help = capsys.readouterr().out
        assert f"Example:\n  sparsestep {name} " in help
        assert max(map(len, help.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("fly", "invalid choice: 'fly'"),
        ("demo --steps 0", "--steps: must be a whole number from 1 to 1000000. Got '0'."),
        ("demo --dim 1e3", "--dim: must be a whole number from 1 to 1024. Got '1e3'."),
        ("demo --seconds nan", "--seconds: must be a number from 1 to 86,400. Got 'nan'."),
        ("demo --out a.svg", "--out: must end in .png. Got 'a.svg'."),
        (
            "demo --out missing/a.png",
            "writable file (No such file or directory). Got 'missing/a.png'.",
        ),
        *(
            (f"plan --tables {table}", "a table must be NAME=ROWSxDIM")
            for table in ("user", "user=0x4", "=5x4", "user=5xtall", "user=²x4", f"u={10**20}x4")
        ),
        ("plan --tables user=9x8:columns", "one of :tables, :rows, :copy. Got ':columns'."),
        ("plan --tables user=9x8:", "one of :tables, :rows, :copy. Got ':'."),
    ],
)
def test_a_bad_option_gets_one_sentence(
    arguments: str, message: str, capsys: Captured, monkeypatch: Patch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        cli.main(arguments.split())
    printed, errors = capsys.readouterr()
    assert printed == ""
    (line,) = (line for line in errors.splitlines() if "error:" in line)
    assert message in line
    assert list(tmp_path.iterdir()) == []  # checking whether --out can be written leaves no file


@pytest.mark.parametrize("package", ["matplotlib", "rich"])
def test_without_the_extra_it_says_what_to_install(
    package: str, out: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    assert cli.main([*TINY, str(out)]) == 1
    printed, message = capsys.readouterr()
    assert printed == ""
    assert message.endswith(f'needs {package}; install it with pip install "sparsestep[cli]".\n')


def test_importing_sparsestep_imports_neither_the_compiler_nor_the_extra() -> None:
    code = """
import sys, sparsestep, sparsestep.cli
print(sorted({"rich", "matplotlib", "torch._dynamo"} & set(sys.modules)))
"""
    assert run_python("-c", code) == "[]\n"


@contextmanager
def broken_pipe() -> Iterator[TextIO]:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        yield stream


def full_disk() -> TextIO:
    return Path("/dev/full").open("w")


@pytest.mark.parametrize("where", [broken_pipe, full_disk])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
@pytest.mark.parametrize("command", [["info"], TINY], ids=" ".join)
def test_output_that_cannot_be_written_gets_at_most_one_line(
    command: list[str], where: Callable, out: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    with where() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert cli.main([*command, str(out)] if command is TINY else command) == 1
    errors = capsys.readouterr().err
    if where is full_disk:
        assert re.search(r"^sparsestep: cannot continue: .*No space left on device", errors, re.M)
    else:
        assert "rror" not in errors


# info


def test_info_prints_a_line_per_key_and_json_the_same(capsys: Captured) -> None:
    assert cli.main(["info"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert cli.main(["info", "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values == info.collect()
    assert [line.partition(":")[0] for line in lines] == list(values)
    assert values["sparsestep"] == sparsestep.__version__
    assert values["torch"] == torch.__version__
    assert values["threads"] == torch.get_num_threads()


def test_info_says_what_is_missing_or_not_here(capsys: Captured, monkeypatch: Patch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(_native, "isa", _native._InstructionSet())
        patch.setenv("SPARSESTEP_ISA", "mmx")
        assert cli.main(["info"]) == 0
        assert "Got 'mmx'" in capsys.readouterr().out
    monkeypatch.setattr(_native, "ext", None)
    monkeypatch.setattr(_native, "import_error", "GLIBC_2.99 not found")
    assert cli.main(["info"]) == 0
    said = "reference (the C++ core is missing: GLIBC_2.99 not found)"
    assert said in capsys.readouterr().out


def test_files_of_linux(tmp_path: Path, monkeypatch: Patch) -> None:
    source = tmp_path / "file"
    source.write_text("processor\t: 0\nmodel\t\t: 85\nmodel name\t: Quick CPU: 3 GHz\n")
    assert info.cpu_model(source) == "Quick CPU: 3 GHz"
    monkeypatch.setattr(platform, "processor", lambda: "")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert info.cpu_model(tmp_path / "missing") == "aarch64"
    source.write_text("always [madvise] never\n")
    assert info.huge_pages(source) == "madvise"
    assert info.huge_pages(tmp_path / "missing") == "unknown"


# plan


def test_plan_of_ten_billion_rows_on_a_thousand_ranks(capsys: Captured) -> None:
    tables = ["user=10000000000x128", "item=1000000x64", "country=200x8"]
    assert cli.main(["plan", "--tables", *tables, "--ranks", "1024", "--network", "25"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[3] for line in said[1:4]] == ["rows"] * 3
    assert "15.0 GB (5.0 GB of tables, 10.0 GB of state)" in said[5]
    assert said[6].endswith("at 25 Gbit/s")
    assert said[7].split(":")[1] == said[6].split(":")[1]  # every rank sends the same


def test_plan_says_which_resource_is_the_limit(capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(plan, "_max_open_files", lambda: 1024)

    def limits(*options: str) -> dict[str, int]:
        assert cli.main(["plan", "--tables", "user=100000000x64", "--ids", "20", *options]) == 0
        line = capsys.readouterr().out.splitlines()[-1].partition(": ")[2]
        pairs = (each.partition(" from ") for each in line.split("; "))
        return {name: int(rest.split()[0]) for name, _, rest in pairs}

    slow = limits("--network", "1")
    fast = limits("--network", "100", "--wire", "int8")
    far = limits("--network", "100", "--latency", "1000")
    assert slow["network"] == 2
    assert "network" not in fast
    assert far["latency"] == 2
    assert "latency" not in slow
    assert slow["CPU for messages"] < fast["CPU for messages"]
    assert {each["sockets"] for each in (slow, fast, far)} == {332}


def test_plan_rejects_two_tables_of_one_name(capsys: Captured) -> None:
    assert cli.main(["plan", "--tables", "user=10x8:rows", "user=10x8:copy"]) == 2
    printed, message = capsys.readouterr()
    assert message.startswith("sparsestep plan: every table must have a name of its own. Got 'us")
    assert not printed


# demo


def test_a_tiny_demo(out: Path, capsys: Captured, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(demo, "_STEPS_FOR_NEIGHBORS", 5)
    assert cli.main([*TINY, str(out)]) == 0
    assert out.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    printed, progress = capsys.readouterr()
    assert "3 files" in printed
    losses = re.search(r"loss at the end +(\d\.\d+) +(\d\.\d+)", printed)
    assert losses is not None
    assert float(losses[1]) == pytest.approx(float(losses[2]), abs=1e-3)
    difference = re.search(r"max weight difference +(\S+)", printed.splitlines()[-1])
    assert difference is not None
    assert float(difference[1]) < 1e-5
    assert re.search(r"append +(\w+ *){5}\n", printed)
    shown = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", progress)  # without colors and cursor moves
    assert "of 60 s, 5 steps each" in shown
    assert re.search(r"sparsestep\.SparseAdam +\d+\.\d s +\d+\.\d ms/step +loss \d\.\d{3}", shown)
    lines = [line for line in printed.splitlines() if str(out) not in line]
    assert max(map(len, lines)) <= 80


def test_without_the_core_the_demo_says_so_once_and_warns_of_nothing(
    out: Path, capsys: Captured, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(_native, "ext", None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", sparsestep.SlowWarning)
        assert cli.main([*TINY, str(out)]) == 0
    assert capsys.readouterr().out.count("so sparsestep is no faster than torch here.") == 1


def test_ctrl_c_shows_the_results_so_far(out: Path, capsys: Captured, monkeypatch: Patch) -> None:
    def interrupt(*_: object) -> str:
        signal.raise_signal(signal.SIGINT)
        return ""

    monkeypatch.setattr(demo, "render_progress", interrupt)
    before = signal.getsignal(signal.SIGINT)
    assert cli.main([*TINY, str(out), "--steps", "1000"]) == 130
    assert signal.getsignal(signal.SIGINT) is before
    printed, progress = capsys.readouterr()
    assert "similar contexts" not in printed  # after so few steps
    assert progress == ""  # no terminal
    assert re.search(r"\nsteps +1 +1 *\n", printed)
    assert printed.endswith("\nInterrupted after 1 of 1,000 steps.\n")
    assert out.exists()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("a = '# not a comment'; b", "a b"),
        (r"a('it\'s b', 'c\\', d)", "a d"),
        ("a\n'''b\n\"c\" ''d'\n'''\nf", "a f"),
        ("""a = f"{b["c"]} d {e!r:>{width}} {{" + f""", "a f"),
        ("async def a(): return None if b else True", "a b"),
        ("größe = 0x1F + 1e5 + 10j + 1_000", "größe"),
    ],
)
def test_identifiers(source: str, expected: str) -> None:
    assert skipgram.find_identifiers(source) == expected.split()


def test_training_is_reproducible_and_both_optimizers_reach_the_same_weights() -> None:
    tables = skipgram.initial_tables(4, 8, seed=0)
    before = tables.words.clone()
    pairs = torch.tensor([[0, 1, 2, 3], [1, 0, 3, 2]])
    dataset = SkipgramDataset(pairs, (40, 20, 10, 1), steps=20, seed=3)
    ours, again, theirs = (
        skipgram.train("run", optimizer, tables, dataset)
        for optimizer in (sparsestep.SparseAdam, sparsestep.SparseAdam, torch.optim.SparseAdam)
    )
    assert ours.losses == again.losses
    assert skipgram.max_difference(ours.tables, again.tables) == 0
    assert_close(ours.losses, theirs.losses)
    assert skipgram.max_difference(ours.tables, theirs.tables) < 1e-5
    assert ours.losses[-1] < ours.losses[0]
    assert torch.equal(tables.words, before)
