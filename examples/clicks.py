"""A made-up click log: what was shown to whom, and whether it was clicked.

The shape is that of a public one, the log of MLPerf's recommender benchmark: 13 numbers and 26
lists of ids for each example. Popular ids come far more often than others. A click is drawn from
hidden weights that every id has, so that there is something to learn, and how well it could be
learned at best is known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

NUMBERS = 13

# How many different ids each feature has, and how many of them each example has.
ROWS = (
    *(40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000, 3_067_956),
    *(405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000, 40_000_000, 40_000_000, 590_152),
    *(12_973, 108, 36),
)
LENGTHS = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)

# Features whose ids matter together: a click on *this* thing by *that* kind of reader.
PAIRS = ((8, 24), (17, 18), (7, 25), (6, 12), (16, 24), (5, 8))

_EXPONENT = 1.05
_SCATTER = 2_654_435_761  # a prime, so that different ranks of a table get different ids
_MIX = (-7046029254386353131, -4658895280553007687)  # odd: multiplying loses no bit


@dataclass
class Batch:
    """Examples.

    Attributes:
        numbers: ``[examples, 13]``.
        ids: for each feature ``[examples, length of its lists]``.
        clicks: one where there was a click, else zero.
        logits: those of the chance of a click; models may not read them.
    """

    numbers: Tensor
    ids: list[Tensor]
    clicks: Tensor
    logits: Tensor

    def part(self, start: int, size: int) -> Batch:
        """Some of the examples."""
        these = slice(start, start + size)
        ids = [each[these] for each in self.ids]
        return Batch(self.numbers[these], ids, self.clicks[these], self.logits[these])


class Clicks:
    """An endless click log; the same seed gives the same one.

    Args:
        seed: where its random numbers begin. The hidden weights do not depend on it.
        most_rows: what the number of different ids of a feature is cut to.
        lengths: how many ids each example has of each feature.

    Example:
        >>> log = Clicks(seed=0, most_rows=1_000)
        >>> batch = log.batch(32)
        >>> len(batch.ids), tuple(batch.ids[1].shape), tuple(batch.numbers.shape)
        (26, (32, 2), (32, 13))
        >>> again = Clicks(seed=0, most_rows=1_000).batch(32)
        >>> torch.equal(batch.clicks, again.clicks)
        True
    """

    def __init__(self, seed: int, most_rows: int, lengths: Sequence[int] = LENGTHS) -> None:
        self.rows = [min(rows, most_rows) for rows in ROWS]
        self.lengths = list(lengths)
        self._generator = torch.Generator().manual_seed(seed)
        feature = torch.arange(len(ROWS)).repeat_interleave(torch.tensor(self.lengths))
        self._rows = torch.tensor(self.rows)[feature]  # of the feature of each column
        self._salt = feature * 1_000_003
        self._share = torch.zeros(len(feature), len(ROWS))
        self._share[torch.arange(len(feature)), feature] = 1.0
        self._share /= torch.tensor(self.lengths).sqrt()

    def batch(self, size: int) -> Batch:
        """The next examples."""
        numbers = torch.randn(size, NUMBERS, generator=self._generator)
        ids = self._draw(size)
        logits = self._logits(numbers, ids)
        clicks = torch.bernoulli(logits.sigmoid(), generator=self._generator)
        lists = [each.contiguous() for each in torch.split(ids, self.lengths, dim=1)]
        return Batch(numbers, lists, clicks, logits)

    def _draw(self, size: int) -> Tensor:
        """Ids after Zipf's law: from a uniform number to a rank, from the rank to its id."""
        uniform = torch.rand(size, len(self._rows), generator=self._generator)
        most = (self._rows + 1.0) ** (1 - _EXPONENT)
        rank = (1 + uniform * (most - 1)).pow_(1 / (1 - _EXPONENT)).long() - 1
        rank = torch.minimum(rank.clamp_(min=0), self._rows - 1)
        return rank * _SCATTER % self._rows

    def _logits(self, numbers: Tensor, ids: Tensor) -> Tensor:
        alone, together = (each @ self._share for each in _hidden(ids + self._salt))
        pairs = sum(together[:, first] * together[:, second] for first, second in PAIRS)
        of_numbers = numbers[:, 0] - 0.5 * numbers[:, 1] + numbers[:, 2] * numbers[:, 3]
        return 0.35 * alone.sum(dim=1) + 0.7 * pairs + 0.4 * of_numbers - 1.0


def _hidden(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Two numbers of mean 0 and variance 1 for each id, always the same ones: a hash."""
    bits = ids
    for factor in _MIX:
        bits = bits * factor
        bits = bits ^ (bits >> 31)
    scale = 12**0.5 / 2**20
    first, second = bits & 0xFFFFF, (bits >> 20) & 0xFFFFF
    return (first - 2**19) * scale, (second - 2**19) * scale


def auc(scores: Tensor, clicks: Tensor) -> float:
    """How likely a click has a higher score than what was not clicked; ties count half.

    Example:
        >>> auc(torch.tensor([0.1, 0.7, 0.7, 0.9]), torch.tensor([0.0, 1.0, 0.0, 1.0]))
        0.875
    """
    ordered = scores.sort().values
    below, up_to = (torch.searchsorted(ordered, scores, right=right) for right in (False, True))
    rank = (below + up_to + 1).double() / 2  # equal scores share the middle of theirs
    clicked = clicks > 0.5
    positive = int(clicked.sum())
    negative = len(clicks) - positive
    above = rank[clicked].sum() - positive * (positive + 1) / 2
    return float(above / (positive * negative))
