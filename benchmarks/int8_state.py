"""State in int8 against state in float32: memory, time of a step, and where training arrives.

A step of SparseAdam on 1,000,000 x 64 with 65,536 uniform lookups, taking turns; skip-gram word
vectors on the source of Python's standard library, as ``sparsestep demo`` trains them; and the
recommender of ``examples/recommender.py``.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

import sparsestep
from benchmarks.harness.race import Stepping, add_rounds, medians
from benchmarks.harness.workload import uniform_coo_grads
from sparsestep.cli import skipgram
from sparsestep.cli.options import int_in_range

sys.path.append(str(Path(__file__).parents[1] / "examples"))
example: Any = import_module("recommender")

ROWS, DIM, LOOKUPS = 1_000_000, 64, 65_536
DTYPES = {"float32": None, "int8": torch.int8}


def time_of_a_step(rounds: int) -> None:
    sets = [[grad] for grad in uniform_coo_grads(ROWS, DIM, LOOKUPS)]
    racers = []
    for dtype in DTYPES.values():
        param = torch.nn.Parameter(torch.randn(ROWS, DIM))
        optimizer = sparsestep.SparseAdam([param], state_dtype=dtype)
        racers.append(Stepping(optimizer, [param], sets))
    plain, coded = medians(racers, rounds)
    sizes = [
        sum(v.nbytes for v in racer.optimizer.state[racer.params[0]].values() if torch.is_tensor(v))
        for racer in racers
    ]
    print(f"step    float32 {plain:.2f} ms, int8 {coded:.2f} ms: {plain / coded:.2f} times as fast")
    print(f"memory  {sizes[0] / 2**20:.0f} and {sizes[1] / 2**20:.0f} MiB: ", end="")
    print(f"{sizes[1] / sizes[0]:.3f} of it")


def word_vectors(steps: int, seed: int) -> None:
    files = skipgram.read_corpus(skipgram.stdlib_path())
    known = skipgram.count_words(files, size=50_000)
    batches = skipgram.SkipgramDataset(
        skipgram.cooccurring_pairs(files, known), known.counts, steps, seed
    )
    weights = skipgram.initial_tables(len(known.words), 64, seed)
    runs = [
        skipgram.train(name, partial(sparsestep.SparseAdam, state_dtype=dtype), weights, batches)
        for name, dtype in DTYPES.items()
    ]
    plain, coded = (run.final_loss for run in runs)
    print(f"skip-gram    loss {plain:.5f} and {coded:.5f}: {coded / plain - 1:+.2%}")


def recommender(steps: int, seed: int) -> None:
    losses = []
    for name, dtype in DTYPES.items():
        torch.manual_seed(seed)
        log = example.Clicks([min(rows, 20_000) for rows in example.ROWS], example.LENGTHS, seed)
        shapes = [(rows, example.DIM) for rows in log.rows]
        model = example.Model(sparsestep.nn.EmbeddingBagCollection(shapes, mode="sum"), len(shapes))
        optimizer = sparsestep.AdamW(
            model.parameters(),
            lr=example.LEARNING_RATE,
            eps=example.EPS,
            weight_decay=0.0,
            state_dtype=dtype,
        )
        run = example.Run(name, model, [optimizer])
        found = []
        for step in range(steps):
            run.train(log.batch(1_024), example.LEARNING_RATE * (1 - step / steps))
            found.append(run.loss)
        losses.append(sum(found[-100:]) / len(found[-100:]))
    plain, coded = losses
    print(f"recommender  loss {plain:.5f} and {coded:.5f}: {coded / plain - 1:+.2%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 100)
    many = int_in_range(1, 1_000_000)
    parser.add_argument("--steps", type=many, default=2_000, help="of training (default: 2,000)")
    parser.add_argument(
        "--seeds", type=int_in_range(0, 2**31), nargs="+", default=[0], help="of training"
    )
    options = parser.parse_args()
    time_of_a_step(options.rounds)
    for seed in options.seeds:
        word_vectors(options.steps, seed)
        recommender(min(options.steps, 500), seed)


if __name__ == "__main__":
    main()
