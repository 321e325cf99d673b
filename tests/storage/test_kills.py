"""Killed at any moment, training goes on from the last checkpoint with the same bits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
@pytest.mark.parametrize(("times", "seed"), [(6, 0), pytest.param(60, 1, marks=pytest.mark.slow)])
def test_processes_that_were_killed_go_on(times: int, seed: int):
    command = [sys.executable, "-m", "tests.storage.kills", f"--kills={times}", f"--seed={seed}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith(f"{times} kills, each went on with the same bits\n"), done.stdout
