"""Word vectors trained twice: torch's AdamW on dense gradients, ours on sparse ones, tracked.

The model is the demo's, skip-gram with negative sampling, with 4,096 lookups per step. Ours has
``semantics="dense"``, so both compute the same thing. They start from the same weights, see the
same batches and take turns. Printed are the losses of both at every hundredth step, and what a step
costs each: the whole training step, and the optimizer's part of it, which for ours includes what is
done before the lookups.

The standard library has some 25,000 identifiers. For a larger vocabulary they are repeated, each
time as other words.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import torch
from torch.nn import Embedding, ModuleList
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsestep
from sparsestep.cli import skipgram
from sparsestep.cli.options import int_in_range
from sparsestep.cli.skipgram import SkipgramBatch, SkipgramDataset, SkipgramTables

VOCABULARY, DIM, STEPS, EVERY = 200_000, 64, 2_000, 100
CANDIDATES = 3  # one near word, two random ones: with the word itself, 4 x 1,024 lookups
WARM_UP = 10  # steps that are not counted, if there are more
LR = skipgram.LEARNING_RATE


class Side:
    """One of the two: a model, its optimizer, and what was measured of each step."""

    def __init__(self, weights: SkipgramTables, sparse: bool, make: Callable[..., Any]) -> None:
        tables = [
            Embedding.from_pretrained(table.clone(), freeze=False, sparse=sparse)
            for table in weights
        ]
        self.words, self.candidates = tables
        self.model = ModuleList(tables)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.optimizer_seconds: list[float] = []
        # Hooks run in the order in which they came: what tracking does lies between these two.
        for table in tables:
            table.register_forward_pre_hook(lambda *_: self._begin())
        self.optimizer = make(self.model)
        for table in tables:
            table.register_forward_pre_hook(lambda *_: self._end())

    def _begin(self) -> None:
        self._began = perf_counter()

    def _end(self) -> None:
        self.optimizer_seconds[-1] += perf_counter() - self._began

    def train(self, batch: SkipgramBatch) -> None:
        """Take a training step."""
        self.optimizer_seconds.append(0.0)
        began = perf_counter()
        scores = (self.candidates(batch.candidates) @ self.words(batch.words).unsqueeze(2)).squeeze(
            2
        )
        truth = torch.zeros_like(scores)
        truth[:, 0] = 1
        loss = binary_cross_entropy_with_logits(scores, truth, reduction="sum") / len(scores)
        self.optimizer.zero_grad()
        loss.backward()
        self._begin()
        self.optimizer.step()
        self._end()
        self.seconds.append(perf_counter() - began)
        self.losses.append(loss.item())

    @property
    def tables(self) -> SkipgramTables:
        """The trained weights; all rows are current."""
        if isinstance(self.optimizer, sparsestep.AdamW):
            self.optimizer.catch_up()
        return SkipgramTables(self.words.weight.detach(), self.candidates.weight.detach())


def tracked(model: ModuleList) -> sparsestep.AdamW:
    optimizer = sparsestep.AdamW(model.parameters(), lr=LR, semantics="dense")
    optimizer.track(model)
    return optimizer


def corpus(vocabulary: int, steps: int) -> SkipgramDataset:
    """The demo's batches, over as many words as asked for."""
    files = skipgram.read_corpus(skipgram.stdlib_path())
    known = skipgram.count_words(files, vocabulary)
    near, size = skipgram.cooccurring_pairs(files, known), len(known.words)
    copies = -(-vocabulary // size)
    repeated = torch.cat([near + copy * size for copy in range(copies)], dim=1)
    repeated = repeated[:, (repeated < vocabulary).all(dim=0)]
    counts = [*known.counts] * copies
    return SkipgramDataset(repeated, counts[:vocabulary], steps, seed=0)


def relative(one: float, other: float) -> float:
    return abs(one - other) / abs(one)


def distances(one: SkipgramTables, other: SkipgramTables) -> tuple[float, float]:
    """The largest and the mean distance between two weights of the same place.

    The largest is that of a weight whose gradients cancel almost: what is left of them is rounding,
    which Adam makes as large as any other gradient. The mean says how close the two runs are.
    """
    mean = sum(float((a - b).abs().mean()) for a, b in zip(one, other, strict=True)) / len(one)
    return skipgram.max_difference(one, other), mean


def show_speed(name: str, theirs: Sequence[float], ours: Sequence[float]) -> None:
    counted = WARM_UP if len(ours) > WARM_UP else 0
    torchs, own = (1e3 * median(times[counted:]) for times in (theirs, ours))
    print(f"{name:22} {torchs / own:6.1f} x as fast: {own:.2f} ms, torch {torchs:.2f} ms")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps",
        type=int_in_range(1, 1_000_000),
        default=STEPS,
        metavar="N",
        help=f"how many batches both see (default: {STEPS:,})",
    )
    parser.add_argument(
        "--vocabulary",
        type=int_in_range(10, 10_000_000),
        default=VOCABULARY,
        metavar="N",
        help=f"how many words have a vector (default: {VOCABULARY:,})",
    )
    parser.add_argument(
        "--plain", action="store_true", help="torch's AdamW as it comes, instead of with fused=True"
    )
    options = parser.parse_args(arguments)
    warnings.simplefilter("error", sparsestep.StaleWarning)
    batches = corpus(options.vocabulary, options.steps)
    weights = skipgram.initial_tables(options.vocabulary, DIM, seed=0)
    fused = None if options.plain else True
    theirs = Side(
        weights,
        sparse=False,
        make=lambda model: torch.optim.AdamW(model.parameters(), lr=LR, fused=fused),
    )
    ours = Side(weights, sparse=True, make=tracked)
    lookups = skipgram.BATCH * (1 + CANDIDATES)
    print(
        f"two tables of {options.vocabulary:,} x {DIM}, {lookups:,} lookups, "
        f"{options.steps:,} steps; torch's AdamW {'as it comes' if options.plain else 'fused'}"
    )
    for number, batch in enumerate(batches, start=1):
        batch = SkipgramBatch(batch.words, batch.candidates[:, :CANDIDATES])
        for side in (theirs, ours):
            side.train(batch)
        if number % EVERY == 0 or number == options.steps:
            loss, own = theirs.losses[-1], ours.losses[-1]
            away = relative(loss, own)
            print(f"step {number:7,}: torch {loss:.6f}, ours {own:.6f}, {away:.1e} apart")
    worst = max(map(relative, theirs.losses, ours.losses))
    print(f"the losses are at most {worst:.1e} apart, relatively, in any step (goal: 1e-4)")
    largest, mean = distances(theirs.tables, ours.tables)
    print(f"the tables are {mean:.1e} apart on average, {largest:.1e} at most")
    show_speed("training step (goal 8)", theirs.seconds, ours.seconds)
    show_speed("optimizer alone", theirs.optimizer_seconds, ours.optimizer_seconds)


if __name__ == "__main__":
    main()
