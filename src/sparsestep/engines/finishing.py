"""Calls of a commit that complete even when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from typing import Any, TypeVar

Result = TypeVar("Result")
Subject = TypeVar("Subject")

# Memory that is given back when an allocation fails, so that the small ones that are needed to
# complete a commit succeed. Blocks of this size come from the heap, not from pages of their own.
_BLOCKS, _BLOCK_BYTES = 8, 1 << 15
_reserve: list[bytearray] = []
_MOST_FAILURES = 1000


def reserve() -> None:
    """Allocate the reserve of ``finish``; call it in prepare, since it may raise."""
    while len(_reserve) < _BLOCKS:
        _reserve.append(bytearray(_BLOCK_BYTES))


def finish(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, in order, each until it succeeds.

    Every call must either raise and have done nothing, or be harmless to repeat. Calls need memory
    for a few small objects at most, such as Python's view of a scalar. If that cannot be had, the
    reserve is released and the call repeated. They are made in advance, so that nothing else is
    left to allocate.

    Example:
        >>> attempts = []
        >>> def call():
        ...     attempts.append("attempt")
        ...     if len(attempts) < 3:
        ...         raise MemoryError
        >>> finish([call])
        >>> len(attempts)
        3
    """
    finish_steps(calls, _INVOKE)


_INVOKE = (methodcaller("__call__"),)
_END: Any = object()


def finish_steps(subjects: Iterable[Subject], steps: Sequence[Callable[[Subject], object]]) -> None:
    """Take all steps with each subject, in order, each step until it succeeds; see ``finish``."""
    remaining = iter(subjects)
    left: Iterator[Callable[[Subject], object]] = iter(())
    subject: Any = None
    step: Callable[[Subject], object] | None = None
    failures = 0
    while True:
        try:
            if step is None:
                step = next(left, None)
                if step is None:
                    left = iter(steps)
                    subject = next(remaining, _END)
                    if subject is _END:
                        return
                    continue
            step(subject)
            step = None
        except (MemoryError, RuntimeError):  # torch reports failed allocations as either
            if failures >= _MOST_FAILURES:
                raise
            failures += 1
            _reserve.clear()


def certain(call: Callable[[], Result]) -> Result:
    """Return the result of a call that ``finish`` could make: where other ranks rely on it.

    Example:
        >>> certain(lambda: 3)
        3
    """
    found: list[Result] = []
    finish((lambda: found.append(call()),))
    return found[0]
