"""Draw the pictures of the README and of the page on performance from published results.

Nothing is measured for that; one example is run.

Example:
    python -m docs.pictures
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.harness.figure import draw
from benchmarks.harness.results import Report

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"

INK, FAINT, OURS, TORCH = "#222222", "#6b6b6b", "#1f6fb4", "#d1812f"
LIGHT = "#9dbfdc"
_SVG: Any = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}


def framed(
    title: str, caption: str, *, height: float = 3.4, left: float = 0.08, bottom: float = 0.45
) -> Axes:
    """Axes on white, without a frame, under the finding and a line that says what it is of.

    Sizes are in inches, but for ``left``; ``bottom`` is the room for the labels of the x axis.
    """
    figure = Figure(figsize=(8.5, height), facecolor="white")
    figure.subplots_adjust(left=left, right=0.96, top=1 - 0.75 / height, bottom=bottom / height)
    axes = figure.add_subplot(facecolor="white")
    axes.tick_params(colors=FAINT, length=0, labelsize=9.5)
    for spine in axes.spines.values():
        spine.set_visible(False)
    figure.text(0.02, 1 - 0.24 / height, title, fontsize=14, fontweight="bold", color=INK)
    figure.text(0.02, 1 - 0.48 / height, caption, fontsize=9.5, color=FAINT)
    return axes


def beside(axes: Axes, value: float, place: float, text: str) -> None:
    """A number beside the end of its bar."""
    axes.annotate(
        text,
        (value, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=OURS,
        fontsize=10,
    )


def save(axes: Axes, path: Path) -> None:
    """Write the picture, with text that can be searched for and without a date."""
    with matplotlib.rc_context(_SVG):
        axes.get_figure(root=True).savefig(path, format="svg", metadata={"Date": None})


def draw_ratios(path: Path, report: Report) -> None:
    """A bar for each case: how many times as fast as torch's SparseAdam a step is."""
    cases = [(each.case.name, each.timing("sparsestep")) for each in report.cases]
    found = [(name, timing.times_torch or 0.0) for name, timing in cases if timing]
    found.sort(key=lambda each: each[1])
    least, most = found[0][1], found[-1][1]
    day = datetime.fromisoformat(report.date).date()
    machine = f"{report.machine.cores} cores of an {report.machine.cpu}"
    axes = framed(
        f"A step {least:.0f} to {most:.0f} times as fast as torch.optim.SparseAdam",
        f"rows x columns, lookups; {machine}, torch {report.versions['torch']}, {day}",
        height=3.1,
        left=0.36,
        bottom=0.15,
    )
    axes.barh([name for name, _ in found], [ratio for _, ratio in found], color=OURS, height=0.62)
    axes.axvline(1.0, color=TORCH, linewidth=2.4)
    for place, (_, ratio) in enumerate(found):
        beside(axes, ratio, place, f"{ratio:.1f}x")
    axes.text(1.0, len(found) - 0.42, " torch", color=TORCH, fontsize=9.5, va="bottom")
    axes.set_xlim(0, most * 1.1)
    axes.set_xticks([])
    axes.tick_params(colors=INK)
    save(axes, path)


def draw_losses(path: Path) -> None:
    """The losses of examples/one_optimizer.py, which is run for that."""
    command = [sys.executable, str(HERE.parent / "examples" / "one_optimizer.py"), "--steps", "120"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^ +(\d+)   (\d\.\d+) #* *(\d\.\d+) #*$", printed, re.MULTILINE)
    steps, ours, torchs = ([float(line[i]) for line in lines] for i in range(3))
    axes = framed("One optimizer learns what two learn", "loss of each batch before its step")
    axes.plot(steps, torchs, color=TORCH, linewidth=6, alpha=0.6)
    axes.plot(steps, ours, color=OURS, linewidth=2)
    labels = [("two optimizers, torch's", TORCH), ("one optimizer, sparsestep.AdamW", OURS)]
    for row, (words, colour) in enumerate(labels):  # above the end of the curves, which fall
        place = (0.98, 0.92 - 0.11 * row)
        axes.text(*place, words, transform=axes.transAxes, ha="right", color=colour, fontsize=9.5)
    axes.set_xlabel("step", color=FAINT)
    axes.spines["bottom"].set_visible(True)
    save(axes, path)


def draw_formulas(path: Path, found: dict[str, Any]) -> None:
    """Three bars for each rule: torch or a class by hand, a formula, the rule in C++."""
    rules = [each for each in found["rules"] if each["lookups"] == "uniform"]
    ahead = [each["ahead_of_torch"] for each in rules]
    day = datetime.fromisoformat(found["date"]).date()
    size = f"{found['rows']:,} x {found['dim']}, {found['lookups']:,} lookups"
    machine = f"one core of an {found['machine']['cpu']}, torch {found['versions']['torch']}"
    axes = framed(
        f"Ten lines of your own: {min(ahead):.0f} to {max(ahead):.0f} times as fast as torch",
        f"CPU time of a step, {size}; {machine}, {day}",
        height=3.7,
        left=0.16,
        bottom=0.15,
    )
    kinds = (
        ("torch_ms", TORCH, "torch.optim, or a class by hand"),
        ("formula_ms", OURS, "ten lines of sparsestep.rule"),
        ("native_ms", LIGHT, "sparsestep's own class"),
    )
    for row, each in enumerate(rules):
        for place, (key, colour, words) in enumerate(kinds):
            label = words if row == 0 else None
            axes.barh(row + 0.27 * (place - 1), each[key], 0.23, color=colour, label=label)
        beside(axes, each["formula_ms"], row, f"{each['ahead_of_torch']:.1f}x")
    axes.set_yticks(range(len(rules)), [each["rule"] for each in rules])
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, loc="lower right", fontsize=9.5, labelcolor=INK)
    save(axes, path)


def main() -> None:
    """Write the pictures."""
    formulas = RESULTS / "user_rules.json"
    draw_formulas(HERE / "user-rules.svg", json.loads(formulas.read_text()))
    draw_losses(HERE / "one-optimizer.svg")
    lookups = Report.from_json((RESULTS / "lookups.json").read_text())
    draw(HERE / "step-time.svg", lookups.cases)
    draw_ratios(HERE / "times-torch.svg", Report.from_json((RESULTS / "peers.json").read_text()))


if __name__ == "__main__":
    main()
