"""The demo's picture: the loss of both runs over wall-clock time."""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sparsestep.cli.skipgram import Run

_INK = "#222222"
_FAINT = "#6b6b6b"
_THEIRS = "#d1812f"
_OURS = "#1f6fb4"


def draw(path: Path, theirs: Run, ours: Run, words: int) -> None:
    """Write the picture.

    Args:
        path: a PNG file.
        theirs: the run to compare with.
        ours: the run of this library's optimizer.
        words: how many words were trained.
    """
    # A Figure of its own, without pyplot, draws with Agg: no window, no global state.
    figure = Figure(figsize=(8, 4.5), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    for run, colour in ((theirs, _THEIRS), (ours, _OURS)):
        _curve(axes, run, colour)
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
    _write_titles(axes, headline(theirs, ours), words, len(ours.losses))
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.2)


def headline(theirs: Run, ours: Run) -> str:
    """What one sees, in one sentence.

    Example:
        >>> from sparsestep.cli.skipgram import Run, Tables
        >>> import torch
        >>> tables = Tables(torch.zeros(1), torch.zeros(1))
        >>> slow, fast = (Run("", [1.0], [seconds], 0.0, tables) for seconds in (3.0, 1.0))
        >>> headline(slow, fast)
        'The same training, 3.0 times faster'
    """
    ratio = sum(theirs.seconds) / sum(ours.seconds)
    if ratio < 1:
        return f"The same training, {1 / ratio:.1f} times slower"
    return f"The same training, {ratio:.1f} times faster"


def _write_titles(axes: Axes, title: str, words: int, steps: int) -> None:
    axes.set_title(title, loc="left", pad=26, fontsize=14, fontweight="bold", color=_INK)
    subtitle = axes.annotate(
        f"Skip-gram vectors of {words:,} identifiers from Python's standard library, "
        f"{steps:,} steps each",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=9.5,
        color=_FAINT,
    )
    subtitle.set_in_layout(False)  # it may be wider than the axes, which keep their width


def smoothed(losses: list[float], memory: float) -> list[float]:
    """A running mean in which a loss weighs less by ``1 / memory`` with each step after it.

    It starts at the first loss instead of at zero.

    Example:
        >>> smoothed([4.0, 2.0, 2.0], memory=2)
        [4.0, 2.6666666666666665, 2.2857142857142856]
    """
    keep = 1 - 1 / memory
    total = weight = 0.0
    result = []
    for loss in losses:
        total = keep * total + loss
        weight = keep * weight + 1
        result.append(total / weight)
    return result


def _curve(axes: Axes, run: Run, colour: str) -> None:
    clock = list(accumulate(run.seconds))
    losses = smoothed(run.losses, memory=max(1.0, len(run.losses) / 100))
    axes.plot(clock, losses, color=colour, linewidth=2, label=run.name)
    axes.plot(clock[-1], losses[-1], "o", color=colour, markersize=6)
    axes.annotate(
        f"{clock[-1]:.1f} s",
        (clock[-1], losses[-1]),
        xytext=(0, -9),  # below, where no curve passes
        textcoords="offset points",
        ha="center",
        va="top",
        color=colour,
        fontweight="bold",
    )
