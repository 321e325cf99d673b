"""The functions with their classes and options, and gradients for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import functional
from sparsestep.optim import state as states
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule
from tests.table import FUNCTIONS, same_bits

SHAPE = (7, 5)
STEPS = 6


@dataclass(frozen=True)
class Function:
    """A function, its class, and options that go to the one, to the other, or to both."""

    call: Callable[..., None]
    cls: type[RuleOptimizer]
    options: dict[str, Any] = field(default_factory=dict)
    class_only: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = {**self.options, **self.class_only}
        return "-".join([self.call.__name__, *(f"{k}={v}" for k, v in given.items())])

    def optimizer(self, params: list[Tensor], **more: Any) -> RuleOptimizer:
        return self.cls(params, **{**self.options, **self.class_only, **more})

    @property
    def rule(self) -> Rule:
        return self.cls.rule_for(self.optimizer([torch.zeros(1)]).param_groups[0])

    def state(self, param: Tensor) -> dict[str, Tensor]:
        """State as it is before the first step, by name."""
        group = self.optimizer([torch.zeros(1)]).param_groups[0]
        made = states.new_state(self.rule, param, group, None)
        return {kept.name: tensor for kept, tensor in zip(self.rule.state, made, strict=True)}

    def __call__(self, param: Tensor, grad: Any, state: dict[str, Tensor], **more: Any) -> Any:
        return self.call(param, grad, **state, **{"step": 1, **self.options, **more})


F = functional
BASIC = [Function(call, cls) for cls, call in FUNCTIONS.items()]
DECOUPLED = {"weight_decay": 0.1, "decoupled_weight_decay": True}
CENTERED = {"centered": True}
MORE = [
    Function(F.sparse_adam_, sparsestep.SparseAdam, {"betas": (0.5, 0.75), "eps": 1e-3}),
    Function(F.adam_, sparsestep.Adam, {}, {"amsgrad": True}),
    Function(F.adam_, sparsestep.Adam, {"weight_decay": 0.1}, {"amsgrad": True}),
    Function(F.adam_, sparsestep.Adam, DECOUPLED),
    Function(F.adamw_, sparsestep.AdamW, {"weight_decay": 0.25}, {"amsgrad": True}),
    Function(F.radam_, sparsestep.RAdam, {"betas": (0.5, 0.99), "weight_decay": 0.1}),
    Function(F.radam_, sparsestep.RAdam, DECOUPLED),
    Function(F.adagrad_, sparsestep.Adagrad, {"lr_decay": 0.5, "weight_decay": 0.1}),
    Function(F.adagrad_, sparsestep.Adagrad, DECOUPLED, {"initial_accumulator_value": 0.25}),
    Function(F.rowwise_adagrad_, sparsestep.RowwiseAdagrad, {"eps": 1e-3, "weight_decay": 0.1}),
    Function(F.rowwise_adagrad_, sparsestep.RowwiseAdagrad, DECOUPLED),
    Function(F.rowwise_adam_, sparsestep.RowwiseAdam, {"weight_decay": 0.1}),
    Function(F.rowwise_adam_, sparsestep.RowwiseAdam, DECOUPLED),
    Function(F.sgd_, sparsestep.SGD, {"weight_decay": 0.1}),
    Function(F.sgd_, sparsestep.SGD, {"momentum": 0.9, "dampening": 0.5}),
    Function(F.sgd_, sparsestep.SGD, {"momentum": 0.9, "nesterov": True, **DECOUPLED}),
    Function(F.rmsprop_, sparsestep.RMSprop, {"momentum": 0.9, "weight_decay": 0.1}),
    Function(F.rmsprop_, sparsestep.RMSprop, {"alpha": 0.5, "eps": 0.5}, CENTERED),
    Function(F.rmsprop_, sparsestep.RMSprop, {"momentum": 0.9, "eps": 0.5, **DECOUPLED}, CENTERED),
    Function(F.lion_, sparsestep.Lion, {"betas": (0.5, 0.75), "weight_decay": 0.1}),
    Function(F.ftrl_, sparsestep.Ftrl, {"l1": 0.5, "l2": 0.25, "beta": 0.5}),
]
STATEFUL = [f for f in BASIC if f.call is not F.sgd_]
STATEFUL.append(Function(F.sgd_, sparsestep.SGD, {"momentum": 0.9}))

of_two_engines = pytest.mark.parametrize("engine", ["reference", "native"])
each_function = pytest.mark.parametrize("function", BASIC, ids=str)
each_variant = pytest.mark.parametrize("function", [*BASIC, *MORE], ids=str)
each_stateful = pytest.mark.parametrize("function", STATEFUL, ids=str)


def coo(indices: list[list[int]], values: Tensor, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor(indices), values, shape)


def gradients(dtype: torch.dtype = torch.float32, steps: int = STEPS) -> list[Tensor]:
    """Rows in any order, with repetitions; now and then single elements, or nothing at all."""
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=dtype)

    found = []
    for step in range(steps):
        if step == 2:
            found.append(coo([[]], values(0, 5)))
        elif step == 3:
            found.append(coo([[6, 0, 6, 2], [1, 4, 1, 0]], values(4)))
        else:
            rows = torch.randint(0, SHAPE[0], (1, 8), generator=generator)
            found.append(coo(rows.tolist(), values(8, 5)))
    return found


def start(dtype: torch.dtype = torch.float32, *, requires_grad: bool = False) -> Tensor:
    values = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0), dtype=dtype)
    return values.requires_grad_(requires_grad)


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, its), number
