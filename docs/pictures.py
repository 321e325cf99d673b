"""Draw the pictures of the README and of the page on performance from published results.

Nothing is measured for that; one example is run.

Example:
    python docs/pictures.py
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
from matplotlib.figure import Figure

from sparsestep.cli.bench.picture import draw
from sparsestep.cli.bench.results import Report

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"

_INK, _FAINT, _OURS, _TORCH = "#222222", "#6b6b6b", "#1f6fb4", "#d1812f"
_NATIVE = "#9dbfdc"
_SVG: Any = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}


def draw_ratios(path: Path, report: Report) -> None:
    """A bar for each case: how many times as fast as torch's SparseAdam a step is."""
    cases = [(each.case.name, each.timing("sparsestep")) for each in report.cases]
    found = [(name, timing.times_torch or 0.0) for name, timing in cases if timing]
    found.sort(key=lambda each: each[1])
    figure = Figure(figsize=(8.5, 3.4), facecolor="white")
    figure.subplots_adjust(left=0.36, right=0.94, top=0.78, bottom=0.11)
    axes = figure.add_subplot(facecolor="white")
    axes.barh([name for name, _ in found], [ratio for _, ratio in found], color=_OURS, height=0.62)
    axes.axvline(1.0, color=_TORCH, linewidth=2.4)
    for place, (_, ratio) in enumerate(found):
        axes.text(ratio + 0.15, place, f"{ratio:.1f}x", va="center", color=_OURS, fontsize=10)
    axes.text(1.0, len(found) - 0.42, " torch", color=_TORCH, fontsize=9.5, va="bottom")
    axes.set_xlim(0, max(ratio for _, ratio in found) * 1.1)
    axes.tick_params(colors=_INK, length=0, labelsize=9.5)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    least, most = found[0][1], found[-1][1]
    title = f"A step {least:.0f} to {most:.0f} times as fast as torch.optim.SparseAdam"
    figure.text(0.02, 0.93, title, fontsize=14, fontweight="bold", color=_INK)
    day = datetime.fromisoformat(report.date).date()
    machine = f"{report.machine.cores} cores of an {report.machine.cpu}"
    caption = f"rows x columns, lookups; {machine}, torch {report.versions['torch']}, {day}"
    figure.text(0.02, 0.86, caption, fontsize=9.5, color=_FAINT)
    with matplotlib.rc_context(_SVG):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_losses(path: Path) -> None:
    """The losses of examples/one_optimizer.py, which is run for that."""
    command = [sys.executable, str(HERE.parent / "examples" / "one_optimizer.py"), "--steps", "120"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^ +(\d+)   (\d\.\d+) #* *(\d\.\d+) #*$", printed, re.MULTILINE)
    steps, ours, torchs = ([float(line[i]) for line in lines] for i in range(3))
    figure = Figure(figsize=(8.5, 3.4), facecolor="white")
    figure.subplots_adjust(left=0.08, right=0.97, top=0.78, bottom=0.14)
    axes = figure.add_subplot(facecolor="white")
    axes.plot(steps, torchs, color=_TORCH, linewidth=6, alpha=0.6)
    axes.plot(steps, ours, color=_OURS, linewidth=2)
    axes.text(steps[1], torchs[1] - 0.03, "two optimizers, torch's", color=_TORCH, fontsize=9.5)
    axes.text(
        steps[1], torchs[1] - 0.055, "one optimizer, sparsestep.AdamW", color=_OURS, fontsize=9.5
    )
    axes.set_xlabel("step", color=_FAINT)
    axes.tick_params(colors=_FAINT, length=0, labelsize=9)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
    title = "One optimizer learns what two learn"
    figure.text(0.02, 0.93, title, fontsize=14, fontweight="bold", color=_INK)
    figure.text(0.02, 0.86, "loss of each batch before its step", fontsize=9.5, color=_FAINT)
    with matplotlib.rc_context(_SVG):
        figure.savefig(path, format="svg", metadata={"Date": None})


def draw_formulas(path: Path, found: dict[str, Any]) -> None:
    """Three bars for each rule: torch or a class by hand, a formula, the rule in C++."""
    rules = [each for each in found["rules"] if each["lookups"] == "uniform"]
    figure = Figure(figsize=(8.5, 4.0), facecolor="white")
    figure.subplots_adjust(left=0.16, right=0.96, top=0.80, bottom=0.04)
    axes = figure.add_subplot(facecolor="white")
    kinds = (
        ("torch_ms", _TORCH, "torch.optim, or a class by hand"),
        ("formula_ms", _OURS, "ten lines of sparsestep.rule"),
        ("native_ms", _NATIVE, "sparsestep's own class"),
    )
    for row, each in enumerate(rules):
        for place, (key, colour, words) in enumerate(kinds):
            label = words if row == 0 else None
            axes.barh(row + 0.27 * (place - 1), each[key], 0.23, color=colour, label=label)
        text = f"  {each['ahead_of_torch']:.1f}x"
        axes.text(each["formula_ms"], row, text, va="center", color=_OURS, fontsize=10)
    axes.set_yticks(range(len(rules)), [each["rule"] for each in rules])
    axes.invert_yaxis()
    axes.tick_params(colors=_INK, length=0, labelsize=9.5)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(False)
    axes.legend(frameon=False, loc="lower right", fontsize=9.5, labelcolor=_INK)
    ahead = [each["ahead_of_torch"] for each in rules]
    title = f"Ten lines of your own: {min(ahead):.0f} to {max(ahead):.0f} times as fast as torch"
    figure.text(0.02, 0.94, title, fontsize=14, fontweight="bold", color=_INK)
    day = datetime.fromisoformat(found["date"]).date()
    size = f"{found['rows']:,} x {found['dim']}, {found['lookups']:,} lookups"
    machine = f"one core of an {found['machine']['cpu']}, torch {found['versions']['torch']}"
    caption = f"CPU time of a step, {size}; {machine}, {day}"
    figure.text(0.02, 0.88, caption, fontsize=9.5, color=_FAINT)
    with matplotlib.rc_context(_SVG):
        figure.savefig(path, format="svg", metadata={"Date": None})


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
