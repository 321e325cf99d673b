"""Draw docs/exchange.svg: what two ranks send each other in a step, for docs/several-machines.md.

Example:
    python -m docs.exchange
"""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch

from docs.theme import BOX, FAINT, GREEN, GRID, INK, LINE, OURS, TEXT, TITLE, TORCH, WIDTH, save

_IDS, _ROWS, _GRADIENTS = TORCH, OURS, GREEN
_LEFT, _RIGHT, _WIDTH = 0.02, 0.65, 0.33


class Line(NamedTuple):
    """One line of the picture, from top to bottom.

    Attributes:
        when: what the program does.
        here: what the rank does that asks.
        sent: what goes over the network; it ends with an arrow to the right or the left.
        there: what the rank does that has the rows.
        color: of what is sent.
    """

    when: str
    here: str
    sent: str
    there: str
    color: str = FAINT


LINES = [
    Line("lookup", "checks ids 7, 3, 7", "counts, status ▶", "agrees, or raises"),
    Line("", "sends each id once", "ids 3, 7 ▶", "looks up rows 3 and 7", _IDS),
    Line("", "rows of 7, 3, 7 for the model", "◀ rows 3, 7", "keeps the ids, not the rows", _ROWS),
    Line("backward", "sums the gradients of its lookups", "", "the same for its own lookups"),
    Line("clip or step", "which lookups have gradients", "counts ▶", "agrees, or raises"),
    Line("", "one row for each id", "gradients ▶", "a compact gradient", _GRADIENTS),
    Line("clip", "norm of its rows", "◀ norms ▶", "norm of its rows"),
    Line("step", "updates its rows", "", "updates its rows"),
]


def draw() -> Figure:
    """Two columns of boxes, and arrows between them; a heading above each part of a step."""
    headings = sum(bool(line.when) for line in LINES)
    bottom = len(LINES) + 0.45 * headings
    figure = Figure(figsize=(WIDTH, 0.5 * (bottom + 2.6)), facecolor="white")
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axes.set_xlim(0, 1)
    axes.set_ylim(bottom + 1.1, -1.5)
    axes.axis("off")
    bold = {"fontweight": "bold", "color": INK}
    axes.text(0.02, -0.9, "A step of two ranks that share a table", fontsize=TITLE, **bold)
    _write(axes, -0.42, "Each rank sends requests and answers them; one direction is shown.")
    for left, words in ((_LEFT, "rank 0 looks up"), (_RIGHT, "rank 1 owns the rows")):
        axes.text(left, 0.25, words, fontsize=TEXT, **bold)
    place = 0.45
    for line in LINES:
        if line.when:
            axes.axhline(place + 0.05, 0.02, 0.98, color=GRID, linewidth=0.8)
            axes.text(0.5, place + 0.3, line.when, fontsize=TEXT, ha="center", va="center", **bold)
            place += 0.45
        _draw_line(axes, place + 0.5, line)
        place += 1
    below = "lockstep(loader, prefetch=1) sends the next ids meanwhile."
    _write(axes, bottom + 0.8, below)
    return figure


def _draw_line(axes: Axes, place: float, line: Line) -> None:
    for left, words in ((_LEFT, line.here), (_RIGHT, line.there)):
        look = {"facecolor": BOX, "edgecolor": LINE, "linewidth": 0.8}
        style = "round,pad=0.0,rounding_size=0.01"
        corner = (left, place - 0.44)
        box = FancyBboxPatch(corner, _WIDTH, 0.88, boxstyle=style, mutation_aspect=9, **look)
        axes.add_patch(box)
        text = textwrap.fill(words, 22)
        axes.text(left + 0.015, place, text, fontsize=TEXT - 0.5, color=INK, va="center")
    if line.sent:
        both = line.sent.startswith("◀") and line.sent.endswith("▶")
        style = "<->" if both else "<-" if line.sent.startswith("◀") else "->"
        arrow = {"arrowstyle": style, "color": line.color, "linewidth": 1.8}
        ends = (_LEFT + _WIDTH + 0.01, place + 0.14), (_RIGHT - 0.01, place + 0.14)
        axes.annotate("", ends[1], ends[0], arrowprops=arrow)
        middle = (ends[0][0] + ends[1][0]) / 2
        words = line.sent.strip("◀▶ ")
        axes.text(middle, place - 0.08, words, fontsize=TEXT - 0.5, color=line.color, ha="center")


def _write(axes: Axes, place: float, words: str) -> None:
    axes.text(0.02, place, words, fontsize=TEXT, color=FAINT)


def main() -> None:
    """Write the picture."""
    save(draw(), Path(__file__).parent / "exchange.svg")


if __name__ == "__main__":
    main()
