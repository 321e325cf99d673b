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

from docs.pictures import FAINT, INK, LIGHT, OURS, TORCH, beside, framed, save

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
    axes.set_xlabel(label, color=FAINT)
    axes.set_xticks(list(steps))
    axes.spines["bottom"].set_visible(True)


def bars(axes: Axes, names: list[str], values: list[float], shown: str, *, faint: int = 0) -> None:
    """Bars from top to bottom with their numbers, the last ones in a lighter colour."""
    colours = [OURS] * (len(names) - faint) + [LIGHT] * faint
    axes.barh(names, values, color=colours, height=0.62)
    for place, value in enumerate(values):
        beside(axes, value, place, f"{value:{shown}}")
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) * 1.12)
    axes.set_xticks([])
    axes.tick_params(colors=INK)


def draw_lightning() -> None:
    """The loss that each run ends with."""
    losses = [each for (each,) in numbers(r"loss (\d\.\d+)", recorded("with_lightning"))]
    names = ["clipped by norm", "clipped by value", "bf16-mixed", "four epochs", "two epochs"]
    axes = framed(
        "Resumed from a checkpoint, the weights are the same",
        "loss of the last batch; Lightning's Trainer, one optimizer for tables and layers",
        left=0.24,
    )
    bars(axes, [*names, "resumed after two"], losses, ".3f")
    save(axes, GALLERY / "lightning.svg")


def draw_accelerate() -> None:
    """The loss, beside that of tossing a coin."""
    ((loss,),) = numbers(r"loss (\d\.\d+)", recorded("with_accelerate"))
    axes = framed(
        "Accumulated, clipped, saved and loaded, it has learned",
        "loss on all data with Accelerate, in bf16; tossing a coin has 0.693",
        left=0.16,
    )
    bars(axes, ["trained", "a coin"], [loss, 0.693], ".3f", faint=1)
    save(axes, GALLERY / "accelerate.svg")


def draw_new_tokens() -> None:
    """All rows of the embedding, and those that changed."""
    rows = recorded("new_tokens").partition("rows that changed: [")[2].partition("]")[0]
    changed = [int(each) for each in rows.split(", ")]
    total = changed[-1] + 1
    axes = framed(
        f"{len(changed)} of {total:,} rows changed: the new ones",
        "the embedding of a small GPT-2, trained by the Transformers Trainer with weight decay",
    )
    axes.barh([0], [total], color=LIGHT, height=0.5)
    axes.barh([0], [len(changed)], left=[changed[0]], color=TORCH, height=0.5)
    words = f"bit-for-bit unchanged: rows 0 to {changed[0] - 1}"
    axes.text(total / 2, 0, words, ha="center", va="center", color=INK, fontsize=10)
    words = f"trained: rows {changed[0]:,} to {changed[-1]:,}"
    axes.text(total, 0.32, words, ha="right", va="bottom", color=TORCH, fontsize=10)
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
    )
    curves(axes, "epoch", losses)
    save(axes, GALLERY / "node2vec.svg")


def draw_knowledge_graph() -> None:
    """Two curves, on top of each other."""
    pattern = r"loss (\S+) with dense gradients, (\S+) fused"
    dense, fused = zip(*numbers(pattern, recorded("knowledge_graph")), strict=True)
    axes = framed("Compact gradients, the same losses", "ComplEx of PyKEEN, loss of each epoch")
    curves(axes, "epoch", list(dense), list(fused))
    gap = 0.09 * (dense[0] - dense[-1])
    axes.text(2.5, dense[0], "dense gradients", color=TORCH, fontsize=9.5, va="center")
    words = "compact gradients, with sparsestep.nn.optimizer_for"
    axes.text(2.5, dense[0] - gap, words, color=OURS, fontsize=9.5, va="center")
    save(axes, GALLERY / "knowledge-graph.svg")


def draw_averages() -> None:
    """How far the averages are from those of dense training, beside a step of the optimizer."""
    ((ema, swa),) = numbers(r"EMA (\S+), SWA (\S+)", printed("averages.py"))
    axes = framed(
        "Averages of sparse training are those of dense training",
        "largest distance of a weight, after 200 steps; a step moves a weight by up to 1e-2",
        left=0.1,
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


def main() -> None:
    """Draw all of them."""
    draw_accelerate()
    draw_averages()
    draw_knowledge_graph()
    draw_lightning()
    draw_new_tokens()
    draw_node2vec()


if __name__ == "__main__":
    main()
