"""``semantics="dense"``: an entry without a gradient is one whose gradient is zero.

The oracle is the same class with dense gradients, zeros where nothing is held, in float64; or
torch's class, where torch has it. Rows are brought up to date before each step for what it touches,
as a model would do it that reads them.
"""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.contract.motion import Still
from sparsestep.dense import history as histories
from sparsestep.dense.clock import RowClock
from sparsestep.dense.history import History
from sparsestep.errors import InputError
from sparsestep.optimizer.base import RuleOptimizer
from tests.table import (
    INSTRUCTION_SETS,
    WITH_DENSE,
    Case,
    Variant,
    cases,
    each_case,
    each_engine,
    on_each_engine,
    running_on,
    same_bits,
    snapshot,
    unchanged,
)

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


def test_every_optimizer_is_covered():
    assert {variant.cls for variant in VARIANTS} == set(WITH_DENSE)
    assert all(variant.rule.motion is not None for variant in VARIANTS)


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the tensors are small


# Runs


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


# The same numbers


@on_each_engine(VARIANTS)
def test_it_is_the_dense_run(variant: Variant, engine: str):
    run = standard()
    param = run.param()
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param)
        opt.catch_up()
    assert_close(kept(opt, param), oracle(variant), room_for(variant))


@each_variant
@on_both_engines
def test_rows_are_current_wherever_one_looks(variant: Variant, engine: str):
    """Some rows after every step, all of them after some, and never all at once in the end."""
    run = standard(20)
    ours, theirs = run.param(), run.param()
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, semantics="dense", engine=name)
        dense = variant([theirs], lr=0.1)
        for t in range(20):
            run.train(opt, ours, range(t, t + 1))
            run.train(dense, theirs, range(t, t + 1))
            rows = torch.arange(24) if t == 9 else torch.tensor([0, t, 23])
            opt.catch_up(ours, rows)
            some, wanted = kept(opt, ours), kept(dense, theirs)
            some, wanted = ({k: v[rows] for k, v in each.items()} for each in (some, wanted))
            assert_close(some, wanted, room_for(variant))


OF_TORCH = [
    ("AdamW", {"weight_decay": 0.1}),
    ("AdamW", {"amsgrad": True}),
    ("Adam", {}),
    ("SGD", {"momentum": 0.9, "dampening": 0.5}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("RMSprop", {"momentum": 0.9}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
@on_both_engines
def test_it_is_the_run_of_torch(name: str, options: dict[str, Any], engine: str):
    run = standard()
    theirs, ours = run.param(), run.param()
    dense = getattr(torch.optim, name)([theirs], lr=0.1, **options)
    run.train(dense, theirs)
    with running_on(engine) as chosen:
        opt = getattr(sparsestep, name)([ours], lr=0.1, semantics="dense", engine=chosen, **options)
        run.train(opt, ours)
        opt.catch_up()
    assert_close(kept(opt, ours), kept(dense, theirs))
    if name != "SGD":
        assert int(opt.state[ours]["step"]) == int(dense.state[theirs]["step"])


@pytest.mark.parametrize(
    "variant",
    [v for v in VARIANTS if not isinstance(v.rule.motion, Still)],
    ids=str,
)
@on_both_engines
@pytest.mark.parametrize("missed", [1, 2, 3])
def test_a_gap(variant: Variant, engine: str, missed: int):
    """A row is touched again after so many steps, with rates that differ from step to step."""
    gradients = [0] + missed * [1] + [0] + missed * [2] + [0, 1]
    results = []
    for sparse in (True, False):
        generator = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([param], lr=0.1, **more)
            for t, row in enumerate(gradients):
                opt.param_groups[0]["lr"] = 0.1 / (t + 1)
                values = torch.randn(1, 2, generator=generator, dtype=torch.float64)
                grad = coo([row], values, (4, 2))
                if sparse:
                    opt.catch_up(param, torch.tensor([row]))
                param.grad = grad if sparse else grad.to_dense()
                opt.step()
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", [sparsestep.Adam, sparsestep.SparseAdam], ids=lambda c: c.__name__)
def test_squares_that_are_nothing(cls: type[RuleOptimizer], engine: str, dtype: torch.dtype):
    """Gradients so small that their squares underflow still move by their share of eps."""
    least, eps = (1e-25, 1e-20) if dtype == torch.float32 else (1e-170, 1e-160)
    results = []
    for sparse in (True, False):
        param = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype if sparse else torch.float64))
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = cls([param], lr=eps / least, eps=eps, **more)
            for row in (0, 1, 1, 0, 1, 1, 1):
                values = torch.full((1, 2), least, dtype=param.dtype)
                grad = coo([row], values, (3, 2))
                if sparse:
                    opt.catch_up(param, torch.tensor([row]))
                param.grad = grad if sparse else grad.to_dense()
                opt.step()
            opt.catch_up()
        results.append(param.detach().double())
        if sparse:
            assert not opt.state[param]["exp_avg_sq"].any()
    ours, exact = results
    assert ours[:2].abs().min() > 0.1
    # In float64 the squares of 1e-25 are there: a hundred-thousandth beside eps.
    assert torch.allclose(ours, exact, rtol=3e-5 if dtype == torch.float32 else 1e-9, atol=0)


WITHOUT_EPS = [
    Variant(sparsestep.AdamW, {"weight_decay": 0.1}),
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"amsgrad": True}),
    Variant(sparsestep.RowwiseAdam, {}),
    Variant(sparsestep.RMSprop, {"momentum": 0.9}),
    Variant(sparsestep.Adagrad, {}),
]


@pytest.mark.parametrize("variant", WITHOUT_EPS, ids=str)
@each_engine
def test_without_eps_rows_that_had_no_gradient_are_not_nan(variant: Variant, engine: str):
    """Dense steps divide zero by zero there. Here it is what any eps gives, however small."""
    run = standard(20)
    ours, theirs, tiny = run.param(), run.param(), run.param()
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, eps=0.0, semantics="dense", engine=name)
        run.train(opt, ours)
        opt.catch_up()
    dense = variant([theirs], lr=0.1, eps=0.0)
    run.train(dense, theirs)
    assert theirs[-2:].isnan().all()
    almost = variant([tiny], lr=0.1, eps=1e-200)
    run.train(almost, tiny)
    assert_close(kept(opt, ours), kept(almost, tiny))


@each_case(case=cases(max_steps=5))
@each_kind
@on_both_engines
def test_any_shape_and_any_gradient(variant: Variant, engine: str, case: Case):
    """0-d to 4-d, empty, sparse in any number of dims, dense or none at all; two groups."""
    ours = [torch.nn.Parameter(p) for p in case.params(torch.float64)]
    theirs = [torch.nn.Parameter(p) for p in case.params(torch.float64)]
    with running_on(engine) as name:
        opt = variant(case.groups(ours), **case.options, semantics="dense", engine=name)
        dense = variant(case.groups(theirs), **case.options)
        for gradients in case.steps:
            opt.catch_up()
            for p, q, gradient in zip(ours, theirs, gradients, strict=True):
                p.grad = None if gradient is None else gradient.tensor(torch.float64)
                q.grad = None if gradient is None else gradient.dense()
            opt.step()
            dense.step()
        opt.catch_up()
    for p, q in zip(ours, theirs, strict=True):
        if p.numel():
            assert_close(kept(opt, p), kept(dense, q))
        assert opt.state.get(p, {}).get("step") == dense.state.get(q, {}).get("step")


# How exact it is in float32


def distances(ours: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, tuple[float, float]]:
    """The largest and the mean one."""
    off = {name: (ours[name].double() - exact[name]).abs() for name in exact}
    return {name: (float(each.max()), float(each.mean())) for name, each in off.items()}


def assert_no_worse(
    ours: dict[str, Tensor], theirs: dict[str, Tensor], exact: dict[str, Tensor]
) -> None:
    """At most as far from the exact run as the dense one, but for one rounding of the largest.

    What is accumulated only where there is a gradient, torch rounds once where we round twice: it
    may fuse a product with a sum, and bits here do not depend on the machine.
    """
    our, their = distances(ours, exact), distances(theirs, exact)
    for name, tensor in exact.items():
        rounding = float(tensor.abs().max()) * torch.finfo(torch.float32).eps
        assert our[name][0] <= their[name][0] + rounding, (name, our, their)
        slack = 1.02 if name == "param" else 1.2
        assert our[name][1] <= slack * their[name][1], (name, our, their)


def in_float32(variant: Variant, run: Run) -> dict[str, Tensor]:
    param = run.param(torch.float32)
    opt = variant([param], lr=0.1, semantics="dense")
    run.train(opt, param)
    opt.catch_up()
    return kept(opt, param)


def by_torch(run: Run, dtype: torch.dtype) -> dict[str, Tensor]:
    param = run.param(dtype)
    opt = torch.optim.AdamW([param], lr=0.1, weight_decay=0.01)
    run.train(opt, param)
    return kept(opt, param)


def test_four_thousand_steps_are_nearer_to_the_exact_run_than_those_of_torch():
    run = Run(4000, (200, 8), peak=0.01, most=24, tail=4.0)
    exact, theirs = by_torch(run, torch.float64), by_torch(run, torch.float32)
    ours = in_float32(Variant(sparsestep.AdamW, {"weight_decay": 0.01}), run)
    assert_no_worse(ours, theirs, exact)
    largest, mean = distances(ours, exact)["param"]
    their_largest, their_mean = distances(theirs, exact)["param"]
    assert largest < 0.5 * their_largest
    assert mean < 0.5 * their_mean


OTHERS = [v for v in VARIANTS if v.cls is not sparsestep.AdamW or "amsgrad" in v.options]


@pytest.mark.parametrize("variant", OTHERS, ids=str)
def test_float32_is_nearer_to_the_exact_run_than_dense_steps_are(variant: Variant):
    run = Run(300, (300, 4), peak=0.01, most=12, tail=4.0)
    exact, theirs = dense_run(variant, run), dense_run(variant, run, torch.float32)
    assert_no_worse(in_float32(variant, run), theirs, exact)


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@on_both_engines
def test_half_precision_with_float32_state(variant: Variant, dtype: torch.dtype, engine: str):
    """What is missed is added up before it is rounded: nearer than step by step."""
    run = Run(40, peak=0.05)
    run.weight = run.weight.to(dtype).double()
    exact = dense_run(variant, run)
    theirs, ours = run.param(dtype), run.param(dtype)
    dense = variant([theirs], lr=0.1)
    run.train(dense, theirs)
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, semantics="dense", engine=name)
        run.train(opt, ours)
        opt.catch_up()
    ours_kept, theirs_kept = kept(opt, ours), kept(dense, theirs)
    for kind in ("exp_avg", "momentum_buffer", "sum", "linear"):
        if kind in ours_kept:
            assert ours_kept[kind].dtype == torch.float32
    our, their = distances(ours_kept, exact)["param"], distances(theirs_kept, exact)["param"]
    rounding = float(exact["param"].abs().max()) * torch.finfo(dtype).eps
    assert our[0] <= their[0] + rounding
    assert our[1] <= 1.05 * their[1]


# A sign that a rounding of bfloat16 has turned, Lion follows for long.
@pytest.mark.parametrize("variant", [v for v in KINDS if v.cls is not sparsestep.Lion], ids=str)
@pytest.mark.parametrize("state_dtype", [torch.bfloat16, torch.float64], ids=str)
@on_both_engines
def test_state_of_another_precision(variant: Variant, state_dtype: torch.dtype, engine: str):
    run = Run(40, peak=0.05)
    run.weight = run.weight.float().double()
    exact = dense_run(variant, run)
    ours, theirs = run.param(torch.float32), run.param(torch.float32)
    dense = variant([theirs], lr=0.1, state_dtype=state_dtype)
    run.train(dense, theirs)
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, semantics="dense", engine=name, state_dtype=state_dtype)
        run.train(opt, ours)
        opt.catch_up()
    assert opt.state[ours][variant.rule.state[0].name].dtype == state_dtype
    our, their = (
        distances({"param": p.detach()}, {"param": exact["param"]})["param"] for p in (ours, theirs)
    )
    rounding = float(exact["param"].abs().max()) * torch.finfo(torch.float32).eps
    assert our[0] <= 1.05 * their[0] + rounding
    assert our[1] <= 1.05 * their[1]


COMPLEX = [v for v in KINDS if v.cls._supports_complex]


@pytest.mark.parametrize("variant", COMPLEX, ids=str)
@on_both_engines
def test_complex_parameters(variant: Variant, engine: str):
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.complex128)

    weight = drawn(8, 3)
    ours, theirs = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, semantics="dense", engine=name)
        dense = variant([theirs], lr=0.1, engine="reference")
        for _ in range(12):
            rows = torch.randint(0, 6, (2,), generator=generator)
            grad = coo(rows, drawn(2, 3), (8, 3))
            opt.catch_up(ours, rows)
            ours.grad, theirs.grad = grad, grad.to_dense()
            opt.step()
            dense.step()
        opt.catch_up()
    assert_close(kept(opt, ours), kept(dense, theirs))


# Gradients of other layouts


def csr(grad: Tensor) -> Tensor:
    return grad.to_sparse_csr()


def every_dim(grad: Tensor) -> Tensor:
    return grad.to_sparse_coo()


def blocks(grad: Tensor) -> Tensor:
    return grad.to_sparse_bsr((2, 1))


def masked(grad: Tensor) -> Tensor:
    """What the mask excludes is zero here, whatever it is."""
    return torch.masked.masked_tensor(torch.where(grad == 0, 77.0, grad), grad != 0)


FUNCTIONAL = [
    (sparsestep.FunctionalAdamW, {"weight_decay": 0.1}),
    (sparsestep.FunctionalSGD, {"momentum": 0.9}),
    (sparsestep.FunctionalRowwiseAdam, DECAY),
    (sparsestep.FunctionalLion, {}),
    (sparsestep.FunctionalFtrl, {"l1": 0.01}),
]


@pytest.mark.parametrize("layout", [csr, every_dim, blocks, masked], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("cls", "options"), FUNCTIONAL, ids=[cls.__name__ for cls, _ in FUNCTIONAL]
)
@on_both_engines
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support is in beta")
def test_what_a_layout_does_not_hold_of_a_row_is_zero(
    layout: Any, cls: Any, options: dict[str, Any], engine: str
):
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    with running_on(engine) as name:
        opt = cls([ours], lr=0.1, semantics="dense", engine=name, **options)
        dense = cls.optimizer_class([theirs], lr=0.1, **options)
        for _ in range(10):
            grad = torch.randn(8, 3, generator=generator, dtype=torch.float64)
            grad *= torch.rand(8, 3, generator=generator) < 0.15
            opt.catch_up(ours)  # blocks hold more rows than those that are not zero
            opt.step([layout(grad)])
            theirs.grad = grad
            dense.step()
        opt.catch_up()
    assert_close(kept(opt, ours), kept(dense, theirs))


@each_kind
@on_both_engines
def test_a_gradient_that_holds_nothing_is_a_step_in_which_all_are_idle(
    variant: Variant, engine: str
):
    results = []
    for sparse in (True, False):
        run = standard(20)
        param = run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([param], lr=0.1, **more)
            for t in range(20):
                run.train(opt, param, range(t, t + 1))
                nothing = coo(
                    torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3).double(), (24, 3)
                )
                param.grad = nothing if sparse else torch.zeros_like(param)
                opt.step()
                if t % 2:  # dense gradients in between are just gradients, from reading all rows
                    opt.catch_up()
                    param.grad = run.dense(t, torch.float64)
                    opt.step()
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


def test_the_first_gradient_may_hold_nothing():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.AdamW([param], lr=0.1, weight_decay=0.5, semantics="dense")
    param.grad = coo(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2), (4, 2))
    opt.step()
    opt.catch_up()
    assert torch.allclose(param, torch.full((4, 2), 0.95))


@each_kind
@on_both_engines
def test_steps_without_a_gradient_are_no_steps(variant: Variant, engine: str):
    """As with torch: a parameter without a gradient is left out, decay and all."""
    run = standard(20)
    results = []
    for sparse in (True, False):
        param, other = run.param(), run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([other, param], lr=0.1, **more)
            for t in range(20):
                opt.param_groups[0]["lr"] = run.rates[t]
                opt.catch_up()
                for each, has in ((param, t % 3), (other, t % 2)):
                    grad = run.sparse(t, torch.float64)
                    each.grad = (grad if sparse else grad.to_dense()) if has else None
                opt.step()
            opt.catch_up()
        results.append([kept(opt, param), kept(opt, other)])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact, room_for(variant))


# Options that change on the way


def changing(**values: list[Any]) -> Callable[[torch.optim.Optimizer, int], None]:
    """Another value every seven steps."""

    def change(opt: torch.optim.Optimizer, t: int) -> None:
        for name, given in values.items():
            opt.param_groups[0][name] = given[t // 7 % len(given)]

    return change


CHANGES: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = [
    (sparsestep.AdamW, {}, {"betas": [(0.9, 0.999), (0.5, 0.9), (0.9, 0.5)]}),
    (sparsestep.AdamW, {}, {"eps": [1e-8, 0.5]}),
    (sparsestep.AdamW, {}, {"weight_decay": [0.0, 0.5, 0.1]}),
    (sparsestep.AdamW, {}, {"maximize": [False, True]}),
    (sparsestep.SparseAdam, {}, {"betas": [(0.9, 0.999), (0.5, 0.9)], "eps": [1e-8, 0.5]}),
    (sparsestep.Adagrad, DECAY, {"lr_decay": [0.0, 0.1], "weight_decay": [0.1, 0.2]}),
    (sparsestep.SGD, {"momentum": 0.9, **DECAY}, {"momentum": [0.9, 0.5], "weight_decay": [0, 1]}),
    (sparsestep.SGD, {"momentum": 0.9}, {"dampening": [0.0, 0.5]}),
    (sparsestep.SGD, {"momentum": 0.9}, {"nesterov": [False, True]}),
    (sparsestep.RMSprop, {"momentum": 0.9}, {"alpha": [0.99, 0.5], "momentum": [0.9, 0.1]}),
    (sparsestep.Lion, {}, {"betas": [(0.9, 0.99), (0.5, 0.5)], "weight_decay": [0.0, 0.1]}),
    (sparsestep.Ftrl, {}, {"l1": [0.0, 0.1], "l2": [0.0, 0.1], "beta": [1.0, 2.0]}),
    (sparsestep.RowwiseAdam, DECAY, {"betas": [(0.9, 0.999), (0.5, 0.9)]}),
]
# The rule itself is another, with other state.
OTHER_RULES: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = [
    (sparsestep.SGD, {}, {"momentum": [0.0, 0.9, 0.5]}),
    (sparsestep.SGD, {"momentum": 0.9, **DECAY}, {"momentum": [0.9, 0.0, 0.0]}),
    (sparsestep.RMSprop, {"momentum": 0.9}, {"momentum": [0.9, 0.0]}),
    (sparsestep.RMSprop, {"centered": True, "eps": 0.5}, {"centered": [True, False, False]}),
    (sparsestep.AdamW, {"amsgrad": True}, {"amsgrad": [True, False, False, False]}),
]


def assert_same_with_changes(
    cls: Any, options: dict[str, Any], changes: dict[str, list[Any]], engine: str, steps: int
) -> None:
    run = Run(steps)
    variant = Variant(cls, options)
    exact = dense_run(variant, run, before=changing(**changes))
    param = run.param()
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, before=changing(**changes))
        opt.catch_up()
    assert_close(kept(opt, param), exact, room_for(variant))


@pytest.mark.parametrize(("cls", "options", "changes"), CHANGES, ids=str)
@on_both_engines
def test_options_that_change_between_steps(cls, options, changes, engine: str):
    assert_same_with_changes(cls, options, changes, engine, steps=35)


@pytest.mark.parametrize(("cls", "options", "changes"), OTHER_RULES, ids=str)
@on_both_engines
def test_options_that_select_another_rule(cls, options, changes, engine: str):
    """What was missed is made up for by the rule that was missed, with its own state."""
    assert_same_with_changes(cls, options, changes, engine, steps=14)


@on_both_engines
def test_groups_with_values_of_their_own(engine: str):
    run = standard(30)
    results = []
    for sparse in (True, False):
        params = [run.param() for _ in range(3)]
        groups = [
            {"params": params[:1], "betas": (0.5, 0.9), "weight_decay": 0.5},
            {"params": params[1:2], "lr": 0.01, "amsgrad": True},
            {"params": params[2:], "eps": 0.5},
        ]
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = sparsestep.AdamW(groups, lr=0.1, **more)
            for t in range(30):
                opt.param_groups[2]["lr"] = run.rates[t]
                opt.catch_up()
                for number, param in enumerate(params):
                    grad = run.sparse((t + number) % 30, torch.float64)
                    param.grad = grad if sparse else grad.to_dense()
                opt.step()
            opt.catch_up()
        results.append([kept(opt, param) for param in params])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact)


def test_a_learning_rate_that_is_a_tensor():
    run = standard(20)
    exact = dense_run(KINDS[0], run)
    param, rate = run.param(), torch.tensor(0.0, dtype=torch.float64)
    opt = KINDS[0]([param], lr=rate, semantics="dense")
    for t in range(20):
        rate.fill_(run.rates[t])
        opt.catch_up(param, run.rows[t])
        param.grad = run.sparse(t, torch.float64)
        opt.step()
    opt.catch_up()
    assert_close(kept(opt, param), exact)


# Masks


@each_kind
@on_both_engines
def test_rows_outside_a_mask_keep_their_bits(variant: Variant, engine: str):
    run = standard(30)
    mask = torch.rand(24, generator=torch.Generator().manual_seed(3)) < 0.5
    results = []
    for sparse in (True, False):
        param = run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([{"params": [param], "mask": mask}], lr=0.1, **more)
            run.train(opt, param)
            opt.catch_up(param, torch.arange(24))
            assert same_bits(param.detach()[~mask], run.weight[~mask])
            opt.catch_up()
        assert same_bits(param.detach()[~mask], run.weight[~mask])
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


@each_kind
@on_both_engines
@pytest.mark.parametrize("how", ["in place", "another", "none in between"])
def test_a_mask_that_changes_on_the_way(variant: Variant, engine: str, how: str):
    """A row misses only the steps in which it might have moved."""
    run = standard(30)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(24, generator=generator) < 0.5 for _ in range(3)]
    results = []
    for sparse in (True, False):
        param, mask = run.param(), masks[0].clone()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([{"params": [param], "mask": mask}], lr=0.1, **more)
            group = opt.param_groups[0]
            for part in range(3):
                if how == "in place":
                    mask.copy_(masks[part])
                elif how == "another" or part != 1:
                    group["mask"] = masks[part]
                else:
                    group["mask"] = None
                run.train(opt, param, range(10 * part, 10 * part + 10))
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


def test_dense_gradients_under_a_mask():
    run = standard(30)
    mask = torch.arange(24) % 3 > 0
    results = []
    for sparse in (True, False):
        param = run.param()
        more = {"semantics": "dense"} if sparse else {}
        opt = KINDS[0]([{"params": [param], "mask": mask}], lr=0.1, **more)
        for t in range(30):
            opt.catch_up()
            param.grad = run.sparse(t, torch.float64)
            if t % 3 == 0 or not sparse:
                param.grad = param.grad.to_dense()
            opt.step()
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)
    assert same_bits(results[0]["param"][~mask], run.weight[~mask])


# Histories


@pytest.mark.parametrize("cls", [sparsestep.AdamW, sparsestep.Lion], ids=lambda c: c.__name__)
def test_histories_longer_than_what_is_reserved(cls: Any):
    """A row that waits for 300 and one that waits for 1,100 steps."""
    results = []
    for sparse in (True, False):
        param = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        opt = cls([param], lr=0.1, **({"semantics": "dense"} if sparse else {}))
        generator = torch.Generator().manual_seed(0)
        for t in range(1105):
            row = {0: 0, 1: 1, 301: 0, 1102: 1}.get(t, 2)
            values = torch.randn(1, 2, generator=generator, dtype=torch.float64)
            opt.param_groups[0]["lr"] = 0.01 * (1 + math.cos(t / 50))
            grad = coo([row], values, (4, 2))
            opt.catch_up(param, torch.tensor([row]))
            param.grad = grad if sparse else grad.to_dense()
            opt.step()
        if sparse:
            assert opt._clocks[id(param)].history.steps == 1105
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


@each_kind
@on_both_engines
@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("at_once", [False, True], ids=["a few with each step", "at once"])
def test_a_history_that_is_full_begins_anew(
    variant: Variant, engine: str, from_the_start: bool, at_once: bool, monkeypatch
):
    run = standard()
    param = run.param()
    begun, forgotten = [], []
    begin_anew, forget = History.begin_anew, History.forget
    monkeypatch.setattr(History, "begin_anew", lambda h: (begun.append(h.now), begin_anew(h)))
    monkeypatch.setattr(History, "forget", lambda h, n: (forgotten.append(n), forget(h, n)))
    if at_once:
        monkeypatch.setattr(History, "is_half_full", False)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        if from_the_start:  # then no series reaches far enough to be used
            monkeypatch.setattr(histories, "_MOST_STEPS", 13)
        run.train(opt, param, range(1))
        monkeypatch.setattr(histories, "_MOST_STEPS", 13)
        run.train(opt, param, range(1, 60))
        assert (len(begun) > 3, len(forgotten) > 3) == (at_once, not at_once)
        opt.catch_up()
    assert_close(kept(opt, param), oracle(variant), room_for(variant))


@on_both_engines
def test_no_step_waits_for_the_whole_table(engine: str, monkeypatch):
    """However long training goes on: what a step catches up is bounded by its share of the rows."""
    monkeypatch.setattr(histories, "_MOST_STEPS", 40)
    run = Run(100, (200, 2))
    param = run.param()
    variant = Variant(sparsestep.AdamW, {"weight_decay": 0.1})
    caught_up = []
    bring = RowClock.catch_up_rows

    def counted(clock: RowClock, *args: Any, **options: Any) -> int:
        caught_up.append(args[2].unique().numel())
        return bring(clock, *args, **options)

    monkeypatch.setattr(RowClock, "catch_up_rows", counted)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param)
    assert opt._clocks[id(param)].history.base >= 40
    assert max(caught_up) == 20  # 200 rows in a quarter of 40 steps
    monkeypatch.undo()
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(variant, run))


@on_both_engines
def test_rows_outside_a_mask_stay_where_they_are_when_a_history_is_long(engine: str, monkeypatch):
    monkeypatch.setattr(histories, "_MOST_STEPS", 13)
    run = standard()
    variant = Variant(sparsestep.AdamW, {"weight_decay": 0.1})
    mask = torch.arange(24) % 3 != 1
    results = []
    for sparse in (True, False):
        param = run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([{"params": [param], "mask": mask}], lr=0.1, **more)
            run.train(opt, param, range(50))
            assert not sparse or opt._clocks[id(param)].history.base >= 30
            opt.catch_up()
            assert same_bits(param[1::3].detach(), run.weight[1::3])
            opt.param_groups[0]["mask"] = ~mask  # now the others move, from where they are
            run.train(opt, param, range(50, 60))
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


@on_both_engines
def test_the_first_step_on_a_large_table_writes_nothing_but_what_it_touches(engine: str):
    """Neither its state nor what is remembered of its rows: a page for each row, no more."""
    rows = 3_000_001
    ids = torch.tensor([5, 7, 2_000_000, rows - 1, 5])
    weight = torch.nn.Parameter(torch.zeros(rows, 1))
    few = torch.nn.Parameter(torch.zeros(5, 1))
    with running_on(engine) as name:
        opts = [
            sparsestep.Adam([param], lr=0.1, semantics="dense", engine=name)
            for param in (weight, few)
        ]
        for t in range(3):
            for opt, param, at in (
                (opts[0], weight, ids),
                (opts[1], few, torch.tensor([0, 1, 2, 3, 0])),
            ):
                opt.catch_up(param, at[t:])
                param.grad = coo(at[t:], torch.ones(5 - t, 1), param.shape)
                opt.step()
        stamps = opts[0]._clocks[id(weight)]._stamps
        assert stamps.pages_left == -(-rows // 1024) - 3
        for opt in opts:
            opt.catch_up()
    assert not stamps.pages_left
    assert torch.equal(weight[ids], few[[0, 1, 2, 3, 0]])
    assert torch.equal(stamps.last[ids], opts[1]._clocks[id(few)].last[[0, 1, 2, 3, 0]])
    assert (stamps.last < 0).sum() == rows - 4


def test_decay_that_leaves_almost_nothing():
    """The history begins anew before numbers become too large."""
    run = Run(80, peak=0.1)
    variant = Variant(sparsestep.AdamW, {"weight_decay": 9.999})
    exact = dense_run(variant, run)
    param = run.param()
    opt = variant([param], lr=0.1, semantics="dense")
    run.train(opt, param)
    opt.catch_up()
    assert_close(kept(opt, param), exact)


# The same bits


@each_variant
def test_bits_do_not_depend_on_threads_or_instruction_set(variant: Variant):
    """Large enough for several pieces, with duplicates and a row that comes very often."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(1500, 20, generator=generator)
    rows = [torch.randint(0, 1500, (1200,), generator=generator) for _ in range(3)]
    for each in rows:
        each[torch.randint(0, 1200, (300,), generator=generator)] = 77
    values = torch.randn(1200, 20, generator=generator)
    results = []
    for engine in INSTRUCTION_SETS:
        for threads in (1, 2, 3, 8) if engine == INSTRUCTION_SETS[-1] else (1, 3):
            torch.set_num_threads(threads)
            with running_on(engine) as name:
                param = torch.nn.Parameter(weight.clone())
                opt = variant([param], lr=0.01, semantics="dense", engine=name)
                for each in rows:
                    opt.catch_up(param, each)
                    param.grad = coo(each, values, weight.shape)
                    opt.step()
                opt.catch_up()
            results.append(kept(opt, param))
    for other in results[1:]:
        for name, tensor in results[0].items():
            assert same_bits(tensor, other[name])


@each_variant
def test_the_engines_agree_to_a_few_roundings(variant: Variant):
    run = standard(20)
    results = []
    for engine in ON_BOTH:
        param = run.param(torch.float32)
        with running_on(engine) as name:
            opt = variant([param], lr=0.1, semantics="dense", engine=name)
            run.train(opt, param)
            opt.catch_up()
        results.append(kept(opt, param))
    # The reference engine rounds a row once per catch-up, the core in a few operations, and torch's
    # square root is not rounded correctly: 2.5 roundings at most were seen, relative to the largest
    # number of the tensor.
    assert_close(results[0], results[-1], 6 * 2.0**-24)


# Training loops


def test_a_step_that_a_scaler_skips_is_no_step():
    run = standard(20)
    results = []
    for sparse in (True, False):
        param = run.param(torch.float32)
        opt = sparsestep.AdamW([param], lr=0.1, **({"semantics": "dense"} if sparse else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for t in range(20):
            scaler.scale(torch.ones(()))
            opt.catch_up()
            grad = run.sparse(t, torch.float32) * scaler.get_scale()
            grad = grad if sparse else grad.to_dense()
            if t % 5 == 3:
                grad = (
                    grad * math.inf
                    if not sparse
                    else coo([0], torch.full((1, 3), math.inf), (24, 3))
                )
            param.grad = grad
            scaler.step(opt)
            scaler.update()
        opt.catch_up()
        assert int(opt.state[param]["step"]) == 16
        results.append(kept(opt, param))
    assert_close(*results, 1e-5)


def test_step_in_backward():
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(12, 3, sparse=sparse).double() for _ in range(2)]
        params = [table.weight for table in tables]
        opt = sparsestep.AdamW(params, lr=0.1, **({"semantics": "dense"} if sparse else {}))
        handle = opt.step_in_backward()
        for t in range(15):
            ids = torch.randint(0, 10, (3,), generator=torch.Generator().manual_seed(t))
            opt.catch_up()
            (tables[0](ids) * tables[1](ids + 1)).sum().backward()
        handle.remove()
        opt.catch_up()
        results.append([kept(opt, param) for param in params])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_given_twice_takes_two_steps():
    run = standard(20)
    results = []
    for sparse in (True, False):
        param = run.param()
        opt = sparsestep.AdamW([param, param], **({"semantics": "dense"} if sparse else {}))
        run.train(opt, param)
        opt.catch_up()
        assert int(opt.state[param]["step"]) == 40
        results.append(kept(opt, param))
    assert_close(*results)


def test_a_parameter_in_several_groups_is_refused_as_by_torch():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    groups = [{"params": [param]}, {"params": [param]}]
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        sparsestep.AdamW(groups, semantics="dense")


# What is refused


@sparsestep.rule(state={"sum": 0.0})
def own_rule(param, grad, sum, *, lr=0.1):
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + 1e-10), sum


COUPLED = "no closed form for coupled weight decay.*Use decoupled_weight_decay=True, or AdamW"
REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (sparsestep.Adam, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.SGD, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.SGD, {"weight_decay": 0.1, "momentum": 0.9}, COUPLED),
    (sparsestep.Adagrad, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.RMSprop, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.RowwiseAdagrad, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.RowwiseAdam, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.SparseAdam, {"bias_correction": "per_row"}, "bias_correction must be global"),
    (sparsestep.Adam, {"bias_correction": "per_row"}, "bias_correction must be global"),
    (sparsestep.AdamW, {"bias_correction": "per_row", "amsgrad": True}, "must be global"),
    (sparsestep.RowwiseAdam, {"bias_correction": "per_row"}, "bias_correction must be global"),
    (sparsestep.AdamW, {"stochastic_rounding": True}, "does not go with stochastic_rounding"),
    (sparsestep.SGD, {"differentiable": True}, "does not go with differentiable"),
    (sparsestep.RAdam, {}, "says what it does without a gradient.*'radam'"),
    (own_rule, {}, "says what it does without a gradient.*'own_rule'.*Use semantics='masked'"),
    (sparsestep.AdamW, {"lr": 0.5, "weight_decay": 2.0}, "must be less than 1. Got 1.0"),
    (sparsestep.Lion, {"lr": 1.0, "weight_decay": 1.5}, "must be less than 1. Got 1.5"),
    (sparsestep.SGD, {"lr": 10.0, **DECAY}, "must be less than 1. Got 1.0"),
    (sparsestep.AdamW, {"mask": torch.ones(3, 2) > 0}, r"mask 0 must have shape \(3,\)"),
]


@pytest.mark.parametrize(("cls", "options", "message"), REFUSED, ids=str)
def test_what_is_refused_at_construction(cls: Any, options: dict[str, Any], message: str):
    param = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(InputError, match=message) as raised:
        cls([param], **options, semantics="dense")
    assert str(raised.value).startswith(f"{cls.__name__}: ")
    # A group that is added later is refused as well, and not added.
    opt = sparsestep.AdamW([torch.nn.Parameter(torch.zeros(1))], semantics="dense")
    if cls is sparsestep.AdamW:
        with pytest.raises(InputError, match=message):
            opt.add_param_group({"params": [param], **options})
        assert len(opt.param_groups) == 1


@pytest.mark.parametrize("other", ["other", "", None, "Dense"])
def test_other_semantics_do_not_exist(other: Any):
    with pytest.raises(InputError, match="AdamW: semantics must be one of masked, dense"):
        sparsestep.AdamW([torch.zeros(1)], semantics=other)
    with pytest.raises(InputError, match="semantics"):
        sparsestep.AdamW([{"params": [torch.zeros(1)], "semantics": "dense"}])


LATER: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    (sparsestep.SGD, {"momentum": 0.9}, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.Adam, {}, {"weight_decay": 0.1}, COUPLED),
    (sparsestep.RowwiseAdam, DECAY, {"decoupled_weight_decay": False}, COUPLED),
    (sparsestep.AdamW, {}, {"lr": 1.0, "weight_decay": 1.0}, "must be less than 1. Got 1.0"),
    (sparsestep.AdamW, {}, {"bias_correction": "per_row"}, "bias_correction must be global"),
    (sparsestep.AdamW, {}, {"mask": torch.ones(24, 3) > 0}, r"mask 0 must have shape \(24,\)"),
]


def bookkeeping(opt: RuleOptimizer) -> list[Any]:
    """What is remembered about rows that are behind."""
    return [
        (key, clock.last.clone(), clock.history.base, clock.history.steps)
        for key, clock in opt._clocks.items()
    ]


def same_bookkeeping(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        x[0] == y[0] and torch.equal(x[1], y[1]) and x[2:] == y[2:]
        for x, y in zip(a, b, strict=True)
    )


@pytest.mark.parametrize(("cls", "options", "later", "message"), LATER, ids=str)
def test_what_is_refused_at_the_step(
    cls: Any, options: dict[str, Any], later: dict[str, Any], message: str
):
    """With nothing changed, and once it is taken back the run goes on as if nothing had been."""
    run = standard(20)
    variant = Variant(cls, options)
    first, param = torch.nn.Parameter(run.weight.clone()), run.param()
    opt = variant([{"params": [first]}, {"params": [param]}], lr=0.1, semantics="dense")
    first.grad = coo([1], torch.ones(1, 3).double(), (24, 3))
    run.train(opt, param, range(10))
    before, books = snapshot(opt), bookkeeping(opt)
    was = dict(opt.param_groups[1])
    opt.param_groups[1].update(later)
    param.grad = run.sparse(11, torch.float64)
    with pytest.raises(InputError, match=message):
        opt.step()
    assert unchanged(opt, before)
    assert same_bookkeeping(bookkeeping(opt), books)
    for name in later:
        del opt.param_groups[1][name]
    opt.param_groups[1].update(was)
    run.train(opt, param, range(10, 20))
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(variant, run))


# A step that raises


@each_kind
@each_engine
@pytest.mark.parametrize("bad", [24, -1, 2**40])
def test_a_bad_index_in_the_last_parameter_changes_nothing(variant: Variant, engine: str, bad: int):
    run = standard(20)
    params = [run.param(), run.param()]
    with running_on(engine) as name:
        opt = variant(
            [{"params": params[:1]}, {"params": params[1:]}], semantics="dense", engine=name
        )
        for t in range(6):
            opt.catch_up()
            for param in params:
                param.grad = run.sparse(t, torch.float64)
            opt.step()
        params[0].grad = run.sparse(7, torch.float64)
        params[1].grad = coo([1, bad], torch.ones(2, 3).double(), (24, 3))
        before, books = snapshot(opt), bookkeeping(opt)
        with pytest.raises(InputError, match=rf"param 0 of group 1: .*Got {bad}"):
            opt.step()
    assert unchanged(opt, before)
    assert same_bookkeeping(bookkeeping(opt), books)


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="there is no native engine")
@pytest.mark.parametrize("first_step", [True, False])
def test_what_the_native_engine_cannot_run_changes_nothing(first_step: bool):
    run = standard(20)
    param = run.param()
    odd = torch.nn.Parameter(torch.zeros(4, 3, 2).transpose(1, 2))
    opt = sparsestep.AdamW([param], semantics="dense", engine="native")
    if not first_step:
        run.train(opt, param, range(6))
    opt.add_param_group({"params": [odd]})
    param.grad = run.sparse(8, torch.float64)
    odd.grad = coo([0], torch.ones(1, 2, 3), (4, 2, 3))
    before, books = snapshot(opt), bookkeeping(opt)
    with pytest.raises(InputError, match="the native engine takes CPU tensors"):
        opt.step()
    assert unchanged(opt, before)
    assert same_bookkeeping(bookkeeping(opt), books)
    opt.catch_up()


# State that is cleared, and state that is made in advance

STATEFUL = [variant for variant in KINDS if variant.rule.state]
CLEARED: dict[str, Callable[[RuleOptimizer, Tensor], None]] = {
    "all": lambda opt, param: opt.state.clear(),
    "the parameter's": lambda opt, param: opt.state[param].clear(),
    "replaced": lambda opt, param: setattr(opt, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("variant", STATEFUL, ids=str)
@pytest.mark.parametrize("how", CLEARED)
@on_both_engines
def test_a_parameter_whose_state_is_cleared_begins_anew(variant: Variant, how: str, engine: str):
    """Nothing was missed any more: it goes on as with a new optimizer."""
    run = standard(20)
    param = run.param(torch.float32)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        CLEARED[how](opt, param)
        weight = param.detach().clone()
        opt.catch_up(param, torch.tensor([0, 3]))
        opt.catch_up()
        opt.state_dict()
        assert same_bits(param.detach(), weight)
        fresh = torch.nn.Parameter(weight.clone())
        new = variant([fresh], lr=0.1, semantics="dense", engine=name)
        for one, its in ((opt, param), (new, fresh)):
            run.train(one, its, range(10, 20))
            one.catch_up()
    ours, wanted = kept(opt, param), kept(new, fresh)
    assert ours.keys() == wanted.keys()
    assert all(same_bits(ours[key], wanted[key]) for key in wanted)


def test_a_buffer_that_is_taken_away_begins_anew_as_with_torch():
    """Torch's SGD takes ``None`` for a first step."""
    param = torch.nn.Parameter(torch.zeros(3, 1))
    opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, semantics="dense")
    param.grad = coo([0], torch.ones(1, 1), (3, 1))
    opt.step()
    opt.state[param]["momentum_buffer"] = None
    opt.catch_up()
    param.grad = coo([1], torch.ones(1, 1), (3, 1))
    opt.step()
    opt.catch_up()
    assert param.flatten().tolist() == [-1.0, -1.0, 0.0]


NO_DECAY = [
    Variant(sparsestep.Adam, {}),
    Variant(sparsestep.RowwiseAdam, {}),
    Variant(sparsestep.Lion, {}),
    Variant(sparsestep.RMSprop, {"momentum": 0.9}),
]


@pytest.mark.parametrize("variant", NO_DECAY, ids=str)
@on_both_engines
def test_state_made_in_advance_is_as_none(variant: Variant, engine: str):
    """Rows without a gradient so far have missed nothing, so nobody is warned (an error here)."""
    results = []
    for in_advance in (True, False):
        param = torch.nn.Parameter(torch.ones(6, 2))
        with running_on(engine) as name:
            opt = variant([param], lr=0.1, semantics="dense", engine=name)
            if in_advance:
                opt.materialize_state()
            for row in range(5):
                param.grad = coo([row], torch.ones(1, 2), (6, 2))
                opt.step()
            books = bookkeeping(opt)
            opt.catch_up()
        results.append((kept(opt, param), books[0][1:]))
    (ours, our_books), (wanted, books) = results
    assert all(same_bits(ours[key], wanted[key]) for key in wanted)
    assert torch.equal(our_books[0], books[0])
    assert our_books[1:] == books[1:]


@on_both_engines
def test_catching_up_in_inference_mode(engine: str):
    """What is remembered of the rows can be written afterwards."""
    run = standard(20)
    param = run.param()
    variant = Variant(sparsestep.AdamW, {})
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        with torch.inference_mode():
            opt.catch_up()
        run.train(opt, param, range(10, 20))
        opt.catch_up()
    assert_close(kept(opt, param), dense_run(variant, run))


# Checkpoints


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_checkpoint_is_current_and_is_that_of_torch():
    run = standard()
    param, theirs = run.param(), run.param()
    opt = sparsestep.AdamW([param], semantics="dense")
    dense = torch.optim.AdamW([theirs])
    run.train(opt, param)
    run.train(dense, theirs)
    ours, wanted = opt.state_dict(), dense.state_dict()
    assert ours["state"][0].keys() == wanted["state"][0].keys()
    assert ours["param_groups"][0].keys() == wanted["param_groups"][0].keys()
    assert_close(kept(opt, param), kept(dense, theirs))
    assert_close(
        {k: v for k, v in ours["state"][0].items() if k != "step"},
        {k: v for k, v in wanted["state"][0].items() if k != "step"},
    )
    assert ours["state"][0]["step"] == wanted["state"][0]["step"]


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
@pytest.mark.parametrize("torch_first", [False, True], ids=["from ours", "from torch"])
def test_training_goes_on_in_the_other_class(name: str, options: dict[str, Any], torch_first: bool):
    run = standard()
    straight, first = run.param(), run.param()
    dense = getattr(torch.optim, name)([straight], lr=0.1, **options)
    run.train(dense, straight)

    def made(param: Tensor, by_torch: bool) -> torch.optim.Optimizer:
        if by_torch:
            return getattr(torch.optim, name)([param], lr=0.1, **options)
        return getattr(sparsestep, name)([param], lr=0.1, semantics="dense", **options)

    opt = made(first, torch_first)
    run.train(opt, first, range(30))
    saved = through_a_file(opt.state_dict())
    second = torch.nn.Parameter(first.detach().clone())
    again = made(second, not torch_first)
    again.load_state_dict(saved)
    run.train(again, second, range(30, 60))
    again.state_dict()
    assert_close(kept(again, second), kept(dense, straight))


@each_variant
@on_both_engines
def test_a_run_that_was_killed_is_resumed_with_the_same_bits(variant: Variant, engine: str):
    run = standard(20)
    param = run.param(torch.float32)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        saved = through_a_file({"opt": opt.state_dict(), "param": param.detach()})
        run.train(opt, param, range(10, 20))
        resumed = torch.nn.Parameter(saved["param"])
        again = variant([resumed], lr=0.5, semantics="dense", engine=name)
        again.load_state_dict(saved["opt"])
        run.train(again, resumed, range(10, 20))
        again.catch_up()
        opt.catch_up()
    for key, tensor in kept(opt, param).items():
        assert same_bits(tensor, kept(again, resumed)[key])


@each_kind
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_current_and_go_on(variant: Variant, how: Any):
    run = standard(40)
    param = run.param(torch.float32)
    opt = variant([param], lr=0.1, semantics="dense")
    run.train(opt, param, range(20))
    again = how(opt)
    (other,) = again.param_groups[0]["params"]
    assert again.semantics == "dense"
    for key, tensor in kept(opt, param).items():
        assert same_bits(tensor, kept(again, other)[key])
    for one, its in ((opt, param), (again, other)):
        run.train(one, its, range(20, 40))
        one.catch_up()
    for key, tensor in kept(opt, param).items():
        assert same_bits(tensor, kept(again, other)[key])


def test_loading_forgets_what_was_missed_before():
    """The checkpoint is current; nothing of the time after it may be made up for."""
    run = standard(40)
    param = run.param()
    opt = sparsestep.AdamW([param], semantics="dense")
    run.train(opt, param, range(20))
    saved, weight = copy.deepcopy(opt.state_dict()), param.detach().clone()
    run.train(opt, param, range(20, 30))
    with torch.no_grad():
        param.copy_(weight)
    opt.load_state_dict(saved)
    opt.catch_up()
    assert same_bits(param.detach(), weight)
    run.train(opt, param, range(20, 40))
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(Variant(sparsestep.AdamW, {}), run))


def test_a_checkpoint_that_does_not_fit_forgets_nothing():
    run = standard(20)
    param = run.param()
    opt = sparsestep.AdamW([param], semantics="dense")
    run.train(opt, param)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(Variant(sparsestep.AdamW, {}), run))


def test_a_resized_parameter_starts_anew():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], lr=0.1, semantics="dense", **DECAY)
    for rows in (4, 6):
        param.grad = None
        param.data = torch.ones(rows, 2)
        for row in (1, 2):
            opt.catch_up(param, torch.tensor([row])) if param.grad is not None else None
            param.grad = coo([row], torch.zeros(1, 2), (rows, 2))
            opt.step()
        opt.catch_up()
        assert torch.allclose(param, torch.full((rows, 2), 0.99**2))
