"""A runner for the pool that misbehaves. It needs no torch, so its processes start quickly."""

from __future__ import annotations

import os
import threading

from tests.fuzz.pool import Outcome


def prepare() -> None:
    """Nothing."""


def collect() -> None:
    """Nothing."""


def run(seed: int) -> Outcome:
    """Crash, compute for ever, wait for ever, or find something odd."""
    if seed == 3:
        os.abort()
    while seed == 60:
        pass
    if seed == 70:
        threading.Event().wait()
    return Outcome(seed, "mine", "odd" if seed % 50 == 7 else "")
