"""Draw docs/exchange.svg: what two ranks send each other in a step, for docs/several-machines.md.

Example:
    python docs/exchange.py                              # writes docs/exchange.svg
    python docs/exchange.py --folder /tmp --format png   # to look at
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

_INK = "#222222"
_FAINT = "#6b6b6b"
_IDS = "#d1812f"
_ROWS = "#1f6fb4"
_GRADIENTS = "#3a8a4d"
# The same bytes every time, and text that a reader can search for.
_SVG = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}
_LEFT, _RIGHT, _WIDTH = 0.18, 0.71, 0.27


class Line(NamedTuple):
    """One line of the picture, from top to bottom.

    Attributes:
        when: what the program does.
        here: what the rank does that asks.
        sent: what goes over the network; it ends with an arrow to the right or the left.
        there: what the rank does that has the rows.
        colour: of what is sent.
    """

    when: str
    here: str
    sent: str
    there: str
    colour: str = _FAINT


LINES = [
    Line("lookup", "checks ids 7, 3, 7; 3 and 7 once", "counts, “refused” ▶", "agrees, or raises"),
    Line("", "", "ids 3, 7 ▶", "looks up rows 3 and 7", _IDS),
    Line("", "rows of 7, 3, 7 for the model", "◀ rows 3, 7", "keeps the ids, not the rows", _ROWS),
    Line("backward", "gradients of the rows, added up", "", "the same, for what it has asked"),
    Line("clip or step", "which lookups have gradients", "counts ▶", "agrees, or raises"),
    Line("", "one row for each id", "gradients of 3, 7 ▶", "a compact gradient", _GRADIENTS),
    Line("clip", "the norm of what it has", "◀ norms ▶", "the norm of what it has"),
    Line("step", "updates the rows it has", "", "updates the rows it has"),
]


def draw() -> Figure:
    """Two columns of boxes, and arrows between them."""
    figure = Figure(figsize=(8.5, 5.4), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, 1)
    axes.set_ylim(len(LINES) + 1.15, -1.15)
    axes.axis("off")
    title = {"fontsize": 14, "fontweight": "bold", "color": _INK}
    axes.text(0.02, -0.62, "A step of two ranks that share a table", **title)
    _write(axes, 0.02, -0.18, "Every rank asks and answers at once; shown is one of the two ways")
    for left, words in ((_LEFT, "rank 0, which asks"), (_RIGHT, "rank 1, which has the rows")):
        axes.text(left + 0.01, 0.34, words, fontsize=10.5, fontweight="bold", color=_INK)
    for place, line in enumerate(LINES, 1):
        _draw_line(axes, place, line)
    below = "The next batch's ids can go while this one computes: lockstep(loader, prefetch=1)"
    _write(axes, 0.02, len(LINES) + 0.85, below)
    return figure


def _draw_line(axes: Axes, place: int, line: Line) -> None:
    if line.when:
        axes.axhline(place - 0.47, 0.02, 0.98, color="#e6e6e6", linewidth=0.8)
        axes.text(0.02, place, line.when, fontsize=10.5, color=_INK, va="center")
    for left, words in ((_LEFT, line.here), (_RIGHT, line.there)):
        if words:
            _box(axes, left, place, words)
    if line.sent:
        both = line.sent.startswith("◀") and line.sent.endswith("▶")
        style = "<->" if both else "<-" if line.sent.startswith("◀") else "->"
        arrow = {"arrowstyle": style, "color": line.colour, "linewidth": 1.8}
        ends = (_LEFT + _WIDTH + 0.015, place + 0.14), (_RIGHT - 0.015, place + 0.14)
        axes.annotate("", ends[1], ends[0], arrowprops=arrow)
        words = line.sent.strip("◀▶ ")
        middle = (ends[0][0] + ends[1][0]) / 2
        axes.text(middle, place - 0.14, words, fontsize=9.5, color=line.colour, ha="center")


def _box(axes: Axes, left: float, place: int, words: str) -> None:
    style = "round,pad=0.0,rounding_size=0.01"
    look = {"facecolor": "#f6f6f6", "edgecolor": "#bbbbbb", "linewidth": 0.8}
    box = FancyBboxPatch(
        (left, place - 0.32), _WIDTH, 0.64, boxstyle=style, mutation_aspect=9, **look
    )
    axes.add_patch(box)
    axes.text(left + 0.01, place, words, fontsize=9.5, color=_INK, va="center")


def _write(axes: Axes, left: float, place: float, words: str) -> None:
    axes.text(left, place, words, fontsize=9.5, color=_FAINT)


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the picture."""
    parser = argparse.ArgumentParser(description="Draw the picture of docs/several-machines.md.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    path = options.folder / f"exchange.{options.format}"
    dated = {"Date": None} if options.format == "svg" else None
    with matplotlib.rc_context(_SVG):
        draw().savefig(path, format=options.format, metadata=dated, dpi=160)
    print(f"wrote {path}")


if __name__ == "__main__":
    main()
