"""``python -m tests.fuzz``: random cases, or one of them again."""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import time

from tests.fuzz import pool
from tests.fuzz.screen import Screen, Tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, help="stop after so long")
    parser.add_argument("--cases", type=int, help="stop after so many")
    parser.add_argument("--first", type=int, help="the first seed; by default from the clock")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=20.0, help="of one case, in seconds")
    parser.add_argument("--seed", type=int, help="run this case alone, and tell its steps")
    options = parser.parse_args()
    return replay(options.seed) if options.seed is not None else search(options)


def replay(seed: int) -> int:
    import faulthandler

    from tests.fuzz import cases

    faulthandler.enable()
    cases.prepare()
    outcome = cases.run(seed, lambda text: print(text, flush=True))
    print(f"FOUND {outcome.finding}: {outcome.detail}" if outcome.finding else "nothing found")
    return int(bool(outcome.finding))


def search(options: argparse.Namespace) -> int:
    first = int(time.time()) * 1000 if options.first is None else options.first
    seeds = (
        itertools.count(first)
        if options.cases is None
        else iter(range(first, first + options.cases))
    )
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    if options.cases is None and options.seconds is None:
        print(f"seeds from {first}; until you stop it")
    tally = Tally()
    screen = Screen(tally)
    try:
        with screen:
            for outcome in pool.run(
                seeds, options.workers, options.timeout, lambda: time.monotonic() < end
            ):
                screen.add(outcome)
    except KeyboardInterrupt:
        print("stopped")
    screen.close()
    if tally.findings:
        print("See a case again with: python -m tests.fuzz --seed SEED")
    return int(bool(tally.findings))


if __name__ == "__main__":
    sys.exit(main())
