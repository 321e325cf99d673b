"""What the steps of an optimizer would have done to a row without a gradient.

For Adam a row that is current after step j and needed after step n has moved by

    sum over s = j+1 .. n of  size_s * m * b1^(s-j) / (sqrt(v * b2^(s-j)) / root_s + eps) * W_s

where W_s is what decay has left since step s. Expanded in powers of eps / sqrt(v), every term is a
number that depends on (j, n) alone times a number that depends on the entry alone. So four sums
for each past step, kept in float64, serve all entries of all rows, however long they were idle. An
entry whose eps / sqrt(v) is not small is followed step by step instead, as far as b1^k matters. The
other rules are special cases: a geometric series, a constant drift, or nothing but decay.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract.rule import Idle

# What a term may be smaller than, relative to the first, to be left out.
_NEGLIGIBLE = 1e-18
# How many past steps are kept at most, and how much decay.
_MOST_STEPS = 1 << 16
_MOST_GROWTH = 1e150
_MUCH_GROWTH = 1e50
_SMALL = {torch.float64: 1e-4}
_USUALLY_SMALL = 0.02
_TERMS = 4


class History:
    """What the steps since ``base`` would have done to an idle row, whatever its last step.

    All of it lies in the CPU's memory, wherever the parameter is: Python writes a few numbers per
    step, and what is read is a few numbers per row.

    Attributes:
        base: the step that every row has reached.
        steps: how many steps were taken since.
        grown: the latest ``growth``.
        growth: 1 / (what decay has left since base), for each step.
        sizes: the size of each step's move.
        roots: what the square root is divided by in each step.
        sums: for each past step, the sums over all later ones; relative to ``growth``.
    """

    first: float
    second: float
    grown: float
    steps: int
    base: int
    reach: int
    converges: bool
    follow: int
    capacity: int
    growth: Tensor
    sizes: Tensor
    roots: Tensor
    firsts: Tensor
    seconds: Tensor
    sums: Tensor

    def __init__(self, idle: Idle, hyper: Mapping[str, Any], base: int) -> None:
        self.idle = idle
        self.base = base
        self.steps = 0
        self.grown = 1.0
        self.first, self.second = idle.factors(hyper)
        self.eps: float = float(hyper.get("eps", 0.0))
        fades = idle.fades.get(idle.square) == 1
        self.fade: float = math.sqrt(self.second) if fades else 1.0
        self.hyper = hyper
        self._find_reach()
        self._tables: Tensor = _shared(array("d", [1.0, *(2 + _TERMS) * [0.0]])).unsqueeze(1)
        self._reserve(256)

    def _find_reach(self) -> None:
        """How many steps back a move still matters, and whether the series may be used."""
        ratios = [self.first]
        if self.idle.along == "quotient":
            ratios = [_quotient(self.first, self.fade ** (i + 1)) for i in range(_TERMS)]
        self.reach = max(_reach(ratio) for ratio in ratios)
        self.converges = self.reach < _MOST_STEPS
        # Followed step by step, an entry is done when its first term's ratio has died out.
        self.follow = _reach(ratios[0])
        reach = self.reach if self.converges else 1
        self._ratios = torch.stack([_powers(ratio, reach + 1)[1:].flip(0) for ratio in ratios])
        self._weight = array("d", [0.0]) * len(ratios)
        self._weights = _shared(self._weight).unsqueeze(1)

    def _reserve(self, capacity: int) -> None:
        # Written as an array, which is much cheaper than one number at a time into a tensor.
        numbers = array("d", [0.0]) * ((3 + _TERMS) * capacity)
        tables = _shared(numbers).view(-1, capacity)
        tables[:, : self._tables.shape[1]] = self._tables
        self.capacity, self._numbers, self._tables = capacity, numbers, tables
        self.growth, self.sizes, self.roots = tables[:3].unbind()
        self.sums = tables[3:]
        self._summed = self.sums[: len(self._weight)]
        self.firsts, self.seconds = (_powers(f, capacity) for f in (self.first, self.second))

    @property
    def tables(self) -> tuple[Tensor, ...]:
        """What the core reads, in its order."""
        return self.growth, self.sizes, self.roots, self.firsts, self.seconds, self.sums

    @staticmethod
    def small_for(dtype: torch.dtype) -> float:
        """The largest eps / sqrt(v) for which four terms of the series are enough."""
        return _SMALL.get(dtype, _USUALLY_SMALL)

    @property
    def now(self) -> int:
        """The latest step."""
        return self.base + self.steps

    @property
    def is_half_full(self) -> bool:
        """Whether it is time to bring rows up to date, a few with each step."""
        return self.steps >= _MOST_STEPS // 2 or self.grown > _MUCH_GROWTH

    @property
    def is_full(self) -> bool:
        """Whether every row has to be brought up to date before the next step."""
        return self.steps + 2 >= _MOST_STEPS or self.grown > _MOST_GROWTH

    def begin_anew(self) -> None:
        """Forget the past; every row has reached ``now``."""
        self.sums[:, : self.steps + 1] = 0.0
        self.base, self.steps, self.grown = self.now, 0, 1.0

    def forget(self, steps: int) -> None:
        """Forget the oldest steps; every row has reached the last of them."""
        left, tables = self.steps - steps, self._tables
        kept = tables[:, steps : self.steps + 1].clone()
        if self.idle.along in ("sign", "leader"):  # there, differences of sums count
            kept[3:] -= kept[3:, :1].clone()
        growth = float(kept[0, 0])
        kept[0] /= growth
        kept[3:] /= growth
        tables[:, : left + 1] = kept
        tables[3:, left + 1 : self.steps + 1] = 0.0
        self.base, self.steps, self.grown = self.base + steps, left, float(kept[0, left])

    def advance(self, size: float, root: float, shrink: float) -> None:
        """Take note of a step."""
        n = self.steps + 1
        if n >= self.capacity:
            self._reserve(2 * self.capacity)
        numbers, capacity = self._numbers, self.capacity
        self.grown /= shrink
        numbers[n], numbers[capacity + n], numbers[2 * capacity + n] = self.grown, size, root
        along, move = self.idle.along, size * self.grown
        if along == "sign" or along == "leader":
            numbers[3 * capacity + n] = numbers[3 * capacity + n - 1] + move
        elif along != "nothing" and self.converges:
            self._add(n, move, root if along == "quotient" else 1.0)
        self.steps = n

    def _add(self, n: int, move: float, root: float) -> None:
        """Add the n-th step's move to the sums of those before it, as far as it matters."""
        ratios, reach = self._ratios, self.reach
        for term in range(len(self._weight)):
            move *= root
            self._weight[term] = move
        if n < reach:
            ratios, reach = ratios[:, reach - n :], n
        self._summed.narrow(1, n - reach, reach).addcmul_(ratios, self._weights)


def _shared(numbers: array[float]) -> Tensor:
    """A tensor in the memory of an array."""
    return torch.frombuffer(numbers, dtype=torch.float64)


def _powers(factor: float, count: int) -> Tensor:
    exponents = torch.arange(count, dtype=torch.float64, device="cpu")
    return torch.full((), factor, dtype=torch.float64, device="cpu") ** exponents


def _quotient(first: float, fade: float) -> float:
    """How the terms of a sum shrink; a square that is gone at once leaves nothing to divide by."""
    return first / fade if fade else math.inf if first else 0.0


def _reach(ratio: float) -> int:
    if ratio <= 0.0:
        return 1
    if ratio >= 1.0:
        return _MOST_STEPS
    return min(_MOST_STEPS, max(1, math.ceil(math.log(_NEGLIGIBLE) / math.log(ratio))))
