"""Runs programs that need other packages; in processes of their own, since those warn a lot."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RECORDED = ROOT / "docs" / "gallery" / "recorded"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",  # other tests run beside this one
    "HF_HUB_OFFLINE": "1",
    "PYTHONPATH": str(EXAMPLES),
}


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skip where packages are not installed; ``make integrations`` installs them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: make integrations"
    return pytest.mark.skipif(bool(missing), reason=reason)


def run(*arguments: str) -> str:
    """What a program prints, which must succeed; a warning of ours is an error."""
    command = [sys.executable]
    for category in ("StaleWarning", "SlowWarning"):
        command += ["-W", f"error::sparsestep.errors.{category}"]
    done = subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=ENVIRONMENT,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str, *arguments: str) -> str:
    """What an example prints."""
    return run(str(EXAMPLES / name), *arguments)


def in_the_gallery(name: str, printed: str) -> bool:
    """Whether the site shows what an example prints, but for its numbers."""
    shown = (RECORDED / f"{name}.txt").read_text()
    number = r"\d+(?:\.\d+)?(?:e[-+]\d+)?"
    assert re.sub(number, "0", printed) == re.sub(number, "0", shown), (
        f"put what it prints into {RECORDED.name}/{name}.txt and draw anew:\n{printed}"
    )
    return True
