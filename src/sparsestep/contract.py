"""What a rule and an engine promise each other.

A *rule* is one update formula, a pure function of values to values in torch operations::

    update(param, grad, *state, step=..., **hyperparameters) -> (param, *state)

It never knows which layout it runs on. An *engine* runs it over the touched part of a parameter:
the reference engine calls ``update`` itself, the native engine runs the rule's C++ twin on the
numbers that ``coefficients`` gives. The two agree bit for bit, so ``update`` is both the oracle of
the tests and the documentation of the native struct.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from sparsestep.grads import Touched


@dataclass(frozen=True)
class State:
    """One tensor that a rule keeps for each parameter, in the parameter's shape.

    Attributes:
        name: its key in the optimizer's state, torch's name where torch has one.
        initial: the value that every element starts with.
    """

    name: str
    initial: float = 0.0


@dataclass(frozen=True)
class Rule:
    """An update formula.

    Attributes:
        name: names the native twin too.
        update: the formula.
        state: what it keeps, in the order in which ``update`` takes and returns it.
        coefficients: ``(step=..., **hyperparameters)`` to the numbers that the native twin takes,
            or ``None`` for a rule without a native twin.
    """

    name: str
    update: Callable[..., tuple[Tensor, ...]]
    state: tuple[State, ...]
    coefficients: Callable[..., tuple[float, ...]] | None = None

    @cached_property
    def hyperparameters(self) -> tuple[str, ...]:
        """The keyword arguments of ``update`` that a param group provides."""
        keywords = inspect.signature(self.update).parameters.values()
        return tuple(k.name for k in keywords if k.kind is k.KEYWORD_ONLY and k.name != "step")


@dataclass(slots=True)
class Update:
    """A rule about to be applied to one parameter, everything checked but the positions.

    Attributes:
        rule: the formula.
        param: the parameter, written in place.
        touched: its gradient.
        state: the rule's state tensors, written in place.
        step: the number of this update, from 1.
        hyper: the formula's other keyword arguments.
        maximize: go along the gradient instead of against it.
        who: names the parameter in messages.
        kept: the optimizer's own record of the state; ``None`` before the first step.
    """

    rule: Rule
    param: Tensor
    touched: Touched
    state: list[Tensor]
    step: int
    hyper: Mapping[str, Any]
    maximize: bool
    who: Callable[[], str]
    kept: dict[str, Any] | None = None
