"""Draw the pictures of docs/masked-or-dense.md: one row of a table, under both semantics.

Each point of the dense curve comes from a run of its own, which is caught up once, at its end: so
the curve shows what a single catch-up makes of all the steps that the row has missed.

Example:
    python -m docs.masked_or_dense
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

import sparsestep
from docs.theme import FAINT, GRID, INK, LINE, OURS, TEXT, TITLE, TORCH, WIDTH, save

# The row's gradient in the steps that touch it. In all others another row is touched.
GRADIENTS = {10: 1.0, 26: 1.0, 70: -2.0}
STEPS = 120
OPTIONS = {"lr": 0.02, "weight_decay": 0.1}

_MASKED, _DENSE = TORCH, OURS
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

    figure = Figure(figsize=(WIDTH, 6.2), facecolor="white")
    figure.subplots_adjust(left=0.13, right=0.97, top=0.85, bottom=0.08, hspace=0.1)
    panels = figure.subplots(2, 1, sharex=True)
    for axes, part in zip(panels, Point._fields, strict=True):
        axes.plot(steps, [getattr(point, part) for point in masked], color=_MASKED, linewidth=2.4)
        axes.plot(steps, [getattr(point, part) for point in dense], color=_DENSE, linewidth=2.4)
        _ring(axes, [getattr(point, part) for point in torchs])
        _dress(axes)
        axes.set_ylabel(f"{part} of the row", color=FAINT)
    panels[1].set_xlabel("step", color=FAINT)
    _mark_gradients(panels[0])
    _mark_gradients(panels[1])
    top = panels[0]
    _say(
        top,
        (118, masked[72].value),
        "masked: frozen until looked up",
        _MASKED,
        lift=-12,
        right=True,
    )
    _say(top, (118, 0.875), "dense: momentum and decay go on", _DENSE, right=True)
    _say(top, (118, 0.875), "○  torch.optim.AdamW, dense", INK, lift=-14, right=True)
    _write_titles(
        top,
        "One row under both semantics",
        "AdamW, lr 0.02, weight decay 0.1. The row has a\ngradient in steps 10, 26 and 70 only.",
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

    figure = Figure(figsize=(WIDTH, 3.9), facecolor="white")
    figure.subplots_adjust(left=0.13, right=0.97, top=0.77, bottom=0.13)
    axes = figure.add_subplot()
    axes.plot(*zip(*line, strict=True), color=_DENSE, linewidth=2.4, clip_on=False)
    _ring(axes, [point.value for point in stored(Run(torch.optim.AdamW, sparse=False))])
    _dress(axes)
    axes.set_ylabel("value of the row", color=FAINT)
    axes.set_xlabel("step", color=FAINT)
    _mark_gradients(axes)
    for place, old, new in jumps:
        missed = place - max((step for step in GRADIENTS if step <= place), default=0)
        words = f"{missed} steps at once"
        room = place > STEPS / 3
        _say(axes, (place, (old + new) / 2), words, _DENSE, along=-7 if room else 14, right=room)
    _say(axes, (28, line[2 * 28][1]), "as stored, dense semantics", _DENSE, lift=10)
    _say(axes, (118, 0.83), "○  torch.optim.AdamW, dense", INK, right=True)
    _write_titles(
        axes,
        "What is stored meanwhile",
        "The row stays as it is until it is looked up again,\nor until state_dict() in the end.",
    )
    return figure


def _ring(axes: Axes, values: Sequence[float]) -> None:
    """Mark torch's numbers."""
    marked = range(0, STEPS + 1, _TORCH_EVERY)
    heights = [values[step] for step in marked]
    axes.plot(
        marked, heights, "o", color=INK, markersize=4.8, fillstyle="none", clip_on=False, zorder=5
    )


def _dress(axes: Axes) -> None:
    axes.set_facecolor("white")
    axes.set_xlim(0, STEPS)
    axes.margins(y=0.1)
    axes.tick_params(colors=FAINT, length=0, labelsize=TEXT)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(LINE)


def _say(
    axes: Axes,
    place: tuple[float, float],
    words: str,
    color: str,
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
        fontsize=TEXT,
        color=color,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )


def _mark_gradients(axes: Axes) -> None:
    for step, gradient in GRADIENTS.items():
        axes.axvline(step, color="#9a9a9a", linewidth=0.9, linestyle=(0, (2, 2)), zorder=0)
        axes.annotate(
            f"{gradient:+g}".replace("-", "−"),  # noqa: RUF001
            (step, 0.02),
            xycoords=("data", "axes fraction"),
            xytext=(4, 0),
            textcoords="offset points",
            fontsize=TEXT - 1,
            color=FAINT,
        )


def _write_titles(axes: Axes, title: str, subtitle: str) -> None:
    axes.set_title(title, loc="left", pad=42, fontsize=TITLE, fontweight="bold", color=INK)
    axes.annotate(
        subtitle,
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=TEXT,
        color=FAINT,
    )


PICTURES = {"masked-or-dense": draw_both, "caught-up": draw_put_off}


def main() -> None:
    """Write the pictures."""
    for name, draw in PICTURES.items():
        save(draw(), Path(__file__).parent / f"{name}.svg")


if __name__ == "__main__":
    main()
