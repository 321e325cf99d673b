"""Formulas as users write them, each beside the library's rule, torch's class and the limit."""

# mypy: allow-untyped-defs

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import sparsestep
from benchmarks.harness.cases import Formula
from benchmarks.harness.contestants import Contestant, Native, OptimizerContestant
from benchmarks.harness.limit import Limit
from benchmarks.harness.race import Follow, race, threads, timings
from benchmarks.harness.results import CaseResult, Refusal
from benchmarks.harness.workload import Unavailable, Workload
from sparsestep.optim.optimizer import RuleOptimizer


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def adam(param, grad, exp_avg, exp_avg_sq, *, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
    """Adam."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    return param - lr / (1 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


@sparsestep.rule(state={"sum": 0.0})
def adagrad(param, grad, sum, *, lr=1e-2, eps=1e-10):
    """Adagrad."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


@sparsestep.rule(state={"exp_avg": 0.0})
def lion(param, grad, exp_avg, *, lr=1e-4, betas=(0.9, 0.99)):
    """Lion."""
    beta1, beta2 = betas
    direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
    return param - lr * direction, beta2 * exp_avg + (1 - beta2) * grad


@sparsestep.rule(state={"square_avg": 0.0})
def rmsprop(param, grad, square_avg, *, lr=1e-2, alpha=0.99, eps=1e-8):
    """RMSprop."""
    square_avg = alpha * square_avg + (1 - alpha) * grad * grad
    return param - lr * grad / (square_avg.sqrt() + eps), square_avg


@sparsestep.rule(row_state={"sum": 0.0})
def rowwise_adagrad(param, grad, sum, *, lr=1e-2, eps=1e-10):
    """Adagrad with one sum for each row."""
    sum = sum + grad.square().mean(1, keepdim=True)
    return param - lr * grad / (sum.sqrt() + eps), sum


class ByHand(Optimizer):
    """What one writes without a library: a formula on the rows of a coalesced gradient.

    Args:
        params: one table.
        lr: the learning rate.
        formula: ``(param, grad, *state, lr)`` to the new values, in place where it can.
        state: its names.
        width: of the state.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        formula: Callable[..., tuple[Tensor, ...]],
        state: Sequence[str],
        width: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._formula, self._names, self._width = formula, state, width

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gather, compute, scatter."""
        [group] = self.param_groups
        for param in group["params"]:
            grad = param.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            state = self.state[param]
            for name in self._names:
                if name not in state:
                    state[name] = torch.zeros(len(param), self._width or param.shape[1])
            old = [state[name][rows] for name in self._names]
            new, *kept = self._formula(param[rows], values, *old, group["lr"])
            param[rows] = new
            for name, value in zip(self._names, kept, strict=True):
                state[name][rows] = value


def _lion(param: Tensor, grad: Tensor, exp_avg: Tensor, lr: float) -> tuple[Tensor, ...]:
    direction = torch.lerp(exp_avg, grad, 0.1).sign_()
    return param.sub_(direction, alpha=lr), exp_avg.lerp_(grad, 0.01)


def _rmsprop(param: Tensor, grad: Tensor, square_avg: Tensor, lr: float) -> tuple[Tensor, ...]:
    square_avg.mul_(0.99).addcmul_(grad, grad, value=0.01)
    return param.addcdiv_(grad, square_avg.sqrt().add_(1e-8), value=-lr), square_avg


def _rowwise(param: Tensor, grad: Tensor, sum: Tensor, lr: float) -> tuple[Tensor, ...]:
    sum += grad.square().mean(1, keepdim=True)
    return param.addcdiv_(grad, sum.sqrt().add_(1e-10), value=-lr), sum


class Rivals(NamedTuple):
    """A formula, the library's rule, and what torch has or one writes by hand.

    Attributes:
        formula: made by ``sparsestep.rule``.
        native: the class whose rule is in C++.
        torch: takes parameters and ``lr``.
        torch_name: whose that is.
    """

    formula: type[RuleOptimizer]
    native: type[RuleOptimizer]
    torch: Callable[..., Optimizer]
    torch_name: str


BY_HAND = "torch, by hand"
FORMULAS: dict[str, Rivals] = {
    "Adam": Rivals(adam, sparsestep.Adam, torch.optim.SparseAdam, "torch SparseAdam"),
    "Adagrad": Rivals(adagrad, sparsestep.Adagrad, torch.optim.Adagrad, "torch Adagrad sparse"),
    "Lion": Rivals(lion, sparsestep.Lion, lambda p, lr: ByHand(p, lr, _lion, ["exp_avg"]), BY_HAND),
    "RMSprop": Rivals(
        rmsprop, sparsestep.RMSprop, lambda p, lr: ByHand(p, lr, _rmsprop, ["square_avg"]), BY_HAND
    ),
    "RowwiseAdagrad": Rivals(
        rowwise_adagrad,
        sparsestep.RowwiseAdagrad,
        lambda p, lr: ByHand(p, lr, _rowwise, ["sum"], 1),
        BY_HAND,
    ),
}
FORMULA = "sparsestep.rule"
_LR = 1e-3


class _Torch(OptimizerContestant):
    states = 2

    def __init__(self, workload: Workload, make: Callable[..., Optimizer]) -> None:
        self._make = make
        super().__init__(workload)

    def make(self, params: list[Parameter]) -> Optimizer:
        """What torch has."""
        return self._make(params, lr=_LR)


def contestants(
    case: Formula, workload: Workload
) -> tuple[list[str], list[Contestant], list[Refusal]]:
    """Those who take part, by name, and those who cannot."""
    rivals = FORMULAS[case.rule]
    makers: dict[str, Callable[[], Contestant]] = {
        Native.name: lambda: Native(workload, rivals.native),
        FORMULA: lambda: Native(workload, rivals.formula),
        rivals.torch_name: lambda: _Torch(workload, rivals.torch),
        Limit.name: lambda: Limit(workload, rivals.native),
    }
    names, found, refusals = [], [], []
    for name, make in makers.items():
        try:
            found.append(make())
            names.append(name)
        except Unavailable as error:
            refusals.append(Refusal(name, str(error)))
    return names, found, refusals


def measure(
    case: Formula, suite: str, seconds: float, follow: Follow = lambda done: None
) -> CaseResult:
    """Race a formula and its rivals."""
    with threads(case.threads), torch.sparse.check_sparse_tensor_invariants(False):
        workload = Workload(case)
        names, racers, refusals = contestants(case, workload)
        times = race(racers, seconds, follow) if racers else []
        return CaseResult(
            suite=suite,
            case=case,
            threads=torch.get_num_threads(),
            unique=workload.unique(),
            shared=workload.shared,
            timings=timings(names, times, base=FORMULAS[case.rule].torch_name),
            unavailable=refusals,
        )
