"""Do updates from several Python threads run side by side? Against one thread, on the same work.

Eight tables, each updated a few times with `step_param`: by one thread, then by eight with a table
each. Torch is told to use one thread, so each update is serial and all that can overlap are the
calls. Beside them, what the machine has to give: two processes, which share no lock of Python's,
doing all of it each. The tables are small enough for the cache, for memory is not the question.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection

import torch
from torch import Tensor

import sparsestep
from benchmarks.harness.race import Racer, add_rounds, medians
from benchmarks.harness.workload import uniform_coo_grads
from sparsestep.cli.options import int_in_range

TABLES, ROWS, DIM, LOOKUPS, TIMES = 8, 5_000, 32, 16_384, 32


class Updating:
    """Updates all tables, several times each, on so many threads."""

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


class Besides:
    """Two processes that do everything, both at once."""

    def __init__(self, lookups: int, sets: Sequence[Sequence[Tensor]]) -> None:
        context = multiprocessing.get_context("spawn")
        self._own = Updating(1, sets)
        self._child, end = context.Pipe()
        # Ends with the parent: then there is nobody left to ask it.
        context.Process(target=serve, args=(end, lookups), daemon=True).start()
        self._child.recv()

    def before(self, number: int, /) -> None:
        """Both take the gradients of a set."""
        self._own.before(number)
        self._number = number

    def step(self) -> None:
        """All updates, twice."""
        self._child.send(self._number)
        self._own.step()
        self._child.recv()


def serve(parent: Connection, lookups: int) -> None:
    torch.set_num_threads(1)
    updating = Updating(1, gradients(lookups))
    parent.send(None)
    while True:
        try:
            number = parent.recv()
        except EOFError:  # the parent is done
            return
        updating.before(number)
        updating.step()
        parent.send(None)


def gradients(lookups: int) -> list[list[Tensor]]:
    """Sets of gradients, one for each table."""
    tables = [uniform_coo_grads(ROWS, DIM, lookups) for _ in range(TABLES)]
    return [list(one_set) for one_set in zip(*tables, strict=True)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 20)
    lookups = int_in_range(1, 1_000_000)
    parser.add_argument("--lookups", type=lookups, default=LOOKUPS, help=f"(default: {LOOKUPS:,})")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    sets = gradients(options.lookups)
    racers: list[Racer] = [
        Updating(1, sets),
        Updating(TABLES, sets),
        Besides(options.lookups, sets),
    ]
    alone, threads, processes = medians(racers, options.rounds)
    print(f"{TABLES} threads / 1 thread: {alone / threads:.2f} times the updates per second")
    print(f"2 processes / 1 process: {2 * alone / processes:.2f}")
    print(
        f"{TABLES} tables of {ROWS:,} x {DIM}, {options.lookups:,} lookups each; an update takes "
        f"{alone / (TABLES * TIMES):.2f} ms"
    )


if __name__ == "__main__":
    main()
