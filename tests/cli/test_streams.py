"""A command whose output goes nowhere ends without a traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from sparsestep import cli
from sparsestep.cli import identifiers

pytestmark = pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")

FULL = Path("/dev/full")
COMMANDS = [
    ["info"],
    ["info", "--json"],
    ["demo", "--words", "200", "--steps", "2", "--dim", "8", "--out"],
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=" ".join)


@contextmanager
def broken_pipe() -> Iterator[TextIO]:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as stream:
        yield stream


@contextmanager
def full_disk() -> Iterator[TextIO]:
    if not FULL.exists():
        pytest.skip("needs Linux's /dev/full")
    with FULL.open("w") as stream:
        yield stream


@pytest.fixture(autouse=True)
def _small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the demo reads."""
    (tmp_path / "module.py").write_text("def first(items):\n    return [item for item in items]\n")
    monkeypatch.setattr(identifiers, "standard_library", lambda: tmp_path)


def run(command: list[str], tmp_path: Path) -> int:
    with_path = [*command, str(tmp_path / "demo.png")] if command[-1] == "--out" else command
    return cli.main(with_path)


@each_command
def test_whoever_stops_reading_is_not_shouted_at(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with broken_pipe() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        try:
            code = run(command, tmp_path)
        except SystemExit as end:  # rich ends the program by itself
            code = int(end.code or 0)
    assert code == 1
    assert "rror" not in capsys.readouterr().err


@each_command
def test_a_full_disk_is_said_in_one_line(
    command: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with full_disk() as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run(command, tmp_path) == 1
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("sparsestep: cannot continue: ")
    assert "No space left on device" in last


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["info"], ["--help"]])
@pytest.mark.parametrize("where", [broken_pipe, full_disk])
def test_a_whole_process(where, arguments: list[str]) -> None:
    with where() as stream:
        done = subprocess.run(
            [sys.executable, "-m", "sparsestep.cli", *arguments],
            stdout=stream,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"},
        )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == (where is full_disk)
    assert "Traceback" not in done.stderr
