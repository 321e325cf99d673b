"""Idle updates: the update of entries whose gradient is zero, for ``semantics="dense"``.

A rule declares its idle update as one of the classes below. In every step without a gradient, each
state tensor decays by a constant factor or stays, decoupled weight decay shrinks the parameter, and
the class adds a move of the parameter. All ``MissedSteps`` of a row are applied at once, in torch
operations. The C++ counterpart is ``native/kernels/idle.h``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from sparsestep.deferred.history import MissedSteps

Hyperparams = Mapping[str, Any]

# The least magnitude of an average whose sign counts; usually the smallest normal number.
_MIN_MAGNITUDE = {torch.float16: 2.0**-24}


@dataclass(frozen=True, kw_only=True)
class IdleUpdate:
    """How a parameter moves without a gradient; functions get the options, most a step as well."""

    # The factor by which each state decays in a step, by name; a state that is not named stays.
    decays: Callable[[Hyperparams], Mapping[str, float]] = lambda hyperparams: {}
    # The size of a step, and the root that ``AdamDrift`` divides by.
    size: Callable[[int, Hyperparams], tuple[float, float]] = lambda step, hyperparams: (0.0, 1.0)
    # The factor of the parameter in the formula, besides decoupled weight decay; None: 1.
    shrink: Callable[[int, Hyperparams], float] | None = None
    # Added to the root by ``AdamDrift``.
    eps: Callable[[Hyperparams], float] = lambda hyperparams: float(hyperparams.get("eps", 0.0))
    fits: Callable[[int, Hyperparams], bool] | None = None  # whether a step has this form
    buffer: str = ""  # the state that gives the direction, if one does
    square: str = ""  # the state that divides, if one does
    native: str = ""  # the C++ kernel
    num_sums: ClassVar[int] = 1  # sums over the steps that it needs
    has_total: ClassVar[bool] = False  # whether it needs the total of all sizes, not a series
    # Whether it computes the parameter from its state: it always writes it, and its kernel takes
    # the options of the rule.
    recomputes: ClassVar[bool] = False

    def ratio(self, decays: Mapping[str, float]) -> float:
        """Return the ratio of successive terms of its series; zero without a series."""
        return 0.0

    def move(self, param: Tensor, state: Mapping[str, Tensor], missed: MissedSteps) -> Tensor:
        """Return the parameter after the missed steps; it and its state are float64."""
        raise NotImplementedError

    def decay(self, name: str, old: Tensor, missed: MissedSteps, dtype: torch.dtype) -> Tensor:
        """Return a state after the missed steps, which is stored as ``dtype``."""
        return old * missed.total_decay(name) if name in missed.decays else old

    def has_moved(self, missed: MissedSteps) -> Tensor | bool:
        """Return which rows have moved, of those with a gradient before; all if not known."""
        return missed.sums[0] != 0 if missed.converges else True

    def is_stale(self, missed: MissedSteps, before: Tensor, after: Tensor) -> Tensor:
        """Return which rows were out of date."""
        return (missed.shrink != 1) | missed.had_gradient & self.has_moved(missed)


@dataclass(frozen=True, kw_only=True)
class NoDrift(IdleUpdate):
    """It does not move: weight decay is all that changes it."""

    native: str = "still"

    def move(self, param: Tensor, state: Mapping[str, Tensor], missed: MissedSteps) -> Tensor:
        """Decayed."""
        return param * missed.shrink

    def has_moved(self, missed: MissedSteps) -> bool:
        """No row."""
        return False


@dataclass(frozen=True, kw_only=True)
class GeometricDrift(IdleUpdate):
    """Along a buffer that decays: ``size * buffer`` in each step, a geometric series."""

    native: str = "geometric"

    def ratio(self, decays: Mapping[str, float]) -> float:
        """Return the buffer's decay."""
        return decays.get(self.buffer, 1.0)

    def move(self, param: Tensor, state: Mapping[str, Tensor], missed: MissedSteps) -> Tensor:
        """The sum of a geometric series, times the buffer."""
        if missed.converges:
            total = missed.sums[0]
        else:
            every = torch.arange(len(param), device=param.device)
            total = torch.zeros_like(missed.shrink)
            for _, size, _ in missed.replay(self.buffer, every):
                total += size
        return param * missed.shrink - state[self.buffer] * total


@dataclass(frozen=True, kw_only=True)
class SignDrift(IdleUpdate):
    """By ``size`` in each step, along the sign of a buffer that decays but keeps its sign."""

    native: str = "sign_drift"
    has_total: ClassVar[bool] = True

    def move(self, param: Tensor, state: Mapping[str, Tensor], missed: MissedSteps) -> Tensor:
        """The sum of the sizes, along the sign."""
        # A buffer that is gone after one step has no sign from then on.
        drift = missed.total_size(first=None if missed.decays[self.buffer] else 1)
        return param * missed.shrink - state[self.buffer].sign() * drift

    def decay(self, name: str, old: Tensor, missed: MissedSteps, dtype: torch.dtype) -> Tensor:
        """The buffer never becomes zero, or it would lose its sign."""
        new = super().decay(name, old, missed, dtype)
        if name != self.buffer or not missed.decays[name]:
            return new
        least = _MIN_MAGNITUDE.get(dtype, torch.finfo(dtype).smallest_normal)
        return torch.where(new.abs() < least, old.sign() * least, new)

    def has_moved(self, missed: MissedSteps) -> Tensor:
        """Return where any step had a size."""
        return missed.total_size() != 0


@dataclass(frozen=True, kw_only=True)
class AdamDrift(IdleUpdate):
    """Adam's: ``size * buffer / (sqrt(square) / root + eps)`` in each step, where both decay.

    The sum over the steps depends on an entry through ``eps / (sqrt(square) * center + eps)``
    alone, a number between 0 and 1: it is a Chebyshev series in that number. Its coefficients are
    sums over the steps, and so is a bound on its error, the last of the sums. Rows for which that
    is too large are replayed step by step.
    """

    native: str = "quotient"
    terms: ClassVar[int] = 16
    num_sums: ClassVar[int] = terms + 1

    def root_decay(self, decays: Mapping[str, float]) -> float:
        """The factor by which the root of the square decays in a step."""
        return math.sqrt(decays.get(self.square, 1.0))

    def ratio(self, decays: Mapping[str, float]) -> float:
        """The buffer's, divided by the root's."""
        buffer, root = decays.get(self.buffer, 1.0), self.root_decay(decays)
        # A square that is gone at once leaves nothing to divide by.
        return buffer / root if root else math.inf if buffer else 0.0

    def move(self, param: Tensor, state: Mapping[str, Tensor], missed: MissedSteps) -> Tensor:
        """By the series where it is exact enough, else step by step."""
        buffer, root = state[self.buffer], state[self.square].sqrt()
        *series, error = missed.sums
        by_series = error <= missed.max_error * series[0].abs()
        by_series = (by_series & missed.converges).expand_as(buffer)
        divisor = root * missed.center + missed.eps
        x = torch.where(divisor > 0, 2 * missed.eps / divisor - 1, -1.0)
        move = buffer / divisor * _chebyshev(x, series)
        others = ~by_series & (buffer != 0)
        replayed = buffer * self._replay(root.expand_as(buffer), missed, others)
        move = torch.where(by_series, move, replayed)
        return param * missed.shrink - torch.where(buffer == 0, 0.0, move)

    def _replay(self, root: Tensor, missed: MissedSteps, where: Tensor) -> Tensor:
        """The sum of the moves of each entry, for a buffer of one, step by step."""
        total, decay = torch.zeros_like(root), self.root_decay(missed.decays)
        rows = where.any(dim=1).nonzero().squeeze(1)
        for step, size, divisor in missed.replay(self.buffer, rows):
            total[rows] += size / (root[rows] * decay**step / divisor + missed.eps)
        return total


@dataclass(frozen=True, kw_only=True)
class RecomputeFromState(IdleUpdate):
    """The parameter is a function of its state and the options: it is recomputed.

    It rests in steps whose learning rate is zero. Nothing decays, the parameter included.
    """

    formula: Callable[[Mapping[str, Tensor], Hyperparams], Tensor]  # of state by name, and options
    size: Callable[[int, Hyperparams], tuple[float, float]] = lambda step, hyperparams: (
        float(bool(hyperparams["lr"])),  # so their total counts the steps in which it did not rest
        1.0,
    )
    has_total: ClassVar[bool] = True
    recomputes: ClassVar[bool] = True

    def move(self, param: Tensor, state: Mapping[str, Tensor], missed: MissedSteps) -> Tensor:
        """Recompute, unless every step size was zero."""
        if not missed.hyperparams["lr"]:
            return param
        return torch.where(missed.total_size() == 0, param, self.formula(state, missed.hyperparams))

    def is_stale(self, missed: MissedSteps, before: Tensor, after: Tensor) -> Tensor:
        """Return where it differs by more than a rounding of bfloat16."""
        return ((after - before).abs() > after.abs() / 256).any(dim=1, keepdim=True)


def _chebyshev(x: Tensor, series: list[Tensor]) -> Tensor:
    """A Chebyshev series at points in [-1, 1], by Clenshaw's recurrence."""
    last = before = torch.zeros_like(x)
    for coefficient in reversed(series[1:]):
        last, before = coefficient + 2 * x * last - before, last
    return series[0] + x * last - before
