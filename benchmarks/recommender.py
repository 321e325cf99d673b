"""Training a recommender with 26 tables: samples per second and AUC, against plain torch.

The model and the clicks are those of examples/recommender.py. Ours has one AdamW for everything;
plain torch has SparseAdam for the tables and Adam for the layers. Both start from the same weights
and are trained on the same batches, for the AUC on a held-out part. Then whole training steps
(forward, backward, update) are raced in turns. Each example has lists of ids, of the lengths in
MLPerf's benchmark, 214 ids in all; then once more with a single id for each feature, where the
layers, which are the same for both, take most of the time.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.race import add_rounds, medians
from benchmarks.harness.workload import SETS
from sparsestep.cli.options import int_in_range

sys.path.append(str(Path(__file__).parents[1] / "examples"))
example: Any = import_module("recommender")

BATCH, ROWS, HELD_OUT = 2_048, 400_000, 32_768
SPEED_GOAL, AUC_GOAL = 3.0, 0.002
KINDS = {
    "lists": ("lists of ids", example.LENGTHS, True),
    "single": ("one id each", [1] * len(example.LENGTHS), False),
}


class Training:
    """One contestant: whole training steps."""

    def __init__(self, run: Any, sets: Sequence[Any]) -> None:
        self._run, self._sets = run, sets

    def before(self, number: int, /) -> None:
        """Take the batch of a set."""
        self._batch = self._sets[number]

    def step(self) -> None:
        """Forward, backward, update."""
        self._run.train(self._batch)


def learn(runs: Sequence[Any], log: Any, steps: int) -> None:
    for step in range(steps):
        batch = log.batch(BATCH)
        for run in runs:
            run.train(batch, example.LEARNING_RATE * (1 - step / steps))
        if sys.stderr.isatty():
            print(f"\rtraining: {step + 1:,} of {steps:,} steps", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)


def compare(kind: str, rows: int, rounds: int, steps: int) -> None:
    name, lengths, has_goals = KINDS[kind]
    torch.manual_seed(0)
    log = example.Clicks([min(each, rows) for each in example.ROWS], lengths, seed=0)
    held_out = log.batch(HELD_OUT)
    runs = example.contestants(log.rows)
    learn(runs, log, steps)
    ours, theirs = (run.auc(held_out) for run in runs)
    goal = f" (goal {AUC_GOAL})" if has_goals else ""
    print(f"{name:14} {'AUC':20} {ours:9.4f}  torch {theirs:9.4f}  {abs(ours - theirs):.4f}{goal}")
    sets = [log.batch(BATCH) for _ in range(SETS)]
    times = medians([Training(run, sets) for run in runs], rounds)
    ours, theirs = (1e3 * BATCH / each for each in times)
    goal = f" (goal {SPEED_GOAL:g})" if has_goals else ""
    print(
        f"{name:14} {'samples per second':20} {ours:9,.0f}  torch {theirs:9,.0f}  "
        f"{ours / theirs:.2f}x{goal}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 60)
    many = int_in_range(1, 100_000_000)
    parser.add_argument(
        "--steps", type=many, default=240, help="to train for, for the AUC (default: 240)"
    )
    parser.add_argument(
        "--rows", type=many, default=ROWS, help=f"of the largest tables (default: {ROWS:,})"
    )
    parser.add_argument("--only", choices=KINDS, help="one kind of examples instead of both")
    options = parser.parse_args(arguments)
    tables = [min(rows, options.rows) for rows in example.ROWS]
    print(
        f"{len(tables)} tables with {sum(tables):,} rows x {example.DIM}, "
        f"{BATCH:,} examples per step, {torch.get_num_threads()} threads"
    )
    for kind in KINDS if options.only is None else [options.only]:
        compare(kind, options.rows, options.rounds, options.steps)


if __name__ == "__main__":
    main()
