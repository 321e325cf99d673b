"""A parameter under dense semantics, before its step: its rows are brought up to date."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract.rule import Settings
from sparsestep.dense.clock import RowClock
from sparsestep.gradients import masks
from sparsestep.gradients.touched import check_positions

Clocks = dict[int, RowClock]  # by id of the parameter


@dataclass(slots=True)
class PendingCatchUp:
    """A parameter under dense semantics, before its step.

    Attributes:
        owner: the parameter as the optimizer has it.
        param: its memory.
        positions: the rows that its gradient holds; ``None`` for all.
        kept: the optimizer's record of its state; ``None`` before the first step.
        tensors: the state tensors; ``None`` before the first step.
        settings: those of its param group.
        selection: what a mask selects.
        clock: what is known of its rows, once it is prepared.
    """

    owner: Tensor
    param: Tensor
    positions: Tensor | None
    kept: dict[str, Any] | None
    tensors: list[Tensor] | None
    settings: Settings
    selection: masks.Selection | None
    clock: RowClock | None = None
    _stale: int = 0

    def __post_init__(self) -> None:
        if self.positions is not None:
            check_positions(self.positions, self.rows)

    def prepare(self, clocks: Clocks, engine: str) -> int:
        """Bring the rows that the step touches up to date; returns how many were stale.

        Nothing changes its meaning by that: should the step not be done after all, rows are current
        that would have been so sooner or later.
        """
        self.clock = clock = self._known(clocks, engine) or self._anew()
        if self.positions is None or (self.tensors is None and clock.rule.state):
            clock.busy = True
            return self._stale  # all are current, or nothing is kept yet, so nothing was missed
        rows = clock.that_may_move(self.positions.reshape(-1))
        real = rows_of(self.param, self.tensors or [])
        return clock.begin_step(*real, rows, engine=engine)

    def cancel(self) -> None:
        """The step is not done."""
        if self.clock is not None:
            self.clock.cancel_step()

    def commit(self, clocks: Clocks) -> None:
        """Take note of the step that was just done."""
        clock = self.clock
        assert clock is not None
        if self.positions is None:
            clock.stamp(clock.among)
        else:
            clock.stamp(clock.that_may_move(self.positions.reshape(-1)))
        clock.advance(self.settings, self.param)
        clocks[id(self.owner)] = clock

    @property
    def rows(self) -> int:
        """How many it has."""
        shape = self.param.shape
        return shape[0] if shape else 1

    @property
    def _among(self) -> Tensor | None:
        return None if self.selection is None else self.selection.positions

    def _known(self, clocks: Clocks, engine: str) -> RowClock | None:
        """What is known of its rows; ``None`` where the parameter is new, or begins anew."""
        clock = clocks.get(id(self.owner))
        if clock is None or clock.owner is not self.owner or clock.rows != self.rows:
            return None  # the parameter was replaced
        # What was missed is made up for by the rule that was missed, with its own state.
        missed, among = clock.state_in(self.kept), self._among
        if missed is None:
            return None
        other = not clock.is_under(self.settings)
        if other or clock.among is not among or clock.history.is_full or self.positions is None:
            stale = clock.catch_up_all(*rows_of(self.param, missed), engine=engine)
            if self.positions is None:  # a gradient for all rows, so all were read
                self._stale = stale
        if other:
            now, fresh = clock.history.now, clock.fresh
            clock = RowClock(self.settings, clock.rows, now, new=False)
            clock.stamp_all(now, fresh=fresh)
            clock.owner = self.owner
        clock.among = among
        return clock

    def _anew(self) -> RowClock:
        kept = self.kept
        done = int(kept.get("step", 0)) if kept else 0
        # State that was made in advance has seen no gradient either.
        new = kept is None or (self.settings.rule.counts and not done)
        clock = RowClock(self.settings, self.rows, done, new=new)
        clock.owner = self.owner
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
