"""The input of engines: updates, which they claim, prepare and commit.

An engine *claims* the updates that it can run. It *prepares* them: everything that can raise,
raises here, for all engines, before anything is written. Then it *commits*. Atomicity follows from
the phases: only commit writes, and commit cannot raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import methodcaller
from typing import Any, TypeVar

import torch
from torch import Tensor

from sparsestep.engines.rounding import RowStride
from sparsestep.errors import InputError, message, usable
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import Gradient
from sparsestep.grads.masks import PackedMask
from sparsestep.rules.options import RowConstraint
from sparsestep.rules.rule import Rule

Result = TypeVar("Result")
Subject = TypeVar("Subject")


@dataclass(slots=True)
class GroupSettings:
    """The options of a param group in this step."""

    rule: Rule
    hyperparams: dict[str, Any]  # the rule's keyword arguments except ``step``
    grad_sign: float  # -1.0 to maximize, else 1.0
    coupled_decay: float  # weight decay that is added to the gradient
    decay_factor: float  # of the parameter, under decoupled weight decay; 1.0 without
    state_dtype: torch.dtype | None  # of new state; None: the parameter's, at least float32
    seed: int | None  # of stochastic rounding; None: round to nearest
    stochastic_rounding: bool  # of half precision; int8 is always rounded stochastically
    describe_param: Callable[[int], str]  # names a parameter, by its index, in messages
    has_torch_kernel: bool = False  # whether torch's own kernel supports the options
    wants_torch_kernel: bool = False  # whether an option asks for it: ``foreach``, ``fused``, ...
    vectors: GroupSettings | None = None  # of parameters without rows, if these have others
    core: dict[Any, Any] = field(default_factory=dict)  # caches of engines
    elementwise: GroupSettings | None = None  # of dense gradients, if these have others
    constraint: RowConstraint | None = None  # of the norm of updated rows

    def for_param(self, param: Tensor) -> GroupSettings:
        """Return the options of a parameter of the group."""
        return self if self.vectors is None or param.dim() > 1 else self.vectors

    @property
    def needs_whole_rows(self) -> bool:
        """Whether updates need whole rows: for state per row, or their norm."""
        return self.rule.needs_whole_rows or self.constraint is not None


@dataclass(slots=True)
class ParamUpdate:
    """One parameter's update in this step, checked except for the indices."""

    settings: GroupSettings
    group: dict[str, Any]
    index: int  # of the parameter in its group
    key: Tensor  # indexes ``optimizer.state``
    param: Tensor  # holds the values; another tensor than ``key`` for a DTensor
    grad: Gradient  # as given
    indexed: IndexedGrad  # in canonical form
    param_state: dict[str, Any] | None = None  # in ``optimizer.state``; None before the first step
    state: list[Tensor] | None = None  # the rule's; None before it exists
    targets: list[Tensor] = field(default_factory=list)  # parameter and state as real tensors
    step: int = 1  # the number of this update
    seed: int | None = None  # of this update's stochastic rounding
    engine: str = ""  # that has claimed it
    fallback_reason: str = ""  # why that is not the native one
    row_stride: RowStride | None = None  # rows of a shard in its table, for their random bits
    # The layout of its state, if that has only the elements that a mask keeps. A dense gradient
    # then stands for these alone.
    packed: PackedMask | None = None

    def steps_taken(self) -> int:
        """Return the number of steps taken; 1 if the state does not count them."""
        if self.param_state is None:
            return 0
        requirement = "the state's 'step' must be the number of steps taken"
        with usable(requirement):
            taken = int(self.param_state.get("step", 1))
        if taken < 0:
            raise InputError(message(requirement, taken))
        return taken

    def error(self, why: object) -> InputError:
        """Return an error that names the parameter."""
        error = type(why) if isinstance(why, InputError) else InputError
        return error(f"{self.settings.describe_param(self.index)}: {why}")


# Calls of a commit, which complete even when memory runs out.

# Memory that is given back when an allocation fails, so that the small ones that are needed to
# complete a commit succeed. Blocks of this size come from the heap, not from pages of their own.
_BLOCKS, _BLOCK_BYTES = 8, 1 << 15
_reserve: list[bytearray] = []
_MOST_FAILURES = 1000


def reserve() -> None:
    """Allocate the reserve of ``finish``; call it in prepare, since it may raise."""
    while len(_reserve) < _BLOCKS:
        _reserve.append(bytearray(_BLOCK_BYTES))


def finish(calls: Iterable[Callable[[], object]]) -> None:
    """Make all calls, in order, each until it succeeds.

    Every call must either raise and have done nothing, or be harmless to repeat. Calls need memory
    for a few small objects at most, such as Python's view of a scalar. If that cannot be had, the
    reserve is released and the call repeated. They are made in advance, so that nothing else is
    left to allocate.
    """
    finish_steps(calls, _INVOKE)


_INVOKE = (methodcaller("__call__"),)
_END: Any = object()


def finish_steps(subjects: Iterable[Subject], steps: Sequence[Callable[[Subject], object]]) -> None:
    """Take all steps with each subject, in order, each step until it succeeds; see ``finish``."""
    remaining = iter(subjects)
    left: Iterator[Callable[[Subject], object]] = iter(())
    subject: Any = None
    step: Callable[[Subject], object] | None = None
    failures = 0
    while True:
        try:
            if step is None:
                step = next(left, None)
                if step is None:
                    left = iter(steps)
                    subject = next(remaining, _END)
                    if subject is _END:
                        return
                    continue
            step(subject)
            step = None
        except (MemoryError, RuntimeError):  # torch reports failed allocations as either
            if failures >= _MOST_FAILURES:
                raise
            failures += 1
            _reserve.clear()


def certain(call: Callable[[], Result]) -> Result:
    """Return the result of a call that ``finish`` could make: where other ranks rely on it."""
    found: list[Result] = []
    finish((lambda: found.append(call()),))
    return found[0]
