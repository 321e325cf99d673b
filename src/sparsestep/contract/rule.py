"""What a rule and an engine promise each other.

A *rule* is one update formula, a pure function of values to values in torch operations::

    update(param, grad, *state, step=..., **hyperparameters) -> (param, *state)

It never knows which layout it runs on. An *engine* runs it over the touched part of a parameter:
the reference engine calls ``update`` itself, the native engine runs the rule's C++ twin on the
numbers that ``coefficients`` gives. The two agree to the last places, so ``update`` is both the
oracle of the tests and the documentation of the native struct.

Maximizing and weight decay are no part of a rule. They mean the same for every one of them, so the
engines do them before the rule is called: the gradient changes its sign, gets ``l2`` times the
parameter added (coupled decay), and the parameter is multiplied by ``shrink`` (decoupled decay).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from sparsestep.contract.motion import Motion
from sparsestep.errors import InputError, sentence
from sparsestep.gradients.touched import Touched


@dataclass(frozen=True)
class State:
    """One tensor that a rule keeps for each parameter.

    Attributes:
        name: its key in the optimizer's state, torch's name where torch has one.
        initial: the value that every element starts with, or the option that holds it.
        per_row: one number for each row of the parameter instead of one for each element. The rule
            then sees it as a column beside rows.
        dtype: where it is not that of the parameter's other state.
    """

    name: str
    initial: float | str = 0.0
    per_row: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Rule:
    """An update formula.

    Attributes:
        name: names the native twin too.
        update: the formula.
        state: what it keeps, in the order in which ``update`` takes and returns it: first what it
            keeps per element, then what it keeps per row.
        coefficients: ``(step=..., **hyperparameters)`` to the numbers that the native twin takes,
            or ``None`` for a rule without a native twin.
        motion: what it does where the gradient is zero, for ``semantics="dense"``; ``None`` for a
            rule that cannot say.
        counts: whether the number of a parameter's steps is part of its state, unlike in torch's
            SGD.
    """

    name: str
    update: Callable[..., Any]
    state: tuple[State, ...] = ()
    coefficients: Callable[..., tuple[float, ...]] | None = None
    counts: bool = True
    motion: Motion | None = None

    @cached_property
    def hyperparameters(self) -> tuple[str, ...]:
        """The keyword arguments of ``update`` that a param group provides."""
        keywords = inspect.signature(self.update).parameters.values()
        return tuple(k.name for k in keywords if k.kind is k.KEYWORD_ONLY and k.name != "step")

    @cached_property
    def takes_step(self) -> bool:
        """Whether ``update`` asks for the number of the step."""
        return "step" in inspect.signature(self.update).parameters

    def new_values(
        self, old: list[Tensor], grad: Tensor, step: int, hyper: Mapping[str, Any]
    ) -> list[Tensor]:
        """Call ``update``, and refuse what does not fit the old values."""
        counted = {"step": step} if self.takes_step else {}
        new = self.update(old[0], grad, *old[1:], **counted, **hyper)
        given = [new] if isinstance(new, Tensor) else list(new)
        names = ["param", *(kept.name for kept in self.state)]
        if len(given) != len(old):
            contract = f"rule {self.name!r} must return {len(old)} values: {', '.join(names)}"
            raise InputError(sentence(contract, len(given)))
        for name, value, was in zip(names, given, old, strict=True):
            if not isinstance(value, Tensor) or value.shape != was.shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                contract = f"rule {self.name!r} must return {name} in its shape, {tuple(was.shape)}"
                raise InputError(sentence(contract, got))
        return given

    @cached_property
    def by_row(self) -> bool:
        """Whether it has to see whole rows."""
        return any(kept.per_row for kept in self.state)


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
        seed: of stochastic rounding; ``None`` to round to nearest.
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
    who: Callable[[int], str]
    uses_torch: bool = False
    core: dict[Any, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Update:
    """A rule about to be applied to one parameter, everything checked but the positions.

    Attributes:
        settings: those of its param group.
        index: the parameter's number in its group.
        param: written in place; a complex parameter is seen as pairs of real numbers.
        touched: its gradient.
        state: the rule's state tensors, written in place.
        step: the number of this update, from 1.
        seed: of this update's stochastic rounding.
        owner: the parameter as the optimizer has it.
    """

    settings: Settings
    index: int
    param: Tensor
    touched: Touched
    state: list[Tensor]
    step: int
    seed: int | None
    owner: Tensor

    def refuse(self, why: object) -> InputError:
        """The error that names the parameter."""
        return InputError(f"{self.settings.who(self.index)}: {why}")


@dataclass(slots=True)
class Batch:
    """Dense gradients of one param group, for torch's own kernel.

    Attributes:
        group: the param group, as the user may change it.
        params: written in place.
        grads: one for each parameter.
        state: lists of state tensors by name; ``None`` where the kernel makes the tensor itself.
        steps: step counts, which the kernel advances.
    """

    group: Mapping[str, Any]
    params: list[Tensor]
    grads: list[Tensor]
    state: dict[str, list[Any]]
    steps: list[Tensor]

    @property
    def has_complex(self) -> bool:
        """Whether any parameter is complex."""
        return any(param.is_complex() for param in self.params)
