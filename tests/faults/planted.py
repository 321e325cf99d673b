"""Operations with a defect each, which the harness has to find, and a correct one."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from tests.faults.operations import Operation, of
from tests.faults.ranks import RankOperation
from tests.faults.snapshot import Snapshot, snapshot


class Torn(Operation):
    """Writes one of two values, then the other."""

    faults = (*Operation.faults, "out of memory")

    def setup(self) -> None:
        self.first = self.second = 0
        self.lock = threading.Lock()

    def run(self) -> None:
        self.first = 1
        torch.zeros(1000)  # may fail
        time.sleep(0.05)
        self.second = 1

    def both(self) -> None:
        self.first = self.second = 1

    def values(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}


def locked(world: Torn) -> None:
    """Never releases its lock when it is interrupted."""
    if not world.lock.acquire(timeout=0.5):
        raise RuntimeError("locked")
    torch.zeros(1000)
    time.sleep(0.01)
    world.both()
    world.lock.release()


def guarded(world: Torn) -> None:
    """Correct: always releases its lock, also when its ``try`` is interrupted."""
    with world.lock:
        torch.zeros(1000)
        try:
            world.both()
        finally:
            time.sleep(0)


def deaf(world: Torn) -> None:
    """Loses signals."""
    handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGUSR1)}
    lost: list[int] = []
    for signum in handlers:
        signal.signal(signum, lambda signum, _: lost.append(signum))
    end = time.monotonic() + 0.5  # a busy machine may send them late
    while len(lost) < len(handlers) and time.monotonic() < end:
        time.sleep(0.001)
    world.both()
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


def crashing(world: Torn) -> None:
    """Reads address 0 where memory runs out."""
    try:
        torch.zeros(1000)
    except RuntimeError:
        os.kill(os.getpid(), signal.SIGSEGV)
    world.both()


class Half(Torn):
    """Leaves half a file when it is killed."""

    faults = ("kill",)

    def run(self) -> None:
        path = self.folder / "file"
        path.write_text("half")
        time.sleep(0)
        path.write_text("half and half")
        self.both()

    def reopen(self) -> Snapshot:
        return snapshot({path.name: path.read_text() for path in self.folder.glob("file")})


class Alone(Torn, RankOperation):
    """Rank 0 does not ask whether rank 1 has failed."""

    faults = ("allocation",)

    def run(self) -> None:
        torch.zeros(1000)
        self.both()


OPERATIONS: dict[str, type[Operation]] = {
    "torn": Torn,
    "locked": of(Torn, run=locked, faults=("line",)),
    "guarded": of(Torn, run=guarded, faults=("line", "allocation")),
    "deaf": of(Torn, run=deaf, faults=("signal",)),
    "crashing": of(Torn, run=crashing, faults=("allocation",)),
    "half": Half,
    "alone": Alone,
}
