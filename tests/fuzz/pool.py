"""Processes that run cases, and survive what a case does to them."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

# So many seeds a message.
BATCH = 50
_STARTING = -1
_IDLE_LOOKS = 3


@dataclass
class Outcome:
    """How a case ended.

    Attributes:
        seed: of the case.
        kind: of the case.
        finding: what was found, in a word or two; empty if nothing.
        detail: the same with numbers.
    """

    seed: int
    kind: str
    finding: str = ""
    detail: str = ""


def _work(runner: str, mailbox: Connection, at: Any, log: str) -> None:
    """Run batches of seeds until there is nothing more to come; ``at`` says which one is on."""
    sys.stdout = sys.stderr  # what a case prints is not for the screen
    trace = Path(log).open("w")  # noqa: SIM115 (it stays open as long as the process lives)
    faulthandler.enable(trace)
    cases = importlib.import_module(runner)  # only those processes need torch that run cases
    cases.prepare()
    while True:
        try:
            seeds = mailbox.recv()
        except EOFError:
            return
        for seed in seeds:
            at[1], at[2] = time.time(), time.process_time()
            at[0] = seed
            mailbox.send(cases.run(seed))
        at[0] = _STARTING
        cases.collect()


@dataclass
class _Worker:
    context: Any
    runner: str
    folder: str
    number: int
    seeds: list[int] = field(default_factory=list)
    idle_looks: int = 0  # how often in a row none of its threads was running

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.mailbox, theirs = self.context.Pipe()
        self.at = self.context.Array("d", [_STARTING, 0.0, 0.0], lock=False)
        self.log = os.path.join(self.folder, f"worker-{self.number}.txt")
        arguments = (self.runner, theirs, self.at, self.log)
        self.process = self.context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        if self.seeds:
            self.mailbox.send(self.seeds)

    def give(self, seeds: list[int]) -> None:
        self.seeds = seeds
        self.mailbox.send(seeds)

    def is_hanging(self, seconds: float) -> bool:
        """Whether the case has computed for so long, or waits and will for ever.

        On a busy machine a case may take long without doing much; that is no finding.
        """
        if self.at[0] == _STARTING or time.time() - self.at[1] <= seconds:
            self.idle_looks = 0
            return False
        assert self.process.pid is not None
        used = _cpu_seconds(self.process.pid)
        if used is None or used - self.at[2] > seconds:
            return True
        self.idle_looks = 0 if _is_running(self.process.pid) else self.idle_looks + 1
        return self.idle_looks >= _IDLE_LOOKS

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.mailbox.close()

    def post_mortem(self, kind: str) -> Outcome:
        """What is to be said about a process that has died, or had to be stopped."""
        seed = int(self.at[0]) if self.at[0] != _STARTING else self.seeds[0]
        trace = Path(self.log).read_text() if os.path.exists(self.log) else ""
        lines = [line.strip() for line in trace.splitlines() if "File" in line]
        ours = [line for line in lines if "/sparsestep/" in line]
        place = (ours or lines or ["no trace"])[0]
        return Outcome(seed, "process", kind, place)


def _fields(stat: Path) -> list[str]:
    """What Linux tells of a process or thread, from its state on."""
    return stat.read_text().rpartition(")")[2].split()


def _cpu_seconds(pid: int) -> float | None:
    """What a process has computed so far; ``None`` where the system does not tell."""
    try:
        fields = _fields(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _is_running(pid: int) -> bool:
    """Whether any of its threads is running, or would be if it had a core."""
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        try:
            if _fields(stat)[0] == "R":
                return True
        except OSError:
            continue  # that thread has ended
    return False


def run(
    seeds: Iterator[int],
    workers: int,
    timeout: float,
    keep_on: Callable[[], bool] = lambda: True,
    runner: str = "tests.fuzz.cases",
) -> Iterator[Outcome]:
    """The outcome of every case, in whatever order they come.

    Args:
        seeds: of the cases.
        workers: how many processes.
        timeout: after so many seconds a case is taken to hang.
        keep_on: whether to begin another batch.
        runner: the module that has ``prepare()``, ``run(seed)`` and ``collect()``.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        team = [_Worker(context, runner, folder, number) for number in range(workers)]
        try:
            for worker in team:
                _more(worker, seeds)
            while any(worker.seeds for worker in team):
                wait([worker.mailbox for worker in team if worker.seeds], timeout=1.0)
                for worker in team:
                    yield from _look_after(worker, timeout)
                    if not worker.seeds and keep_on():
                        _more(worker, seeds)
        finally:
            for worker in team:
                worker.stop()


def _more(worker: _Worker, seeds: Iterator[int]) -> None:
    batch = [seed for _, seed in zip(range(BATCH), seeds, strict=False)]
    if batch:
        worker.give(batch)


def _look_after(worker: _Worker, timeout: float) -> Iterator[Outcome]:
    """What a process has to say; a new one in its place if it will not say anything more."""
    if not worker.seeds:
        return
    gone = ""
    try:
        while worker.mailbox.poll():
            found = worker.mailbox.recv()
            worker.seeds = worker.seeds[1:]
            yield found
    except (EOFError, OSError):
        worker.process.join(timeout=5)
        gone = f"crash, exit code {worker.process.exitcode}"
    if not gone and worker.is_hanging(timeout):
        gone = f"hang, more than {timeout:g} s"
    if gone:
        lost = worker.post_mortem(gone)
        worker.stop()
        worker.seeds = worker.seeds[1:]
        worker.start()
        yield lost
