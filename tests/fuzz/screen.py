"""What is shown while cases run, and in the end."""

from __future__ import annotations

import re
import sys
import time
from collections import Counter, defaultdict
from typing import Any

from tests.fuzz.outcome import Outcome

try:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table
except ImportError:  # plain text, then
    Console = None  # type: ignore[assignment, misc]


class Tally:
    """Cases by kind, and findings by what they are."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.bad: Counter[str] = Counter()
        self.findings: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
        self.begun = time.monotonic()

    def add(self, outcome: Outcome) -> None:
        self.kinds[outcome.kind] += 1
        if outcome.finding:
            self.bad[outcome.kind] += 1
            self.findings[outcome.kind, _without_numbers(outcome.finding)].append(outcome)

    def is_new(self, outcome: Outcome) -> bool:
        """Whether it is the first finding of its kind."""
        return len(self.findings[outcome.kind, _without_numbers(outcome.finding)]) == 1

    @property
    def cases(self) -> int:
        return sum(self.kinds.values())

    @property
    def rate(self) -> float:
        return self.cases / max(time.monotonic() - self.begun, 1e-9)

    def head(self) -> str:
        seconds = time.monotonic() - self.begun
        count = sum(self.bad.values())
        return (
            f"{self.cases:,} cases in {seconds:.0f} s, {self.rate:.0f} a second, {count} findings"
        )

    def rows(self) -> list[tuple[str, str, str]]:
        return [
            (kind, f"{n:,}", str(self.bad[kind] or "")) for kind, n in sorted(self.kinds.items())
        ]

    def report(self) -> list[str]:
        """Every finding once, with how often it came and how to see it again."""
        lines = []
        for (kind, what), found in sorted(self.findings.items(), key=lambda item: -len(item[1])):
            seeds = ", ".join(str(outcome.seed) for outcome in found[:5])
            lines.append(f"{len(found):5} x {kind}: {what}")
            lines.append(f"        {found[0].detail}")
            lines.append(f"        seeds {seeds}")
        return lines


def _without_numbers(text: str) -> str:
    return re.sub(r"\d{3,}", "…", text)


class Screen:
    """A live table where there is a terminal and rich; else a line now and then."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._shown = time.monotonic()
        self._live: Any = None
        if Console is not None and sys.stdout.isatty():
            self._live = Live(self._table(), refresh_per_second=4)

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.update(self._table())
            self._live.stop()

    def add(self, outcome: Outcome) -> None:
        """Count it; a finding of a new kind is told at once, lest it is lost with whoever looks."""
        self._tally.add(outcome)
        if outcome.finding and self._live is None and self._tally.is_new(outcome):
            print(f"seed {outcome.seed}, {outcome.kind}: {outcome.finding}: {outcome.detail}")
        self._update()

    def _update(self) -> None:
        now = time.monotonic()
        if now - self._shown < (0.25 if self._live is not None else 10):
            return
        self._shown = now
        if self._live is not None:
            self._live.update(self._table())
        else:
            print(self._tally.head(), flush=True)

    def _table(self) -> Any:
        table = Table(title=self._tally.head(), title_justify="left")
        for name, justify in (("kind", "left"), ("cases", "right"), ("findings", "right")):
            table.add_column(name, justify=justify)
        for row in self._tally.rows():
            table.add_row(*row)
        return table

    def close(self) -> None:
        """Print what came of it."""
        if self._live is None:
            print(self._tally.head())
            for kind, cases, bad in self._tally.rows():
                print(f"  {kind:32}{cases:>10}{bad:>8}")
        for line in self._tally.report():
            print(line)
