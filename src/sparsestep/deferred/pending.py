"""A parameter under dense semantics, before its step: its rows are brought up to date."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsestep.deferred.rows import RowClock
from sparsestep.engines.base import ParamUpdate
from sparsestep.errors import InputError, StaleWarning, warn_once
from sparsestep.grads import masks
from sparsestep.grads.indexed import check_positions

Clocks = dict[int, RowClock]  # by id of the parameter


class PendingCatchUps:
    """The catch-ups of one step: prepared and committed like an engine's updates.

    Args:
        clocks: the optimizer's.
        engine: as for a step.

    Attributes:
        new: what ``clocks`` does not hold yet, and has to when the step is done.
        calls: take note of the step; to be made in the end, for they remember how often parameters
            were written.
    """

    def __init__(self, clocks: Clocks, engine: str) -> None:
        self._clocks = clocks
        self._engine = engine
        self._pending: list[PendingCatchUp] = []
        self.new: list[tuple[int, RowClock]] = []
        self.calls: list[Callable[[], object]] = []

    def __bool__(self) -> bool:
        return bool(self._pending)

    def add(self, update: ParamUpdate, selection: masks.Selection | None) -> None:
        """Have the rows current that an update touches, before it is computed."""
        self._pending.append(PendingCatchUp(update, selection))

    def prepare(self) -> None:
        """Bring them up to date.

        Nothing changes its meaning by that: should the step not be done after all, rows are current
        that would have been so sooner or later.
        """
        stale = 0
        for pending in self._pending:
            stale += pending.prepare(self._clocks, self._engine)
            key, clock = id(pending.update.owner), pending.clock
            if clock is not None and self._clocks.get(key) is not clock:
                self.new.append((key, clock))
            self.calls += pending.calls
        if stale:
            warn_once(
                StaleWarning,
                "some rows that got a gradient were read before they were brought up to date "
                "(semantics='dense'). Call optimizer.track(model) once, or "
                "optimizer.catch_up(param, rows) before each lookup.",
            )

    def cancel(self) -> None:
        """The step is not done."""
        for pending in self._pending:
            pending.cancel()


class PendingCatchUp:
    """A parameter under dense semantics, before its step.

    Attributes:
        update: of the parameter.
        clock: what is known of its rows, once it is prepared.
        calls: take note of the step, once it is prepared.
    """

    def __init__(self, update: ParamUpdate, selection: masks.Selection | None) -> None:
        self.update = update
        self._selection = selection
        # As they are now: a mask makes the gradient smaller, and a first step makes state.
        self._positions, self._state = update.touched.positions, update.state
        self.clock: RowClock | None = None
        self.calls: tuple[Callable[[], object], ...] = ()
        self._stale = 0
        if self._positions is not None:
            check_positions(self._positions, self.rows)

    def prepare(self, clocks: Clocks, engine: str) -> int:
        """Bring the rows that the step touches up to date; returns how many were stale."""
        try:
            self.clock = clock = self._known(clocks, engine) or self._anew()
        except InputError as error:
            raise self.update.refuse(error) from None
        rows = None if self._positions is None else self._positions.reshape(-1)
        rows = clock.among if rows is None else clock.that_may_move(rows)
        try:
            stamp = clock.prepare_stamp(rows)
        except InputError as error:
            raise self.update.refuse(error) from None
        self.calls = (stamp, partial(clock.advance, self.update.settings, self.update.param))
        if rows is None or self._positions is None or (self._state is None and clock.rule.state):
            clock.busy = True
            stale = self._stale  # all are current, or nothing is kept yet, so nothing was missed
        else:
            real = rows_of(self.update.param, self._state or [])
            stale = clock.begin_step(*real, rows, engine=engine)
        clock.history.reserve()
        return stale

    def cancel(self) -> None:
        """The step is not done."""
        if self.clock is not None:
            self.clock.cancel_step()

    @property
    def rows(self) -> int:
        """How many it has."""
        shape = self.update.param.shape
        return shape[0] if shape else 1

    @property
    def _among(self) -> Tensor | None:
        return None if self._selection is None else self._selection.positions

    def _known(self, clocks: Clocks, engine: str) -> RowClock | None:
        """What is known of its rows; ``None`` where the parameter is new, or begins anew."""
        clock = clocks.get(id(self.update.owner))
        if clock is None or clock.owner is not self.update.owner or clock.rows != self.rows:
            return None  # the parameter was replaced
        # What was missed is made up for by the rule that was missed, with its own state.
        missed, among = clock.state_in(self.update.record), self._among
        if missed is None:
            return None
        other = not clock.is_under(self.update.settings)
        if other or clock.among is not among or clock.history.is_full or self._positions is None:
            stale = clock.catch_up_all(*rows_of(self.update.param, missed), engine=engine)
            if self._positions is None:  # a gradient for all rows, so all were read
                self._stale = stale
        if other:
            now, fresh = clock.history.now, clock.fresh
            clock = RowClock(self.update.settings, clock.rows, now, new=False)
            clock.stamp_all(now, fresh=fresh)
            clock.owner = self.update.owner
        clock.among = among
        return clock

    def _anew(self) -> RowClock:
        record, done = self.update.record, 0
        if record and "step" in record:
            done = self.update.steps_taken()
        # State that was made in advance has seen no gradient either.
        new = record is None or (self.update.settings.rule.counts and not done)
        clock = RowClock(self.update.settings, self.rows, done, new=new)
        clock.owner = self.update.owner
        clock.among = self._among
        return clock


def rows_of(param: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its state as real tensors whose first dim are the rows."""
    if param.dim() and not param.is_complex():
        return param, state

    def real(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return tensor if param.dim() else tensor.unsqueeze(0)

    return real(param), [real(tensor) for tensor in state]
