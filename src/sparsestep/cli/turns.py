"""Two runs that take turns: what disturbs the machine meanwhile disturbs both."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

from sparsestep.cli.skipgram import Run

BLOCK = 50  # steps in a row; then it is the other's turn


@dataclass
class Budget:
    """When to stop, whatever comes first.

    Attributes:
        steps: of each run.
        seconds: of both together.
        interrupted: somebody has pressed Ctrl-C.
    """

    steps: int
    seconds: float
    interrupted: bool = False

    def is_spent(self, done: int, elapsed: float) -> bool:
        """Whether another round, as long as those before, is too much.

        Example:
            >>> Budget(steps=1000, seconds=60).is_spent(done=100, elapsed=30)
            False
            >>> Budget(steps=1000, seconds=60).is_spent(done=100, elapsed=50)
            True
        """
        if not done:  # without one round there is nothing to show
            return False
        too_long = elapsed * (done + BLOCK) > self.seconds * done
        return self.interrupted or done >= self.steps or too_long

    def left(self, done: int, elapsed: float) -> float:
        """How many seconds it will still take, if it goes on like this.

        Example:
            >>> Budget(steps=1000, seconds=60).left(done=500, elapsed=10)
            10.0
            >>> Budget(steps=1000, seconds=15).left(done=500, elapsed=12.5)
            2.5
        """
        return max(0.0, min(elapsed * (self.steps / done - 1), self.seconds - elapsed))


def take_turns(
    runs: Sequence[Iterator[Run]],
    budget: Budget,
    each_step: Mapping[int, Callable[[Run, float], None]],
) -> list[Run]:
    """Train in blocks until the budget is spent; all runs have done as many steps then.

    Args:
        runs: each yields itself after each step.
        budget: when to stop.
        each_step: by the number of a run, what is called between its steps: with the run, and how
            many seconds all of them will still take.
    """
    began, done, left = perf_counter(), 0, budget.seconds
    latest: list[Run] = []
    while not budget.is_spent(done, perf_counter() - began):
        size = min(BLOCK, budget.steps - done)
        latest = []
        for number, run in enumerate(runs):
            for _ in range(size):
                state = next(run)
                each_step[number](state, left)
            latest.append(state)
        done += size
        left = budget.left(done, perf_counter() - began)
    return latest


@contextmanager
def stopped_by_ctrl_c(budget: Budget) -> Iterator[None]:
    """The first Ctrl-C spends the budget, so that results can be shown; the second interrupts."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        budget.interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
