"""The examples on real data: accuracy reached against seconds, torch's optimizers and ours.

Each example is run with all four contestants, then with ours alone at half and twice the learning
rate, so that masked and dense semantics are compared at the best rate of each. The result is
benchmarks/results/board.json; tables and pictures in docs/gallery are made from it.

Fails if no semantics reaches the published accuracy within its tolerance, if ours is not as
accurate as torch's optimizer with the same semantics, or if ours has become slower beside it than
in the last results.

Example:
    make board
    python -m benchmarks.board --draw    # tables and pictures only, from the results
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from benchmarks.harness.results import header
from docs.theme import FAINT, INK, OURS, TORCH, WIDTH, framed, save

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "board.json"
GALLERY = ROOT / "docs" / "gallery"
PAGE = GALLERY / "board.md"
EXAMPLES = ("umls", "movielens", "word_vectors")
RATES = (0.5, 2.0)  # times the learning rate
SLOWER = 1.3  # than in the last results, beside torch
SAME = 0.25  # of the tolerance: how far ours may be from torch's with the same semantics

Result = dict[str, Any]


def run(name: str, *options: str, quick: bool = False) -> Result:
    """What an example reports, with what it prints."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, f"examples/{name}.py", *options, *["--quick"] * quick]
        print("$", " ".join(command), flush=True)
        done = subprocess.run(
            [*command, "--json", str(path)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONWARNINGS": "error"},
        )
        print(done.stdout, flush=True)
        if not path.exists():  # the example has said why
            sys.exit(done.returncode or 1)
        return {**json.loads(path.read_text()), "printed": done.stdout}


def measure(name: str, quick: bool) -> Result:
    """All contestants, then ours at other learning rates."""
    result = run(name, quick=quick)
    ours = [each for each in result["contestants"] if is_ours(each)]
    rates = [{"lr": result["lr"], **{each["semantics"]: score(result, each) for each in ours}}]
    for factor in RATES:
        lr = result["lr"] * factor
        names = [each["name"] for each in ours]
        other = run(name, "--lr", f"{lr:g}", "--only", *names, quick=quick)
        found = {each["semantics"]: score(other, each) for each in other["contestants"]}
        rates.append({"lr": lr, **found})
    result["rates"] = sorted(rates, key=lambda each: each["lr"])
    return {"example": name, **result}


def is_ours(contestant: Result) -> bool:
    return str(contestant["name"]).startswith("sparsestep")


def score(result: Result, contestant: Result) -> float:
    return float(contestant["scores"][result["metric"]])


def behind(result: Result, found: float, wanted: float) -> float:
    """By how much a score is worse than another one."""
    return wanted - found if result["higher_is_better"] else found - wanted


def best(result: Result, semantics: str) -> float:
    """Over the learning rates."""
    choose = max if result["higher_is_better"] else min
    return float(choose(each[semantics] for each in result["rates"]))


def twin(result: Result, contestant: Result) -> Result:
    """Torch's optimizer with the same semantics."""
    return next(
        each
        for each in result["contestants"]
        if each["semantics"] == contestant["semantics"] and not is_ours(each)
    )


def seconds_to_published(result: Result, contestant: Result) -> float | None:
    """After how many seconds the metric was at the published one."""
    wanted = result["published"][result["metric"]]
    points = contestant["curve"]
    return next((s for s, found in points if behind(result, found, wanted) <= 0), None)


def regressions(result: Result, last: Result | None) -> list[str]:
    """What is worse than it should be."""
    found = []
    choose = max if result["higher_is_better"] else min
    for metric, wanted in result["published"].items():
        reached = choose(each["scores"][metric] for each in result["contestants"])
        if behind(result, reached, wanted) > result["tolerance"]:
            found.append(f"{result['data']}: {metric} {reached:.4f}, published {wanted}")
    for each in result["contestants"]:
        what = f"{result['data']}, {each['name']}"
        if not is_ours(each):
            continue
        theirs = twin(result, each)
        apart = abs(score(result, each) - score(result, theirs))
        if apart > SAME * result["tolerance"]:
            found.append(f"{what}: {apart:.4f} from {theirs['name']}")
        before = next(old for old in (last or result)["contestants"] if old["name"] == each["name"])
        now, then = (
            one["seconds"] / twin(of, one)["seconds"]
            for of, one in ((result, each), (last or result, before))
        )
        if now > SLOWER * then:
            found.append(f"{what}: {now:.2f} times torch's seconds, {then:.2f} in the last results")
    return found


def summary(results: Sequence[Result]) -> str:
    """The table of all contestants, in Markdown."""
    lines = [
        "| data | optimizer | missing row | accuracy | seconds | until the published | peak MB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        published = result["published"][result["metric"]]
        for each in result["contestants"]:
            first = each is result["contestants"][0]
            scores = ", ".join(f"{name} {value:.3f}" for name, value in each["scores"].items())
            seconds = seconds_to_published(result, each)
            until = "not reached" if seconds is None else f"{seconds:.1f}"
            memory = "" if each["megabytes"] is None else f"{each['megabytes']:.0f}"
            meaning = "zero" if each["semantics"] == "dense" else "skipped"
            lines.append(
                f"| {result['data'] if first else ''} | `{each['name']}` | {meaning} | {scores} "
                f"| {each['seconds']:.1f} | {until} | {memory} |"
            )
        lines.append(
            f"| | {result['published_by']} | | {result['metric']} {published} "
            f"± {result['tolerance']} | | | |"
        )
    return "\n".join(lines)


def semantics_table(results: Sequence[Result]) -> str:
    """The table of masked and dense semantics, in Markdown."""
    lines = [
        "| data | rows a batch looks up | metric | learning rate | masked | dense |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        for each in result["rates"]:
            first = each is result["rates"][0]
            share = f"{100 * result['share_of_rows']:.0f} %"
            start = (result["data"], share, result["metric"]) if first else ("", "", "")
            marked = [
                f"**{each[kind]:.4f}**" if each[kind] == best(result, kind) else f"{each[kind]:.4f}"
                for kind in ("masked", "dense")
            ]
            cells = [*start, f"{each['lr']:g}", *marked]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(page: str, results: Sequence[Result]) -> str:
    """The page, with the tables between its marks."""
    for mark, table in (("all", summary(results)), ("semantics", semantics_table(results))):
        before, begin, rest = page.partition(f"% {mark}, from benchmarks/results/board.json\n")
        _, end, after = rest.partition("% end\n")
        page = f"{before}{begin}\n{table}\n{end}{after}"
    return page


def draw(axes: Axes, result: Result) -> None:
    """Accuracy against seconds."""
    wanted = result["published"][result["metric"]]
    scores = [found for each in result["contestants"] for _, found in each["curve"]]
    for each in result["contestants"]:
        seconds, found = zip(*each["curve"], strict=True)
        axes.plot(
            seconds,
            found,
            color=OURS if is_ours(each) else TORCH,
            linestyle="-" if each["semantics"] == "dense" else (0, (3, 1.5)),
            linewidth=2.2,
            label=f"{each['name']}, {each['semantics']}",
        )
    axes.axhline(wanted, color=FAINT, linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        f"{result['published_by']}: {wanted}",
        (1, wanted),
        xycoords=("axes fraction", "data"),
        xytext=(0, 3),
        textcoords="offset points",
        ha="right",
        color=FAINT,
        fontsize=9,
    )
    # The first points of a curve would flatten the rest.
    sign = 1 if result["higher_is_better"] else -1
    good = sorted([*scores, wanted], key=lambda value: sign * value)
    low, high = sorted((good[len(good) // 6], good[-1]))
    axes.set_ylim(low - 0.08 * (high - low), high + 0.12 * (high - low))
    axes.set_xlim(left=0)
    axes.set_ylabel(result["metric"], color=FAINT)
    axes.set_xlabel("seconds of CPU", color=FAINT)
    axes.spines["bottom"].set_visible(True)
    axes.spines["bottom"].set_color(FAINT)
    place = axes.transAxes + ScaledTranslation(0, -0.42, axes.figure.dpi_scale_trans)  # inches
    axes.legend(
        frameon=False,
        loc="upper center",
        bbox_to_anchor=(0.45, 0),
        bbox_transform=place,
        ncols=2,
        columnspacing=1.2,
        fontsize=9,
        labelcolor=INK,
    )


def draw_all(results: Sequence[Result], folder: Path) -> None:
    """A picture for each example, and one with all of them."""
    for result in results:
        caption = f"{result['metric']} against seconds, {result['data']}; one thread, taking turns"
        axes = framed(title(result), caption, height=2.6, left=0.75, bottom=0.95)
        draw(axes, result)
        save(axes, folder / f"{result['example'].replace('_', '-')}.svg")
    height = 3.8 * len(results)
    figure = Figure(figsize=(WIDTH, height), facecolor="white")
    figure.subplots_adjust(left=0.14, right=0.96, top=1 - 0.4 / height, bottom=0.95 / height)
    figure.subplots_adjust(hspace=0.6)
    panels = figure.subplots(len(results), 1, squeeze=False)[:, 0]
    for axes, result in zip(panels, results, strict=True):
        axes.set_facecolor("white")
        axes.tick_params(colors=FAINT, length=0, labelsize=9.5)
        for spine in axes.spines.values():
            spine.set_visible(False)
        draw(axes, result)
        axes.set_title(result["data"], loc="left", fontsize=12, fontweight="bold", color=INK)
    save(panels[0], folder / "board.svg")


def title(result: Result) -> str:
    """What the picture of an example shows."""
    found = [score(result, each) for each in result["contestants"]]
    worst = min(found) if result["higher_is_better"] else max(found)
    wanted = result["published"][result["metric"]]
    words = "at least" if result["higher_is_better"] else "at most"
    return f"{result['metric']} {words} {worst:.3f}; {result['published_by']}: {wanted}"


def publish(results: Sequence[Result]) -> None:
    """Write tables, pictures, and what the examples printed, into the gallery."""
    PAGE.write_text(written(PAGE.read_text(), results))
    draw_all(results, GALLERY)
    for result in results:
        (GALLERY / "recorded" / f"{result['example']}.txt").write_text(result["printed"])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--draw", action="store_true", help="tables and pictures of the results")
    parser.add_argument("--only", choices=EXAMPLES, help="one example; results of others stay")
    parser.add_argument("--quick", action="store_true", help="tiny runs; nothing is written")
    options = parser.parse_args(arguments)
    last = json.loads(RESULTS.read_text())["results"] if RESULTS.exists() else []
    if options.draw:
        publish(last)
        return 0
    names = [options.only] if options.only else EXAMPLES
    results = [{**asdict(header()), **measure(name, options.quick)} for name in names]
    print(summary(results), semantics_table(results), sep="\n\n", flush=True)
    if options.quick:
        return 0
    before = {each["example"]: each for each in last}
    worse = [line for each in results for line in regressions(each, before.get(each["example"]))]
    if worse:  # the last results stay
        print("\nThis has become worse:", *worse, sep="\n  ", file=sys.stderr)
        return 1
    before |= {each["example"]: each for each in results}
    results = [before[name] for name in EXAMPLES if name in before]
    RESULTS.write_text(json.dumps({"results": results}, indent=2) + "\n")
    publish(results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
