"""The past steps of an optimizer, as sums from which a row without a gradient catches up.

For Adam a row that is current after step j and needed after step n has moved by

    sum over s = j+1 .. n of  size_s * m * b1^(s-j) / (sqrt(v * b2^(s-j)) / root_s + eps) * W_s

where W_s is what decay has left since step s. Expanded in powers of eps / sqrt(v), every term is a
number that depends on (j, n) alone times a number that depends on the entry alone. So four sums
for each past step, kept in float64, serve all entries of all rows, however long they were idle. An
entry whose eps / sqrt(v) is not small is replayed step by step instead, as far as b1^k matters. The
other rules are special cases: a geometric series, a constant drift, or nothing but decay.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep._torch import stack
from sparsestep.engines.finishing import finish
from sparsestep.rules.idle import AdamDrift, IdleUpdate

# Terms below this, relative to the first, are left out.
_NEGLIGIBLE = 1e-18
# Limits on the past steps, and on their decay.
MAX_STEPS = 1 << 16
_MAX_INVERSE_DECAY = 1e150
_SWEEP_INVERSE_DECAY = 1e50
_SERIES_RATIO = {torch.float64: 1e-4}
_DEFAULT_SERIES_RATIO = 0.02
_TERMS = AdamDrift.terms


class StepHistory:
    """The steps since ``base``, as sums for idle rows with any last step.

    It is on the CPU for parameters on any device: a few numbers are written per step, and a few
    read per row.

    Attributes:
        idle_update: the rule's.
        hyperparams: its options; of the learning rates, the latest that was not zero.
        base: the step that every row has reached.
        steps: the number of steps since.
        decays: the factor by which each state decays in a step, by name.
        powers: the powers of these factors, by name.
        inverse_decay: for each step, 1 / (product of the weight decay factors since base).
        latest_inverse_decay: that of the latest step.
        sizes: the step size of each step.
        roots: the divisor of the square root in each step.
        sums: for each past step, the sums over all later ones, relative to ``inverse_decay``; or
            the total of all sizes so far, if the idle update ``has_total``.
        horizon: number of steps after which a step is negligible in the sums.
        replay_limit: number of steps that an entry is replayed for.
        converges: whether the sums converge.
    """

    def __init__(self, idle_update: IdleUpdate, hyperparams: Mapping[str, Any], base: int) -> None:
        self.idle_update = idle_update
        self.hyperparams = hyperparams
        self.base = base
        self.steps = 0
        self.latest_inverse_decay = 1.0
        self.decays = idle_update.decays(hyperparams)
        self.eps = idle_update.eps(hyperparams)
        self._prepare_series(idle_update.ratios(self.decays))
        self._tables: Tensor = _as_tensor(array("d", [1.0, *(2 + _TERMS) * [0.0]])).unsqueeze(1)
        self._reserve(256)

    def _prepare_series(self, ratios: list[float]) -> None:
        """Compute the horizon, and the weights of the steps within it."""
        self.horizon = max(map(_horizon, ratios), default=1)
        self.converges = self.horizon < MAX_STEPS
        # A replay ends when the first term is negligible.
        self.replay_limit = _horizon(ratios[0]) if ratios else 1
        horizon = self.horizon if self.converges else 1
        powers = [_powers(ratio, horizon + 1)[1:].flip(0) for ratio in ratios]
        self._terms = len(ratios)
        if ratios:
            self._ratios = stack(powers)
            self._weight = array("d", [0.0]) * self._terms
            self._weights = _as_tensor(self._weight).unsqueeze(1)

    def reserve(self) -> None:
        """Allocate for one more step, so that ``append`` does not."""
        if self.steps + 1 >= self.capacity:
            self._reserve(2 * self.capacity)

    def _reserve(self, capacity: int) -> None:
        # An array: writing single numbers to a tensor is slow.
        numbers = array("d", [0.0]) * ((3 + _TERMS) * capacity)
        tables = _as_tensor(numbers).view(-1, capacity)
        tables[:, : self._tables.shape[1]] = self._tables
        by_factor = {factor: _powers(factor, capacity) for factor in set(self.decays.values())}
        powers = {name: by_factor[factor] for name, factor in self.decays.items()}
        (inverse_decay, sizes, roots), sums = tables[:3].unbind(), tables[3:]
        summed = sums[: self._terms]
        # Nothing below can fail.
        self.capacity, self._numbers, self._tables = capacity, numbers, tables
        self.inverse_decay, self.sizes, self.roots = inverse_decay, sizes, roots
        self.sums, self._summed, self.powers = sums, summed, powers

    @staticmethod
    def max_series_ratio(dtype: torch.dtype) -> float:
        """The largest eps / sqrt(v) for which four terms of the series are enough."""
        return _SERIES_RATIO.get(dtype, _DEFAULT_SERIES_RATIO)

    @property
    def now(self) -> int:
        """The latest step."""
        return self.base + self.steps

    @property
    def is_half_full(self) -> bool:
        """Whether to catch up a few rows in each step, so that old steps can be dropped."""
        return self.steps >= MAX_STEPS // 2 or self.latest_inverse_decay > _SWEEP_INVERSE_DECAY

    @property
    def is_full(self) -> bool:
        """Whether every row has to catch up before the next step."""
        return self.steps + 2 >= MAX_STEPS or self.latest_inverse_decay > _MAX_INVERSE_DECAY

    def clear(self) -> None:
        """Drop all steps; every row has reached ``now``."""
        self.sums[:, : self.steps + 1] = 0.0
        self.base, self.steps, self.latest_inverse_decay = self.now, 0, 1.0

    def drop_oldest(self, steps: int) -> None:
        """Drop the oldest steps; every row has reached the last of them."""
        left, tables = self.steps - steps, self._tables
        rest = tables[:, steps : self.steps + 1].clone()
        if self.idle_update.has_total:  # only differences of totals matter
            rest[3:] -= rest[3:, :1].clone()
        first = float(rest[0, 0])
        rest[0] /= first
        rest[3:] /= first
        base, latest = self.base + steps, float(rest[0, left])
        kept, emptied = tables[:, : left + 1], tables[3:, left + 1 : self.steps + 1]
        finish((partial(kept.copy_, rest), emptied.zero_))
        self.base, self.steps, self.latest_inverse_decay = base, left, latest

    def append(self, size: float, root: float, shrink: float) -> None:
        """Append a step. Atomic: on error, nothing has changed.

        Args:
            size: its step size.
            root: the divisor of the square root in ``AdamDrift``; 1.0 for other idle updates.
            shrink: its weight decay factor.
        """
        self.reserve()
        n = self.steps + 1
        numbers, capacity = self._numbers, self.capacity
        inverse_decay = self.latest_inverse_decay / shrink
        numbers[n] = inverse_decay
        numbers[capacity + n], numbers[2 * capacity + n] = size, root
        move = size * inverse_decay
        if self.idle_update.has_total:
            numbers[3 * capacity + n] = numbers[3 * capacity + n - 1] + move
        elif self._terms and self.converges:
            self._accumulate(n, move, root)
        self.steps, self.latest_inverse_decay = n, inverse_decay

    def _accumulate(self, n: int, move: float, root: float) -> None:
        """Add the n-th step to the sums of the steps before it, within the horizon."""
        ratios, horizon = self._ratios, self.horizon
        for term in range(self._terms):
            move *= root
            self._weight[term] = move
        if n < horizon:
            ratios, horizon = ratios[:, horizon - n :], n
        self._summed.narrow(1, n - horizon, horizon).addcmul_(ratios, self._weights)


def _as_tensor(numbers: array[float]) -> Tensor:
    """A tensor that shares the memory of an array."""
    return torch.frombuffer(numbers, dtype=torch.float64)


def _powers(factor: float, count: int) -> Tensor:
    exponents = torch.arange(count, dtype=torch.float64, device="cpu")
    return torch.full((), factor, dtype=torch.float64, device="cpu") ** exponents


def _horizon(ratio: float) -> int:
    """Number of steps after which a term that decays by a ratio is negligible."""
    if ratio <= 0.0:
        return 1
    if ratio >= 1.0:
        return MAX_STEPS
    return min(MAX_STEPS, max(1, math.ceil(math.log(_NEGLIGIBLE) / math.log(ratio))))
