"""Train word vectors with torch's SparseAdam and with sparsestep's, and compare.

The words are the identifiers in the source of Python's standard library. Both
runs start from the same weights and see the same batches, in turns, so that
only the time differs. It takes about a minute at most. Press Ctrl-C to stop
early and see the results so far.

Example:
  sparsestep demo --seconds 20 --out loss.png
"""

from __future__ import annotations

import argparse
import math
import platform
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

import sparsestep
from sparsestep.cli import skipgram
from sparsestep.cli.options import add_number, float_in_range, int_in_range, output_path
from sparsestep.cli.skipgram import TrainingRun, WordCounts

# rich and matplotlib come with sparsestep[cli]: imported when the command runs, never before.
if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.progress import Progress
    from rich.table import Table

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "torch.optim.SparseAdam": torch.optim.SparseAdam,
    "sparsestep.SparseAdam": sparsestep.SparseAdam,
}
BLOCK = 50  # steps of one run before the other continues

# Shown if they are in the vocabulary. With all of them, the output fits on 24 lines.
FAMILIAR_WORDS = ("append", "startswith", "encode", "args", "open", "TypeError")

_NEIGHBORS = 5
_REFRESH_SECONDS = 0.1
_WARM_UP_STEPS = 20
_INTERRUPTED = 130  # the exit code that shells expect after SIGINT

_INK = "#222222"
_FAINT = "#6b6b6b"
_COLORS = ("#d1812f", "#1f6fb4")  # torch's, ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparsestep demo``."""
    add_number(
        parser,
        "--words",
        int_in_range(10, 1_000_000),
        20_000,
        "number of identifiers, the most frequent ones first",
    )
    add_number(
        parser,
        "--steps",
        int_in_range(1, 1_000_000),
        5000,
        "maximum number of batches for each run",
    )
    add_number(
        parser,
        "--seconds",
        float_in_range(1, 86_400),
        60.0,
        "time limit for both runs together",
        "S",
    )
    add_number(parser, "--dim", int_in_range(1, 1024), 64, "length of a vector")
    add_number(
        parser, "--seed", int_in_range(0, 2**63 - 1), 0, "random seed for weights and batches"
    )
    parser.add_argument(
        "--out",
        type=output_path(".png"),
        default="sparsestep-demo.png",
        metavar="FILE",
        help="PNG file for the picture (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Read, train twice, compare; returns the exit code."""
    import matplotlib.figure  # noqa: F401  a missing package is reported before the training

    console = DemoConsole()
    root = skipgram.stdlib_path()
    with console.spinner(f"reading {root}"):
        files = skipgram.read_corpus(root)
        words = skipgram.count_words(files, options.words)
        pairs = skipgram.cooccurring_pairs(files, words)
    if pairs.shape[1] == 0:
        raise SystemExit(f"sparsestep: no Python source to learn from in {root}.")
    console.print(
        f"The standard library of Python {platform.python_version()}: {len(files):,} files, "
        f"{sum(map(len, files)):,} identifiers.\n"
        f"Two tables of {len(words.words):,} x {options.dim}, {options.steps:,} steps per run or "
        f"{options.seconds:g} s, threads: {torch.get_num_threads()}."
    )
    dataset = skipgram.SkipgramDataset(pairs, words.counts, options.steps, options.seed)
    budget = Budget(options.steps, options.seconds)
    theirs, ours = _train(console, dataset, options.dim, budget)
    console.print_neighbors(ours.tables.words, words)
    try:
        draw_figure(options.out, theirs, ours, len(words.words))
    except OSError as error:
        raise SystemExit(f"sparsestep: cannot write the picture: {error}.") from None
    console.print(f"The loss over time: {options.out}")
    console.print_comparison(theirs, ours)
    if budget.interrupted:
        console.print(f"Interrupted after {len(ours.losses):,} of {options.steps:,} steps.")
        return _INTERRUPTED
    return 0


def _train(
    console: DemoConsole, dataset: skipgram.SkipgramDataset, dim: int, budget: Budget
) -> list[TrainingRun]:
    tables = skipgram.initial_tables(len(dataset.counts), dim, dataset.seed)
    # Warm up: starting threads and loading code is not timed.
    few = replace(dataset, steps=_WARM_UP_STEPS)
    for name, optimizer in OPTIMIZERS.items():
        skipgram.train(name, optimizer, tables, few)
    runs = [skipgram.train_steps(*each, tables, dataset) for each in OPTIMIZERS.items()]
    with stop_on_sigint(budget), console.progress() as bars:
        updates = [track(bars, name, dataset.steps) for name in OPTIMIZERS]
        return run_interleaved(runs, budget, updates)


# Taking turns


@dataclass
class Budget:
    """When to stop, whatever comes first.

    Attributes:
        steps: of each run.
        seconds: of both together.
        interrupted: Ctrl-C was pressed.
    """

    steps: int
    seconds: float
    interrupted: bool = False

    def is_exhausted(self, done: int, elapsed: float) -> bool:
        """Whether another block, as long as those before, is too much.

        Example:
            >>> Budget(steps=1000, seconds=60).is_exhausted(done=100, elapsed=30)
            False
            >>> Budget(steps=1000, seconds=60).is_exhausted(done=100, elapsed=50)
            True
        """
        if not done:  # without one block there is nothing to show
            return False
        too_long = elapsed * (done + BLOCK) > self.seconds * done
        return self.interrupted or done >= self.steps or too_long

    def remaining_seconds(self, done: int, elapsed: float) -> float:
        """Estimate the remaining seconds from the speed so far.

        Example:
            >>> Budget(steps=1000, seconds=60).remaining_seconds(done=500, elapsed=10)
            10.0
            >>> Budget(steps=1000, seconds=15).remaining_seconds(done=500, elapsed=12.5)
            2.5
        """
        return max(0.0, min(elapsed * (self.steps / done - 1), self.seconds - elapsed))


def run_interleaved(
    runs: Sequence[Iterator[TrainingRun]],
    budget: Budget,
    updates: Sequence[Callable[[TrainingRun, float], None]],
) -> list[TrainingRun]:
    """Interleave training runs in blocks, so that noise affects all of them equally.

    Args:
        runs: each yields itself after each step.
        budget: when to stop.
        updates: for each run, a function that is called after each step, with the run and the
            remaining seconds of all runs together.
    """
    began, done, left = perf_counter(), 0, budget.seconds
    latest: list[TrainingRun] = []
    while not budget.is_exhausted(done, perf_counter() - began):
        size = min(BLOCK, budget.steps - done)
        latest = []
        for run, update in zip(runs, updates, strict=True):
            for _ in range(size):
                state = next(run)
                update(state, left)
            latest.append(state)
        done += size
        left = budget.remaining_seconds(done, perf_counter() - began)
    return latest


@contextmanager
def stop_on_sigint(budget: Budget) -> Iterator[None]:
    """The first Ctrl-C ends the budget, so that results can be shown; the second interrupts."""
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


# The terminal


class DemoConsole:
    """Results go to stdout, progress to stderr: a pipe or a file gets the results alone."""

    def __init__(self) -> None:
        from rich.console import Console

        self._results = Console(highlight=False)
        self._progress = Console(stderr=True, highlight=False)

    def print(self, text: str) -> None:
        """Print a line without breaking it, so that a path in it can be copied."""
        self._results.print(text, markup=False, soft_wrap=True)

    def spinner(self, text: str) -> AbstractContextManager[object]:
        """Show that something is going on that will not take long."""
        from rich.text import Text

        return self._progress.status(Text(text), spinner="line")

    def progress(self) -> Progress:
        """Progress bars, as a context manager that leaves the terminal clean."""
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        return Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._progress,
            auto_refresh=False,  # a drawing thread would compete with the run that is timed
        )

    def print_comparison(self, theirs: TrainingRun, ours: TrainingRun) -> None:
        """Print times, losses and weights of both runs side by side."""
        self._results.print()
        self._results.print(comparison_table(theirs, ours))

    def print_neighbors(self, vectors: Tensor, words: WordCounts) -> None:
        """Print the nearest neighbors of some familiar words."""
        from rich.table import Table

        table = Table(title="Words used in similar contexts", title_justify="left", box=None)
        table.add_column("word", style="bold")
        table.add_column("nearest neighbors")
        for word in FAMILIAR_WORDS:
            if word in words.index:
                nearest = skipgram.nearest_neighbors(vectors, words, word, _NEIGHBORS)
                table.add_row(word, "  ".join(nearest))
        if table.row_count:
            self._results.print()
            self._results.print(table)
            self._results.print()


def track(bars: Progress, name: str, steps: int) -> Callable[[TrainingRun, float], None]:
    """Add a bar; returns the function that updates it after each step."""
    task = bars.add_task(name, total=steps, figures="")
    drawn = -math.inf

    def update(run: TrainingRun, left: float) -> None:
        nonlocal drawn
        done, now = len(run.losses), perf_counter()
        if now - drawn < _REFRESH_SECONDS and done < steps:
            return
        drawn = now
        figures = f"loss {run.final_loss:.3f} {done / sum(run.seconds):4.0f} steps/s"
        if done < steps:
            figures += f" ETA {left // 60:.0f}:{left % 60:02.0f}"
        bars.update(task, completed=done, figures=figures, refresh=True)

    return update


def comparison_table(theirs: TrainingRun, ours: TrainingRun) -> Table:
    """Time, loss and weights of both runs."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column()
    table.add_column(theirs.name, justify="right")
    table.add_column(ours.name, justify="right")
    table.add_column("ratio", justify="right", style="bold")
    table.add_row("steps", f"{len(theirs.losses):,}", f"{len(ours.losses):,}", "")
    times = {
        "time per step": (sum(theirs.seconds), sum(ours.seconds)),
        "in optimizer.step()": (theirs.optimizer_seconds, ours.optimizer_seconds),
    }
    for label, (before, after) in times.items():
        cells = (f"{1000 * seconds / len(ours.losses):.2f} ms" for seconds in (before, after))
        table.add_row(label, *cells, f"{before / after:.1f}x")
    table.add_row("loss at the end", f"{theirs.final_loss:.4f}", f"{ours.final_loss:.4f}", "")
    difference = skipgram.max_difference(theirs.tables, ours.tables)
    table.add_row("max weight difference", "", f"{difference:.1e}", "")
    return table


# The figure


def draw_figure(path: Path, theirs: TrainingRun, ours: TrainingRun, words: int) -> None:
    """Plot the loss of both runs over wall-clock time into a PNG file."""
    from matplotlib.figure import Figure

    # A Figure without pyplot draws with Agg: no window, no global state.
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for run, color in zip((theirs, ours), _COLORS, strict=True):
        _plot_run(axes, run, color)
    axes.set_xlim(left=0, right=1.08 * max(sum(theirs.seconds), sum(ours.seconds)))
    axes.margins(y=0.1)
    axes.set_xlabel("wall-clock time of training (seconds)", color=_FAINT)
    axes.set_ylabel("loss (smoothed)", color=_FAINT)
    axes.tick_params(colors=_FAINT, length=0)
    axes.grid(color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")
    axes.legend(frameon=False, labelcolor=_INK)
    axes.set_title(
        _title(theirs, ours), loc="left", pad=26, fontsize=14, fontweight="bold", color=_INK
    )
    subtitle = axes.annotate(
        f"Skip-gram vectors of {words:,} identifiers from Python's standard library, "
        f"{len(ours.losses):,} steps each",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=9.5,
        color=_FAINT,
    )
    subtitle.set_in_layout(False)  # it may be wider than the axes, which keep their width
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.2)


def _title(theirs: TrainingRun, ours: TrainingRun) -> str:
    ratio = sum(theirs.seconds) / sum(ours.seconds)
    if ratio < 1:
        return f"The same training, {1 / ratio:.1f} times slower"
    return f"The same training, {ratio:.1f} times faster"


def _exponential_mean(losses: list[float], memory: float) -> list[float]:
    """Running mean that starts at the first loss; weights fall by ``1 / memory`` per step."""
    keep = 1 - 1 / memory
    total = weight = 0.0
    result = []
    for loss in losses:
        total = keep * total + loss
        weight = keep * weight + 1
        result.append(total / weight)
    return result


def _plot_run(axes: Axes, run: TrainingRun, color: str) -> None:
    clock = list(accumulate(run.seconds))
    losses = _exponential_mean(run.losses, memory=max(1.0, len(run.losses) / 100))
    axes.plot(clock, losses, color=color, linewidth=2, label=run.name)
    axes.plot(clock[-1], losses[-1], "o", color=color, markersize=6)
    axes.annotate(
        f"{clock[-1]:.1f} s",
        (clock[-1], losses[-1]),
        xytext=(0, -9),  # below, where no curve passes
        textcoords="offset points",
        ha="center",
        va="top",
        color=color,
        fontweight="bold",
    )
