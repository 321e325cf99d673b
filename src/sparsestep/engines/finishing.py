"""Calls of a commit that complete even when memory runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

Result = TypeVar("Result")

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
    reserve is released and the call repeated.

    Args:
        calls: made in advance, so that nothing else is left to allocate.

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
    remaining = iter(calls)
    failures, call = 0, None
    while True:
        try:
            if call is None:
                call = next(remaining, None)
                if call is None:
                    return
            call()
            call = None
        except (MemoryError, RuntimeError):  # torch reports failed allocations as either
            failures = failed(failures)


def failed(failures: int) -> int:
    """Release the reserve so that a call can be repeated; raises if that happens too often.

    Args:
        failures: how often calls have failed before.

    Returns:
        How often they have failed now.
    """
    if failures >= _MOST_FAILURES:
        raise
    _reserve.clear()
    return failures + 1


def certain(call: Callable[[], Result]) -> Result:
    """Return the result of a call that ``finish`` could make: where other ranks rely on it.

    Example:
        >>> certain(lambda: 3)
        3
    """
    found: list[Result] = []
    finish((lambda: found.append(call()),))
    return found[0]
