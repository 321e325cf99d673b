"""Processes on this machine that meet through a file and leave what they found in another."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
TIMEOUT = 180.0  # of a busy machine; seconds otherwise

# Elsewhere, what torch uses may not survive a fork.
_FORKS = sys.platform == "linux"

Results = dict[str, Any]


def run_ranks(
    module: str, folder: Path, world: int, killed: int | None = None, timeout: float = TIMEOUT
) -> list[Results]:
    """What the worker of that module returned in each of several processes.

    Args:
        module: which has a worker.
        folder: where they meet.
        world: how many processes.
        killed: one that is to end by a signal; it leaves nothing.
        timeout: how many seconds they may take.
    """
    loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), None)
    names = {"GLOO_SOCKET_IFNAME": loopback, "TP_SOCKET_IFNAME": loopback} if loopback else {}
    env = {**os.environ, **names, "OMP_NUM_THREADS": "1"}
    ranks = [rank for rank in range(world) if rank != killed]
    logs = [folder / f"log{rank}" for rank in range(world)]
    workers = []
    try:
        for number, command in enumerate(_commands(module, folder, world, killed)):
            with (folder / f"log{number}").open("w") as out:
                python = [sys.executable, "-W", "error", "-m"]
                worker = subprocess.Popen(
                    [*python, *command],
                    cwd=ROOT,
                    env=env,
                    stdout=out,
                    stderr=out,
                    start_new_session=_FORKS,
                )
            workers.append(worker)
        expected = workers if _FORKS else [workers[rank] for rank in ranks]
        _wait(expected, timeout)
    finally:
        for worker in workers:
            _end(worker)
    codes = [worker.returncode for worker in expected]
    if any(codes):
        said = "\n".join(f"--- {log.name}\n{log.read_text()}" for log in logs)
        pytest.fail(f"the processes ended with {codes}\n{said}", pytrace=False)
    return [torch.load(folder / f"results{rank}") for rank in ranks]


def _commands(module: str, folder: Path, world: int, killed: int | None) -> list[list[str]]:
    """What is to be started: one process that becomes all ranks, or each rank for itself."""
    if _FORKS:
        none = -1 if killed is None else killed
        return [["tests.distributed.starter", module, str(folder), str(world), str(none)]]
    return [[module, str(rank), str(folder), str(world)] for rank in range(world)]


def _end(worker: subprocess.Popen[bytes]) -> None:
    """Nothing, if it has ended, and all that it has become."""
    if _FORKS:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
    else:
        worker.kill()
    worker.wait()


def _wait(workers: list[subprocess.Popen[bytes]], timeout: float) -> None:
    """Until all have ended, or one has failed, which others might wait for, or too long."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        codes = [worker.poll() for worker in workers]
        if None not in codes or any(codes):
            return
        time.sleep(0.05)


def world_size() -> int:
    """How many processes there are, for one of them."""
    return int(sys.argv[3])


def main(work: Callable[[int, str], Results]) -> None:
    """Be one of them: ``work`` gets the rank and the address to meet at."""
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    # Torch's parts warn each other of TorchScript, and of process groups without a frontend.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\b")
    warnings.filterwarnings("ignore", "You are using a Backend", UserWarning)
    warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)  # torch 2.7's own
    results = work(rank, (folder / "meeting").as_uri())
    torch.save(results, folder / f"results{rank}")
