"""A month of clicks on articles that come and go, learned with a tenth of the rows.

New ids appear all day, are popular for a while and are never seen again; some appear once. Three
models predict each batch of clicks, and then learn it:

- a vocabulary, which gives its rows to recent ids (`sparsestep.nn.Vocabulary`),
- a table with the same number of rows, into which ids are hashed,
- a table with a row for every id, ten times as many.

    python examples/streaming.py --picture streaming.svg
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import sparsestep

DAYS = 30
LIFE = 1.5  # of an id, in days
ONCE = 0.02  # how many ids of a batch come once in a month
POPULAR = 12  # one id in so many gets half of what is shown
FEATURES = 2  # users and articles
_MIX = -7046029254386353131
_COLORS = {"vocabulary": "#1f6fb4", "hashed": "#d1812f", "unlimited": "#6b6b6b"}


class Stream:
    """A stream of clicks, the same for the same seed.

    Args:
        ids: number of ids of each feature in the month, without those that come once.
        seed: of the random numbers.
    """

    def __init__(self, ids: int, seed: int) -> None:
        self._ids = ids
        self._chance = torch.Generator().manual_seed(seed)

    def batch(self, day: float, size: int) -> tuple[Tensor, Tensor]:
        """The ids shown at a time of the month, ``[size, FEATURES]``, and the clicks."""
        shape = (size, FEATURES)
        window = self._ids * LIFE / (DAYS + LIFE)  # ids that are around at any time
        newest = window + day / DAYS * (self._ids - window)
        number = (newest - window * torch.rand(shape, generator=self._chance)).long()
        popular = torch.rand(shape, generator=self._chance) < 0.5
        number = torch.where(popular, number // POPULAR * POPULAR, number).clamp_(0)
        once = torch.randint(2**40, 2**41, shape, generator=self._chance)
        rare = torch.rand(shape, generator=self._chance) < ONCE
        ids = hashed(torch.where(rare, once, FEATURES * number + torch.arange(FEATURES)))
        click = torch.bernoulli(logits_of(ids).sigmoid(), generator=self._chance)
        return ids, click


def hashed(numbers: Tensor) -> Tensor:
    """Hash numbers to 64 bits: to make ids, and to hash ids into rows."""
    numbers = numbers * _MIX
    numbers = (numbers ^ (numbers >> 29)) * _MIX
    return numbers ^ (numbers >> 32)


def logits_of(ids: Tensor) -> Tensor:
    """Logits of a click, from hidden weights that are hashes of the ids."""
    weights = (hashed(ids ^ 0x5DEECE66D) >> 20 & 0xFFFF).float() / 2**15 - 1
    return 1.8 * weights.sum(dim=1) - 0.5


class Learner:
    """A logistic regression with a weight per row, learned online.

    Args:
        rows: of the table.
        vocabulary: assigns rows to ids; without one, ids are hashed.
    """

    def __init__(self, rows: int, vocabulary: sparsestep.nn.Vocabulary | None) -> None:
        self._rows, self.vocabulary = rows, vocabulary
        self._table = sparsestep.nn.EmbeddingBag(rows, 1, mode="sum")
        torch.nn.init.zeros_(self._table.weight)
        self._bias = torch.nn.Parameter(torch.zeros(1))
        self._optimizer = sparsestep.Adagrad([self._table.weight, self._bias], lr=0.4)
        if vocabulary is not None:
            vocabulary.attach(self._table, self._optimizer, init=torch.nn.init.zeros_)

    @property
    def used(self) -> int:
        """The number of rows in use."""
        return self._rows if self.vocabulary is None else self.vocabulary.used

    def predict_and_learn(self, ids: Tensor, clicks: Tensor) -> Tensor:
        """Predict a batch, then learn it; returns the predictions."""
        rows = ids.remainder(self._rows) if self.vocabulary is None else self.vocabulary(ids)
        scores = self._table(rows).squeeze(1) + self._bias
        self._optimizer.zero_grad()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(scores, clicks, reduction="sum")
        loss.backward()
        self._optimizer.step()
        return scores.detach()


def auc(scores: Tensor, clicks: Tensor) -> float:
    """The probability that a click has a higher score than a non-click."""
    ranks, clicked = scores.argsort().argsort() + 1, clicks > 0.5
    positive = int(clicked.sum())
    above = int(ranks[clicked].sum()) - positive * (positive + 1) // 2
    return above / (positive * (len(clicks) - positive))


@dataclass
class Day:
    """The results of a day.

    Attributes:
        auc: of all predictions of a learner, by its name.
        used: the rows in use at the end of the day, likewise.
    """

    auc: dict[str, float]
    used: dict[str, int]


def run(ids: int, batches: int, size: int, seed: int) -> list[Day]:
    """Learn for a month.

    Args:
        ids: number of ids of each feature, without those that come once.
        batches: per day.
        size: of a batch.
        seed: of the clicks.
    """
    stream = Stream(ids, seed)
    found: list[Day] = []
    total = FEATURES * (ids + int(ONCE * DAYS * batches * size)) + 1
    capacity = total // 10
    new = sparsestep.nn.Vocabulary
    learners = {
        "vocabulary": Learner(capacity, new(capacity, evict="lru")),
        "hashed": Learner(capacity, None),
        "unlimited": Learner(total, new(total)),
    }
    print(f"{DAYS} days of {batches * size:,} clicks; {capacity:,} rows, unlimited {total:,}")
    print("day " + "".join(f"{name:>14}" for name in learners) + "   rows in use")
    for day in range(DAYS):
        scores: dict[str, list[Tensor]] = {name: [] for name in learners}
        clicks: list[Tensor] = []
        for number in range(batches):
            shown, clicked = stream.batch(day + number / batches, size)
            clicks.append(clicked)
            for name, learner in learners.items():
                scores[name].append(learner.predict_and_learn(shown, clicked))
        found.append(
            Day(
                {name: auc(torch.cat(each), torch.cat(clicks)) for name, each in scores.items()},
                {name: learner.used for name, learner in learners.items()},
            )
        )
        figures = "".join(f"{value:14.4f}" for value in found[-1].auc.values())
        print(f"{day + 1:3} {figures}   {', '.join(f'{n:,}' for n in found[-1].used.values())}")
    return found


def draw(path: str, days: Sequence[Day]) -> None:
    """Draw AUC and rows in use, day by day."""
    import matplotlib
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, 5.4), facecolor="white", layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    numbers = range(1, len(days) + 1)
    for width, (name, color) in zip((1.8, 4.2, 7.0), _COLORS.items(), strict=True):
        # Curves that coincide: narrow ones lie on wide ones.
        look = {"color": color, "linewidth": width, "zorder": 3 - width / 4}
        upper.plot(numbers, [day.auc[name] for day in days], label=name, **look)
        lower.plot(numbers, [day.used[name] for day in days], **look)
    upper.set_title("A tenth of the rows predict as well", loc="left", fontweight="bold")
    upper.set_ylabel("AUC of predictions before learning")
    lower.set_ylabel("rows in use")
    lower.set_xlabel("day")
    lower.set_yscale("log")
    upper.legend(frameon=False)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    with matplotlib.rc_context({"svg.hashsalt": "sparsestep", "svg.fonttype": "none"}):
        metadata = {"Date": None} if path.endswith(".svg") else None
        figure.savefig(path, metadata=metadata)


def main(arguments: Sequence[str] | None = None) -> None:
    """Learn, and print the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="a small town")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", metavar="PATH", help="where to draw it")
    options = parser.parse_args(arguments)
    size = (2_000, 10, 512) if options.quick else (15_000, 15, 2_048)
    days = run(*size, options.seed)
    later = days[7:]  # the first week is for learning
    means = {name: sum(day.auc[name] for day in later) / len(later) for name in days[0].auc}
    print("\nmean AUC after the first week")
    for name, value in means.items():
        print(f"{name:12} {value:.4f}")
    if options.picture:
        draw(options.picture, days)


if __name__ == "__main__":
    main()
