"""Work that no signal handler comes between.

Python runs the handlers of signals between any two of its instructions, and that of Ctrl-C raises
an exception there. What must be done as a whole, or not at all, holds the handlers back meanwhile.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable

# Those that programs have handlers for.
_NAMES = ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGVTALRM", "SIGPROF")
_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))


def uninterrupted(work: Callable[[], object]) -> None:
    """Call ``work``; signals that arrive meanwhile are handled when it has returned.

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
    if threading.current_thread() is not threading.main_thread():
        work()  # handlers run in the main thread alone
        return
    arrived: list[int] = []
    handlers = {}
    try:
        for signum in _SIGNALS:
            handler = signal.getsignal(signum)
            if callable(handler):  # else it is no handler of Python's
                handlers[signum] = handler
                signal.signal(signum, lambda signum, _: arrived.append(signum))
        work()
    finally:
        for signum, handler in reversed(handlers.items()):  # Ctrl-C last: its handler raises
            signal.signal(signum, handler)
    for signum in arrived:
        signal.raise_signal(signum)
