"""Training runs under ``semantics="dense"``, and the dense runs that they are compared with.

The oracle is the same class with dense gradients, zeros where nothing is held, in float64; or
torch's class, where torch has it. Rows are brought up to date before each step for what it touches,
as a model would do it that reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import INSTRUCTION_SETS, Variant

DECAY = {"weight_decay": 0.1, "decoupled_weight_decay": True}

VARIANTS = [
    Variant(sparsestep.SparseAdam, {}),
    Variant(sparsestep.SparseAdam, {"eps": 0.1, "betas": (0.8, 0.9)}),
    Variant(sparsestep.Adam, {}),
    Variant(sparsestep.Adam, DECAY),
    Variant(sparsestep.Adam, {"amsgrad": True}),
    Variant(sparsestep.AdamW, {"weight_decay": 0.1}),
    Variant(sparsestep.AdamW, {"amsgrad": True, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    Variant(sparsestep.AdamW, {"betas": (0.99, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"betas": (0.9, 0.81)}),
    Variant(sparsestep.AdamW, {"betas": (0.9, 0.99), "eps": 1.0}),
    Variant(sparsestep.AdamW, {"betas": (0.0, 0.9)}),
    Variant(sparsestep.AdamW, {"betas": (0.5, 0.0), "eps": 0.1}),
    Variant(sparsestep.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    Variant(sparsestep.Adagrad, DECAY),
    Variant(sparsestep.RowwiseAdagrad, DECAY),
    Variant(sparsestep.RowwiseAdam, DECAY),
    Variant(sparsestep.SGD, {}),
    Variant(sparsestep.SGD, DECAY),
    Variant(sparsestep.SGD, {"momentum": 0.9}),
    Variant(sparsestep.SGD, {"momentum": 0.9, "dampening": 0.5, **DECAY}),
    Variant(sparsestep.SGD, {"momentum": 0.9, "nesterov": True, **DECAY}),
    Variant(sparsestep.RMSprop, DECAY),
    Variant(sparsestep.RMSprop, {"momentum": 0.9}),
    Variant(sparsestep.RMSprop, {"centered": True, "eps": 0.01, **DECAY}),
    Variant(sparsestep.RMSprop, {"centered": True, "momentum": 0.9, "eps": 0.01}),
    Variant(sparsestep.Lion, {"weight_decay": 0.1}),
    Variant(sparsestep.Lion, {"betas": (0.9, 0.0)}),
    Variant(sparsestep.Lion, {"betas": (0.0, 0.9)}),
    Variant(sparsestep.Ftrl, {"l1": 0.01, "l2": 0.1, "initial_accumulator_value": 0.1}),
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)

# One for each way in which an idle row moves.
KINDS = [
    Variant(sparsestep.AdamW, {"weight_decay": 0.1}),
    Variant(sparsestep.AdamW, {"amsgrad": True}),
    Variant(sparsestep.RowwiseAdam, DECAY),
    Variant(sparsestep.Adagrad, DECAY),
    Variant(sparsestep.SGD, {"momentum": 0.9, "dampening": 0.5, **DECAY}),
    Variant(sparsestep.RMSprop, {"centered": True, "momentum": 0.9, "eps": 0.5}),
    Variant(sparsestep.Lion, {"weight_decay": 0.1}),
    Variant(sparsestep.Ftrl, {"l1": 0.01, "l2": 0.1}),
]
each_kind = pytest.mark.parametrize("variant", KINDS, ids=str)
ON_BOTH = ["reference", *INSTRUCTION_SETS[-1:]]
on_both_engines = pytest.mark.parametrize("engine", ON_BOTH)


def coo(rows: Any, values: Tensor, shape: Any) -> Tensor:
    indices = torch.as_tensor(rows)
    return torch.sparse_coo_tensor(indices[None], values, shape, check_invariants=False)


def schedule(steps: int, peak: float) -> list[float]:
    """Warm-up from zero, cosine, and a stretch of zeros."""
    warm = max(1, steps // 10)
    rates = [
        peak * min(1.0, t / warm) * 0.5 * (1 + math.cos(math.pi * t / steps)) for t in range(steps)
    ]
    rates[2 * steps // 5 : steps // 2] = [0.0] * len(rates[2 * steps // 5 : steps // 2])
    return rates


class Run:
    """What a training run gives its optimizer: rows with duplicates, six decades of values.

    Few rows are touched often, many rarely, and the last two never.
    """

    def __init__(
        self,
        steps: int,
        shape: tuple[int, ...] = (24, 3),
        *,
        peak: float = 0.1,
        seed: int = 0,
        most: int = 5,
        tail: float = 3.0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.shape = shape
        self.weight = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.rates = schedule(steps, peak)
        self.rows, self.values = [], []
        for _ in range(steps):
            n = int(torch.randint(0, most + 1, (), generator=generator))
            rows = ((shape[0] - 2) * torch.rand(n, generator=generator) ** tail).long()
            values = torch.randn((n, *shape[1:]), generator=generator)
            decades = torch.rand((n, *[1] * (len(shape) - 1)), generator=generator)
            self.rows.append(rows)
            # Exact in float32, so that runs of different precision have the same gradients.
            self.values.append((values * 10 ** (1 - 6 * decades)).double())

    def __len__(self) -> int:
        return len(self.rows)

    def param(self, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
        return torch.nn.Parameter(self.weight.to(dtype, copy=True))

    def sparse(self, t: int, dtype: torch.dtype) -> Tensor:
        return coo(self.rows[t], self.values[t].to(dtype), self.shape)

    def dense(self, t: int, dtype: torch.dtype) -> Tensor:
        zeros = torch.zeros(self.shape, dtype=dtype)
        return zeros.index_add_(0, self.rows[t], self.values[t].to(dtype))

    def train(
        self,
        opt: torch.optim.Optimizer,
        param: Tensor,
        steps: range | None = None,
        before: Callable[[torch.optim.Optimizer, int], None] | None = None,
    ) -> None:
        """Take steps; with sparse gradients if that is enough."""
        sparse = getattr(opt, "semantics", "masked") == "dense"
        for t in steps or range(len(self)):
            for group in opt.param_groups:
                group["lr"] = self.rates[t]
            if before is not None:
                before(opt, t)
            if sparse:
                opt.catch_up(param, self.rows[t])
                param.grad = self.sparse(t, param.dtype)
            else:
                param.grad = self.dense(t, param.dtype)
            opt.step()


@cache
def standard(steps: int = 60) -> Run:
    return Run(steps)


def kept(opt: Any, param: Tensor) -> dict[str, Tensor]:
    """A copy of the parameter and its state tensors, by name."""
    state = {k: v for k, v in opt.state.get(param, {}).items() if k != "step" and v is not None}
    return {"param": param.detach().clone(), **{k: v.clone() for k, v in state.items()}}


def dense_run(
    variant: Variant,
    run: Run,
    dtype: torch.dtype = torch.float64,
    before: Callable[[torch.optim.Optimizer, int], None] | None = None,
) -> dict[str, Tensor]:
    """What the same class comes to with dense gradients."""
    param = run.param(dtype)
    opt = variant([param], lr=0.1)
    run.train(opt, param, before=before)
    return kept(opt, param)


_known: dict[Any, dict[str, Tensor]] = {}


def oracle(variant: Variant, steps: int = 60) -> dict[str, Tensor]:
    key = (str(variant), steps)
    if key not in _known:
        _known[key] = dense_run(variant, standard(steps))
    return _known[key]


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor], room: float = 1e-12) -> None:
    """Relative to what is largest in the tensor."""
    assert ours.keys() == exact.keys()
    for name, tensor in exact.items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        off = (ours[name].to(wide) - tensor.to(wide)).abs()
        if off.numel():
            assert float(off.max()) <= room * max(float(tensor.abs().max()), 1e-3), name


# FTRL multiplies what is rounded by 1 / lr, which is large when the rate is small.
def room_for(variant: Variant) -> float:
    return 1e-9 if variant.cls is sparsestep.Ftrl else 1e-12


OF_TORCH = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"momentum": 0.9}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


def bookkeeping(opt: RuleOptimizer) -> list[Any]:
    """What is remembered about rows that are behind."""
    return [
        (key, clock.last_step.clone(), clock.history.base, clock.history.steps)
        for key, clock in opt.deferred.items()
    ]
