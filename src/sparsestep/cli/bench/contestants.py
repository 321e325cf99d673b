"""Who takes part: torch's optimizers, this library's, and the limit of the machine.

A contestant is made for one workload. ``before`` hands it a gradient, off the clock; ``step`` is
what is timed. One that cannot take part raises ``Unavailable`` while it is made.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch.nn import Parameter
from torch.optim import Optimizer

from sparsestep import SparseAdam
from sparsestep.cli.bench.workload import LEARNING_RATE, Unavailable, Workload
from sparsestep.engines import native

_MOST_DENSE_ELEMENTS = 100_000_000


class Contestant(ABC):
    """Something that can do one step of the workload."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, workload: Workload) -> None: ...

    @abstractmethod
    def before(self, number: int) -> None:
        """Get ready for a step with the gradients of set ``number``; not timed."""

    @abstractmethod
    def step(self) -> None:
        """The step; timed."""


class OptimizerContestant(Contestant):
    """An optimizer that finds its gradients in ``param.grad``."""

    states: ClassVar[int]  # how many copies of the table its state takes

    def __init__(self, workload: Workload) -> None:
        self.reserve(workload)
        self.params = workload.params()
        self._gradients = [[gradient.coo for gradient in batch] for batch in workload.sets]
        self.optimizer = self.make(self.params)

    def reserve(self, workload: Workload) -> None:
        """Set the memory for the state aside."""
        workload.reserve(self.states)

    @abstractmethod
    def make(self, params: list[Parameter]) -> Optimizer:
        """The optimizer."""

    def before(self, number: int) -> None:
        """Put the gradients where the optimizer looks for them."""
        for param, gradient in zip(self.params, self._gradients[number], strict=True):
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


class Native(OptimizerContestant):
    """This library, on its native engine."""

    name = "sparsestep"
    states = 2

    def __init__(self, workload: Workload) -> None:
        if native.core is None:
            raise Unavailable("installed without the C++ core")
        super().__init__(workload)
        if workload.shared:
            self.before(0)
            self.step()
            kept = [self.optimizer.state[param] for param in self.params]
            workload.moments = [(state["exp_avg"], state["exp_avg_sq"]) for state in kept]

    def make(self, params: list[Parameter]) -> Optimizer:
        """``sparsestep.SparseAdam``."""
        return SparseAdam(params, lr=LEARNING_RATE, engine="native")


class Reference(OptimizerContestant):
    """This library, on the engine that runs anywhere."""

    name = "sparsestep reference"
    states = 2

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        if workload.moments:
            for param, (exp_avg, exp_avg_sq) in zip(self.params, workload.moments, strict=True):
                state = {"step": 0, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
                self.optimizer.state[param] = state

    def reserve(self, workload: Workload) -> None:
        """Nothing where the moments are there already."""
        if not workload.moments:
            super().reserve(workload)

    def make(self, params: list[Parameter]) -> Optimizer:
        """``sparsestep.SparseAdam``."""
        return SparseAdam(params, lr=LEARNING_RATE, engine="reference")
