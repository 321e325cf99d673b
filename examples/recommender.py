"""A recommender with 26 tables: one optimizer for tables and layers, against plain torch.

The model is that of DLRM (Naumov et al., 2019): a table for each list of ids, a perceptron for the
numbers, the dot products of all pairs, and a perceptron on top. Plain torch needs two optimizers,
SparseAdam for the tables and Adam for the layers. Both models start from the same weights and train
on the same batches in turns. Shown are the loss, the AUC on held-out examples (0.5 is guessing, 1
is perfect), and the examples per second.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsestep

# MLPerf's click log: different ids of each feature, and how many of them an example has.
ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
NUMBERS, DIM, LEARNING_RATE = 13, 16, 5e-3
# SparseAdam adds eps before bias correction, Adam after it. The gradients of a mean loss are tiny,
# so a smaller eps than the default keeps the two comparable.
EPS = 1e-16
ZIPF, SCATTER = 1.05, 2_654_435_761  # the exponent; a prime, so that popular ids are far apart


class Batch(NamedTuple):
    """Examples, and the logits that their clicks were drawn with, which models may not read."""

    numbers: Tensor  # [examples, 13]
    ids: list[Tensor]  # for each feature, [examples, length of its lists]
    clicks: Tensor
    logits: Tensor


class Clicks:
    """An endless, made-up click log: ids follow Zipf's law, and each has a hidden weight."""

    def __init__(self, rows: Sequence[int], lengths: Sequence[int], seed: int) -> None:
        self.rows, self.lengths = rows, lengths
        self.generator = torch.Generator().manual_seed(seed)
        self.weights = [torch.randn(each, generator=self.generator) for each in rows]

    def batch(self, size: int) -> Batch:
        """The next examples."""
        numbers = torch.randn(size, NUMBERS, generator=self.generator)
        logits = 0.4 * (numbers[:, 0] - numbers[:, 1] + numbers[:, 2] * numbers[:, 3])
        ids: list[Tensor] = []
        for rows, length, weights in zip(self.rows, self.lengths, self.weights, strict=True):
            uniform = torch.rand(size, length, generator=self.generator)
            rank = (1 + uniform * ((rows + 1.0) ** (1 - ZIPF) - 1)) ** (1 / (1 - ZIPF)) - 1
            ids.append(rank.long().clamp_(0, rows - 1) * SCATTER % rows)
            logits += 0.4 * weights[ids[-1]].sum(dim=1) / length**0.5
        clicks = torch.bernoulli(logits.sigmoid(), generator=self.generator)
        return Batch(numbers, ids, clicks, logits)


def auc(scores: Tensor, clicks: Tensor) -> float:
    """The probability that a click has a higher score than a non-click; ties count half.

    Example:
        >>> auc(torch.tensor([0.1, 0.7, 0.7, 0.9]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
        0.875
    """
    ordered, clicked = scores.sort().values, clicks > 0.5
    below, up_to = (torch.searchsorted(ordered, scores, right=right) for right in (False, True))
    ranks = (below + up_to + 1).double() / 2  # equal scores share the mean of their ranks
    positive = int(clicked.sum())
    above = ranks[clicked].sum() - positive * (positive + 1) / 2
    return float(above / (positive * (len(clicks) - positive)))


class TorchTables(nn.Module):
    """What ``sparsestep.nn.EmbeddingBagCollection`` does, with torch's modules."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(each, DIM, mode="sum", sparse=True) for each in rows)
        self.tables = nn.ModuleList(bags)

    def forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Look up all features: a row for each list of ids."""
        return [table(each) for table, each in zip(self.tables, ids, strict=True)]


class Model(nn.Module):
    """Tables, two perceptrons, and products between them."""

    def __init__(self, tables: nn.Module, features: int) -> None:
        super().__init__()
        self.tables = tables
        for table in tables.parameters():
            nn.init.normal_(table, std=0.02)
        self.bottom = perceptron(NUMBERS, 128, 64, DIM)
        self.top = perceptron(DIM + (features + 1) ** 2, 128, 64, 1)

    def forward(self, numbers: Tensor, ids: Sequence[Tensor]) -> Tensor:
        """Logits of the probability of a click."""
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *self.tables(ids)], dim=1)
        products = torch.bmm(vectors, vectors.mT).flatten(1)
        logits: Tensor = self.top(torch.cat([dense, products], dim=1))
        return logits.squeeze(1)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, with a ReLU after each but the last."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Run:
    """A model, its optimizers, and what has been measured."""

    def __init__(self, name: str, model: Model, optimizers: list[torch.optim.Optimizer]) -> None:
        self.name, self.model, self.optimizers = name, model, optimizers
        self.seconds: list[float] = []  # of each step
        self.loss = 0.0

    def train(self, batch: Batch, lr: float = LEARNING_RATE) -> None:
        """Take one step, on the clock."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr
        began = perf_counter()
        loss = binary_cross_entropy_with_logits(self.model(batch.numbers, batch.ids), batch.clicks)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.seconds.append(perf_counter() - began)
        self.loss = loss.item()

    @torch.no_grad()
    def auc(self, held_out: Batch) -> float:
        """The AUC on examples that were not trained on."""
        return auc(self.model(held_out.numbers, held_out.ids), held_out.clicks)

    def speed(self, batch: int) -> float:
        """Examples per second, by the median step, without the first ones."""
        return batch / median(self.seconds[8:] or self.seconds)


def contestants(rows: Sequence[int]) -> tuple[Run, Run]:
    """The same model twice, with the same weights: ours, then plain torch."""
    tables = sparsestep.nn.EmbeddingBagCollection([(each, DIM) for each in rows], mode="sum")
    ours, plain = Model(tables, len(rows)), Model(TorchTables(rows), len(rows))
    plain.load_state_dict(ours.state_dict())
    # One optimizer for everything. No weight decay, since torch's SparseAdam has none.
    adamw = sparsestep.AdamW(ours.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.0)
    layers = [*plain.bottom.parameters(), *plain.top.parameters()]
    sparse = torch.optim.SparseAdam(plain.tables.parameters(), lr=LEARNING_RATE, eps=EPS)
    dense = torch.optim.Adam(layers, lr=LEARNING_RATE, eps=EPS)
    return (
        Run("sparsestep.AdamW", ours, [adamw]),
        Run("torch SparseAdam + Adam", plain, [sparse, dense]),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="small tables: takes seconds")
    parser.add_argument("--steps", type=int, default=240, help="of each (default: %(default)s)")
    parser.add_argument("--single", action="store_true", help="one id for each feature, no lists")
    parser.add_argument("--seed", type=int, default=0, help="of data and weights")
    options = parser.parse_args(arguments)
    largest, size, checked = (2_000, 256, 8_192) if options.quick else (400_000, 2_048, 32_768)
    torch.manual_seed(options.seed)
    lengths = [1] * len(LENGTHS) if options.single else LENGTHS
    log = Clicks([min(rows, largest) for rows in ROWS], lengths, options.seed)
    held_out = log.batch(checked)
    threads = torch.get_num_threads()
    print(f"{len(log.rows)} tables with {sum(log.rows):,} rows x {DIM}, threads: {threads}.")
    print(f"{size:,} examples per step, {sum(lengths)} ids per example.")
    best = auc(held_out.logits, held_out.clicks)
    print(f"The best possible AUC, from the hidden weights: {best:.4f}.\n")

    runs = contestants(log.rows)
    print(f"{'':8}{''.join(f'{run.name:32}' for run in runs)}".rstrip())
    print(f"  step  {'loss    AUC     samples/s       ' * 2}".rstrip())
    scores: list[float] = []
    for step in range(1, options.steps + 1):
        batch = log.batch(size)
        for run in runs if step % 2 else reversed(runs):
            # It falls to zero, so that runs that round differently end at the same place.
            run.train(batch, LEARNING_RATE * (1 - (step - 1) / options.steps))
        if step * 10 // options.steps > (step - 1) * 10 // options.steps:
            scores = [run.auc(held_out) for run in runs]
            columns = (
                f"{run.loss:<8.4f}{score:<8.4f}{run.speed(size):<16,.0f}"
                for run, score in zip(runs, scores, strict=True)
            )
            print(f"{step:6}  {''.join(columns)}".rstrip(), flush=True)

    ours, theirs = (run.speed(size) for run in runs)
    print(f"\n{'':20}{runs[0].name:>18}{runs[1].name:>25}")
    print(f"{'samples per second':20}{ours:18,.0f}{theirs:25,.0f}   {ours / theirs:.1f}x")
    apart = abs(scores[0] - scores[1])
    print(f"{'AUC, held-out part':20}{scores[0]:18.4f}{scores[1]:25.4f}   {apart:.4f} apart")
    if apart > 0.002:
        print("The two should agree within 0.002.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
