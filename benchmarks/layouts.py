"""Cost follows storage: Adam on a sparse weight of 4,096 x 4,096 against torch's dense Adam.

Two layouts of its gradient: CSR with 1 % of the elements, scattered, and BSR with 5 % of the blocks
of 16 x 16. Ours takes them as they are; torch's fused Adam takes the same gradients made dense, for
it has no other way. Beside them, what memory has to give: the cache lines that hold an element,
each updated as a whole, in order and known in advance. Afterwards nothing may have moved that was
never held, and the growth of the peak of resident memory in one step is read, in a process of its
own (Linux).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

import sparsestep
from benchmarks.harness.memory import peak_rss_growth
from benchmarks.harness.race import Stepping, add_rounds, medians
from benchmarks.harness.workload import SETS
from sparsestep import IndexedGrad
from sparsestep.cli.options import int_in_range
from sparsestep.grads.layouts import Gradient

SIZE, BLOCK = 4_096, 16
LINE = 16  # numbers in a cache line
SHARES = {"CSR": 0.01, "BSR": 0.05}
LR = 1e-3


def gradient(layout: str, size: int) -> Tensor:
    """Random places, random values."""
    if layout == "CSR":
        held = torch.rand(size, size) < SHARES[layout]
        return torch.randn(size, size).mul_(held).to_sparse_csr()
    blocks = size // BLOCK
    held = torch.rand(blocks, 1, blocks, 1) < SHARES[layout]
    values = torch.randn(blocks, BLOCK, blocks, BLOCK).mul_(held)
    return values.view(size, size).to_sparse_bsr((BLOCK, BLOCK))


@dataclass
class ByHand:
    """Our Adam with gradients passed by hand.

    Attributes:
        weight: what is trained.
        sets: its gradients.
    """

    weight: Tensor
    sets: Sequence[Gradient]

    def __post_init__(self) -> None:
        self._optimizer = sparsestep.FunctionalAdam([self.weight], LR)
        self._grad = self.sets[0]
        self._steps = 0

    def before(self, number: int, /) -> None:
        """Take the gradient of a set; soon, the huge pages that a long training gets in time."""
        self._grad = self.sets[number]
        self._steps += 1
        if self._steps == 3:
            self._optimizer.optimizer.store.huge_pages.move_all()

    def step(self) -> None:
        """The step."""
        self._optimizer.step([self._grad])


def cache_lines(grad: Tensor) -> IndexedGrad:
    """The lines of the weight that hold an element of the gradient, with one gradient for all."""
    lines = (grad != 0).view(-1, LINE).any(dim=1).nonzero().squeeze(1)
    return IndexedGrad(lines, torch.ones(1, LINE), value_index=torch.zeros_like(lines))


def compare(layout: str, size: int, rounds: int) -> None:
    torch.manual_seed(0)
    start = torch.randn(size, size)
    sets = [gradient(layout, size) for _ in range(SETS)]
    whole = [[grad.to_dense()] for grad in sets]
    dense = Parameter(start.clone())
    theirs = Stepping(torch.optim.Adam([dense], lr=LR, fused=True), [dense], whole)
    ours = ByHand(start.clone(), sets)
    lines = ByHand(start.clone().view(-1, LINE), [cache_lines(grad) for [grad] in whole])
    torch_ms, our_ms, line_ms = medians([theirs, ours, lines], rounds)
    print(
        f"{layout}, {SHARES[layout]:.0%} of {size:,} x {size:,}: {torch_ms / our_ms:.1f} x torch's "
        f"dense fused Adam: {our_ms:.2f} ms, torch {torch_ms:.2f} ms; "
        f"its cache lines {line_ms:.2f} ms"
    )
    never = torch.stack([grad == 0 for [grad] in whole]).all(dim=0)
    # As integers: equal bits, not equal numbers.
    moved = ours.weight.view(torch.int32) != start.view(torch.int32)
    assert moved.any(), "nothing has moved"
    assert not (moved & never).any(), "elements have moved that no gradient held"


STEP = """
import torch
from benchmarks import layouts
from sparsestep import functional
torch.manual_seed(0)
layout, size = sys.argv[1], int(sys.argv[2])

def case(size):
    mean, square = (torch.ones(size, size) for _ in range(2))
    return torch.ones(size, size), layouts.gradient(layout, size), mean, square

functional.adam_(*case(16 * layouts.BLOCK), step=1)  # loads code, starts threads
given = case(size)
begin()
functional.adam_(*given, step=1)
print(growth())
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 100)
    parser.add_argument(
        "--size",
        type=int_in_range(BLOCK, 1 << 15),
        default=SIZE,
        metavar="N",
        help=f"rows and columns of the weight, a multiple of {BLOCK} (default: {SIZE:,})",
    )
    options = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", "Sparse ... tensor support is in beta")
    for layout in SHARES:
        compare(layout, options.size, options.rounds)
    if sys.platform.startswith("linux"):
        for layout in SHARES:
            extra = peak_rss_growth(STEP, layout, options.size, return_freed=True)
            share = extra / (4 * options.size**2)
            print(f"{layout}: a step takes {share:.2f} of the weight's memory on top")


if __name__ == "__main__":
    main()
