"""``python -m tests.fuzz``: random cases, or one of them again."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator

from tests import processes
from tests.fuzz import cases
from tests.fuzz.cases import Outcome
from tests.processes import Tally

BATCH = 50  # seeds of one process


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--first", type=int, help="the first seed; by default from the clock")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=20.0, help="of one case, in seconds")
    parser.add_argument("--seed", type=int, help="run this case alone, and tell its steps")
    options = parser.parse_args()
    cases.prepare()
    return replay(options.seed) if options.seed is not None else search(options)


def replay(seed: int) -> int:
    faulthandler.enable()
    outcome = cases.run(seed, lambda text: print(text, flush=True))
    print(f"FOUND {outcome.finding}: {outcome.detail}" if outcome.finding else "nothing found")
    return int(bool(outcome.finding))


def search(options: argparse.Namespace) -> int:
    first = int(time.time()) * 1000 if options.first is None else options.first
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    last = float("inf") if options.cases is None else first + options.cases
    if options.cases is None and options.seconds is None:
        print(f"seeds from {first}; until you stop it")

    def batches() -> Iterator[list[int]]:
        for begin in itertools.count(first, BATCH):
            if begin >= last or time.monotonic() >= end:
                return
            yield list(range(begin, int(min(begin + BATCH, last))))

    tally = Tally()
    try:
        count(tally, batches(), cases.run, options.workers, options.timeout)
    except KeyboardInterrupt:
        print("stopped")
    print(tally.report())
    if tally.findings:
        print("See a case again with: python -m tests.fuzz --seed SEED")
    return int(bool(tally.findings))


def count(
    tally: Tally,
    batches: Iterator[list[int]],
    run: Callable[[int], Outcome],
    workers: int,
    timeout: float,
) -> None:
    for seed, found in processes.run(batches, run, workers, timeout):
        outcome = cases.lost(found) if isinstance(found, processes.Lost) else found
        tally.add(outcome.kind, seed, outcome.finding, outcome.detail)


if __name__ == "__main__":
    sys.exit(main())
