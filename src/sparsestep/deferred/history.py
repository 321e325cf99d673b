"""The past steps of an optimizer, as sums from which a row without a gradient catches up.

For Adam a row that is current after step j and needed after step n has moved by

    sum over s = j+1 .. n of  size_s * m * b1^(s-j) / (sqrt(v) * q_s + eps) * W_s

where q_s = b2^((s-j)/2) / root_s and W_s is what decay has left since step s. With u = eps /
(sqrt(v) * center + eps), a number between 0 and 1 wherever v and eps are, and r = q_s / center, a
term's quotient is 1 / (r + (1 - r) u), relative to that of q_s = center. This is the Chebyshev
series

    1 / sqrt(r) * (1 + 2 * sum over i > 0 of  g^i T_i(2u - 1)),    g = (sqrt(r) - 1) / (sqrt(r) + 1)

whose coefficients do not depend on the entry. So a few sums for each past step j, kept in float64,
serve all entries of all rows, however long they were idle. ``center`` is q_s some steps after j, so
that r is close to one and g is small while b1^(s-j) is not. What the terms that are left out may
amount to is added up as well: where it is too much, in the first steps of a training or for a b2
that is small beside b1, rows are replayed step by step instead.

The other rules are special cases: a geometric series, a constant drift, or nothing but decay.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.engines.base import finish
from sparsestep.rules.idle import AdamDrift, IdleUpdate, SignDrift
from sparsestep.rules.options import RowConstraint

# Terms below this, relative to the first, are left out.
_NEGLIGIBLE = 1e-18
# Limits on the past steps, and on their decay.
MAX_STEPS = 1 << 16
_MAX_INVERSE_DECAY = 1e150
_SWEEP_INVERSE_DECAY = 1e50
_MAX_ERROR = {torch.float64: 1e-14}
_DEFAULT_MAX_ERROR = 1e-6


class StepHistory:
    """The steps since ``base``, as sums for idle rows with any last step.

    It is on the CPU for parameters on any device: a few numbers are written per step, and a few
    read per row.

    Attributes:
        inverse_decay: for each step, 1 / (product of the weight decay factors since base).
        sizes: the step size of each step.
        roots: the divisor of the square root in each step.
        centers: for each past step, the ``center`` of the sums over later ones.
        sums: for each past step, the sums over all later ones, relative to ``inverse_decay``; or
            the total of all sizes so far, if the idle update ``has_total``.
        powers: the powers of ``decays``, by name.
    """

    def __init__(
        self,
        idle_update: IdleUpdate,
        hyperparams: Mapping[str, Any],
        base: int,
        constraint: RowConstraint | None = None,
    ) -> None:
        self.idle_update = idle_update
        self.hyperparams = hyperparams  # with the latest learning rate that was not zero
        self.base = base  # the step that every row has reached
        self.constraint = constraint  # of the norm of every row after every step
        self.steps = 0  # since base
        self.latest_inverse_decay = 1.0
        self.decays = idle_update.decays(hyperparams)  # of each state in a step, by name
        self.eps = idle_update.eps(hyperparams)
        self._prepare_series()
        self._tables = torch.tensor([[1.0], [0.0], [0.0], [0.0]], dtype=torch.float64, device="cpu")
        self.sums: Tensor = torch.zeros(1, idle_update.num_sums, dtype=torch.float64, device="cpu")
        self._reserve(256)

    def _prepare_series(self) -> None:
        """Compute the horizon, and powers for the steps within it."""
        idle, decays = self.idle_update, self.decays
        ratio = idle.ratio(decays)
        self.horizon = _horizon(ratio)  # steps after which a step is negligible
        self.converges = self.horizon < MAX_STEPS
        self._is_summed = ratio > 0.0 and self.converges
        buffer = decays.get(idle.buffer, 1.0)
        root = idle.root_decay(decays) if isinstance(idle, AdamDrift) else 1.0
        # From a past step to its center, where the buffer has moved the parameter about half as far
        # as it will.
        self.center_lag = min(self.horizon, math.ceil(1.5 / (1 - buffer))) if buffer < 1 else 1
        self._center = root**self.center_lag
        if self._is_summed:  # from the oldest step within the horizon to the one before
            self._buffer_powers = _powers(buffer, self.horizon + 1)[1:].flip(0)
            self._root_powers = _powers(root, self.horizon + 1)[1:].flip(0)

    def reserve(self) -> None:
        """Allocate for one more step, so that ``append`` does not."""
        if self.steps + 1 >= self.capacity:
            self._reserve(2 * self.capacity)

    def _reserve(self, capacity: int) -> None:
        # An array: writing single numbers to a tensor is slow.
        numbers = array("d", [0.0]) * ((4 + self.idle_update.num_sums) * capacity)
        memory = torch.frombuffer(numbers, dtype=torch.float64)
        tables, sums = memory[: 4 * capacity].view(4, -1), memory[4 * capacity :].view(capacity, -1)
        tables[:, : self._tables.shape[1]] = self._tables
        sums[: len(self.sums)] = self.sums
        by_factor = {factor: _powers(factor, capacity) for factor in set(self.decays.values())}
        powers = {name: by_factor[factor] for name, factor in self.decays.items()}
        by_step = tables.unbind()
        # Nothing below can fail.
        self.capacity, self._numbers, self._tables = capacity, numbers, tables
        self.inverse_decay, self.sizes, self.roots, self.centers = by_step
        self.sums, self.powers = sums, powers

    @staticmethod
    def max_error(dtype: torch.dtype) -> float:
        """The largest error of the sums, relative to the first."""
        return _MAX_ERROR.get(dtype, _DEFAULT_MAX_ERROR)

    @property
    def now(self) -> int:
        """The latest step."""
        return self.base + self.steps

    @property
    def single_steps(self) -> int:
        """How many of the steps that a row missed are taken one by one under a constraint.

        Later ones only scale the row, and so may come before the constraint all at once.
        """
        return MAX_STEPS if isinstance(self.idle_update, SignDrift) else self.horizon

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
        self.sums[: self.steps + 1] = 0.0
        self.base, self.steps, self.latest_inverse_decay = self.now, 0, 1.0

    def drop_oldest(self, steps: int) -> None:
        """Drop the oldest steps; every row has reached the last of them."""
        left, end = self.steps - steps, self.steps + 1
        tables, sums = self._tables[:, steps:end].clone(), self.sums[steps:end].clone()
        if self.idle_update.has_total:  # only differences of totals matter
            sums -= sums[0].clone()
        first = float(tables[0, 0])
        tables[0] /= first
        sums /= first
        base, latest = self.base + steps, float(tables[0, left])
        kept = self._tables[:, : left + 1], self.sums[: left + 1]
        emptied = self.sums[left + 1 : end]
        finish((partial(kept[0].copy_, tables), partial(kept[1].copy_, sums), emptied.zero_))
        self.base, self.steps, self.latest_inverse_decay = base, left, latest

    def append(self, size: float, root: float, shrink: float, middle: float) -> None:
        """Append a step. Atomic: on error, nothing has changed.

        Args:
            size: its step size.
            root: the divisor of the square root in ``AdamDrift``; 1.0 for other idle updates.
            shrink: its weight decay factor.
            middle: the root ``center_lag`` steps after the step before; its value decides how exact
                the sums are, not what they are.
        """
        self.reserve()
        n = self.steps + 1
        numbers, capacity = self._numbers, self.capacity
        inverse_decay = self.latest_inverse_decay / shrink
        numbers[n] = inverse_decay
        numbers[capacity + n], numbers[2 * capacity + n] = size, root
        numbers[3 * capacity + n - 1] = self._center / middle
        move = size * inverse_decay
        if self.idle_update.has_total:
            numbers[4 * capacity + n] = numbers[4 * capacity + n - 1] + move
        elif self._is_summed:
            self._accumulate(n, move, root)
        self.steps, self.latest_inverse_decay = n, inverse_decay

    def _accumulate(self, n: int, move: float, root: float) -> None:
        """Add the n-th step to the sums of the steps before it, within the horizon."""
        powers, root_powers = self._buffer_powers, self._root_powers
        if ext is not None and isinstance(self.idle_update, AdamDrift):
            ext.add_step(self.sums, self.centers, powers, root_powers, n, move, root)
            return
        lags = min(n, self.horizon)
        past, powers = slice(n - lags, n), powers[-lags:]
        if not isinstance(self.idle_update, AdamDrift):
            self.sums[past, 0].add_(powers, alpha=move)
            return
        root_of_r = (root_powers[-lags:] / (root * self.centers[past])).sqrt_()
        g = (root_of_r - 1) / (root_of_r + 1)
        terms = torch.linalg.vander(g, N=self.sums.shape[1])
        terms *= (move * powers / root_of_r).unsqueeze(1)
        terms[:, 1:] *= 2
        terms[:, -1] = terms[:, -1].abs() / (1 - g.abs())
        self.sums[past] += terms


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
