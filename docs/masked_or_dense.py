"""Draw the pictures of docs/masked-or-dense.md: one row of a table, under both semantics.

Each point of the dense curve comes from a run of its own, which is caught up once, at its end: so
the curve shows what a single catch-up makes of all the steps that the row has missed.

Example:
    python docs/masked_or_dense.py                              # writes docs/*.svg
    python docs/masked_or_dense.py --folder /tmp --format png   # to look at
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import sparsestep

# The row's gradient in the steps that touch it. In all others another row is touched.
GRADIENTS = {10: 1.0, 26: 1.0, 70: -2.0}
STEPS = 120
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}

_INK = "#222222"
_FAINT = "#6b6b6b"
_MASKED = "#d1812f"
_DENSE = "#1f6fb4"
# The same bytes every time, and text that a reader can search for.
_SVG = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}
_TORCH_EVERY = 5  # steps between the marks of torch's numbers


class Point(NamedTuple):
    """What a table and its optimizer hold of the row."""

    value: float
    momentum: float


class Run:
    """The training of a table with two rows, of which row 0 is looked at."""

    def __init__(self, cls: Callable[..., Any], *, sparse: bool, **options: Any) -> None:
        self.table = torch.nn.Embedding(2, 1, sparse=sparse)
        torch.nn.init.ones_(self.table.weight)
        self.optimizer = cls(self.table.parameters(), **OPTIONS, **options)
        self.taken = 0

    def read(self) -> Point:
        """What is stored of the row now."""
        kept = self.optimizer.state[self.table.weight]
        momentum = kept["exp_avg"][0].item() if kept else 0.0
        # Rounded, so that another processor draws the same picture.
        return Point(round(self.table.weight[0].item(), 5), round(momentum, 5))

    def step(self) -> Point:
        """Take a step; returns what was stored between the lookup and the update."""
        self.taken += 1
        gradient = GRADIENTS.get(self.taken)
        self.optimizer.zero_grad()
        found = self.table(torch.tensor([1 if gradient is None else 0]))
        between = self.read()
        (found * (gradient or 1.0)).sum().backward()
        self.optimizer.step()
        return between


def tracked() -> Run:
    """A run under dense semantics."""
    run = Run(sparsestep.AdamW, sparse=True, semantics="dense")
    run.optimizer.track(run.table)
    return run


def stored(run: Run) -> list[Point]:
    """The row before the first step and after each."""
    points = [run.read()]
    for _ in range(STEPS):
        run.step()
        points.append(run.read())
    return points


def caught_up_after(steps: int) -> Point:
    """The row under dense semantics, read once, after so many steps."""
    run = tracked()
    for _ in range(steps):
        run.step()
    run.optimizer.catch_up()
    return run.read()


def draw_both() -> Figure:
    """Value and momentum under both semantics, and torch's numbers for dense gradients."""
    steps = range(STEPS + 1)
    masked = stored(Run(sparsestep.AdamW, sparse=True))
    dense = [caught_up_after(count) for count in steps]
    torchs = stored(Run(torch.optim.AdamW, sparse=False))

    figure = Figure(figsize=(8.5, 6.8), facecolor="white")
    figure.subplots_adjust(left=0.09, right=0.97, top=0.86, bottom=0.08, hspace=0.1)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, part in zip(panels, Point._fields, strict=True):
        axes.plot(steps, [getattr(point, part) for point in masked], color=_MASKED, linewidth=2.4)
        axes.plot(steps, [getattr(point, part) for point in dense], color=_DENSE, linewidth=2.4)
        _ring(axes, [getattr(point, part) for point in torchs])
        _dress(axes)
        axes.set_ylabel(f"{part} of the row", color=_FAINT)
    panels[1].set_xlabel("step", color=_FAINT)
    _mark_gradients(panels[0])
    _mark_gradients(panels[1])
    top = panels[0]
    _say(top, (72, masked[72].value), "masked: frozen until it is looked up", _MASKED, lift=-12)
    _say(top, (72, 0.875), "dense: momentum and decay go on", _DENSE)
    _say(top, (72, 0.875), "○  torch.optim.AdamW on dense gradients", _INK, lift=-14)
    _write_titles(
        top,
        "One row under both semantics",
        "AdamW, lr 0.02, weight decay 0.1. In all steps but 10, 26 and 70 the batch has other rows",
    )
    return figure


def draw_put_off() -> Figure:
    """What the table holds under dense semantics, and what dense training would hold."""
    run = tracked()
    line = [(0, run.read().value)]
    jumps = []  # the step after which a catch-up came, and the values before and after it
    for _ in range(STEPS):
        before, between = run.read(), run.step()
        line += [(run.taken - 1, between.value), (run.taken, run.read().value)]
        if between != before:
            jumps.append((run.taken - 1, before.value, between.value))
    before = run.read()
    run.optimizer.state_dict()
    line.append((STEPS, run.read().value))
    jumps.append((STEPS, before.value, run.read().value))

    figure = Figure(figsize=(8.5, 4.4), facecolor="white")
    figure.subplots_adjust(left=0.09, right=0.97, top=0.79, bottom=0.12)
    axes = figure.add_subplot()
    axes.plot(*zip(*line, strict=True), color=_DENSE, linewidth=2.4, clip_on=False)
    _ring(axes, [point.value for point in stored(Run(torch.optim.AdamW, sparse=False))])
    _dress(axes)
    axes.set_ylabel("value of the row", color=_FAINT)
    axes.set_xlabel("step", color=_FAINT)
    _mark_gradients(axes)
    for place, old, new in jumps:
        missed = place - max((step for step in GRADIENTS if step <= place), default=0)
        words = f"{missed} steps at once"
        room = place > STEPS / 3
        _say(axes, (place, (old + new) / 2), words, _DENSE, along=-7 if room else 14, right=room)
    _say(axes, (28, line[2 * 28][1]), "as stored under dense semantics", _DENSE, lift=10)
    _say(axes, (72, 0.84), "○  torch.optim.AdamW on dense gradients", _INK)
    _write_titles(
        axes,
        "What is stored meanwhile",
        "The row stays as it is until it is looked up again, or until state_dict() in the end",
    )
    return figure


def _ring(axes: Axes, values: Sequence[float]) -> None:
    """Mark torch's numbers."""
    marked = range(0, STEPS + 1, _TORCH_EVERY)
    heights = [values[step] for step in marked]
    axes.plot(
        marked, heights, "o", color=_INK, markersize=4.8, fillstyle="none", clip_on=False, zorder=5
    )


def _dress(axes: Axes) -> None:
    axes.set_facecolor("white")
    axes.set_xlim(0, STEPS)
    axes.margins(y=0.1)
    axes.tick_params(colors=_FAINT, length=0, labelsize=9)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")


def _say(
    axes: Axes,
    place: tuple[float, float],
    words: str,
    colour: str,
    *,
    along: float = 0,
    lift: float = 0,
    right: bool = False,
) -> None:
    axes.annotate(
        words,
        place,
        xytext=(along, lift),
        textcoords="offset points",
        ha="right" if right else "left",
        va="center",
        fontsize=9.5,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )


def _mark_gradients(axes: Axes) -> None:
    for step, gradient in GRADIENTS.items():
        axes.axvline(step, color="#9a9a9a", linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
        axes.annotate(
            f"gradient {gradient:+g}".replace("-", "−"),  # noqa: RUF001
            (step, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=8.5,
            color=_FAINT,
        )


def _write_titles(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=26, fontsize=14, fontweight="bold", color=_INK)
    axes.annotate(
        subtitle,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=9.5,
        color=_FAINT,
    )


PICTURES = {"masked-or-dense": draw_both, "caught-up": draw_put_off}


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the pictures."""
    parser = argparse.ArgumentParser(description="Draw the pictures of docs/masked-or-dense.md.")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent)
    parser.add_argument("--format", choices=("svg", "png"), default="svg")
    options = parser.parse_args(arguments)
    for name, draw in PICTURES.items():
        path = options.folder / f"{name}.{options.format}"
        dated = {"Date": None} if options.format == "svg" else None
        with matplotlib.rc_context(_SVG):
            draw().savefig(path, format=options.format, metadata=dated, dpi=160)
        print(f"wrote {path}")


if __name__ == "__main__":
    main()
