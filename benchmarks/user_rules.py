"""Five formulas of ``sparsestep.rule`` beside the rules of the library and the classes of torch.

A table of 1,000,000 x 64 with 65,536 lookups, uniform and Zipf, one thread. What is measured is CPU
time, so other work on the machine disturbs little; contestants take turns on the same gradients.
"of the native rule" is the formula's time divided by that of the rule in C++; "torch" is the time
of torch's own class for sparse gradients, or of a class as one writes it by hand (gather, compute,
scatter on the coalesced gradient), divided by the formula's.

``--picture`` draws what it found.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor
from turns import add_rounds

import sparsestep
from sparsestep.cli.options import output_path

ROWS, DIM, LOOKUPS, ROUNDS = 1_000_000, 64, 65_536, 21


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def adam(param, grad, exp_avg, exp_avg_sq, *, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
    """Adam."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    return param - lr / (1 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


@sparsestep.rule(state={"sum": 0.0})
def adagrad(param, grad, sum, *, lr=1e-2, eps=1e-10):
    """Adagrad."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


@sparsestep.rule(state={"exp_avg": 0.0})
def lion(param, grad, exp_avg, *, lr=1e-4, betas=(0.9, 0.99)):
    """Lion."""
    beta1, beta2 = betas
    direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
    return param - lr * direction, beta2 * exp_avg + (1 - beta2) * grad


@sparsestep.rule(state={"square_avg": 0.0})
def rmsprop(param, grad, square_avg, *, lr=1e-2, alpha=0.99, eps=1e-8):
    """RMSprop."""
    square_avg = alpha * square_avg + (1 - alpha) * grad * grad
    return param - lr * grad / (square_avg.sqrt() + eps), square_avg


@sparsestep.rule(row_state={"sum": 0.0})
def rowwise_adagrad(param, grad, sum, *, lr=1e-2, eps=1e-10):
    """Adagrad with one sum for each row."""
    sum = sum + grad.square().mean(1, keepdim=True)
    return param - lr * grad / (sum.sqrt() + eps), sum


class ByHand(torch.optim.Optimizer):
    """What one writes without a library: a formula on the rows of a coalesced gradient."""

    def __init__(
        self, params: Any, formula: Callable[..., Any], state: Sequence[str], width: int
    ) -> None:
        super().__init__(params, {})
        self._formula, self._names, self._width = formula, state, width

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gather, compute, scatter."""
        (param,) = self.param_groups[0]["params"]
        grad = param.grad.coalesce()
        rows, values = grad.indices()[0], grad.values()
        state = self.state[param]
        for name in self._names:
            if name not in state:
                state[name] = torch.zeros(len(param), self._width)
        old = [state[name][rows] for name in self._names]
        new, *kept = self._formula(param[rows], values, *old)
        param[rows] = new
        for name, value in zip(self._names, kept, strict=True):
            state[name][rows] = value


def _torch_lion(param: Tensor, grad: Tensor, exp_avg: Tensor) -> tuple[Tensor, ...]:
    direction = torch.lerp(exp_avg, grad, 0.1).sign_()
    return param.sub_(direction, alpha=1e-4), exp_avg.lerp_(grad, 0.01)


def _torch_rmsprop(param: Tensor, grad: Tensor, square_avg: Tensor) -> tuple[Tensor, ...]:
    square_avg.mul_(0.99).addcmul_(grad, grad, value=0.01)
    return param.addcdiv_(grad, square_avg.sqrt().add_(1e-8), value=-1e-2), square_avg


def _torch_rowwise(param: Tensor, grad: Tensor, sum: Tensor) -> tuple[Tensor, ...]:
    sum += grad.square().mean(1, keepdim=True)
    return param.addcdiv_(grad, sum.sqrt().add_(1e-10), value=-1e-2), sum


class Trio(NamedTuple):
    """A formula, the library's rule, and what torch has or one writes by hand."""

    ours: Callable[..., torch.optim.Optimizer]
    native: Callable[..., torch.optim.Optimizer]
    torch: Callable[..., torch.optim.Optimizer]
    torch_name: str


TRIOS = {
    "Adam": Trio(adam, sparsestep.Adam, torch.optim.SparseAdam, "torch.optim.SparseAdam"),
    "Adagrad": Trio(adagrad, sparsestep.Adagrad, torch.optim.Adagrad, "torch.optim.Adagrad"),
    "Lion": Trio(
        lion, sparsestep.Lion, lambda p: ByHand(p, _torch_lion, ["exp_avg"], DIM), "by hand"
    ),
    "RMSprop": Trio(
        rmsprop,
        sparsestep.RMSprop,
        lambda p: ByHand(p, _torch_rmsprop, ["square_avg"], DIM),
        "by hand",
    ),
    "RowwiseAdagrad": Trio(
        rowwise_adagrad,
        sparsestep.RowwiseAdagrad,
        lambda p: ByHand(p, _torch_rowwise, ["sum"], 1),
        "by hand",
    ),
}


def positions(kind: str, draw: torch.Generator) -> Tensor:
    """The rows that a step looks up."""
    if kind == "uniform":
        return torch.randint(0, ROWS, (LOOKUPS,), generator=draw)
    rank = ROWS ** torch.rand(LOOKUPS, generator=draw, dtype=torch.float64)
    return rank.long().clamp(1, ROWS) * 2_654_435_761 % ROWS


def measure(name: str, kind: str, rounds: int) -> dict[str, Any]:
    """The medians of CPU time of one formula and its two rivals."""
    trio, draw = TRIOS[name], torch.Generator().manual_seed(0)
    tables = [torch.nn.Parameter(torch.zeros(ROWS, DIM)) for _ in range(3)]
    racers = [
        make([table])
        for make, table in zip((trio.ours, trio.native, trio.torch), tables, strict=True)
    ]
    values = torch.randn(LOOKUPS, DIM, generator=draw)
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 2):
        rows = positions(kind, draw)
        for place in range(3):
            which = (place + number) % 3
            tables[which].grad = torch.sparse_coo_tensor(
                rows[None], values, (ROWS, DIM), check_invariants=False
            )
            begin = time.process_time()
            racers[which].step()
            spent = time.process_time() - begin
            if number >= 2:
                times[which].append(spent)
    ours, native, other = (statistics.median(each) for each in times)
    return {
        "rule": name,
        "lookups": kind,
        "ms": {"formula": ours * 1e3, "native": native * 1e3, trio.torch_name: other * 1e3},
        "of_native": ours / native,
        "ahead_of_torch": other / ours,
    }


def draw(path: Path, found: Sequence[dict[str, Any]]) -> None:
    """Bars for uniform lookups: torch or by hand, the formula, the rule in C++."""
    shown = [each for each in found if each["lookups"] == "uniform"]
    figure = Figure(figsize=(8.5, 4.2), facecolor="white")
    figure.subplots_adjust(left=0.16, right=0.97, top=0.86, bottom=0.12)
    axes = figure.add_subplot(facecolor="white")
    colours = ("#d1812f", "#1f6fb4", "#9dbfdc")
    words = ("torch.optim, or written by hand", "ten lines of sparsestep.rule", "the rule in C++")
    for row, each in enumerate(shown):
        formula, native, other = each["ms"].values()
        for place, milliseconds in enumerate((other, formula, native)):
            bar = axes.barh(row + 0.27 * (place - 1), milliseconds, 0.24, color=colours[place])
            if row == 0:
                bar.set_label(words[place])
            if place == 1:
                text = f" {other / formula:.1f} times faster"
                axes.text(milliseconds, row, text, va="center", color=colours[1], fontsize=9)
    axes.set_yticks(range(len(shown)), [each["rule"] for each in shown])
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("milliseconds of CPU for a step", color="#6b6b6b")
    axes.set_title(f"{ROWS:,} rows of {DIM}, {LOOKUPS:,} lookups", loc="left", color="#222222")
    axes.legend(frameon=False, loc="lower right")
    settings: Any = {"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}
    with matplotlib.rc_context(settings):
        figure.savefig(path, format="svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rounds(parser, ROUNDS)
    parser.add_argument("--rules", nargs="+", choices=TRIOS, default=list(TRIOS))
    parser.add_argument("--json", type=output_path(".json"), metavar="FILE")
    parser.add_argument("--picture", type=output_path(".svg"), metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    found = []
    for name in options.rules:
        for kind in ("uniform", "zipf"):
            each = measure(name, kind, options.rounds)
            found.append(each)
            times = ", ".join(f"{who} {ms:.1f} ms" for who, ms in each["ms"].items())
            print(
                f"{name:14}  {kind:7}  {each['of_native']:.2f} of the native rule's time, "
                f"{each['ahead_of_torch']:.1f} times ahead  ({times})",
                flush=True,
            )
            gc.collect()
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    if options.picture:
        draw(options.picture, found)


if __name__ == "__main__":
    main()
