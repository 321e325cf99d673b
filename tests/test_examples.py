"""The examples run, and show what they say they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", str(EXAMPLES / name), *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [[], ["--float32"]], ids=["float64", "float32"])
def test_one_optimizer_trains_like_two(options: list[str]):
    done = run("one_optimizer.py", "--steps", "40", *options)
    assert done.returncode == 0, done.stderr
    steps = re.findall(r"^ +(\d+)   (\d\.\d+) #* *(\d\.\d+) #*$", done.stdout, re.MULTILINE)
    assert [int(steps[0][0]), int(steps[-1][0])] == [1, 40]
    for _, ours, theirs in steps:
        assert float(ours) == pytest.approx(float(theirs), rel=0.01)
    ours, theirs = re.findall(r"^  (?:one|two) optimizer.* (\d\.\d+)$", done.stdout, re.MULTILINE)
    assert float(ours) == pytest.approx(float(theirs), rel=0.01)
    assert float(ours) < 0.67  # it has learned something: tossing a coin has 0.69


def test_one_optimizer_says_what_is_wrong_with_an_option():
    done = run("one_optimizer.py", "--steps", "0")
    assert done.returncode == 2
    assert "--steps: must be at least 1, got 0" in done.stderr
