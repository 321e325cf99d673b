"""A recommender with 26 tables, trained with one optimizer, against plain torch on the same clicks.

Plain torch needs two optimizers, SparseAdam for the tables and Adam for the layers. Both models
start from the same weights and take turns, a few steps each, on the same fresh batches. What is
shown is how well they tell clicks from the rest on a part that is held out (the AUC: 0.5 is
guessing, 1 is perfect), and how many examples per second they learn from. Needs
``pip install "sparsestep[cli]"``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch
from clicks import LENGTHS, Batch, Clicks, auc
from dlrm import DIM, Run, contestants, learning_rate

from sparsestep.cli.options import int_in_range

try:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn
    from rich.table import Table
except ImportError:
    sys.exit("This example shows its progress with rich: pip install 'sparsestep[cli]'")

TURN = 4  # steps
EVALUATIONS = 10
APART = 0.002


class Screen:
    """What a person sees: bars where there is a terminal, and lines everywhere."""

    def __init__(self, runs: Sequence[Run], steps: int, batch: int) -> None:
        self._console = Console(highlight=False)
        self._runs, self._batch = runs, batch
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=16),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
            # A thread that draws would compete with the run that is being timed.
            auto_refresh=False,
        )
        self._tasks: list[TaskID] = [
            self._bars.add_task(run.name, total=steps, figures="") for run in runs
        ]

    def __enter__(self) -> Screen:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def say(self, text: str = "") -> None:
        """Print a line, above the bars."""
        self._console.print(text, markup=False, soft_wrap=True)

    def follow(self) -> None:
        """Move the bars."""
        for run, task in zip(self._runs, self._tasks, strict=True):
            figures = f"loss {run.loss:.3f}  {self._speed(run):,.0f} samples/s"
            self._bars.update(task, completed=len(run.seconds), figures=figures)
        self._bars.refresh()

    def header(self) -> None:
        """Say what the lines that follow have in their columns."""
        columns = "".join(f"{'loss':8}{'AUC':8}{'samples/s':16}" for _ in self._runs)
        self.say(f"{'':8}{''.join(f'{run.name:32}' for run in self._runs)}".rstrip())
        self.say(f"  step  {columns}".rstrip())

    def line(self, found: Sequence[float]) -> None:
        """Print where the runs are."""
        figures = (
            f"{run.loss:<8.4f}{each:<8.4f}{self._speed(run):<16,.0f}"
            for run, each in zip(self._runs, found, strict=True)
        )
        self.say(f"{len(self._runs[0].seconds):6}  {''.join(figures)}".rstrip())

    def compare(self, found: Sequence[float]) -> None:
        """Print where they have arrived, side by side."""
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column()
        for run in self._runs:
            table.add_column(run.name, justify="right")
        table.add_column("", justify="right", style="bold")
        ours, theirs = (self._speed(run) for run in self._runs)
        table.add_row(
            "samples per second", f"{ours:,.0f}", f"{theirs:,.0f}", f"{ours / theirs:.1f}x"
        )
        apart = f"{abs(found[0] - found[1]):.4f} apart"
        table.add_row("AUC, held-out part", *(f"{each:.4f}" for each in found), apart)
        self._console.print(table)

    def _speed(self, run: Run) -> float:
        return self._batch / run.seconds_per_step()


def train(
    runs: Sequence[Run], log: Clicks, held_out: Batch, options: argparse.Namespace, screen: Screen
) -> list[float]:
    """Train all runs in turns, on the same batches; the AUC of each at the end."""
    found: list[float] = []
    shown = [round(options.steps * part / EVALUATIONS) for part in range(1, EVALUATIONS + 1)]
    for first in range(0, options.steps, TURN):
        numbers = range(first, min(first + TURN, options.steps))
        batches = [log.batch(options.batch) for _ in numbers]
        for run in runs if first // TURN % 2 == 0 else reversed(runs):
            for number, batch in zip(numbers, batches, strict=True):
                run.train(batch, learning_rate(number, options.steps))
        screen.follow()
        if any(number + 1 in shown for number in numbers):
            found = [run.auc(held_out) for run in runs]
            screen.line(found)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both and compare; returns the exit code."""
    options = parsed(arguments)
    torch.manual_seed(options.seed)
    lengths = [1] * len(LENGTHS) if options.single else LENGTHS
    log = Clicks(options.seed, options.rows, lengths)
    threads = torch.get_num_threads()
    print(f"{len(log.rows)} tables with {sum(log.rows):,} rows x {DIM}, threads: {threads}.")
    print(f"{options.batch:,} examples per step, {sum(log.lengths)} ids per example.", flush=True)
    held_out = log.batch(options.held_out)
    best = auc(held_out.logits, held_out.clicks)
    print(f"The best possible AUC, from the hidden weights: {best:.4f}.\n", flush=True)
    runs = contestants(log.rows)
    with Screen(runs, options.steps, options.batch) as screen:
        screen.header()
        found = train(runs, log, held_out, options, screen)
        screen.say()
        screen.compare(found)
    if abs(found[0] - found[1]) > APART:
        print(f"The two should agree within {APART}.", file=sys.stderr)
        return 1
    return 0


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options; ``--quick`` changes the defaults of the others."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    many = int_in_range(1, 1_000_000_000)
    parser.add_argument("--steps", type=many, metavar="N", help="of each model (default: 240)")
    parser.add_argument("--batch", type=many, metavar="N", help="examples per step (default: 2048)")
    parser.add_argument(
        "--rows", type=many, metavar="N", help="of the largest tables (default: 400000)"
    )
    parser.add_argument(
        "--held-out",
        type=int_in_range(512, 1_000_000_000),  # both kinds must be there
        metavar="N",
        help="examples for the AUC (default: 32768)",
    )
    parser.add_argument(
        "--single", action="store_true", help="one id for each feature instead of lists of ids"
    )
    parser.add_argument(
        "--seed",
        type=int_in_range(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="of data and weights (default: 0)",
    )
    parser.add_argument(
        "--quick", action="store_true", help="a small model and few steps: takes seconds"
    )
    options = parser.parse_args(arguments)
    usual = {"steps": 240, "batch": 2_048, "rows": 400_000, "held_out": 32_768}
    quick = {"steps": 80, "batch": 256, "rows": 2_000, "held_out": 8_192}
    for name, value in (quick if options.quick else usual).items():
        if getattr(options, name) is None:
            setattr(options, name, value)
    return options


if __name__ == "__main__":
    sys.exit(main())
