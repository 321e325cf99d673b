"""Rules: update formulas, pure functions of values to values in torch operations.

    update(param, grad, *state, step=..., **hyperparams) -> (param, *state)

A rule never sees a layout. Engines run it over the updated part of a parameter: the reference
engine calls ``update`` itself, the native engine runs the C++ kernel of the same name, or the
traced formula. The results agree to the last places, so ``update`` is both the oracle of the tests
and the documentation of the kernel.

Maximizing and weight decay are not part of a rule. Engines apply them to every rule alike, before
it is called: they negate the gradient, add ``coupled_decay`` times the parameter to it, and
multiply the parameter by ``decay_factor`` (decoupled decay).
"""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from sparsestep.errors import InputError, counted, message
from sparsestep.rules.idle import IdleUpdate


@dataclass(frozen=True)
class StateSpec:
    """One state tensor of a rule."""

    name: str  # its key in ``optimizer.state``, torch's name if torch has one
    initial: float | str = 0.0  # of every element, or the option that has it
    per_row: bool = False  # one value per row, not per element: the rule sees a column beside rows
    dtype: torch.dtype | None = None  # if it differs from the parameter's other state
    # How it may be stored as int8, see ``int8.py``; None if the rounding would harm training.
    int8_format: Literal["signed", "unsigned"] | None = None
    encode_initial: Callable[[float], float] | None = None  # to the stored value, if it differs


def fits_float32(value: float) -> bool:
    """Whether float32 can hold a number; it can hold infinity and NaN."""
    return not math.inf > abs(value) > torch.finfo(torch.float32).max


# Graphs of torch.compile hold no Python objects, so they name a rule by its key.
rules_by_key: WeakValueDictionary[str, Rule] = WeakValueDictionary()
_serial = itertools.count(2)


@dataclass(frozen=True)
class Rule:
    """An update formula."""

    name: str  # that of its native kernel, too
    update: Callable[..., Any]
    state: tuple[StateSpec, ...] = ()  # in the order of ``update``: per element, then per row
    has_native_kernel: bool = False
    counts_steps: bool = True  # whether the state has a ``step`` entry; torch's SGD has none
    idle_update: IdleUpdate | None = None  # without a gradient, for ``semantics="dense"``
    traceable_update: Callable[..., Any] | None = None  # traced if there is no kernel
    key: str = field(init=False, repr=False, compare=False)  # the name, numbered if it is taken

    def __post_init__(self) -> None:
        taken = self.name in rules_by_key
        object.__setattr__(self, "key", f"{self.name}#{next(_serial)}" if taken else self.name)
        rules_by_key[self.key] = self

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    @cached_property
    def hyperparam_names(self) -> tuple[str, ...]:
        """Keyword arguments of ``update`` that a param group provides."""
        keywords = inspect.signature(self.update).parameters.values()
        return tuple(k.name for k in keywords if k.kind is k.KEYWORD_ONLY and k.name != "step")

    @cached_property
    def state_names(self) -> tuple[str, ...]:
        """Names of the state tensors, in order."""
        return tuple(spec.name for spec in self.state)

    @cached_property
    def takes_step(self) -> bool:
        """Whether ``update`` takes the step number."""
        return "step" in inspect.signature(self.update).parameters

    def pack_hyperparams(self, hyperparams: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the options of ``update`` as the native kernel takes them: in order, flat."""
        found: list[float] = []
        for name in self.hyperparam_names:
            values = hyperparams[name] if name == "betas" else [hyperparams[name]]
            found += (float(value + 0.0) for value in values)  # text is no number
        return tuple(found)

    def apply(
        self, old: list[Tensor], grad: Tensor, step: int, hyperparams: Mapping[str, Any]
    ) -> list[Tensor]:
        """Call ``update``, and refuse results that do not match the old values."""
        count = {"step": step} if self.takes_step else {}
        new = self.update(old[0], grad, *old[1:], **count, **hyperparams)
        given = [new] if isinstance(new, Tensor) else list(new)
        names = ["param", *self.state_names]
        if len(given) != len(old):
            wanted = ", ".join(names[: len(old)])
            requirement = f"rule {self.name!r} must return {counted(len(old), 'value')}: {wanted}"
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
    def needs_whole_rows(self) -> bool:
        """Whether ``update`` needs whole rows: it has state per row."""
        return any(spec.per_row for spec in self.state)
