"""One step with one gradient, by hand, for gradients of every layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.grads.layouts import Gradient as AnyGradient
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import ENGINES, Variant, same_bits, state_tensors

MARKS = [
    pytest.mark.filterwarnings("ignore:Sparse ... tensor support is in beta"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors"),
]

BY_HAND = {each.optimizer_class: each for each in FUNCTIONAL}


def by_hand(cls: type[RuleOptimizer]) -> type[FunctionalOptimizer]:
    """The functional optimizer of a class; one made up for a rule of a user."""
    return BY_HAND.get(cls) or type("Functional", (FunctionalOptimizer,), {"optimizer_class": cls})


# One of each kind: per element, with decay, with numbers per row, without any state.
FEW = [
    Variant(sparsestep.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    Variant(sparsestep.SparseAdam, {"bias_correction": "per_row"}),
    Variant(sparsestep.RowwiseAdagrad, {}),
    Variant(sparsestep.RowwiseAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sparsestep.SGD, {}),
]
each_of_a_few = pytest.mark.parametrize("variant", FEW, ids=str)
# Instruction sets differ in nothing that these tests could see, but for the first.
each_kind = pytest.mark.parametrize("engine", list(dict.fromkeys([ENGINES[0], ENGINES[-1]])))


@dataclass
class Run:
    """A parameter and its optimizer, whose state may be that of another."""

    variant: Variant
    engine: str
    start: Tensor
    options: dict[str, Any] = field(default_factory=dict)
    state: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        self.param = self.start.clone()
        if not self.variant.has_twin:
            self.engine = "auto"
        options = {**self.variant.options, **self.options, "engine": self.engine}
        self.by_hand = by_hand(self.variant.cls)([self.param], **options)
        if self.state is not None:
            self.by_hand.load_state_dict(self.state)

    @property
    def optimizer(self) -> RuleOptimizer:
        return self.by_hand.optimizer

    def again(self) -> Run:
        """From where this one has arrived."""
        state = self.by_hand.state_dict()
        return Run(self.variant, self.engine, self.param, self.options, state)

    def step(self, grad: AnyGradient, mask: Tensor | None = None) -> Run:
        if mask is not None:
            self.by_hand.param_group["mask"] = mask
        self.by_hand.step([grad])
        return self

    @property
    def tensors(self) -> list[Tensor]:
        return [self.param, *state_tensors(self.optimizer)]

    def same_as(self, other: Run) -> bool:
        ours, theirs = self.tensors, other.tensors
        return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))

    def like(self, other: Run) -> bool:
        """The same bits, or the last places of the reference engine: torch's square root depends
        on where in a tensor a number stands."""
        if self.engine == "native":
            return self.same_as(other)
        rtol = 1e-2 if self.param.dtype in (torch.float16, torch.bfloat16) else 1e-6
        ours, theirs = self.tensors, other.tensors
        return len(ours) == len(theirs) and all(
            torch.allclose(our, their, rtol=rtol, atol=1e-7, equal_nan=True)
            for our, their in zip(ours, theirs, strict=True)
        )


def randn(shape: tuple[int, ...], seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
