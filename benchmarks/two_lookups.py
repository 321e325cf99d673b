"""A table that is looked up twice in a forward, as in skip-gram: fused, plain, and torch's own.

A table of 400,000 x 128 with centre words and context words, whole iteration and step alone.
``nn.fuse`` must not lose against the plain module: each lookup leaves a part of the gradient, and
the core reads the parts where they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

import sparsestep
from benchmarks.harness.gradients import SETS
from benchmarks.harness.turns import add_rounds, medians
from sparsestep.cli.options import int_in_range

ROWS, DIM, PAIRS = 400_000, 128, 65_536


class Training:
    """One contestant: a table, its optimizer, and the pairs of words of each set."""

    def __init__(self, table: torch.nn.Embedding, optimizer: type, sets: Sequence[Tensor]) -> None:
        self._table, self._sets = table, sets
        self._optimizer: Optimizer = optimizer(table.parameters(), lr=1e-3)

    def before(self, set_index: int, /) -> None:
        """Take the pairs of a set."""
        self._pairs = self._sets[set_index]

    def step(self) -> None:
        """Look up, differentiate, update."""
        self._optimizer.zero_grad()
        self._loss().backward()
        self._optimizer.step()

    def _loss(self) -> Tensor:
        centre, context = self._table(self._pairs[0]), self._table(self._pairs[1])
        return torch.nn.functional.softplus(-(centre * context).sum(1)).sum()


class StepAlone(Training):
    """The same with everything but the step off the clock."""

    def before(self, set_index: int, /) -> None:
        """Take the pairs of a set, up to the gradient."""
        super().before(set_index)
        self._optimizer.zero_grad()
        self._loss().backward()

    def step(self) -> None:
        """Update."""
        self._optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 30)
    kind = int_in_range(1, 100_000_000)
    parser.add_argument("--rows", type=kind, default=ROWS, help=f"(default: {ROWS:,})")
    parser.add_argument("--pairs", type=kind, default=PAIRS, help=f"(default: {PAIRS:,})")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    sets = [torch.randint(options.rows, (2, options.pairs)) for _ in range(SETS)]
    for what, kind_of_training in (("iteration", Training), ("step alone", StepAlone)):
        racers = [
            kind_of_training(table, optimizer, sets)
            for table, optimizer in (
                (sparsestep.nn.Embedding(options.rows, DIM), sparsestep.SparseAdam),
                (torch.nn.Embedding(options.rows, DIM, sparse=True), sparsestep.SparseAdam),
                (torch.nn.Embedding(options.rows, DIM, sparse=True), torch.optim.SparseAdam),
            )
        ]
        fused, plain, torchs = medians(racers, options.rounds)
        print(
            f"{what:10}  fused {fused:7.1f} ms   plain / fused {plain / fused:5.2f}   "
            f"torch / fused {torchs / fused:5.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
