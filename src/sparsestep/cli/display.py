"""What the demo shows in a terminal: progress while it trains, then tables."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from time import perf_counter

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text
from torch import Tensor

from sparsestep.cli.console import Streams
from sparsestep.cli.identifiers import Vocabulary
from sparsestep.cli.skipgram import Run, difference, neighbours

# Words that a Python programmer knows; those that are in the vocabulary are shown. With all of them
# the output still fits on a screen of 24 lines.
FAMILIAR = ("append", "startswith", "encode", "args", "open", "TypeError")

_NEIGHBOURS = 5
_REFRESH_SECONDS = 0.1


class Bars(Progress):
    """A progress bar per run; leaving the context leaves the terminal clean, whatever happened."""

    def __init__(self, console: Console) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
            # A thread that draws would compete with the run that is being timed.
            auto_refresh=False,
        )

    def follow(self, name: str, steps: int) -> Callable[[Run, float], None]:
        """Add a bar; the result is to be called after each step, and draws now and then."""
        task = self.add_task(name, total=steps, figures="")
        drawn = -math.inf

        def each_step(run: Run, left: float) -> None:
            nonlocal drawn
            done, now = len(run.losses), perf_counter()
            if now - drawn < _REFRESH_SECONDS and done < steps:
                return
            drawn = now
            figures = f"loss {run.final_loss:.3f} {done / sum(run.seconds):4.0f} steps/s"
            if done < steps:
                figures += f" ETA {left // 60:.0f}:{left % 60:02.0f}"
            self.update(task, completed=done, figures=figures, refresh=True)

        return each_step


class Screen(Streams):
    """What a person sees of the demo."""

    def waiting(self, text: str) -> AbstractContextManager[object]:
        """Show that something is going on that will not take long."""
        return self._progress.status(Text(text), spinner="line")

    def bars(self) -> Bars:
        """Progress bars, to be entered as a context manager."""
        return Bars(self._progress)

    def compare(self, theirs: Run, ours: Run) -> None:
        """Print times, losses and weights of both runs side by side."""
        self._results.print()
        self._results.print(comparison(theirs, ours))

    def show_neighbours(self, vectors: Tensor, known: Vocabulary) -> None:
        """Print the nearest neighbours of some familiar words."""
        table = Table(title="Words used in similar contexts", title_justify="left", box=None)
        table.add_column("word", style="bold")
        table.add_column("nearest neighbours")
        for word in FAMILIAR:
            if word in known.index:
                table.add_row(word, "  ".join(neighbours(vectors, known, word, _NEIGHBOURS)))
        if table.row_count:
            self._results.print()
            self._results.print(table)
            self._results.print()


def comparison(theirs: Run, ours: Run) -> Table:
    """The table of what both runs took and where they arrived."""
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
    apart = difference(theirs.tables, ours.tables)
    table.add_row("max weight difference", "", f"{apart:.1e}", "")
    return table
