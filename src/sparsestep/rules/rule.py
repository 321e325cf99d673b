"""What a rule and an engine promise each other.

A *rule* is one update formula, a pure function of values to values in torch operations::

    update(param, grad, *state, step=..., **hyperparameters) -> (param, *state)

It never knows which layout it runs on. An *engine* runs it over the touched part of a parameter:
the reference engine calls ``update`` itself, the native engine runs the rule's C++ twin on the same
options. The two agree to the last places, so ``update`` is both the
oracle of the tests and the documentation of the native struct.

Maximizing and weight decay are no part of a rule. They mean the same for every one of them, so the
engines do them before the rule is called: the gradient changes its sign, gets ``l2`` times the
parameter added (coupled decay), and the parameter is multiplied by ``shrink`` (decoupled decay).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsestep.errors import InputError, message
from sparsestep.rules.idle import Motion


@dataclass(frozen=True)
class State:
    """One tensor that a rule keeps for each parameter.

    Attributes:
        name: its key in the optimizer's state, torch's name where torch has one.
        initial: the value that every element starts with, or the option that holds it.
        per_row: one number for each row of the parameter instead of one for each element. The rule
            then sees it as a column beside rows.
        dtype: where it is not that of the parameter's other state.
        int8: the code by which it may be stored as int8, see ``int8.py``; ``None`` where rounding
            that much would spoil the parameter.
        first: what is stored for the initial value, where that is not the value itself.
    """

    name: str
    initial: float | str = 0.0
    per_row: bool = False
    dtype: torch.dtype | None = None
    int8: Literal["signed", "unsigned"] | None = None
    first: Callable[[float], float] | None = None


# Graphs of torch.compile have no objects of ours in them, so they name a rule by its key.
rules_by_key: WeakValueDictionary[str, Rule] = WeakValueDictionary()
_numbers = itertools.count(2)


@dataclass(frozen=True)
class Rule:
    """An update formula.

    Attributes:
        name: names the native twin too.
        update: the formula.
        state: what it keeps, in the order in which ``update`` takes and returns it: first what it
            keeps per element, then what it keeps per row.
        is_native: whether the core has a twin of it, under the same name.
        motion: what it does where the gradient is zero, for ``semantics="dense"``; ``None`` for a
            rule that cannot say.
        counts: whether the number of a parameter's steps is part of its state, unlike in torch's
            SGD.
        recorded: the formula that is recorded and run as a program, where the core has no twin;
            ``None`` for a rule that is only ever called.
        key: its name, and a number where there is another of that name.
    """

    name: str
    update: Callable[..., Any]
    state: tuple[State, ...] = ()
    is_native: bool = False
    counts: bool = True
    motion: Motion | None = None
    recorded: Callable[..., Any] | None = None
    key: str = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        taken = self.name in rules_by_key
        object.__setattr__(self, "key", f"{self.name}#{next(_numbers)}" if taken else self.name)
        rules_by_key[self.key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @cached_property
    def hyperparameters(self) -> tuple[str, ...]:
        """The keyword arguments of ``update`` that a param group provides."""
        keywords = inspect.signature(self.update).parameters.values()
        return tuple(k.name for k in keywords if k.kind is k.KEYWORD_ONLY and k.name != "step")

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """Those of its state, in its order."""
        return tuple(spec.name for spec in self.state)

    @cached_property
    def takes_step(self) -> bool:
        """Whether ``update`` asks for the number of the step."""
        return "step" in inspect.signature(self.update).parameters

    def numbers(self, hyper: Mapping[str, Any]) -> tuple[float, ...]:
        """The options of ``update`` as the native twin takes them: in their order, pairs as two.

        Example:
            >>> def update(param, grad, *, lr, betas, nesterov): ...
            >>> Rule("mine", update).numbers({"lr": 0.1, "betas": (0.5, 0.75), "nesterov": True})
            (0.1, 0.5, 0.75, 1.0)
        """
        found: list[float] = []
        for name in self.hyperparameters:
            values = hyper[name] if name == "betas" else [hyper[name]]
            found += (float(value + 0.0) for value in values)  # text is no number
        return tuple(found)

    def new_values(
        self, old: list[Tensor], grad: Tensor, step: int, hyper: Mapping[str, Any]
    ) -> list[Tensor]:
        """Call ``update``, and refuse what does not fit the old values."""
        counted = {"step": step} if self.takes_step else {}
        new = self.update(old[0], grad, *old[1:], **counted, **hyper)
        given = [new] if isinstance(new, Tensor) else list(new)
        names = ["param", *(spec.name for spec in self.state)]
        if len(given) != len(old):
            wanted = ", ".join(names[: len(old)])
            requirement = f"rule {self.name!r} must return {len(old)} values: {wanted}"
            raise InputError(message(requirement, len(given)))
        for name, value, was in zip(names, given, old, strict=False):
            if not isinstance(value, Tensor) or value.shape != was.shape:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                requirement = (
                    f"rule {self.name!r} must return {name} in its shape, {tuple(was.shape)}"
                )
                raise InputError(message(requirement, got))
        return given

    @cached_property
    def by_row(self) -> bool:
        """Whether it has to see whole rows."""
        return any(spec.per_row for spec in self.state)
