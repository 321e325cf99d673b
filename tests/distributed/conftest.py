"""Processes are started once for all tests that look at what they found."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pair import TIMEOUT, Results, run_ranks


@pytest.fixture(scope="session", params=[2, 3])
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    """What each of several ranks found that share tables."""
    world, shared = request.param, tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all workers: the first one starts the ranks, for all
    folder = shared / f"shard{world}"
    try:
        folder.mkdir()
    except FileExistsError:
        return _of_another_worker(folder, world)
    try:
        return run_ranks("tests.distributed.shard_worker", folder, world)
    finally:
        (folder / "ended").touch()


def _of_another_worker(folder: Path, world: int) -> list[Results]:
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return [torch.load(folder / f"results{rank}") for rank in range(world)]
