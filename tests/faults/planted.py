"""Operations with a defect each, which the harness has to find, and a correct one."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import torch

from tests.faults.operations import Operation
from tests.faults.ranks import RankOperation
from tests.faults.snapshot import Snapshot, snapshot


class Torn(Operation):
    """Writes one of two values, then the other."""

    faults = (*Operation.faults, "out of memory")

    def setup(self) -> None:
        self.first = self.second = 0

    def run(self) -> None:
        self.first = 1
        torch.zeros(1000)  # may fail
        time.sleep(0.05)
        self.second = 1

    def values(self) -> dict[str, Any]:
        return {"first": self.first, "second": self.second}


class Locked(Torn):
    """Never releases its lock when it is interrupted."""

    faults = ("line",)

    def precede(self) -> None:
        self.lock = threading.Lock()

    def run(self) -> None:
        if not self.lock.acquire(timeout=0.5):
            raise RuntimeError("locked")
        torch.zeros(1000)
        time.sleep(0.01)
        self.first = self.second = 1
        self.lock.release()


class Guarded(Locked):
    """Correct: always releases its lock, also when its ``try`` is interrupted."""

    faults = ("line", "allocation")

    def run(self) -> None:
        with self.lock:
            torch.zeros(1000)
            try:
                self.first = self.second = 1
            finally:
                time.sleep(0)


class Deaf(Torn):
    """Loses signals."""

    faults = ("signal",)

    def run(self) -> None:
        handlers = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGUSR1)}
        lost: list[int] = []
        for signum in handlers:
            signal.signal(signum, lambda signum, _: lost.append(signum))
        end = time.monotonic() + 0.5  # a busy machine may send them late
        while len(lost) < len(handlers) and time.monotonic() < end:
            time.sleep(0.001)
        self.first = self.second = 1
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


class Crashing(Torn):
    """Reads address 0 where memory runs out."""

    faults = ("allocation",)

    def run(self) -> None:
        try:
            torch.zeros(1000)
        except RuntimeError:
            os.kill(os.getpid(), signal.SIGSEGV)
        self.first = self.second = 1


class Half(Torn):
    """Leaves half a file when it is killed."""

    faults = ("kill",)

    def run(self) -> None:
        path = self.folder / "file"
        path.write_text("half")
        time.sleep(0)
        path.write_text("half and half")
        self.first = self.second = 1

    def reopen(self) -> Snapshot:
        return snapshot({path.name: path.read_text() for path in self.folder.glob("file")})


class Alone(RankOperation):
    """Rank 0 does not ask whether rank 1 has failed."""

    faults = ("allocation",)

    def setup(self) -> None:
        self.value = 0

    def run(self) -> None:
        torch.zeros(1000)
        self.value = 1

    def values(self) -> dict[str, Any]:
        return {"value": self.value}


OPERATIONS: dict[str, type[Operation]] = {
    "torn": Torn,
    "locked": Locked,
    "guarded": Guarded,
    "deaf": Deaf,
    "crashing": Crashing,
    "half": Half,
    "alone": Alone,
}
