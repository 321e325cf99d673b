"""Train word vectors with torch's SparseAdam and with sparsestep's, and compare.

The words are the identifiers in the source of Python's standard library. Both
runs start from the same weights and see the same batches, in turns, so that
only the time differs. It takes about a minute. Press Ctrl-C to stop early and
see the results so far.

Example:
  sparsestep demo --seconds 20 --out loss.png
"""

from __future__ import annotations

import argparse
import platform
import signal
import warnings
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

import sparsestep
from sparsestep import _native
from sparsestep.cli import skipgram
from sparsestep.cli.options import add_number, float_in_range, int_in_range, output_path
from sparsestep.cli.skipgram import SkipgramDataset, TrainingRun

# matplotlib and rich come with sparsestep[cli]: imported when the command runs, never before.
if TYPE_CHECKING:
    from rich.console import Console, RenderableType

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "torch.optim.SparseAdam": torch.optim.SparseAdam,
    "sparsestep.SparseAdam": sparsestep.SparseAdam,
}
MAX_BLOCK = 10  # steps of one run before the other continues

# Shown if they are in the vocabulary. With all of them, the output fits on 24 lines.
FAMILIAR_WORDS = ("append", "startswith", "encode", "args", "open", "TypeError")

_NEIGHBORS = 5
_STEPS_FOR_NEIGHBORS = 1000  # after fewer, neighbors are mostly chance
_WARM_UP_STEPS = 5
_INTERRUPTED = 130  # the exit code that shells expect after SIGINT

_INK = "#222222"
_FAINT = "#6b6b6b"
_COLORS = ("#d1812f", "#1f6fb4")  # torch's, ours


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparsestep demo``."""
    words = "number of identifiers, the most frequent ones first"
    add_number(parser, "--words", int_in_range(10, 1_000_000), 20_000, words)
    steps = "maximum number of batches for each run"
    add_number(parser, "--steps", int_in_range(1, 1_000_000), 5000, steps)
    seconds = "time limit for both runs together"
    add_number(parser, "--seconds", float_in_range(1, 86_400), 60.0, seconds, "S")
    add_number(parser, "--dim", int_in_range(1, 1024), 64, "length of a vector")
    seed = "random seed for weights and batches"
    add_number(parser, "--seed", int_in_range(0, 2**63 - 1), 0, seed)
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
    from rich.console import Console

    # Results go to stdout, progress to stderr: a pipe or a file gets the results alone.
    console = Console(stderr=True)
    root = skipgram.stdlib_path()
    with console.status("Reading the source of Python's standard library"):
        files = skipgram.read_corpus(root)
        words = skipgram.count_words(files, options.words)
        pairs = skipgram.cooccurring_pairs(files, words)
    if pairs.shape[1] == 0:
        raise SystemExit(f"sparsestep: no Python source to learn from in {root}.")
    print(
        f"Corpus: standard library of Python {platform.python_version()}, "
        f"{len(files):,} files, {sum(map(len, files)):,} identifiers.\n"
        f"Two tables of {len(words.words):,} x {options.dim}, threads: {torch.get_num_threads()}.",
        flush=True,
    )
    dataset = SkipgramDataset(pairs, words.counts, options.steps, options.seed)
    with warnings.catch_warnings():
        if _native.ext is None:
            print("The C++ core is missing, so sparsestep is no faster than torch here.")
            warnings.simplefilter("ignore", sparsestep.SlowWarning)
        (theirs, ours), is_interrupted = train_in_turns(
            dataset, options.dim, options.seconds, console
        )
    is_trained = len(ours.losses) >= _STEPS_FOR_NEIGHBORS
    known = [word for word in FAMILIAR_WORDS if is_trained and word in words.index]
    if known:
        print("\nWords used in similar contexts")
    for word in known:
        nearest = skipgram.nearest_neighbors(ours.tables.words, words, word, _NEIGHBORS)
        print(f"  {word:<12}{'  '.join(nearest)}")
    try:
        draw_figure(options.out, theirs, ours, len(words.words))
    except OSError as error:
        raise SystemExit(f"sparsestep: cannot write the picture: {error}.") from None
    print(f"\nThe loss over time: {options.out}\n")
    print_comparison(theirs, ours)
    if is_interrupted:
        print(f"Interrupted after {len(ours.losses):,} of {options.steps:,} steps.")
        return _INTERRUPTED
    return 0


def train_in_turns(
    dataset: SkipgramDataset, dim: int, seconds: float, console: Console
) -> tuple[list[TrainingRun], bool]:
    """Interleave the runs in blocks, so that noise affects both equally.

    The first Ctrl-C ends the training after a block, so that results can be shown; the second
    interrupts. Returns the runs, and whether Ctrl-C was pressed.
    """
    from rich.live import Live

    tables = skipgram.initial_tables(len(dataset.counts), dim, dataset.seed)
    # Warm up: starting threads and loading code is not timed.
    few = replace(dataset, steps=_WARM_UP_STEPS)
    with console.status("Warming up"):
        for name, optimizer in OPTIMIZERS.items():
            skipgram.train(name, optimizer, tables, few)
    runs = [skipgram.train_steps(*each, tables, dataset) for each in OPTIMIZERS.items()]
    is_interrupted = False

    def stop(*_: object) -> None:
        nonlocal is_interrupted
        is_interrupted = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, stop)
    try:
        began, done, size, is_over = perf_counter(), 0, 1, False
        with Live(console=console, auto_refresh=False, transient=True) as live:
            while not is_over:
                latest = [list(islice(run, size))[-1] for run in runs]
                done += size
                elapsed = perf_counter() - began
                live.update(render_progress(latest, elapsed, seconds), refresh=True)
                # Blocks of about a second, so that a slow machine shows progress, too.
                seconds_per_step = elapsed / done
                size = max(1, min(MAX_BLOCK, dataset.steps - done, int(1 / seconds_per_step)))
                is_late = elapsed + size * seconds_per_step > seconds
                is_over = is_interrupted or is_late or done == dataset.steps
    finally:
        signal.signal(signal.SIGINT, before)
    return latest, is_interrupted


def render_progress(runs: list[TrainingRun], elapsed: float, limit: float) -> RenderableType:
    """A bar of elapsed time, and a line for each run."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    steps = len(runs[0].losses)
    bar = Table.grid(padding=(0, 1))
    words = f"{elapsed:.0f} of {limit:.0f} s, {steps:,} steps each"
    bar.add_row(ProgressBar(total=limit, completed=min(elapsed, limit), width=30), words)
    lines = Table.grid(padding=(0, 3))
    lines.add_column()
    for _ in range(3):
        lines.add_column(justify="right")
    for run, style in zip(runs, ("yellow", "bold blue"), strict=True):
        total = sum(run.seconds)
        cells = (f"{total:.1f} s", f"{1000 * total / steps:.1f} ms/step")
        lines.add_row(run.name, *cells, f"loss {run.final_loss:.3f}", style=style)
    return Group(bar, lines)


def print_comparison(theirs: TrainingRun, ours: TrainingRun) -> None:
    """Print times, losses and weights of both runs side by side."""
    steps = len(ours.losses)
    rows = [("", theirs.name, ours.name, "ratio"), ("steps", f"{steps:,}", f"{steps:,}", "")]
    times = {
        "time per step": (sum(theirs.seconds), sum(ours.seconds)),
        "in optimizer.step()": (theirs.optimizer_seconds, ours.optimizer_seconds),
    }
    for label, (before, after) in times.items():
        theirs_ms, ours_ms = (f"{1000 * each / steps:.2f} ms" for each in (before, after))
        rows.append((label, theirs_ms, ours_ms, f"{before / after:.1f}x"))
    rows.append(("loss at the end", f"{theirs.final_loss:.4f}", f"{ours.final_loss:.4f}", ""))
    difference = skipgram.max_difference(theirs.tables, ours.tables)
    rows.append(("max weight difference", "", f"{difference:.1e}", ""))
    for label, *cells in rows:
        print(f"{label:<22}{cells[0]:>24}{cells[1]:>24}{cells[2]:>8}".rstrip())


# The figure


def draw_figure(path: Path, theirs: TrainingRun, ours: TrainingRun, words: int) -> None:
    """Plot the loss of both runs over wall-clock time into a PNG file."""
    from matplotlib.figure import Figure

    # A Figure without pyplot draws with Agg: no window, no global state.
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for run, color in zip((theirs, ours), _COLORS, strict=True):
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
    ratio = sum(theirs.seconds) / sum(ours.seconds)
    title = f"The same training, {ratio:.1f} times as fast"
    axes.set_title(title, loc="left", pad=26, fontsize=14, fontweight="bold", color=_INK)
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
