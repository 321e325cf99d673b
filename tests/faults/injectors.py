"""Faults: what goes wrong while an operation runs."""

from __future__ import annotations

import ctypes
import dis
import functools
import linecache
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

SMALLEST_ALLOCATION = 256  # below that, most are the interpreter's own
NEVER = 1 << 62


class Injector:
    """A fault at the n-th of an operation's events."""

    raises: tuple[type[BaseException], ...] = ()  # what an operation may raise because of it
    kills = False  # whether the process ends

    def count(self, run: Callable[[], None]) -> int:
        """Run the operation undisturbed; the number of its events."""
        return self.inject(run, NEVER)

    def inject(self, run: Callable[[], None], nth: int) -> int:
        """Run the operation with the fault at its n-th event, counted from 0."""
        raise NotImplementedError


class Lines(Injector):
    """Ctrl-C when a line of Python begins.

    Two kinds of lines are left out, where the interpreter checks for no signal: those of ``with``
    statements, traced once more when the block ends, and a ``try:`` inside of another block, which
    CPython's compiler does not protect by that block.

    Args:
        folder: only lines of files in there.
    """

    raises = (KeyboardInterrupt,)

    def __init__(self, folder: str = "") -> None:
        self._folder = folder

    def fault(self) -> None:
        signal.raise_signal(signal.SIGINT)

    def inject(self, run: Callable[[], None], nth: int) -> int:
        seen = 0

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal seen
            if event == "line":
                if _is_interruptible(frame.f_code, frame.f_lineno, frame.f_lasti):
                    seen += 1
                    if seen - 1 == nth:
                        sys.settrace(before)
                        self.fault()
            elif event == "call":
                file = frame.f_code.co_filename
                return trace if file != __file__ and file.startswith(self._folder) else None
            return trace

        before = sys.gettrace()  # that of coverage
        sys.settrace(trace)
        try:
            run()
        finally:
            sys.settrace(before)
        return seen


@functools.cache
def _is_interruptible(code: Any, number: int, last: int) -> bool:
    line = linecache.getline(code.co_filename, number).lstrip()
    if not line.startswith("try:"):
        return not line.startswith("with ")
    entries = getattr(dis.Bytecode(code), "exception_entries", ())  # since Python 3.11

    def is_protected(offset: int) -> bool:
        return any(entry.start <= offset < entry.end for entry in entries)

    return is_protected(last) or not is_protected(last - 2)


class Kills(Lines):
    """The process is killed when a line of Python begins."""

    kills = True

    def fault(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class AllocationFailures(Injector):
    """One allocation fails, in Python, torch or the core, in any thread.

    Python's own compiler reports some of these as ``SystemError``.
    """

    raises = (MemoryError, SystemError)
    persistent = False

    def inject(self, run: Callable[[], None], nth: int) -> int:
        preloaded = ctypes.CDLL(None)
        arm, disarm = preloaded.sparsestep_faults_arm, preloaded.sparsestep_faults_disarm
        disarm.restype = ctypes.c_long
        number, size = ctypes.c_long(nth + 1), ctypes.c_size_t(SMALLEST_ALLOCATION)
        arm(number, size, int(self.persistent))
        try:
            run()
        finally:
            seen = disarm()
        return seen


class MemoryEnds(AllocationFailures):
    """One allocation fails, and so do all later ones."""

    persistent = True


class Signals(Injector):
    """Signals at a moment in the course of the operation; events are slices of its duration."""

    raises = (KeyboardInterrupt,)
    SLICES = 1000

    def count(self, run: Callable[[], None]) -> int:
        started = time.perf_counter()
        run()
        self.seconds = time.perf_counter() - started
        return self.SLICES

    def inject(self, run: Callable[[], None], nth: int) -> int:
        handled: list[int] = []
        is_running = False

        def handle(signum: int, _: Any) -> None:
            handled.append(signum)
            if is_running and signum == signal.SIGINT:
                raise KeyboardInterrupt

        pid, begin = os.getpid(), threading.Event()

        def send() -> None:
            begin.wait()
            time.sleep(self.seconds * nth / self.SLICES)
            os.kill(pid, signal.SIGUSR1)
            os.kill(pid, signal.SIGINT)

        both = (signal.SIGUSR1, signal.SIGINT)
        previous = [signal.signal(signum, handle) for signum in both]
        sender = threading.Thread(target=send)
        sender.start()
        try:
            is_running = True
            begin.set()
            run()
        finally:
            is_running = False
            sender.join()
            if [signal.getsignal(signum) for signum in both] != [handle, handle]:
                raise AssertionError("a signal handler was lost")
            for signum, handler in zip(both, previous, strict=True):
                signal.signal(signum, handler)
            if sorted(handled) != sorted(both):
                raise AssertionError(f"signals {sorted(both)} were sent, {sorted(handled)} handled")
        return 1


INJECTORS: dict[str, Callable[[], Injector]] = {
    "line": Lines,
    "allocation": AllocationFailures,
    "out of memory": MemoryEnds,
    "signal": Signals,
    "kill": Kills,
}
