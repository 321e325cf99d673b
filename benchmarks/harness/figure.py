"""The picture of the "lookups" suite: time per step against lookups."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.harness.contestants import Native, TorchSparseAdam
from benchmarks.harness.limit import Limit
from benchmarks.harness.results import CaseResult

_INK = "#222222"
_FAINT = "#6b6b6b"
_GRID = "#e6e6e6"

# What the picture is about stands out; the others are told apart by their labels.
_STRONG = {Native.name: "#1f6fb4", TorchSparseAdam.name: "#d1812f"}
_OTHERS = ("#7a8a5c", "#9467a8", "#8c6d5a", "#5f8f96", "#a3627a", "#7f7f7f")

_LABEL_GAP = 0.05  # between labels, as a part of the height
_SIZE = (8.5, 5.0)
# The same bytes for the same input, and text that a reader can search for.
_SVG: Any = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}

Line = tuple[str, list[int], list[float]]


def draw(path: Path, results: Sequence[CaseResult], format: str = "svg") -> None:
    """Write the picture.

    Args:
        path: where to.
        results: of the cases, which differ in their lookups.
        format: that matplotlib knows.
    """
    ordered = sorted(results, key=lambda result: result.case.lookups)
    # A Figure of its own, without pyplot: no window, no global state.
    figure = Figure(figsize=_SIZE, facecolor="white")
    figure.subplots_adjust(left=0.08, right=0.75, top=0.86, bottom=0.11)
    axes = figure.add_subplot(facecolor="white")
    drawn = lines(ordered)
    colours = colours_of([name for name, _, _ in drawn])
    for name, lookups, milliseconds in drawn:
        style = (1.2, (0, (5, 3))) if name == Limit.name else (2.4 if name in _STRONG else 1.4, "-")
        axes.plot(
            lookups, milliseconds, color=colours[name], linewidth=style[0], linestyle=style[1]
        )
    _dress(axes, [result.case.lookups for result in ordered])
    _label_ends(axes, drawn, colours)
    _write_titles(axes, ordered[0])
    with matplotlib.rc_context(_SVG):
        figure.savefig(path, format=format, metadata={"Date": None} if format == "svg" else None)


def lines(results: Sequence[CaseResult]) -> list[Line]:
    """Name, lookups and milliseconds of each contestant, where it took part."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for result in results:
        for timing in result.timings:
            lookups, milliseconds = found.setdefault(timing.contestant, ([], []))
            lookups.append(result.case.lookups)
            milliseconds.append(timing.median_ms)
    return [(name, *points) for name, points in found.items()]


def colours_of(names: Sequence[str]) -> dict[str, str]:
    """A colour for each name."""
    others = [name for name in sorted(names) if name not in _STRONG and name != Limit.name]
    weak = {name: _OTHERS[index % len(_OTHERS)] for index, name in enumerate(others)}
    return {Limit.name: _INK, **_STRONG, **weak}


def spread_out(heights: Sequence[float], gap: float) -> list[float]:
    """The heights, moved as little as needed so that neighbours are ``gap`` apart.

    Example:
        >>> [round(height, 2) for height in spread_out([0.5, 0.52, 0.9], gap=0.1)]
        [0.46, 0.56, 0.9]
    """
    clusters: list[list[float]] = []  # of what touches, lowest first, each with wanted heights
    order = sorted(range(len(heights)), key=lambda index: heights[index])
    for index in order:
        clusters.append([heights[index]])
        while len(clusters) > 1 and _bottom(clusters[-1], gap) < _top(clusters[-2], gap) + gap:
            touching = clusters.pop()
            clusters[-1] += touching
    placed = [
        _bottom(cluster, gap) + place * gap for cluster in clusters for place in range(len(cluster))
    ]
    result = [0.0] * len(heights)
    for index, height in zip(order, placed, strict=True):
        result[index] = height
    return result


def _bottom(cluster: list[float], gap: float) -> float:
    """Where the lowest of a cluster lies if the cluster is centred on what its members want."""
    return sum(cluster) / len(cluster) - gap * (len(cluster) - 1) / 2


def _top(cluster: list[float], gap: float) -> float:
    return _bottom(cluster, gap) + gap * (len(cluster) - 1)


def _label_ends(axes: Axes, drawn: Sequence[Line], colours: dict[str, str]) -> None:
    axes.autoscale_view()  # now, not when it is drawn: the labels go by it
    to_axes = axes.transData + axes.transAxes.inverted()
    ends = [to_axes.transform((lookups[-1], times[-1])) for _, lookups, times in drawn]
    heights = spread_out([float(end[1]) for end in ends], _LABEL_GAP)
    for (name, _, _), end, height in zip(drawn, ends, heights, strict=True):
        axes.annotate(
            name,
            xy=(float(end[0]), float(end[1])),
            xytext=(1.03, height),
            xycoords="axes fraction",
            textcoords="axes fraction",
            va="center",
            fontsize=9.5,
            fontweight="bold" if name in _STRONG else "normal",
            color=colours[name],
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colours[name],
                "linewidth": 0.6,
                "alpha": 0.6,
                "relpos": (0, 0.5),  # from the middle of the left edge
                "shrinkA": 1,
                "shrinkB": 2,
            },
        )


def _dress(axes: Axes, lookups: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0.0, y=0.06)
    axes.xaxis.set_major_locator(FixedLocator(list(lookups)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("lookups per step", color=_FAINT)
    axes.tick_params(colors=_FAINT, length=0, labelsize=9)
    axes.grid(color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color("#bbbbbb")


def _write_titles(axes: Axes, result: CaseResult) -> None:
    case = result.case
    axes.set_title(
        "Milliseconds per optimizer step",
        loc="left",
        pad=26,
        fontsize=14,
        fontweight="bold",
        color=_INK,
    )
    axes.annotate(
        f"One table of {case.rows:,} x {case.dim}, {case.distribution} lookups, "
        f"threads: {result.threads}; both axes are logarithmic",
        (0, 1),
        xycoords="axes fraction",
        xytext=(0, 10),
        textcoords="offset points",
        fontsize=9.5,
        color=_FAINT,
    )
