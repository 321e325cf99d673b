"""The past steps of an optimizer, and how rows catch up with the steps that they missed.

``StepHistory`` has sums over past steps, in float64, that serve all entries of all rows, however
long they were idle: the README of this folder derives them. ``catch_up_native`` and, as its
reference, ``catch_up_reference`` apply them to rows.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._native import ext, isa
from sparsestep._process import uninterrupted
from sparsestep._torch import disable_compiler
from sparsestep.engines.base import finish, reserve
from sparsestep.rules.idle import AdamDrift, IdleUpdate, SignDrift
from sparsestep.rules.options import RowConstraint
from sparsestep.rules.rule import Rule

if TYPE_CHECKING:
    from sparsestep.deferred.rows import DeferredRows

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

    @torch.inference_mode(False)  # later steps write to it
    def _reserve(self, capacity: int) -> None:
        # An array: writing single numbers to a tensor is slow.
        numbers = array("d", [0.0]) * ((4 + self.idle_update.num_sums) * capacity)
        memory = torch.frombuffer(numbers, dtype=torch.float64)
        tables, sums = memory[: 4 * capacity].view(4, -1), memory[4 * capacity :].view(capacity, -1)
        tables[:, : self._tables.shape[1]] = self._tables
        sums[: len(self.sums)] = self.sums
        by_factor = {factor: _powers(factor, capacity) for factor in set(self.decays.values())}
        powers = {name: by_factor[factor] for name, factor in self.decays.items()}
        by_step = tables.unbind()  # nothing below can fail
        self.capacity, self._numbers, self._tables = capacity, numbers, tables
        self.inverse_decay, self.sizes, self.roots, self.centers = by_step
        self.sums, self.powers = sums, powers
        self._native_call: Any = None  # whose tables have moved

    def native_call(self, rule: Rule) -> Any:
        """The core's view of the steps, for catch-ups of parameters with this rule."""
        if self._native_call is None:
            assert ext is not None
            idle, names = self.idle_update, rule.state_names
            call = self._native_call = ext.CatchUp()
            call.idle_update = _IDLE_UPDATES.index(idle.native)
            call.states_per_row = sum(spec.per_row for spec in rule.state)
            call.powers = tuple(map(self.powers.get, names))
            if idle.buffer:
                call.buffer = names.index(idle.buffer)
                call.buffer_decay = self.decays.get(idle.buffer, 1.0)
            if idle.square:
                call.square = names.index(idle.square)
                call.square_decay = self.decays.get(idle.square, 1.0)
            call.eps, call.converges, call.horizon = self.eps, self.converges, self.horizon
            call.inverse_decay, call.centers = self.inverse_decay, self.centers
            call.sizes, call.roots, call.sums = self.sizes, self.roots, self.sums
            call.constraint, call.single_steps = self.constraint, self.single_steps
        return self._native_call

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
        """Drop all steps; every row has reached ``now``. Atomic."""
        first, count = 4 * self.capacity, (self.steps + 1) * self.idle_update.num_sums
        self._numbers[first : first + count] = array("d", bytes(8 * count))
        vars(self).update(base=self.now, steps=0, latest_inverse_decay=1.0)

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
        """Append a step, with its weight decay factor ``shrink``. Atomic.

        ``middle`` is the root ``center_lag`` steps after the step before. It affects only the
        accuracy of the sums.
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


# Catching up

_IDLE_UPDATES = ext.idle_updates() if ext else []


def catch_up_native(
    deferred: DeferredRows, param: Tensor, state: list[Tensor], rows: Tensor | None
) -> int | None:
    """Catch up rows, or all, in the core.

    Parameter and state are real tensors. Returns the number of rows whose parameter was not
    current; ``None`` if the core declines and nothing has changed.
    """
    if torch.compiler.is_dynamo_compiling():  # the core stays outside graphs
        return cast("int | None", _uncompiled(deferred, param, state, rows))
    history, rule, idle = deferred.history, deferred.rule, deferred.history.idle_update
    if ext is None or not param.is_cpu or idle.native not in _IDLE_UPDATES:
        return None
    call = history.native_call(rule)
    if idle.recomputes:
        call.options = rule.pack_hyperparams(history.hyperparams)
    done = call.run(
        param,
        tuple(state),
        None if rows is None else rows.contiguous(),
        deferred.stored_steps,
        deferred.initial_step,
        history.now,
        history.base,
        history.max_error(param.dtype),
        torch.get_num_threads(),
        isa.index,
    )
    if done is None:
        return None
    caught_up, stale = done
    # A row's state may be deferred while its parameter is current.
    if stale or (caught_up and (idle.recomputes or history.constraint is not None)):
        increment_version([param])
    return int(stale)


_uncompiled = disable_compiler(catch_up_native)


@torch.no_grad()
def catch_up_reference(
    deferred: DeferredRows, param: Tensor, state: list[Tensor], rows: Tensor | None
) -> int:
    """Catch up in torch operations, in float64; arguments and result as ``catch_up_native``."""
    history, stored, initial = deferred.history, deferred.stored_steps, deferred.initial_step
    rows = torch.arange(len(stored), device="cpu") if rows is None else rows.cpu().unique()
    old = stored[rows].long() ^ initial
    had_gradient = old >= 0
    since = torch.where(had_gradient, old, ~old) - history.base
    now = torch.where(had_gradient, history.now, ~history.now).to(torch.int32)
    set_last_step = partial(stored.index_put_, (rows,), now ^ initial)
    is_deferred = since < history.steps
    rows, since, had_gradient = rows[is_deferred], since[is_deferred], had_gradient[is_deferred]
    if not rows.numel() or not param.numel():
        set_last_step()
        return 0
    there = rows.to(param.device)
    before, *states = (t[there].double().reshape(len(there), -1) for t in (param, *state))
    idle, missed = history.idle_update, MissedSteps(history, since, had_gradient, param)
    move = _move if history.constraint is None else _move_constrained
    old_states = dict(zip(deferred.rule.state_names, states, strict=True))
    after, states, is_stale = move(missed, before, old_states, state)
    written, stale = [*zip(state, states, strict=True), (param, after)], int(is_stale.sum())
    if not stale and not idle.recomputes and history.constraint is None:
        written.pop()  # the parameter keeps its version
    calls: list[Callable[[], object]] = []
    for tensor, new in written:
        new = new.to(tensor.dtype).reshape(len(there), *tensor.shape[1:])
        calls.append(partial(tensor.detach().index_put_, (there,), new))
    reserve()
    uninterrupted(partial(finish, [*calls, set_last_step]))
    return stale


Moved = tuple[Tensor, list[Tensor], Tensor]  # parameter, state, which rows were stale


def _move(
    missed: MissedSteps, param: Tensor, states: dict[str, Tensor], stored: Sequence[Tensor]
) -> Moved:
    """Take all steps at once; parameter and states are in float64, to be stored as others."""
    idle = missed.history.idle_update
    after = idle.move(param, states, missed)
    decayed = [
        idle.decay(name, old, missed, tensor.dtype)
        for (name, old), tensor in zip(states.items(), stored, strict=True)
    ]
    return after, decayed, idle.is_stale(missed, param, after).flatten()


def _move_constrained(
    missed: MissedSteps, param: Tensor, states: dict[str, Tensor], stored: Sequence[Tensor]
) -> Moved:
    """Take steps one by one, each with the constraint, as long as they turn a row."""
    history, names = missed.history, list(states)
    constraint, buffer = history.constraint, states.get(history.idle_update.buffer)
    assert constraint is not None
    single_steps = torch.ones_like(missed.since)
    if buffer is not None:  # else there is nothing to move along
        single_steps[buffer.cpu().any(dim=1)] = history.single_steps
    new = [param.clone(), *(state.clone() for state in states.values())]
    stale = torch.zeros(len(param), dtype=torch.bool, device=param.device)
    since, taken = missed.since, 0
    while (rows := (since < history.steps).nonzero().squeeze(1)).numel():
        until = torch.where(taken < single_steps, since + 1, history.steps)
        part, since, taken = missed.between(since, until, rows), until, taken + 1
        rows = rows.to(param.device)
        before, *old = (values[rows] for values in new)
        after, decayed, is_stale = _move(part, before, dict(zip(names, old, strict=True)), stored)
        after = constraint.apply(after)
        is_far = (after - before).abs() > after.abs() / 256  # more than a rounding, of bfloat16
        stale[rows] |= is_stale | is_far.any(dim=1)
        for values, changed in zip(new, (after, *decayed), strict=True):
            values[rows] = changed
    return new[0], new[1:], stale


class MissedSteps:
    """The steps that some rows missed, as the argument of an idle update (``rules/idle.py``).

    ``since`` has the last step of each row, counted from the history's base, and ``until`` the step
    that it is brought to, by default the latest; both and ``had_gradient`` are on the CPU.
    """

    def __init__(
        self,
        history: StepHistory,
        since: Tensor,
        had_gradient: Tensor,
        param: Tensor,
        until: Tensor | None = None,
    ) -> None:
        self.history = history
        self.since = since
        self._until = torch.full_like(since, history.steps) if until is None else until
        self._had_gradient = had_gradient
        self._param = param
        self._latest = history.inverse_decay[self._until]
        self.hyperparams: Mapping[str, Any] = history.hyperparams
        self.decays: Mapping[str, float] = history.decays
        self.eps: float = history.eps
        # Sums go to the latest step.
        has_sums = until is None or bool((until == history.steps).all())
        self.converges: bool = history.converges and has_sums
        self.max_error: float = history.max_error(param.dtype)

    def between(self, since: Tensor, until: Tensor, rows: Tensor) -> MissedSteps:
        """A part of the steps, of some rows."""
        had_gradient = self._had_gradient[rows]
        return MissedSteps(self.history, since[rows], had_gradient, self._param, until[rows])

    def _column(self, of_rows: Tensor) -> Tensor:
        """Values per row as a column, on the parameter's device."""
        return of_rows.to(self._param.device)[..., None]

    @cached_property
    def shrink(self) -> Tensor:
        """The product of the weight decay factors."""
        return self._column(self.history.inverse_decay[self.since] / self._latest)

    @property
    def had_gradient(self) -> Tensor:
        """Which rows ever had a gradient."""
        return self._column(self._had_gradient)

    @cached_property
    def sums(self) -> Tensor:
        """The sum over the missed steps of each term of the idle update's series."""
        return self._column(self.history.sums[self.since].T / self._latest)

    @property
    def center(self) -> Tensor:
        """The factor of a root in about the middle of the steps."""
        return self._column(self.history.centers[self.since])

    def total_size(self, first: int | None = None) -> Tensor:
        """The sum of the sizes of the missed steps, or of the ``first`` few of them."""
        since = self.since
        end = self._until if first is None else since + first
        totals = self.history.sums[:, 0]
        return self._column((totals[end] - totals[since]) / self._latest)

    def total_decay(self, name: str) -> Tensor:
        """The product of a state's decay factors."""
        return self._column(self.history.powers[name][self._until - self.since])

    def replay(self, buffer: str, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the steps of some rows one by one, within the horizon."""
        history, rows = self.history, rows.cpu()
        since, until, latest = self.since[rows], self._until[rows], self._latest[rows]
        if not since.numel():
            return
        decay = history.powers.get(buffer)
        for k in range(1, min(history.horizon, int((until - since).max())) + 1):
            step = since + k
            was_taken = step <= until
            step = torch.minimum(step, until)
            size = history.sizes[step] * history.inverse_decay[step] / latest
            size = torch.where(was_taken, size if decay is None else size * decay[k], 0.0)
            yield k, self._column(size), self._column(history.roots[step])
