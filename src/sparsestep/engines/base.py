"""What engines are given: updates, which they claim, prepare and commit.

An engine *claims* the updates that it can run. It *prepares* them: everything that can raise,
raises here, for all engines, before anything is written. Then it *commits*. Atomicity follows from
the phases: only commit writes, and commit cannot raise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsestep.engines.rounding import RowStride
from sparsestep.errors import InputError, message, usable
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import Gradient
from sparsestep.rules.rule import Rule


@dataclass(slots=True)
class GroupSettings:
    """The options of a param group in this step.

    Attributes:
        rule: the rule.
        hyperparams: the rule's keyword arguments except ``step``.
        grad_sign: -1.0 to maximize, else 1.0.
        coupled_decay: weight decay that is added to the gradient.
        decay_factor: factor of the parameter under decoupled weight decay; 1.0 without.
        state_dtype: dtype of new state; ``None`` for the parameter's, at least float32.
        seed: seed of stochastic rounding; ``None`` to round to nearest.
        stochastic_rounding: whether half precision is rounded stochastically; int8 always is.
        describe_param: names a parameter of the group, by its index, in messages.
        has_torch_kernel: whether torch's own kernel supports the options, for dense gradients.
        wants_torch_kernel: whether an option asks for it, such as ``foreach`` or ``fused``.
        vectors: the options of parameters without rows, where they differ; see ``for_param``.
        core: the native engine's cache of the group.
        elementwise: the settings of parameters with dense gradients, if they have others.
    """

    rule: Rule
    hyperparams: dict[str, Any]
    grad_sign: float
    coupled_decay: float
    decay_factor: float
    state_dtype: torch.dtype | None
    seed: int | None
    stochastic_rounding: bool
    describe_param: Callable[[int], str]
    has_torch_kernel: bool = False
    wants_torch_kernel: bool = False
    vectors: GroupSettings | None = None
    core: dict[Any, Any] = field(default_factory=dict)
    elementwise: GroupSettings | None = None

    def for_param(self, param: Tensor) -> GroupSettings:
        """Return the options of a parameter of the group."""
        return self if self.vectors is None or param.dim() > 1 else self.vectors


@dataclass(slots=True)
class ParamUpdate:
    """One parameter's update in this step, checked except for the indices.

    Attributes:
        settings: the options of its param group.
        group: the param group itself.
        index: the parameter's index in its group.
        key: the tensor that indexes ``optimizer.state``.
        param: the tensor that holds its values; another one for a DTensor.
        grad: its gradient as given.
        indexed: its gradient in canonical form.
        param_state: its entry in ``optimizer.state``; ``None`` before the first step.
        state: the rule's state tensors; ``None`` before they exist.
        targets: the parameter and its state as real tensors, which engines write in place.
        step: the number of this update, counted from 1.
        seed: seed of this update's stochastic rounding.
        engine: the name of the engine that has claimed it.
        fallback_reason: why that is not the native engine.
        row_stride: its rows within a sharded table, for their random bits.
    """

    settings: GroupSettings
    group: dict[str, Any]
    index: int
    key: Tensor
    param: Tensor
    grad: Gradient
    indexed: IndexedGrad
    param_state: dict[str, Any] | None = None
    state: list[Tensor] | None = None
    targets: list[Tensor] = field(default_factory=list)
    step: int = 1
    seed: int | None = None
    engine: str = ""
    fallback_reason: str = ""
    row_stride: RowStride | None = None

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
