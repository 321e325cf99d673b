"""Draw the pictures of the gallery from what its examples print.

Examples that need other packages are not run: what they printed is in docs/gallery/recorded.

Example:
    python -m docs.thumbnails
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from docs.pictures import beside
from docs.theme import FAINT, GRID, INK, LIGHT, OURS, TEXT, TORCH, WIDTH, framed, save

HERE = Path(__file__).parent
GALLERY = HERE / "gallery"


def recorded(name: str) -> str:
    """What an example printed."""
    return (GALLERY / "recorded" / f"{name}.txt").read_text()


def printed(name: str, *options: str) -> str:
    """What an example prints."""
    command = [sys.executable, str(HERE.parent / "examples" / name), *options]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def numbers(pattern: str, text: str) -> list[tuple[float, ...]]:
    """The numbers that the groups of a pattern find, match by match."""
    found = re.finditer(pattern, text)
    return [tuple(float(each.replace(",", "")) for each in match.groups()) for match in found]


def curves(axes: Axes, label: str, wide: list[float], narrow: list[float] | None = None) -> None:
    """One curve, or a narrow one on a wide one; the caller labels them."""
    steps = range(1, len(wide) + 1)
    if narrow is not None:
        axes.plot(steps, wide, color=TORCH, linewidth=7, alpha=0.6)
    axes.plot(steps, narrow if narrow is not None else wide, color=OURS, linewidth=2.2)
    axes.set_xlabel(label, color=FAINT, fontsize=TEXT)
    axes.set_xticks(list(steps))


def bars(axes: Axes, names: list[str], values: list[float], shown: str, *, faint: int = 0) -> None:
    """Bars from top to bottom with their numbers, the last ones in a lighter color."""
    colors = [OURS] * (len(names) - faint) + [LIGHT] * faint
    axes.barh(names, values, color=colors, height=0.62)
    for place, value in enumerate(values):
        beside(axes, value, place, f"{value:{shown}}")
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.2)
    axes.set_xticks([])
    axes.tick_params(colors=INK)


def draw_lightning() -> None:
    """The loss that each run ends with."""
    losses = [each for (each,) in numbers(r"loss (\d\.\d+)", recorded("with_lightning"))]
    names = ["clipped by norm", "clipped by value", "bf16-mixed", "four epochs", "two epochs"]
    axes = framed(
        "Resumed from a checkpoint, the weights are the same",
        "loss of the last batch; Lightning's Trainer, one optimizer for tables and layers",
        height=2.4,
        left=1.7,
        bottom=0.15,
    )
    bars(axes, [*names, "resumed after two"], losses, ".3f")
    save(axes, GALLERY / "lightning.svg")


def draw_accelerate() -> None:
    """The loss, beside the chance level."""
    ((loss,),) = numbers(r"loss (\d\.\d+)", recorded("with_accelerate"))
    axes = framed(
        "Accelerate: accumulation, clipping and bf16 converge",
        "loss on all data in bf16, with state saved and loaded; chance level is 0.693",
        height=1.6,
        left=0.9,
        bottom=0.15,
    )
    bars(axes, ["trained", "chance"], [loss, 0.693], ".3f", faint=1)
    save(axes, GALLERY / "accelerate.svg")


def draw_new_tokens() -> None:
    """All rows of the embedding, and those that changed."""
    rows = recorded("new_tokens").partition("rows that changed: [")[2].partition("]")[0]
    changed = [int(each) for each in rows.split(", ")]
    total = changed[-1] + 1
    axes = framed(
        f"{len(changed)} of {total:,} rows changed: the new ones",
        "the embedding of a small GPT-2, trained by the Transformers Trainer with weight decay",
        height=1.4,
        left=0.3,
        bottom=0.15,
    )
    axes.barh([0], [total], color=LIGHT, height=0.5)
    axes.barh([0], [len(changed)], left=[changed[0]], color=TORCH, height=0.5)
    words = f"bit-for-bit unchanged: rows 0 to {changed[0] - 1}"
    axes.text(total / 2, 0, words, ha="center", va="center", color=INK, fontsize=TEXT)
    words = f"trained: rows {changed[0]:,} to {changed[-1]:,}"
    axes.text(total, 0.32, words, ha="right", va="bottom", color=TORCH, fontsize=TEXT)
    axes.set_ylim(-0.5, 0.6)
    axes.set_yticks([])
    axes.set_xticks([])
    save(axes, GALLERY / "new-tokens.svg")


def draw_node2vec() -> None:
    """The loss of each epoch."""
    text = recorded("node2vec")
    losses = [loss for (loss,) in numbers(r"epoch \d+: loss (\d+\.\d+)", text)]
    ((within, across),) = numbers(r"mean cosine: (\S+) within a community, (\S+) across", text)
    axes = framed(
        f"Two communities found: cosine {within:.2f} within, {across:.2f} across",
        "loss of each epoch; Node2Vec of PyTorch Geometric with sparsestep.SparseAdam",
        height=2.2,
        left=0.5,
    )
    curves(axes, "epoch", losses)
    save(axes, GALLERY / "node2vec.svg")


def draw_knowledge_graph() -> None:
    """Two curves, on top of each other."""
    pattern = r"loss (\S+) with dense gradients, (\S+) fused"
    dense, fused = zip(*numbers(pattern, recorded("knowledge_graph")), strict=True)
    axes = framed(
        "Compact gradients, the same losses",
        "ComplEx of PyKEEN, loss of each epoch",
        height=2.4,
        left=0.6,
    )
    curves(axes, "epoch", list(dense), list(fused))
    gap = 0.11 * (dense[0] - dense[-1])
    axes.text(1.9, dense[0], "dense gradients", color=TORCH, fontsize=TEXT, va="center")
    words = "compact gradients: sparsestep.nn.optimizer_for"
    axes.text(1.9, dense[0] - gap, words, color=OURS, fontsize=TEXT, va="center")
    save(axes, GALLERY / "knowledge-graph.svg")


def draw_recommender() -> None:
    """The held-out AUC of one optimizer and of torch's two."""
    text = printed("recommender.py", "--quick", "--steps", "40")
    pattern = r"\n +(\d+) +\S+ +(0\.\d+) +\S+ +\S+ +(0\.\d+) +[\d,]+(?=\n)"
    steps, ours, theirs = zip(*numbers(pattern, text), strict=True)
    axes = framed(
        "26 tables and layers, one optimizer, the same AUC",
        "held-out AUC against steps; examples/recommender.py --quick",
        height=2.4,
        left=0.6,
    )
    axes.plot(steps, theirs, color=TORCH, linewidth=7, alpha=0.6)
    axes.plot(steps, ours, color=OURS, linewidth=2.2)
    labels = [("torch SparseAdam + Adam", TORCH), ("sparsestep.AdamW", OURS)]
    for row, (words, color) in enumerate(labels):  # below the end of the curves, which rise
        place = (0.98, 0.2 - 0.12 * row)
        axes.text(*place, words, transform=axes.transAxes, ha="right", color=color, fontsize=TEXT)
    axes.set_xlabel("step", color=FAINT, fontsize=TEXT)
    save(axes, GALLERY / "recommender.svg")


def draw_averages() -> None:
    """How far the averages are from those of dense training, beside a step of the optimizer."""
    ((ema, swa),) = numbers(r"EMA (\S+), SWA (\S+)", printed("averages.py"))
    axes = framed(
        "Averages of sparse training are those of dense training",
        "largest difference of a weight, and largest move of one step; log scale",
        height=1.8,
        left=0.8,
        bottom=0.15,
    )
    names, values = ["EMA", "SWA", "a step"], [ema, swa, 1e-2]
    axes.barh(names, values, color=[OURS, OURS, LIGHT], height=0.62)
    for place, value in enumerate(values):
        beside(axes, value, place, f"{value:.0e}")
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(1e-8, 1e-1)
    axes.set_xticks([])
    axes.minorticks_off()
    axes.tick_params(colors=INK)
    save(axes, GALLERY / "averages.svg")


def draw_ngram_memory() -> None:
    """Loss by tokens and by seconds, step time by rows, and memory."""
    text = recorded("ngram_memory")
    pattern = r"\n +([\d,]+) +(\d\.\d+) +([\d.]+) s +(\d\.\d+) +([\d.]+) s(?=\n)"
    tokens, plain, plain_seconds, ours, seconds = zip(*numbers(pattern, text), strict=True)
    sizes, milliseconds = zip(*numbers(r"\n +([\d,]+) rows: ([\d.]+) ms", text), strict=True)
    kinds = r"(?:layers|memory): ([\d,]+) bytes, and ([\d,]+) of state"
    (layers, layers_state), (table, table_state) = numbers(kinds, text)

    figure = Figure(figsize=(WIDTH, 5.6), facecolor="white")
    figure.subplots_adjust(left=0.09, right=0.97, top=0.93, bottom=0.09, hspace=0.45, wspace=0.45)
    by_tokens, by_seconds, by_rows, memory = figure.subplots(2, 2).flat
    for axes, name, (x, other) in (
        (by_tokens, "loss, by tokens", (tokens, tokens)),
        (by_seconds, "loss, by seconds", (plain_seconds, seconds)),
    ):
        axes.set_title(name, loc="left", fontsize=TEXT, fontweight="bold", color=INK)
        axes.plot(x, plain, color=TORCH, linewidth=2.2, label="layers alone")
        axes.plot(other, ours, color=OURS, linewidth=2.2, label="with n-grams")
        axes.legend(frameon=False, fontsize=9.5, labelcolor="linecolor", loc="upper right")
    by_tokens.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value / 1e3:,.0f} k"))
    by_rows.set_title("ms a step, by rows", loc="left", fontsize=TEXT, fontweight="bold", color=INK)
    by_rows.plot(sizes[1:], milliseconds[1:], "o-", color=OURS, linewidth=2.2)
    by_rows.axhline(milliseconds[0], color=TORCH, linewidth=2.2)
    by_rows.annotate(
        "layers alone",
        (sizes[1], milliseconds[0]),
        xytext=(0, -13),
        textcoords="offset points",
        color=TORCH,
        fontsize=9.5,
    )
    by_rows.set_xscale("log")
    by_rows.set_ylim(0, 1.2 * max(milliseconds))
    memory.set_title("megabytes", loc="left", fontsize=TEXT, fontweight="bold", color=INK)
    bars(
        memory,
        ["layers", "their state", "table", "its state", "AdamW's"],
        [each / 1e6 for each in (layers, layers_state, table, table_state, 2 * table)],
        ".1f",
        faint=1,
    )
    for axes in (by_tokens, by_seconds, by_rows, memory):
        axes.set_facecolor("white")
        axes.tick_params(colors=INK if axes is memory else FAINT, length=0, labelsize=9.5)
        axes.minorticks_off()
        for spine in axes.spines.values():
            spine.set_visible(False)
        if axes is not memory:
            axes.grid(color=GRID, linewidth=0.8)
    save(figure, GALLERY / "ngram-memory.svg")


def main() -> None:
    """Draw all of them."""
    draw_accelerate()
    draw_averages()
    draw_knowledge_graph()
    draw_lightning()
    draw_new_tokens()
    draw_ngram_memory()
    draw_node2vec()
    draw_recommender()


if __name__ == "__main__":
    main()
