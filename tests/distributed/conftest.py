"""Processes are started once for all tests that look at what they found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.pair import TIMEOUT, Results, run_ranks

RunOnce = Callable[[str, int], list[Results]]


@pytest.fixture(scope="session")
def run_once(tmp_path_factory: pytest.TempPathFactory) -> RunOnce:
    """Like ``run_ranks``, but the ranks of a worker are started once, for all that ask."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all of pytest's processes: the first one starts the ranks

    def run(module: str, world: int) -> list[Results]:
        folder = shared / f"{module}-{world}"
        try:
            folder.mkdir()
        except FileExistsError:
            return _of_another_process(folder, world)
        try:
            return run_ranks(module, folder, world)
        finally:
            (folder / "ended").touch()

    return run


def _of_another_process(folder: Path, world: int) -> list[Results]:
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return [torch.load(folder / f"results{rank}") for rank in range(world)]


@pytest.fixture(scope="session", params=[2, 3])
def found(request: Any, run_once: RunOnce) -> list[Results]:
    """What each of several ranks found that share tables."""
    return run_once("tests.distributed.shard_worker", request.param)
