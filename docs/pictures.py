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

from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from benchmarks.harness.figure import lines
from benchmarks.harness.results import Report
from docs import claims
from docs.theme import FAINT, GRID, INK, LIGHT, OURS, TEXT, TORCH, framed, save

HERE = Path(__file__).parent
RESULTS = HERE.parent / "benchmarks" / "results"


def beside(axes: Axes, value: float, place: float, text: str) -> None:
    """A number beside the end of its bar."""
    axes.annotate(
        text,
        (value, place),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        color=OURS,
        fontsize=TEXT,
    )


def draw_training(path: Path, found: dict[str, Any]) -> None:
    """The loss of both runs of the demo against time."""
    day = datetime.fromisoformat(found["date"]).date()
    torch_version = found["versions"]["torch"].partition("+")[0]
    axes = framed(
        f"The same training, {claims.training(found)} times as fast",
        f"word2vec, {found['words']:,} words, {found['steps']:,} steps; one line differs. "
        f"Loss against CPU time, one thread of an {found['machine']['cpu']}, "
        f"torch {torch_version}, {day}",
        height=2.6,
        left=0.5,
    )
    for run, color in zip(found["runs"], (TORCH, OURS), strict=True):
        axes.plot(run["seconds"], run["losses"], color=color, linewidth=2.4)
        end = (run["seconds"][-1], run["losses"][-1])
        axes.plot(*end, "o", color=color, markersize=6)
        look = {"color": color, "fontweight": "bold", "fontsize": TEXT, "va": "center"}
        lift, side = (34, "right") if color == TORCH else (-14, "center")
        place = {"xytext": (0, lift), "textcoords": "offset points", "ha": side}
        axes.annotate(f"{run['name']}, {end[0]:.0f} s", end, **place, **look)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=1.05)
    axes.set_xlabel("seconds", color=FAINT, fontsize=TEXT)
    save(axes, path)


def draw_lookups(path: Path, report: Report) -> None:
    """Milliseconds per step against lookups, on logarithmic axes."""
    cases = sorted(report.cases, key=lambda each: each.case.lookups)
    case = cases[0].case
    axes = framed(
        "Milliseconds per step against lookups",
        f"one table of {case.rows:,} x {case.dim}, {case.distribution} ids, two threads; "
        "both axes are logarithmic",
        height=3.2,
        left=0.6,
    )
    looks = {
        "torch SparseAdam": (TORCH, 2.4, "-", "torch.optim.SparseAdam"),
        "torch Adam dense fused": (FAINT, 1.4, "-", "torch.optim.Adam, dense"),
        "sparsestep": (OURS, 2.4, "-", "sparsestep.SparseAdam"),
        "limit": (INK, 1.2, (0, (5, 3)), "the limit"),
    }
    for name, lookups, milliseconds in lines(cases):
        if name in looks:
            color, width, style, label = looks[name]
            look = {"color": color, "linewidth": width, "linestyle": style, "label": label}
            axes.plot(lookups, milliseconds, **look)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.margins(x=0)
    axes.xaxis.set_major_locator(FixedLocator([each.case.lookups for each in cases][::2]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.get_xticklabels()[-1].set_horizontalalignment("right")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_minor_locator(NullLocator())
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_xlabel("lookups per step", color=FAINT, fontsize=TEXT)
    axes.legend(frameon=False, fontsize=TEXT, labelcolor="linecolor", loc="upper left")
    save(axes, path)


def draw_ratios(path: Path, report: Report) -> None:
    """A bar for each case: how many times as fast as torch's SparseAdam a step is."""
    cases = [(each.case.name, each.timing("sparsestep")) for each in report.cases]
    found = [(name, timing.times_torch or 0.0) for name, timing in cases if timing]
    found.sort(key=lambda each: each[1])
    most = found[-1][1]
    day = datetime.fromisoformat(report.date).date()
    machine = f"{report.machine.cores} cores of an {report.machine.cpu}"
    axes = framed(
        f"A step is {claims.speedup(report)} times as fast as torch.optim.SparseAdam",
        f"rows x columns, lookups; {machine}, torch {report.versions['torch']}, {day}",
        height=2.3,
        left=2.55,
        bottom=0.15,
    )
    axes.barh([name for name, _ in found], [ratio for _, ratio in found], color=OURS, height=0.62)
    axes.axvline(1.0, color=TORCH, linewidth=2.4)
    for place, (_, ratio) in enumerate(found):
        beside(axes, ratio, place, f"{ratio:.1f}x")
    axes.set_ylim(-0.5, len(found) - 0.1)
    axes.text(1.3, len(found) - 0.55, "torch", color=TORCH, fontsize=TEXT, va="bottom")
    axes.set_xlim(0, most * 1.25)
    axes.set_xticks([])
    axes.tick_params(colors=INK)
    save(axes, path)


def draw_losses(path: Path) -> None:
    """The losses of examples/one_optimizer.py, which is run for that."""
    command = [sys.executable, str(HERE.parent / "examples" / "one_optimizer.py"), "--steps", "120"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^ +(\d+)   (\d\.\d+) #* *(\d\.\d+) #*$", printed, re.MULTILINE)
    steps, ours, torchs = ([float(line[i]) for line in lines] for i in range(3))
    axes = framed(
        "One optimizer learns what two learn",
        "loss of each batch before its step",
        height=2.4,
        left=0.5,
    )
    axes.plot(steps, torchs, color=TORCH, linewidth=6, alpha=0.6)
    axes.plot(steps, ours, color=OURS, linewidth=2)
    labels = [("two optimizers, torch's", TORCH), ("one optimizer, sparsestep.AdamW", OURS)]
    for row, (words, color) in enumerate(labels):  # above the end of the curves, which fall
        place = (0.98, 0.92 - 0.11 * row)
        axes.text(*place, words, transform=axes.transAxes, ha="right", color=color, fontsize=TEXT)
    axes.set_xlabel("step", color=FAINT, fontsize=TEXT)
    save(axes, path)


def draw_formulas(path: Path, found: dict[str, Any]) -> None:
    """Three bars for each rule: torch or a class by hand, a formula, the rule in C++."""
    rules = [each for each in found["rules"] if each["lookups"] == "uniform"]
    day = datetime.fromisoformat(found["date"]).date()
    size = f"{found['rows']:,} x {found['dim']}, {found['lookups']:,} lookups"
    machine = f"one core of an {found['machine']['cpu']}, torch {found['versions']['torch']}"
    axes = framed(
        f"Ten lines of your own: {claims.own_rule(found)} times as fast as torch",
        f"CPU time of a step, {size}; {machine}, {day}",
        height=3.2,
        left=1.4,
        bottom=0.15,
    )
    kinds = (
        ("torch_ms", TORCH, "torch.optim, or a class by hand"),
        ("formula_ms", OURS, "ten lines of sparsestep.rule"),
        ("native_ms", LIGHT, "sparsestep's own class"),
    )
    for row, each in enumerate(rules):
        for place, (key, color, words) in enumerate(kinds):
            label = words if row == 0 else None
            axes.barh(row + 0.27 * (place - 1), each[key], 0.23, color=color, label=label)
        beside(axes, each["formula_ms"], row + 0.12, f"{each['ahead_of_torch']:.1f}x")
    axes.set_yticks(range(len(rules)), [each["rule"] for each in rules])
    axes.set_ylim(len(rules) + 1.2, -0.5)  # room for the legend
    axes.set_xticks([])
    axes.tick_params(colors=INK)
    axes.legend(frameon=False, loc="lower left", fontsize=TEXT, labelcolor=INK)
    save(axes, path)


def main() -> None:
    """Write the pictures."""
    formulas = RESULTS / "user_rules.json"
    draw_formulas(HERE / "user-rules.svg", json.loads(formulas.read_text()))
    draw_losses(HERE / "one-optimizer.svg")
    lookups = Report.from_json((RESULTS / "lookups.json").read_text())
    draw_lookups(HERE / "step-time.svg", lookups)
    draw_ratios(HERE / "times-torch.svg", Report.from_json((RESULTS / "peers.json").read_text()))
    training = RESULTS / "loss_against_time.json"
    draw_training(HERE / "loss-against-time.svg", json.loads(training.read_text()))


if __name__ == "__main__":
    main()
