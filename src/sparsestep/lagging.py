"""A parameter under dense semantics, before its step: its rows are brought up to date."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sparsestep import masks
from sparsestep.catch_up import Idling
from sparsestep.contract import Settings
from sparsestep.grads import check_positions

if TYPE_CHECKING:
    from sparsestep.optimizer import RuleOptimizer


@dataclass(slots=True)
class Lagging:
    """A parameter under dense semantics, before its step.

    Attributes:
        owner: the parameter as the optimizer has it.
        param: its memory.
        positions: the rows that its gradient holds; ``None`` for all.
        kept: the optimizer's record of its state; ``None`` before the first step.
        tensors: the state tensors; ``None`` before the first step.
        settings: those of its param group.
        selection: what a mask selects.
        idling: what is known of its rows, once it is prepared.
    """

    owner: Tensor
    param: Tensor
    positions: Tensor | None
    kept: dict[str, Any] | None
    tensors: list[Tensor] | None
    settings: Settings
    selection: masks.Selection | None
    idling: Idling | None = None
    _stale: int = 0

    def __post_init__(self) -> None:
        if self.positions is not None:
            check_positions(self.positions, self.rows)

    def prepare(self, optimizer: RuleOptimizer) -> int:
        """Bring the rows that the step touches up to date; returns how many were stale.

        Nothing changes its meaning by that: should the step not be done after all, rows are current
        that would have been so sooner or later.
        """
        self.idling = idling = self._known(optimizer) or self._anew()
        if self.positions is None or (self.tensors is None and idling.rule.state):
            idling.busy = True
            return self._stale  # all are current, or nothing is kept yet, so nothing was missed
        rows = idling.that_may_move(self.positions.reshape(-1))
        real = rows_of(self.param, self.tensors or [])
        return idling.begin_step(*real, rows, engine=optimizer.engine)

    def cancel(self) -> None:
        """The step is not done."""
        if self.idling is not None:
            self.idling.cancel_step()

    def commit(self, optimizer: RuleOptimizer) -> None:
        """Take note of the step that was just done."""
        idling = self.idling
        assert idling is not None
        if self.positions is None:
            idling.stamp(idling.among)
        else:
            idling.stamp(idling.that_may_move(self.positions.reshape(-1)))
        idling.advance(self.settings, self.param)
        optimizer.idle[id(self.owner)] = idling

    @property
    def rows(self) -> int:
        """How many it has."""
        shape = self.param.shape
        return shape[0] if shape else 1

    @property
    def _among(self) -> Tensor | None:
        return None if self.selection is None else self.selection.positions

    def _known(self, optimizer: RuleOptimizer) -> Idling | None:
        """What is known of its rows; ``None`` where the parameter is new, or begins anew."""
        idling = optimizer.idle.get(id(self.owner))
        if idling is None or idling.owner is not self.owner or idling.rows != self.rows:
            return None  # the parameter was replaced
        # What was missed is made up for by the rule that was missed, with its own state.
        missed, among = idling.state_in(self.kept), self._among
        if missed is None:
            return None
        other = not idling.is_under(self.settings)
        if other or idling.among is not among or idling.history.is_full or self.positions is None:
            stale = idling.bring_all(*rows_of(self.param, missed), engine=optimizer.engine)
            if self.positions is None:  # a gradient for all rows, so all were read
                self._stale = stale
        if other:
            now, fresh = idling.history.now, idling.fresh
            idling = Idling(self.settings, idling.rows, now, new=False)
            idling.stamp_all(now, fresh=fresh)
            idling.owner = self.owner
        idling.among = among
        return idling

    def _anew(self) -> Idling:
        kept = self.kept
        done = int(kept.get("step", 0)) if kept else 0
        # State that was made in advance has seen no gradient either.
        new = kept is None or (self.settings.rule.counts and not done)
        idling = Idling(self.settings, self.rows, done, new=new)
        idling.owner = self.owner
        idling.among = self._among
        return idling


def rows_of(param: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its state as real tensors whose first dim are the rows."""
    if param.dim() and not param.is_complex():
        return param, state

    def real(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return tensor if param.dim() else tensor.unsqueeze(0)

    return real(param), [real(tensor) for tensor in state]
