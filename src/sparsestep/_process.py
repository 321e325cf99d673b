"""Deferred signals: work that no signal handler interrupts.

Python runs signal handlers between any two bytecodes of the main thread, and the handler of Ctrl-C
raises an exception there. Work that must happen as a whole replaces the handlers while it runs.

A signal mask would not do: another thread, such as one of torch's, may receive the signal, and
Python then runs the handler in the main thread all the same.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # signal.getsignal takes ten times as long
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from itertools import count
from operator import methodcaller
from types import FrameType
from typing import Any, TypeVar


def _is_main() -> bool:
    name = "_interpreters" if sys.version_info >= (3, 13) else "_xxsubinterpreters"
    try:
        interpreters = import_module(name)
    except ImportError:  # a Python without subinterpreters
        return True
    return bool(interpreters.get_current() == interpreters.get_main())


if not _is_main():
    raise ImportError(
        "sparsestep must be imported in the main interpreter, got a subinterpreter, where neither "
        "torch nor the native core can be loaded. Use a process instead.",
        name="sparsestep",
    )


# How long a fork waits for the steps of other threads, in seconds.
_PATIENCE = 5.0

_numbers = count()
_locks: weakref.WeakValueDictionary[int, threading.RLock] = weakref.WeakValueDictionary()


def fork_safe_lock() -> threading.RLock:
    """A reentrant lock that is free in a forked process."""
    lock = threading.RLock()
    _locks[next(_numbers)] = lock
    return lock


class _Fork(threading.local):
    """The locks during a fork of this thread, in order of creation, and which it has acquired."""

    def __init__(self) -> None:
        self.locks: list[threading.RLock] = []
        self.is_acquired: list[bool] = []

    # A signal handler may raise between any two bytecodes. So locks are acquired, and the results
    # noted, inside single calls of C functions.
    def before(self) -> None:
        deadline = time.monotonic() + _PATIENCE
        self.locks, self.is_acquired = [], []
        self.locks += [lock for each in _locks.valuerefs() if (lock := each()) is not None]
        self.is_acquired.extend(map(methodcaller("acquire", blocking=False), self.locks))
        for index, is_acquired in enumerate(self.is_acquired):
            if not is_acquired:
                acquire = methodcaller("acquire", timeout=max(0.0, deadline - time.monotonic()))
                self.is_acquired[index : index + 1] = map(acquire, self.locks[index : index + 1])

    def in_parent(self) -> None:
        for lock, is_acquired in zip(self.locks, self.is_acquired, strict=False):
            if is_acquired:
                lock.release()
        self.locks, self.is_acquired = [], []

    def in_child(self) -> None:
        for index, lock in enumerate(self.locks):
            if index >= len(self.is_acquired) or not self.is_acquired[index]:
                lock._at_fork_reinit()  # type: ignore[attr-defined]  # noqa: SLF001
        self.in_parent()


_fork = _Fork()
if hasattr(os, "register_at_fork"):  # bound late: each thread has its own attributes
    os.register_at_fork(
        before=lambda: _fork.before(),
        after_in_parent=lambda: _fork.in_parent(),
        after_in_child=lambda: _fork.in_child(),
    )


Result = TypeVar("Result")

_SIGNALS = tuple(sorted(map(int, signal.valid_signals())))


def uninterrupted(work: Callable[[], Result]) -> Result:
    """Call ``work`` with signals deferred, and return its result.

    Signals that arrive meanwhile are handled when ``work`` has returned or raised, each of them,
    after all handlers have been restored. If a handler raises, its exception propagates, with that
    of ``work`` as its context. If several do, the first one propagates, or the first that is no
    ``Exception``, such as ``KeyboardInterrupt``.

    Example:
        >>> done = []
        >>> def work():
        ...     signal.raise_signal(signal.SIGINT)
        ...     done.append("all of it")
        >>> try:
        ...     uninterrupted(work)
        ... except KeyboardInterrupt:
        ...     print(done)
        ['all of it']
    """
    if threading.get_ident() != threading.main_thread().ident:
        return work()  # handlers run in the main thread only
    deferral = _Deferral()
    try:
        deferral.install()
        return work()
    finally:
        try:
            deferral.release()
        finally:  # in case a handler raised outside the loop, where handlers may run again
            if deferral.is_pending:
                deferral.release()


@dataclass(eq=False)
class _Deferral:
    """A handler that records signals, or passes them on once it is no longer ``is_holding``.

    So signals work even if a handler raises before this object has been uninstalled everywhere.
    """

    is_holding: bool = True
    is_pending: bool = True
    _handlers: dict[int, Any] = field(default_factory=dict)
    _installed: list[int] = field(default_factory=list)
    _arrived: list[tuple[int, FrameType | None]] = field(default_factory=list)
    _errors: list[BaseException] = field(default_factory=list)

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if self.is_holding:
            self._arrived.append((signum, frame))
        else:
            self._handlers[signum](signum, frame)

    def install(self) -> None:
        """Replace every handler that is a Python function."""
        for signum, handler in zip(_SIGNALS, map(_signal.getsignal, _SIGNALS), strict=True):
            if callable(handler):
                if isinstance(handler, _Deferral) and not handler.is_holding:  # left behind
                    handler = handler._handlers[signum]  # noqa: SLF001
                self._handlers[signum] = handler
                self._installed.append(signum)
                _signal.signal(signum, self)

    def release(self) -> None:
        """Restore all handlers, then handle the signals that have arrived. May be called again."""
        while self.is_pending:
            try:
                self.is_holding = False  # from here on, a handler may raise at any bytecode
                while self._installed:
                    signum = self._installed[-1]
                    if _signal.getsignal(signum) is self:
                        _signal.signal(signum, self._handlers[signum])
                    self._installed.pop()
                while self._arrived:
                    handler = self._handlers[self._arrived[0][0]]
                    handler(*self._arrived.pop(0))
                self.is_pending = False
            except BaseException as error:
                self._errors.append(error)
        errors, self._errors = self._errors, []
        if errors:
            raise next((e for e in errors if not isinstance(e, Exception)), errors[0])
