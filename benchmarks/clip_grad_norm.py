"""What does clipping by norm cost beside a step? For sparse gradients torch has nothing like it.

A table of 1,000,000 x 64 with 4,096 bags of 16 ids, uniform and Zipf: `sparsestep.clip_grad_norm_`
on the COO gradient of torch's module and on the compact one of ours, and the step of SparseAdam on
the latter. Rows must be summed before their norm is taken.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import sparsestep
from benchmarks.harness.cases import case
from benchmarks.harness.race import add_rounds, medians
from benchmarks.harness.workload import SETS

ROWS, DIM, BAGS, IDS = 1_000_000, 64, 4_096, 16


class Timed:
    """Something that is done to a module's gradient, of fresh ids each time."""

    def __init__(
        self, module: torch.nn.Module, do: Callable[[], object], sets: Sequence[Tensor]
    ) -> None:
        self._module, self._do, self._sets = module, do, sets
        self._grad = torch.randn(BAGS, DIM)

    def before(self, number: int, /) -> None:
        """Make the gradient of a set."""
        self._module.zero_grad()
        self._module(self._sets[number].view(BAGS, IDS)).backward(self._grad)

    def step(self) -> None:
        """Do it."""
        self._do()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 40)
    options = parser.parse_args(arguments)
    ours = sparsestep.nn.EmbeddingBag(ROWS, DIM, mode="sum")
    torchs = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    optimizer = sparsestep.SparseAdam(ours.parameters())
    print(f"{ROWS:,} x {DIM}, {BAGS:,} bags of {IDS} ids, {torch.get_num_threads()} threads")
    for distribution in ("uniform", "zipf"):
        drawn = case(ROWS, DIM, BAGS * IDS, distribution)
        sets = [drawn.positions(number) for number in range(SETS)]
        compact, coo, step = medians(
            [
                Timed(ours, lambda: sparsestep.clip_grad_norm_(ours.parameters(), 1.0), sets),
                Timed(torchs, lambda: sparsestep.clip_grad_norm_(torchs.parameters(), 1.0), sets),
                Timed(ours, optimizer.step, sets),
            ],
            options.rounds,
        )
        print(f"{distribution:8} compact {compact:.2f} ms, COO {coo:.2f} ms; a step {step:.2f} ms")


if __name__ == "__main__":
    main()
