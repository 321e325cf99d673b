"""Ratings of MovieLens-100k by matrix factorization, with torch's optimizers and ours.

943 people gave 100,000 ratings to 1,682 movies. The model is Surprise's SVD: a mean, a bias of each
person and movie, and the product of their vectors. The error of predicted ratings (RMSE) is the
mean over five folds, each of which is predicted from the other four.

The data comes with RecBole, which is not imported: ``pip install --no-deps recbole``. Seconds are
CPU time of training on one thread, for all five folds, contestants taking turns. Memory is the peak
that weights, gradients, state and temporaries need, measured in a process of its own (Linux).
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import NamedTuple

import torch
from torch import Tensor, nn

import sparsestep

USERS, MOVIES, DIM = 943, 1_682, 50
FOLDS, LEARNING_RATE, PENALTY = 5, 0.005, 0.1
# Surprise's benchmarks with five folds (surpriselib.com). SVD is the model below; SVD++ adds a
# vector for each movie that a person has rated at all.
PUBLISHED, TOLERANCE = {"SVD": 0.934, "SVD++": 0.919}, 0.005


# What each optimizer takes a row for that a batch does not look up: "dense", its gradient is zero;
# "masked", it is skipped.
SEMANTICS = {
    "torch.optim.Adam": "dense",
    "sparsestep.Adam": "dense",
    "torch.optim.SparseAdam": "masked",
    "sparsestep.SparseAdam": "masked",
}


def optimizer_for(name: str, model: nn.Module, lr: float) -> torch.optim.Optimizer:
    """Create an optimizer by its name."""
    if name == "torch.optim.Adam":
        return torch.optim.Adam(model.parameters(), lr=lr, fused=True)
    if name == "torch.optim.SparseAdam":  # the model has sparse=True
        return torch.optim.SparseAdam(list(model.parameters()), lr=lr)
    if name == "sparsestep.Adam":
        return sparsestep.nn.optimizer_for(model, sparsestep.Adam, lr=lr)
    return sparsestep.nn.optimizer_for(model, sparsestep.SparseAdam, lr=lr, semantics="masked")


class Ratings(NamedTuple):
    """Ratings as three columns."""

    users: Tensor
    movies: Tensor
    stars: Tensor

    def select(self, rows: Tensor) -> Ratings:
        """Select some ratings."""
        return Ratings(*(column[rows] for column in self))


def read() -> Ratings:
    """Read all ratings from one of RecBole's files."""
    package = importlib.util.find_spec("recbole")
    if package is None or package.origin is None:
        sys.exit("This example's data comes with RecBole: pip install --no-deps recbole==1.2.1")
    path = Path(package.origin).parent / "dataset_example" / "ml-100k" / "ml-100k.inter"
    if not path.exists():
        sys.exit(f"RecBole has no file {path} here: pip install --no-deps recbole==1.2.1")
    lines = path.read_text(encoding="utf-8").splitlines()[1:]
    numbers = torch.tensor([[int(field) for field in line.split("\t")[:3]] for line in lines])
    return Ratings(numbers[:, 0] - 1, numbers[:, 1] - 1, numbers[:, 2].float())


class Factors(nn.Module):
    """Biases and vectors of people and movies."""

    def __init__(self, mean: float, sparse: bool) -> None:
        super().__init__()
        self.mean = mean
        self.user_bias = nn.Embedding(USERS, 1, sparse=sparse)
        self.movie_bias = nn.Embedding(MOVIES, 1, sparse=sparse)
        self.users = nn.Embedding(USERS, DIM, sparse=sparse)
        self.movies = nn.Embedding(MOVIES, DIM, sparse=sparse)
        for bias in (self.user_bias, self.movie_bias):
            nn.init.zeros_(bias.weight)
        for table in (self.users, self.movies):
            nn.init.normal_(table.weight, std=0.05)

    def forward(self, users: Tensor, movies: Tensor) -> tuple[Tensor, Tensor]:
        """Predicted ratings, and the mean square of vectors, which is penalized."""
        user, movie = self.users(users), self.movies(movies)
        bias = (self.user_bias(users) + self.movie_bias(movies)).squeeze(1)
        squares = user.square().sum(dim=1) + movie.square().sum(dim=1)
        return self.mean + bias + (user * movie).sum(dim=1), squares.mean()


class Run:
    """A model of one fold, its optimizer, and its measurements."""

    def __init__(self, name: str, ratings: Ratings, lr: float, steps: int) -> None:
        torch.manual_seed(0)
        self.model = Factors(ratings.stars.mean().item(), sparse=name == "torch.optim.SparseAdam")
        self.optimizer = optimizer_for(name, self.model, lr)
        self.schedule = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.05, steps)
        self.seconds = 0.0

    def train(self, batches: Sequence[Ratings]) -> None:
        """Train on batches of ratings."""
        began = process_time()
        for users, movies, stars in batches:
            predicted, squares = self.model(users, movies)
            loss = (predicted - stars).square().mean() + PENALTY * squares
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
        self.seconds += process_time() - began

    @torch.no_grad()
    def error(self, ratings: Ratings) -> float:
        """The RMSE of predicted ratings."""
        predicted, _ = self.model(ratings.users, ratings.movies)
        return (predicted.clamp(1, 5) - ratings.stars).square().mean().sqrt().item()


def batches_of(ratings: Ratings, size: int, seed: int) -> list[Ratings]:
    """The batches of an epoch."""
    order = torch.randperm(len(ratings.stars), generator=torch.Generator().manual_seed(seed))
    return [ratings.select(rows) for rows in torch.split(order, size)]


def count_used(ids: Tensor) -> int:
    """The number of different ids."""
    return int(torch.bincount(ids).count_nonzero())


def train(
    names: Sequence[str], ratings: Ratings, options: argparse.Namespace
) -> list[list[tuple[float, float]]]:
    """For each optimizer its seconds and RMSE after each epoch: sums and means over the folds."""
    size, epochs = len(ratings.stars), options.epochs
    fold = torch.randperm(size, generator=torch.Generator().manual_seed(0)) % FOLDS
    folds = range(1 if options.quick else FOLDS)
    curves = [[(0.0, 0.0)] * epochs for _ in names]
    for number in folds:
        known = ratings.select((fold != number).nonzero().squeeze(1))
        unknown = ratings.select((fold == number).nonzero().squeeze(1))
        steps = epochs * -(-len(known.stars) // options.batch)
        runs = [Run(name, known, options.lr, steps) for name in names]
        for epoch in range(epochs):
            batches = batches_of(known, options.batch, epoch)
            for run, curve in zip(runs, curves, strict=True):
                run.train(batches)
                seconds, error = curve[epoch]
                error += run.error(unknown) / len(folds)
                curve[epoch] = seconds + run.seconds, error
    return curves


def peak_megabytes(run: Callable[[], Run], batches: Sequence[Ratings]) -> float:
    """How much resident memory grows while a model is made and trained."""

    def kilobytes(field: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(field))

    run().train([batches[0].select(torch.arange(2))])  # loads the code
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = kilobytes("VmRSS")
    run().train(batches)
    return (kilobytes("VmHWM") - before) / 1024


def measure_memory(name: str, batch: int) -> float | None:
    """Measure it in a process of its own."""
    if sys.platform != "linux":
        return None
    # Freed memory goes back to the system at once, so that only memory in use counts.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, __file__, "--memory-of", name, "--batch", str(batch)]
    return float(subprocess.check_output(command, env=environment, text=True))


def main(arguments: Sequence[str] | None = None) -> int:
    """Train all of them and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="one fold, two epochs: takes seconds")
    parser.add_argument("--epochs", type=int, help="of each fold (default: 15)")
    parser.add_argument("--batch", type=int, default=1024, help="ratings (default: %(default)s)")
    parser.add_argument("--lr", type=float, default=LEARNING_RATE, help="(default: %(default)s)")
    parser.add_argument(
        "--only", nargs="+", choices=SEMANTICS, metavar="NAME", help="optimizers, by name"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    parser.add_argument("--memory-of", choices=SEMANTICS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    options.epochs = options.epochs or (2 if options.quick else 15)
    torch.set_num_threads(1)  # too little work for more
    ratings = read()
    batches = batches_of(ratings, options.batch, 0)
    names: list[str] = options.only or list(SEMANTICS)
    if options.memory_of:
        print(
            peak_megabytes(
                lambda: Run(options.memory_of, ratings, options.lr, len(batches)), batches
            )
        )
        return 0

    used = [count_used(batch.users) + count_used(batch.movies) for batch in batches]
    share = sum(used) / len(used) / (USERS + MOVIES)
    print(f"MovieLens-100k: {len(ratings.stars):,} ratings of {MOVIES:,} movies by {USERS} people.")
    print(f"A batch of {options.batch:,} ratings looks up {100 * share:.0f} % of all rows.\n")
    curves = train(names, ratings, options)

    print(f"{'':24}{'missing =':12}{'RMSE':>8}{'seconds':>9}{'peak MB':>9}")
    results: list[dict[str, object]] = []
    for name, curve in zip(names, curves, strict=True):
        memory = None if options.quick or options.only else measure_memory(name, options.batch)
        seconds, error = curve[-1]
        shown = "-" if memory is None else f"{memory:.1f}"
        meaning = "zero" if SEMANTICS[name] == "dense" else "skipped"
        print(f"{name:24}{meaning:12}{error:8.4f}{seconds:9.1f}{shown:>9}")
        results.append(
            {
                "name": name,
                "semantics": SEMANTICS[name],
                "scores": {"RMSE": error},
                "seconds": seconds,
                "megabytes": memory,
                "curve": curve,
            }
        )
    published = "  ".join(f"{name} {value}" for name, value in PUBLISHED.items())
    print(f"\npublished, Surprise: {published}")
    if options.json:
        report = {
            "data": "MovieLens-100k",
            "metric": "RMSE",
            "higher_is_better": False,
            "published": {"RMSE": PUBLISHED["SVD"]},
            "published_by": "Surprise's SVD",
            "tolerance": TOLERANCE,
            "lr": options.lr,
            "batch": options.batch,
            "share_of_rows": share,
            "contestants": results,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    best = min(curve[-1][1] for curve in curves)
    if best > PUBLISHED["SVD"] + TOLERANCE and not options.quick:
        print(f"This is more than {TOLERANCE} above the published figure.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
