"""Processes are started once for all tests that look at what they found."""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.pair import TIMEOUT, Results, run_ranks

RunOnce = Callable[[str, int], list[Results]]
Once = Callable[[str, Callable[[Path], Any]], Any]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """Calls a function with a folder of its own, in one of pytest's processes, for all that ask."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent  # of all of pytest's processes

    def made(name: str, make: Callable[[Path], Any]) -> Any:
        folder = shared / name
        try:
            folder.mkdir()
        except FileExistsError:
            return _of_another_process(folder)
        try:
            found = make(folder)
            (folder / "found").write_bytes(pickle.dumps(found))
        finally:
            (folder / "ended").touch()
        return found

    return made


def _of_another_process(folder: Path) -> Any:
    deadline = time.monotonic() + TIMEOUT
    while not (folder / "ended").exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return pickle.loads((folder / "found").read_bytes())


@pytest.fixture(scope="session")
def run_once(once: Once) -> RunOnce:
    """Like ``run_ranks``, but the ranks of a worker are started once, for all that ask."""
    return lambda module, world: once(
        f"{module}-{world}", lambda folder: run_ranks(module, folder, world)
    )
