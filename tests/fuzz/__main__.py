"""``python -m tests.fuzz``: random cases, or one of them again."""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import os
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator

from tests import processes
from tests.fuzz import cases
from tests.fuzz.cases import Outcome

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
    if options.cases is None and options.seconds is None:
        print(f"seeds from {first}; until you stop it")

    def batches() -> Iterator[list[int]]:
        last = float("inf") if options.cases is None else first + options.cases
        for begin in itertools.count(first, BATCH):
            if begin >= last or time.monotonic() >= end:
                return
            yield list(range(begin, int(min(begin + BATCH, last))))

    tally = Tally()
    try:
        for outcome in outcomes(batches(), cases.run, options.workers, options.timeout):
            tally.add(outcome)
            tally.show_now_and_then()
    except KeyboardInterrupt:
        print("stopped")
    print("\n".join(tally.report()))
    if tally.findings:
        print("See a case again with: python -m tests.fuzz --seed SEED")
    return int(bool(tally.findings))


def outcomes(
    batches: Iterator[list[int]], run: Callable[[int], Outcome], workers: int, timeout: float
) -> Iterator[Outcome]:
    for seed, found in processes.run(batches, run, workers, timeout):
        yield cases.lost(seed, found) if isinstance(found, processes.Lost) else found


class Tally:
    """Cases by kind, and findings by what they are."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.findings: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        self._start = self._shown = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        """Count it; a new finding is printed at once."""
        self.kinds[outcome.kind] += 1
        if outcome.finding:
            same = self.findings[outcome.kind, re.sub(r"\d{3,}", "…", outcome.finding)]
            same.append(outcome)
            if len(same) == 1:
                print(f"seed {outcome.seed}, {outcome.kind}: {outcome.finding}: {outcome.detail}")

    def show_now_and_then(self) -> None:
        if time.monotonic() - self._shown > 10:
            self._shown = time.monotonic()
            print(self.head(), flush=True)

    @property
    def cases(self) -> int:
        return sum(self.kinds.values())

    def head(self) -> str:
        seconds = time.monotonic() - self._start
        count = sum(map(len, self.findings.values()))
        rate = self.cases / max(seconds, 1e-9)
        return f"{self.cases:,} cases in {seconds:.0f} s, {rate:.0f} a second, {count} findings"

    def report(self) -> list[str]:
        """Every finding once, with how often it came and how to see it again."""
        lines = [self.head(), *(f"  {kind:32}{n:10,}" for kind, n in sorted(self.kinds.items()))]
        for (kind, what), found in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            seeds = ", ".join(str(outcome.seed) for outcome in found[:5])
            lines.append(f"{len(found):5} x {kind}: {what}")
            lines.append(f"        {found[0].detail}")
            lines.append(f"        seeds {seeds}")
        return lines


if __name__ == "__main__":
    sys.exit(main())
