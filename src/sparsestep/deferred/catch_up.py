"""Catch-up of deferred rows: native, and in torch operations as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._native import ext, isa
from sparsestep._process import uninterrupted
from sparsestep._torch import disable_compiler
from sparsestep.deferred.history import StepHistory
from sparsestep.engines.base import finish, reserve
from sparsestep.rules.rule import Rule

_IDLE_UPDATES = ext.idle_updates() if ext else []


def catch_up_native(
    history: StepHistory,
    rule: Rule,
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int | None:
    """Catch up rows, or all, in the core; ``last`` has the last step of each row.

    Parameter and state are real tensors. Returns the number of rows whose parameter was not
    current; ``None`` if the core declines and nothing has changed.
    """
    if torch.compiler.is_compiling():  # the core stays outside graphs
        found: int | None = _uncompiled(history, rule, last, param, state, rows)
        return found
    idle = history.idle_update
    if ext is None or not param.is_cpu or idle.native not in _IDLE_UPDATES:
        return None
    work = _work(history, rule, param)
    work.state = tuple(state)
    work.rows = None if rows is None else rows.contiguous()
    work.last, work.now, work.base = last, history.now, history.base
    done: tuple[int, int] | None = work.run(
        threads=torch.get_num_threads(), instruction_set=isa.index
    )
    if done is None:
        return None
    deferred, stale = done
    # A row's state may be deferred while its parameter is current.
    if stale or (deferred and (idle.recomputes or history.constraint is not None)):
        increment_version([param])
    return stale


def _work(history: StepHistory, rule: Rule, param: Tensor) -> Any:
    """Return a call of the core with the arguments that do not depend on rows."""
    assert ext is not None
    idle, names = history.idle_update, [spec.name for spec in rule.state]
    work = ext.CatchUp()
    work.idle_update = _IDLE_UPDATES.index(idle.native)
    work.param = param
    work.states_per_row = sum(spec.per_row for spec in rule.state)
    work.powers = tuple(map(history.powers.get, names))
    if idle.buffer:
        work.buffer = names.index(idle.buffer)
        work.buffer_decay = history.decays.get(idle.buffer, 1.0)
    if idle.square:
        work.square = names.index(idle.square)
        work.square_decay = history.decays.get(idle.square, 1.0)
    work.eps = history.eps
    work.max_error = history.max_error(param.dtype)
    work.converges = history.converges
    work.horizon = history.horizon
    work.inverse_decay, work.centers = history.inverse_decay, history.centers
    work.sizes, work.roots, work.sums = history.sizes, history.roots, history.sums
    work.constraint, work.single_steps = history.constraint, history.single_steps
    if idle.recomputes:
        work.options = rule.pack_hyperparams(history.hyperparams)
    return work


_uncompiled = disable_compiler(catch_up_native)


@torch.no_grad()
def catch_up_reference(
    history: StepHistory,
    rule: Rule,
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int:
    """Catch up in torch operations, in float64; arguments and result as ``catch_up_native``.

    A row's steps are looked up on the CPU, then moved to the parameter's device.
    """
    rows = torch.arange(len(last), device="cpu") if rows is None else rows.cpu().unique()
    old = last[rows].long()
    had_gradient = old >= 0
    since = torch.where(had_gradient, old, ~old) - history.base
    now = torch.where(had_gradient, history.now, ~history.now).to(torch.int32)
    set_last_step = partial(last.index_put_, (rows,), now)
    deferred = since < history.steps
    rows, since, had_gradient = rows[deferred], since[deferred], had_gradient[deferred]
    if not rows.numel() or not param.numel():
        set_last_step()
        return 0
    there = rows.to(param.device)
    before, *states = (t[there].double().reshape(len(there), -1) for t in (param, *state))
    names = [spec.name for spec in rule.state]
    idle, missed = history.idle_update, MissedSteps(history, since, had_gradient, param)
    move = _move if history.constraint is None else _move_constrained
    after, states, is_stale = move(missed, before, dict(zip(names, states, strict=True)), state)
    written = list(zip(state, states, strict=True))
    stale = int(is_stale.sum())
    # Else leave the parameter's version as it is.
    if stale or idle.recomputes or history.constraint is not None:
        written.append((param, after))
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
        """What a root is multiplied by, in about the middle of the steps."""
        return self._column(self.history.centers[self.since])

    def total_size(self, first: int | None = None) -> Tensor:
        """The sum of the sizes of the missed steps, or of the ``first`` few of them."""
        since = self.since
        end = self._until if first is None else since + first
        totals = self.history.sums[:, 0]
        return self._column((totals[end] - totals[since]) / self._latest)

    def what_is_left(self, name: str) -> Tensor:
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
