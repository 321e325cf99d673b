"""Masks that cost what they keep: AdamW on a masked weight against torch's fused AdamW.

Torch's optimizer has no masks, so its contestants multiply the weight by the mask after every
step: by a bool mask, and by a float one, which takes four times its memory but is faster. Three
masks: random elements and blocks of 16 x 16, of which 10 % are kept, and two of every four.
Gradients are dense. Beside the times: that of ``set_mask`` with another such mask, the share of
dense state, the index of the mask, and the growth of the peak of resident memory in one step, in a
process of its own (Linux).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter

import torch
from torch import Tensor
from torch.nn import Parameter

import sparsestep
from benchmarks.harness.memory import peak_rss_growth
from benchmarks.harness.race import Racer, Stepping, add_rounds, medians
from sparsestep.cli.options import int_in_range

COLUMNS, BLOCK = 8_000, 16
ROWS = 6_256  # 50 million weights
KEPT = 0.1
LR = 1e-3


def random_elements(rows: int) -> Tensor:
    return torch.rand(rows, COLUMNS) < KEPT


def two_of_four(rows: int) -> Tensor:
    order = torch.rand(rows * COLUMNS // 4, 4).argsort(dim=1)
    return (order < 2).view(rows, COLUMNS)


def blocks(rows: int) -> Tensor:
    kept = torch.rand(rows // BLOCK, 1, COLUMNS // BLOCK, 1) < KEPT
    return kept.expand(-1, BLOCK, -1, BLOCK).reshape(rows, COLUMNS)


MASKS: dict[str, Callable[[int], Tensor]] = {
    "random 10 %": random_elements,
    "2:4": two_of_four,
    "blocks of 16 x 16, 10 %": blocks,
}


class Multiplied:
    """Torch's fused AdamW, then the weight times the mask."""

    def __init__(self, weight: Parameter, mask: Tensor, sets: Sequence[list[Tensor]]) -> None:
        optimizer = torch.optim.AdamW([weight], lr=LR, fused=True)
        self._weight, self._mask = weight, mask
        self._inner = Stepping(optimizer, [weight], sets)

    def before(self, number: int, /) -> None:
        """Hand out the gradients of a set."""
        self._inner.before(number)

    @torch.no_grad()
    def step(self) -> None:
        """The step, and the mask."""
        self._inner.step()
        self._weight.mul_(self._mask)


def compare(name: str, rows: int, rounds: int) -> None:
    torch.manual_seed(0)
    mask = MASKS[name](rows)
    start = torch.randn(rows, COLUMNS) * mask
    sets = [[torch.randn(rows, COLUMNS)]] * 8  # too large to be found in a cache
    theirs, ours = Parameter(start.clone()), Parameter(start.clone())
    optimizer = sparsestep.AdamW([ours], lr=LR, mask=mask)
    contestants: list[Racer] = [
        Multiplied(theirs, mask, sets),
        Multiplied(Parameter(start.clone()), mask.float(), sets),
        Stepping(optimizer, [ours], sets),
    ]
    torch_ms, float_ms, our_ms = medians(contestants, rounds)
    found = optimizer.metrics()["state_bytes"]
    packed = optimizer.store.layouts[ours]
    index = packed.words.nbytes + packed.ranks.nbytes
    print(
        f"{name}: {torch_ms / our_ms:.1f} x torch's fused AdamW and mul_ by the mask, "
        f"{float_ms / our_ms:.1f} x with a float mask: {our_ms:.1f} ms, torch {torch_ms:.1f} and "
        f"{float_ms:.1f} ms; state {found / (2 * start.nbytes):.1%} of dense, index "
        f"{index / (2 * start.nbytes):.1%}"
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
    assert not ours.detach()[~mask].any(), "elements outside the mask have moved"
    changes = []
    for other in (MASKS[name](rows), mask) * 3:
        began = perf_counter()
        optimizer.set_mask(ours, other)
        changes.append(1e3 * (perf_counter() - began))
    change = median(changes)
    print(f"    set_mask: {change:.0f} ms, the time of {change / our_ms:.1f} steps")


STEP = """
import torch, sparsestep
from benchmarks import masks
torch.manual_seed(0)
name, rows = sys.argv[1], int(sys.argv[2])
weight = torch.nn.Parameter(torch.ones(rows, masks.COLUMNS))
optimizer = sparsestep.AdamW([weight], mask=masks.MASKS[name](rows))
weight.grad = torch.ones_like(weight)
for _ in range(2):
    optimizer.step()
begin()
optimizer.step()
print(growth())
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 20)
    parser.add_argument(
        "--rows",
        type=int_in_range(BLOCK, 1 << 20),
        default=ROWS,
        metavar="N",
        help=f"rows of {COLUMNS:,} weights, a multiple of {BLOCK} (default: {ROWS:,})",
    )
    options = parser.parse_args(arguments)
    for name in MASKS:
        compare(name, options.rows, options.rounds)
    if sys.platform.startswith("linux"):
        for name in MASKS:
            extra = peak_rss_growth(STEP, name, options.rows, return_freed=True)
            share = extra / (4 * options.rows * COLUMNS)
            print(f"{name}: a step takes {share:.2%} of the weight's memory on top")


if __name__ == "__main__":
    main()
