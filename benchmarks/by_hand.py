"""Does `step_param` from eight Python threads use both cores? Against one thread, on the same work.

Eight tables with a gradient each, updated a few times over: by one thread one after the other, then
by eight threads with a table each. Torch is told to use one thread, so each update is serial and
all that runs side by side are the calls.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from gradients import SETS, uniform
from torch import Tensor
from turns import add_rounds, medians

import sparsestep
from sparsestep.cli.options import whole_number

TABLES, ROWS, DIM, LOOKUPS, TIMES = 8, 5_000, 32, 32_768, 8


class Updating:
    """Updates all tables, ``TIMES`` times each, on so many threads."""

    def __init__(self, threads: int, sets: Sequence[Sequence[Tensor]]) -> None:
        self._sets = sets
        self._grads = sets[0]
        self._params = [torch.zeros(ROWS, DIM) for _ in range(TABLES)]
        self._optimizer = sparsestep.FunctionalAdam(self._params)
        self._team = ThreadPoolExecutor(threads) if threads > 1 else None

    def before(self, number: int, /) -> None:
        """Take the gradients of a set."""
        self._grads = self._sets[number]

    def step(self) -> None:
        """All updates."""
        if self._team is None:
            for table in range(TABLES):
                self._update(table)
        else:
            list(self._team.map(self._update, range(TABLES)))

    def _update(self, table: int) -> None:
        for _ in range(TIMES):
            self._optimizer.step_param(self._params[table], self._grads[table])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 60)
    lookups = whole_number(1, 1_000_000)
    parser.add_argument("--lookups", type=lookups, default=LOOKUPS, help=f"(default: {LOOKUPS:,})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    grads = uniform(ROWS, DIM, options.lookups * TABLES)
    sets = [[part.clone() for part in _parts(grad, options.lookups)] for grad in grads]
    assert len(sets) == SETS
    alone, together = medians([Updating(1, sets), Updating(TABLES, sets)], options.rounds)
    updates = TABLES * TIMES
    print(
        f"{TABLES} threads / 1 thread: {alone / together:.2f} times the updates per second "
        f"({os.cpu_count()} cores)"
    )
    print(
        f"{TABLES} tables of {ROWS:,} x {DIM}, {options.lookups:,} lookups each: an update takes "
        f"{alone / updates:.2f} ms; {1000 * updates / alone:,.0f} and "
        f"{1000 * updates / together:,.0f} updates per second"
    )


def _parts(grad: Tensor, lookups: int) -> list[Tensor]:
    """A gradient for each table."""
    indices, values = grad._indices().split(lookups, dim=1), grad._values().split(lookups)
    return [
        torch.sparse_coo_tensor(i, v, grad.shape, check_invariants=False)
        for i, v in zip(indices, values, strict=True)
    ]


if __name__ == "__main__":
    main()
