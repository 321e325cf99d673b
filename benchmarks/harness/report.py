"""What a benchmark shows in a terminal: progress while it runs, then a table per case."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import geometric_mean
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from benchmarks.harness.contestants import Native
from benchmarks.harness.limit import Limit
from benchmarks.harness.race import Follow
from benchmarks.harness.results import CaseResult, Header, Report, Timing

_BAR_WIDTH = 14
_EIGHTHS = " ▏▎▍▌▋▊▉"
_REFRESH_SECONDS = 0.5
_MISSING = "-"


class Screen:
    """Results go to stdout, progress to stderr: a pipe or a file gets the results alone."""

    def __init__(self) -> None:
        self._results = Console(highlight=False)
        self._progress = Console(stderr=True, highlight=False)

    def say(self, text: str) -> None:
        """Print a line without breaking it, so that a path in it can be copied."""
        self._results.print(text, markup=False, soft_wrap=True)

    def introduce(self, header: Header) -> None:
        """Print what is measured with."""
        machine = header.machine
        versions = ", ".join(f"{name} {number}" for name, number in header.versions.items())
        self.say(
            f"{machine.cpu}, cores: {machine.cores}, threads: {machine.threads}, "
            f"huge pages: {machine.huge_pages}\n"
            f"{versions}, instruction set: {header.instruction_set or 'none'}"
        )

    def begin(self, report: Report) -> None:
        """Print what is measured with, and how far it is from the real sizes."""
        self.introduce(report)
        if report.scale != 1:
            self.say(f"Rows and lookups are divided by {report.scale:g}: only for a quick look.")

    @contextmanager
    def progress(self, name: str) -> Iterator[Follow]:
        """A progress bar where there is a terminal; it is gone afterwards, whatever happened."""
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f}%"),
            console=self._progress,
            transient=True,
            disable=not self._progress.is_terminal,
            # A thread that draws would compete with the step that is being timed.
            auto_refresh=False,
        )
        drawn = -math.inf

        def follow(done: float) -> None:
            nonlocal drawn
            if perf_counter() - drawn >= _REFRESH_SECONDS:
                bar.update(task, completed=done, refresh=True)
                drawn = perf_counter()

        with bar:
            task = bar.add_task(name, total=1.0)
            bar.refresh()  # making the tables of a large case takes a while
            yield follow

    def show(self, result: CaseResult) -> None:
        """Print the table of one case, and who did not take part."""
        self._results.print()
        self._results.print(Text(headline(result), style="bold"))
        plain = not self._results.encoding.startswith("utf")
        self._results.print(case_table(result, plain))
        reasons = dict.fromkeys(refusal.reason for refusal in result.unavailable)
        for reason in reasons:
            names = [each.contestant for each in result.unavailable if each.reason == reason]
            self.say(f"{_MISSING} {', '.join(names)}: {reason}.")

    def summarise(self, suite: str, results: Sequence[CaseResult]) -> None:
        """Print what the cases of a suite come to."""
        self._results.print()
        self._results.print(Text(f"{suite}: {Native.name} in short", style="bold"))
        self._results.print(summary_table(results))


def headline(result: CaseResult) -> str:
    """What was measured, in one line."""
    shared = ", one table for all" if result.shared else ""
    return f"{_with_threads(result)}; rows touched: {result.unique:,}{shared}"


def _with_threads(result: CaseResult) -> str:
    if result.case.threads:  # it is in the name
        return result.case.name
    return f"{result.case.name}, {result.threads} thread{'s' if result.threads > 1 else ''}"


def case_table(result: CaseResult, plain: bool) -> Table:
    """The contestants, ratios first; the limit on top, then the fastest first.

    Args:
        result: what to show.
        plain: draw with ASCII characters alone.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("contestant", no_wrap=True)
    table.add_column("x torch", justify="right", style="bold")
    table.add_column("of limit", justify="right", style="bold")
    table.add_column("ms", justify="right")
    table.add_column("spread", justify="right")
    table.add_column("speed", no_wrap=True)
    limit = result.timing(Limit.name)
    others = [timing for timing in result.timings if timing is not limit]
    fastest = min((timing.median_ms for timing in result.timings), default=1.0)
    for timing in [limit, *others] if limit else others:
        table.add_row(
            timing.contestant,
            times(timing.times_torch),
            fraction(timing.of_limit),
            milliseconds(timing.median_ms),
            _spread(timing, plain),
            bar(fastest / timing.median_ms, _BAR_WIDTH, plain),
        )
    for refusal in result.unavailable:
        table.add_row(refusal.contestant, *[_MISSING] * 4)
    return table


def summary_table(results: Sequence[CaseResult]) -> Table:
    """This library against torch and the limit on each case, and the geometric means.

    There are no means where the machine was disturbed: they would be taken for a result.
    """
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("case")
    table.add_column("x torch", justify="right", style="bold")
    table.add_column("of limit", justify="right", style="bold")
    ours = [(result, result.timing(Native.name)) for result in results]
    differ = len({result.threads for result in results}) > 1
    for result, timing in ours:
        name = _with_threads(result) if differ else result.case.name
        if result.is_disturbed:
            name += " (disturbed)"
        against = (timing.times_torch, timing.of_limit) if timing else (None, None)
        table.add_row(name, times(against[0]), fraction(against[1]))
    table.add_section()
    if any(result.is_disturbed for result in results):
        table.add_row("no mean: the machine was disturbed; wait and run again", _MISSING, _MISSING)
        return table
    taken = [timing for _, timing in ours if timing]
    table.add_row(
        "geometric mean",
        times(_mean([timing.times_torch for timing in taken])),
        fraction(_mean([timing.of_limit for timing in taken])),
    )
    return table


def _mean(ratios: Sequence[float | None]) -> float | None:
    known = [ratio for ratio in ratios if ratio is not None]
    return geometric_mean(known) if known else None


def bar(length: float, width: int, plain: bool = False) -> str:
    """A horizontal bar that fills ``length`` of ``width`` characters.

    Example:
        >>> bar(1.0, 4), bar(0.4, 4), bar(0.4, 4, plain=True)
        ('████', '█▋', '##')
    """
    if plain:
        return "#" * round(length * width)
    whole, eighths = divmod(round(length * width * 8), 8)
    return ("█" * whole + _EIGHTHS[eighths]).rstrip()


def times(ratio: float | None) -> str:
    """How many times faster, to three digits.

    Example:
        >>> times(123.4), times(12.34), times(0.1234), times(None)
        ('123x', '12.3x', '0.12x', '-')
    """
    if ratio is None:
        return _MISSING
    digits = 0 if ratio >= 100 else 1 if ratio >= 0.95 else 2
    return f"{ratio:.{digits}f}x"


def fraction(ratio: float | None) -> str:
    """A part of 1, to two digits after the point.

    Example:
        >>> fraction(0.7123), fraction(0.00123)
        ('0.71', '0.001')
    """
    if ratio is None:
        return _MISSING
    return f"{ratio:.2f}" if ratio >= 0.01 else f"{ratio:.3f}"


def milliseconds(value: float) -> str:
    """To three digits.

    Example:
        >>> milliseconds(1234.5), milliseconds(4.1234), milliseconds(0.0061234)
        ('1,234', '4.12', '0.00612')
    """
    if value >= 100:
        return f"{value:,.0f}"
    digits = 2 - math.floor(math.log10(value)) if value > 0 else 2
    return f"{value:.{digits}f}"


def _spread(timing: Timing, plain: bool) -> str:
    return f"{'+-' if plain else '±'}{timing.spread:.0%}"
