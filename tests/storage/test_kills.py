"""Killed at any moment, training goes on from the last checkpoint with the same bits."""

from __future__ import annotations

import random
import sys

import pytest

from sparsestep.storage import checkpoint
from tests.storage import kills


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("kinds", "times"),
    [
        ((0, 2, kills.EVICTING), 2),
        pytest.param(range(len(kills.OPTIMIZERS)), 10, marks=pytest.mark.slow),
    ],
)
def test_processes_that_were_killed_go_on(kinds, times, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(checkpoint, "_COMPACT_MIN_BYTES", 1)
    monkeypatch.setattr(checkpoint, "_COMPACT_RATIO", 0.6)
    chance = random.Random(0)
    for kind in kinds:
        kills.check(kind, times, chance)
