"""Locks that a forked process can use, whatever other threads were doing.

A fork copies locks as they are, but not the threads that would release them. So a thread that forks
first acquires every lock of this module. The child then has free locks, and finds optimizers and
vocabularies between two steps, not inside one.

If a lock cannot be acquired in time, for example because its step waits for another process, the
fork goes ahead. The child gets a fresh lock, but may find what the lock protects half updated.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from itertools import count
from operator import methodcaller

# How long a fork waits for the steps of other threads, in seconds.
_PATIENCE = 5.0

_numbers = count()
_locks: weakref.WeakValueDictionary[int, threading.RLock] = weakref.WeakValueDictionary()


def fork_safe_lock() -> threading.RLock:
    """A reentrant lock that is free in a forked process.

    Example:
        >>> with fork_safe_lock() as is_held:
        ...     is_held
        True
    """
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
                lock._at_fork_reinit()  # type: ignore[attr-defined]
        self.in_parent()


_fork = _Fork()
if hasattr(os, "register_at_fork"):  # bound late: each thread has its own attributes
    os.register_at_fork(
        before=lambda: _fork.before(),
        after_in_parent=lambda: _fork.in_parent(),
        after_in_child=lambda: _fork.in_child(),
    )
