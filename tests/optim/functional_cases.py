"""Functional optimizers with their options, and how they are trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import same_bits, state_tensors

SHAPES = [(7, 5), (4,), (3, 2, 2)]
STEPS = 5

each_functional = pytest.mark.parametrize("cls", FUNCTIONAL, ids=lambda cls: cls.__name__)
each_engine = pytest.mark.parametrize("engine", ["reference", "native"])


@dataclass(frozen=True)
class Variant:
    """A functional optimizer with options; called like the class."""

    cls: type[FunctionalOptimizer]
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, params: Any, **more: Any) -> FunctionalOptimizer:
        return self.cls(params, **{**self.options, **more})

    def optimizer(self, params: Any, **more: Any) -> RuleOptimizer:
        return self.cls.optimizer_class(params, **{**self.options, **more})

    def __str__(self) -> str:
        return "-".join([self.cls.__name__, *(f"{k}={v}" for k, v in self.options.items())])


STATEFUL = [
    Variant(sparsestep.FunctionalSGD, {"momentum": 0.9}),
    Variant(sparsestep.FunctionalAdam),
    Variant(sparsestep.FunctionalRowwiseAdagrad),
]
each_stateful = pytest.mark.parametrize("variant", STATEFUL, ids=str)


def start() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def sparse(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    rows = torch.randint(0, shape[0], (1, 6), generator=generator)
    return torch.sparse_coo_tensor(rows, torch.randn((6, *shape[1:]), generator=generator), shape)


def dense(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator)


def batches(
    make: Callable[[tuple[int, ...], torch.Generator], Tensor], *, steps: int = STEPS
) -> list[list[Tensor | None]]:
    """Gradients for each param, step by step; not every param has one in every step."""
    generator = torch.Generator().manual_seed(1)
    found: list[list[Tensor | None]] = [
        [make(shape, generator) for shape in SHAPES] for _ in range(steps)
    ]
    found[1][0] = found[2][1] = found[-1][2] = None
    return found


def train(opt: torch.optim.Optimizer, params: list[Tensor], steps: list[Any]) -> None:
    for grads in steps:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad
        opt.step()


def everything(opt: FunctionalOptimizer | torch.optim.Optimizer) -> list[Tensor]:
    """Params and state tensors."""
    inner = opt.optimizer if isinstance(opt, FunctionalOptimizer) else opt
    params = [param.detach() for param in inner.param_groups[0]["params"]]
    return [*params, *state_tensors(inner)]


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, its), number


def kept(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]
