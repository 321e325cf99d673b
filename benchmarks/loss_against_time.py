"""The demo's training under torch's SparseAdam and under ours: loss against time.

The runs of ``sparsestep demo`` with its defaults, one thread. What is measured is CPU time, so
other work on the machine disturbs little; the runs take turns, on the same batches.
``docs/pictures.py`` draws what ``--json`` has kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import accumulate, islice

import torch

from benchmarks.harness import results
from sparsestep.cli import demo, skipgram
from sparsestep.cli.options import int_in_range, output_path

WORDS, DIM, SEED, EVERY = 20_000, 64, 0, 20


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int_in_range(EVERY, 1_000_000), default=2000)
    parser.add_argument("--json", type=output_path(".json"))
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    files = skipgram.read_corpus(skipgram.stdlib_path())
    words = skipgram.count_words(files, WORDS)
    pairs = skipgram.cooccurring_pairs(files, words)
    batches = skipgram.SkipgramDataset(pairs, words.counts, options.steps, SEED)
    tables = skipgram.initial_tables(len(words.words), DIM, SEED)
    for each in demo.OPTIMIZERS.items():  # warm up
        skipgram.train(*each, tables, islice(batches, EVERY))
    turns = [
        skipgram.train_steps(*each, tables, batches, time.process_time)
        for each in demo.OPTIMIZERS.items()
    ]
    for runs in zip(*turns, strict=True):
        latest = runs
    theirs, ours = (sum(run.seconds) for run in latest)
    print(f"{options.steps:,} steps: {theirs:.1f} s, ours {ours:.1f} s, {theirs / ours:.1f} times")
    for run in latest:
        print(f"{run.name}: loss {run.final_loss:.4f}, step() {run.optimizer_seconds:.1f} s")
    if options.json:
        kept = {
            **asdict(results.header()),
            "words": len(words.words),
            "dim": DIM,
            "steps": options.steps,
            "every": EVERY,
            "runs": [
                {
                    "name": run.name,
                    "optimizer_seconds": round(run.optimizer_seconds, 3),
                    "seconds": [round(each, 3) for each in accumulate(run.seconds)][
                        EVERY - 1 :: EVERY
                    ],
                    "losses": [
                        round(sum(run.losses[i : i + EVERY]) / EVERY, 4)
                        for i in range(0, options.steps, EVERY)
                    ],
                }
                for run in latest
            ],
        }
        options.json.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
