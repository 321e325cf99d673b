"""Who takes part: torch's optimizers, this library's, and the limit of the machine.

A contestant is made for one workload. ``before`` hands it a gradient, off the clock; ``step`` is
what is timed. One that cannot take part raises ``Unavailable`` while it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.harness.workload import LEARNING_RATE, Unavailable, Workload
from sparsestep import SparseAdam, _native
from sparsestep.optim import sparse_adam
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule

# A class of this library: takes the parameters, lr, engine and its own options.
Factory = Callable[..., RuleOptimizer]

_MOST_DENSE_ELEMENTS = 100_000_000

# With the second step an optimizer has looked at the state that the first has made.
_STEPS_UNTIL_STATE_IS_KNOWN = 3


class Contestant(ABC):
    """Something that can do one step of the workload."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, workload: Workload) -> None: ...

    @abstractmethod
    def before(self, set_index: int) -> None:
        """Get ready for a step with the gradients of ``set_index``; not timed."""

    @abstractmethod
    def step(self) -> None:
        """The step; timed."""


class OptimizerContestant(Contestant):
    """An optimizer that finds its gradients in ``param.grad``."""

    states: int  # how many copies of the table its state takes

    def __init__(self, workload: Workload) -> None:
        self.reserve(workload)
        self.params: list[Parameter] = workload.params()
        self._gradients = [[gradient.coo for gradient in batch] for batch in workload.sets]
        self.optimizer: Optimizer = self.make(self.params)

    def reserve(self, workload: Workload) -> None:
        """Set the memory for the state aside."""
        workload.reserve(self.states)

    @abstractmethod
    def make(self, params: list[Parameter]) -> Optimizer:
        """The optimizer."""

    def before(self, set_index: int) -> None:
        """Put the gradients where the optimizer looks for them."""
        for param, gradient in zip(self.params, self._gradients[set_index], strict=True):
            param.grad = gradient

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()


class TorchSparseAdam(OptimizerContestant):
    """What every other is compared with."""

    name = "torch SparseAdam"
    states = 2

    def make(self, params: list[Parameter]) -> Optimizer:
        """``torch.optim.SparseAdam``."""
        return torch.optim.SparseAdam(params, lr=LEARNING_RATE)


class TorchAdagrad(OptimizerContestant):
    """Torch's other optimizer for sparse gradients; one moment instead of two."""

    name = "torch Adagrad sparse"
    states = 1

    def make(self, params: list[Parameter]) -> Optimizer:
        """``torch.optim.Adagrad``."""
        return torch.optim.Adagrad(params, lr=LEARNING_RATE)


class TorchDenseAdam(OptimizerContestant):
    """What one pays without sparse gradients: every row moves in every step.

    Its one dense gradient covers the whole table, so it does not matter which set is on.
    """

    name = "torch Adam dense fused"
    states = 3  # the gradient is as large as the table too

    def __init__(self, workload: Workload) -> None:
        if workload.case.table_bytes > 4 * _MOST_DENSE_ELEMENTS:
            raise Unavailable("left out on tables of over 100 million elements")
        super().__init__(workload)
        dense = [torch.randn_like(param, requires_grad=False) for param in self.params]
        self._gradients = [dense] * len(workload.sets)

    def make(self, params: list[Parameter]) -> Optimizer:
        """``torch.optim.Adam`` with its fused kernel."""
        return torch.optim.Adam(params, lr=LEARNING_RATE, fused=True)


def rule_of(optimizer: Factory, **options: Any) -> Rule:
    """The rule that an optimizer with these options follows.

    Example:
        >>> rule_of(SparseAdam, bias_correction="per_row").name
        'sparse_adam_per_row'
    """
    made = optimizer([torch.zeros(1, 1)], **options)
    return made._rule_for(made.param_groups[0])


def element_states(rule: Rule) -> int:
    """How many of a rule's state tensors are as large as the table.

    Example:
        >>> element_states(rule_of(SparseAdam))
        2
    """
    return sum(not spec.per_row for spec in rule.state)


def tensors(rule: Rule, optimizer: Optimizer, params: list[Parameter]) -> list[list[Tensor]]:
    """The state of each parameter, in the order in which the rule takes it."""
    return [[optimizer.state[param][spec.name] for spec in rule.state] for param in params]


class Native(OptimizerContestant):
    """This library, on its native engine.

    Args:
        workload: what is measured.
        optimizer: the class; the command measures SparseAdam.
        **options: for the class.
    """

    name = "sparsestep"

    def __init__(self, workload: Workload, optimizer: Factory = SparseAdam, **options: Any) -> None:
        if _native.ext is None:
            raise Unavailable("installed without the C++ core")
        self._optimizer, self._options = optimizer, options
        self._steps = 0
        rule = rule_of(optimizer, **options)
        self.states: int = element_states(rule)
        super().__init__(workload)
        if workload.shared:
            self.before(0)
            self.step()
            workload.states[rule.name] = tensors(rule, self.optimizer, self.params)

    def before(self, set_index: int) -> None:
        """The same; and soon, off the clock, the huge pages that a long training gets in time."""
        super().before(set_index)
        self._steps += 1
        if self._steps == _STEPS_UNTIL_STATE_IS_KNOWN:
            assert isinstance(self.optimizer, RuleOptimizer)
            self.optimizer._huge_pages.move_all()

    def make(self, params: list[Parameter]) -> Optimizer:
        """The class that was asked for."""
        return self._optimizer(params, lr=LEARNING_RATE, engine="native", **self._options)


class Reference(OptimizerContestant):
    """This library, on the engine that runs anywhere."""

    name = "sparsestep reference"
    states = 2

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        rule = sparse_adam.RULES[False]
        names = [spec.name for spec in rule.state]
        shared = workload.states.get(rule.name)
        if shared is not None:
            for param, state in zip(self.params, shared, strict=True):
                self.optimizer.state[param] = {"step": 0, **dict(zip(names, state, strict=True))}

    def reserve(self, workload: Workload) -> None:
        """Nothing where the moments are there already."""
        if sparse_adam.RULES[False].name not in workload.states:
            super().reserve(workload)

    def make(self, params: list[Parameter]) -> Optimizer:
        """``sparsestep.SparseAdam``."""
        return SparseAdam(params, lr=LEARNING_RATE, engine="reference")
