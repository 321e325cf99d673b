"""Sharded tables over a long time, and what the others do when a rank is gone."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.pair import run_ranks
from tests.distributed.shard_soak import STEPS, TIMEOUT

WORKER = "tests.distributed.shard_soak"


def test_the_others_raise_when_a_rank_is_killed(tmp_path: Path):
    begun = time.monotonic()
    (found,) = run_ranks(WORKER, tmp_path, 2, killed=1)
    assert found["said"], "a step without the other rank must not succeed"
    assert found["unchanged"]
    assert time.monotonic() - begun < 3 * TIMEOUT


@pytest.mark.slow
def test_many_steps_neither_hang_nor_grow(tmp_path: Path):
    found = run_ranks(WORKER, tmp_path, 4, timeout=180 + STEPS / 5)
    for each in found:
        assert each["kept"] <= 6, "lookups of the step before, and of this one"
        assert each["grown"] < 20_000, "kilobytes"
        assert set(each["steps"]) <= set(found[0]["steps"])
