"""What an engine is and what it is given: updates are claimed, prepared, committed.

An engine *claims* the updates that it can do. It *prepares* them: whatever may raise does so here,
for all engines, and nothing is written yet. Then it *commits*, and nothing may raise. So a step
that raises has changed nothing: that is the shape of the code and no special care of anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from sparsestep.engines.rounding import Dealt
from sparsestep.errors import InputError, message, usable
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import Gradient
from sparsestep.rules.rule import Rule


@dataclass(slots=True)
class Settings:
    """What a param group says about its updates, in this step.

    Attributes:
        rule: the formula.
        hyper: the formula's keyword arguments but for the step.
        sign: -1.0 to maximize, else 1.0.
        l2: coupled weight decay.
        shrink: what decoupled weight decay leaves of a parameter; 1.0 without.
        state_dtype: the dtype of new state; ``None`` for that of the parameter, at least float32.
        seed: of random rounding; ``None`` to round to nearest.
        stochastic: whether half precision is rounded at random; int8 always is.
        who: names a parameter of the group, by its number, in messages.
        uses_torch: whether torch's own kernel does what is asked for, where gradients are dense.
        core: what the native engine keeps beside it.
    """

    rule: Rule
    hyper: dict[str, Any]
    sign: float
    l2: float
    shrink: float
    state_dtype: torch.dtype | None
    seed: int | None
    stochastic: bool
    who: Callable[[int], str]
    uses_torch: bool = False
    core: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class ParamUpdate:
    """One parameter's update in this step, everything checked but the positions.

    Attributes:
        settings: those of its param group.
        group: the param group, as the user may change it.
        index: the parameter's number in its group.
        owner: the parameter as the optimizer has it.
        param: its memory.
        grad: its gradient as it was given.
        touched: the same in the one form that engines know.
        record: what the optimizer keeps for it; ``None`` before the first step.
        state: the rule's state tensors; ``None`` before there are any.
        written: the parameter and its state as real numbers, which engines write in place.
        step: the number of this update, counted from 1.
        seed: of this update's stochastic rounding.
        engine: the name of the one that has claimed it.
        reason: why that is not the native one.
        dealt: which rows of a whole these are, for their random bits, where others have the rest.
    """

    settings: Settings
    group: dict[str, Any]
    index: int
    owner: Tensor
    param: Tensor
    grad: Gradient
    touched: IndexedGrad
    record: dict[str, Any] | None = None
    state: list[Tensor] | None = None
    written: list[Tensor] = field(default_factory=list)
    step: int = 1
    seed: int | None = None
    engine: str = ""
    reason: str = ""
    dealt: Dealt | None = None

    def steps_taken(self) -> int:
        """How many steps its record says were taken; 1 where a record does not count them."""
        if self.record is None:
            return 0
        requirement = "the state's 'step' must be the number of steps taken"
        with usable(requirement):
            taken = int(self.record.get("step", 1))
        if taken < 0:
            raise InputError(message(requirement, taken))
        return taken

    def refuse(self, why: object) -> InputError:
        """The error that names the parameter."""
        error = type(why) if isinstance(why, InputError) else InputError
        return error(f"{self.settings.who(self.index)}: {why}")


class Engine(Protocol):
    """Runs rules over the touched parts of parameters."""

    def claim(self, update: ParamUpdate) -> bool:
        """Take an update; false, and nothing taken, where this engine has no way to do it."""
        ...

    def prepare(self) -> None:
        """Do all that may raise, and write nothing."""
        ...

    def commit(self) -> None:
        """Write; nothing can fail."""
        ...
