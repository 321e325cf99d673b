"""Training runs under ``semantics="dense"``, and the dense runs that they are compared with.

The oracle is the same class with dense gradients, in float64. The rows of each gradient catch up
before the step, as they do when a tracked model reads them.
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
from tests.table import INSTRUCTION_SETS, Variant, running_on, same_bits

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
    Variant(sparsestep.NAdam, {"betas": (0.8, 0.9), "momentum_decay": 0.5, **DECAY}),
    Variant(sparsestep.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    Variant(sparsestep.Adagrad, DECAY),
    Variant(sparsestep.RowwiseAdagrad, DECAY),
    Variant(sparsestep.RowwiseAdam, DECAY),
    Variant(sparsestep.RowwiseAdam, {"betas": (0.0, 0.999), **DECAY}),
    Variant(sparsestep.SGD, {}),
    Variant(sparsestep.SGD, DECAY),
    Variant(sparsestep.SGD, {"momentum": 0.9}),
    Variant(sparsestep.SGD, {"momentum": 0.9999}),  # reaches back further than is kept
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
# Where the kind of drift makes no difference: a series, a sum, a sign.
A_FEW = [KINDS[0], KINDS[4], KINDS[6]]
a_few = pytest.mark.parametrize("variant", A_FEW, ids=str)
CONSTRAINTS: list[dict[str, Any]] = [{"max_norm": 0.7}, {"normalize": True}]
on_both_engines = pytest.mark.parametrize("engine", ["reference", *INSTRUCTION_SETS[-1:]])


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
    make: Callable[..., Any],
    run: Run,
    dtype: torch.dtype = torch.float64,
    train: Callable[[Any, Tensor], None] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Train with dense gradients; with ``semantics="dense"`` in the options, with sparse ones."""
    param = run.param(dtype)
    opt = make([param], lr=0.1, **options)
    (train or run.train)(opt, param)
    if hasattr(opt, "catch_up"):  # or it is torch's
        opt.catch_up()
    return kept(opt, param)


def assert_dense_run(
    make: Callable[..., Any], run: Run, engine: str = "reference", room: float = 1e-12, **how: Any
) -> dict[str, Tensor]:
    """Train with sparse gradients and deferred rows: it comes to the dense run. Returns it."""
    with running_on(engine) as name:
        ours = dense_run(make, run, semantics="dense", engine=name, **how)
    if isinstance(make, Variant):
        room = max(room, room_for(make))
    assert_close(ours, dense_run(make, run, **how), room)
    return ours


def assert_close(ours: dict[str, Tensor], exact: dict[str, Tensor], room: float = 1e-12) -> None:
    """Relative to what is largest in the tensor."""
    assert ours.keys() == exact.keys()
    for name, tensor in exact.items():
        wide = torch.complex128 if tensor.is_complex() else torch.float64
        off = (ours[name].to(wide) - tensor.to(wide)).abs()
        if off.numel():
            assert float(off.max()) <= room * max(float(tensor.abs().max()), 1e-3), name


def room_for(variant: Variant) -> float:
    """FTRL multiplies rounding errors by 1 / lr."""
    return 1e-9 if variant.cls is sparsestep.Ftrl else 1e-12


def assert_same_bits(ours: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert ours.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same_bits(ours[name], tensor), name


def bookkeeping(opt: RuleOptimizer) -> list[Any]:
    """The last step of each row, and the history, of each parameter."""
    return [
        (key, rows.last_step.tolist(), rows.history.base, rows.history.steps)
        for key, rows in opt.deferred.items()
    ]
