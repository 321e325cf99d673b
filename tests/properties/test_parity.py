"""Torch's numbers and state; with dense gradients, its bits if you ask for its kernel."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing._internal.common_optimizers import optim_db

import sparsestep
from sparsestep import _native as native
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.cases import Case, cases
from tests.generate.grads import Drawn, plain_coo
from tests.generate.params import REAL
from tests.properties.marks import QUIET
from tests.subject import Snapshot, Subject
from tests.table import (
    each_counterpart,
    each_dtype,
    each_engine,
    running_on,
    same_bits,
    saved_state,
)

pytestmark = QUIET
STEPS = 8

SHAPES = [(), (1,), (7,), (3, 4), (2, 3, 5), (0,), (3, 0), (33, 17)]
ARRANGEMENTS = ["contiguous", "transposed", "sliced"]
HALVES = [torch.bfloat16, torch.float16]


def arranged(tensor: Tensor, arrangement: str) -> Tensor:
    """The same values with other strides."""
    if tensor.dim() < 2 or arrangement == "contiguous":
        return tensor
    if arrangement == "transposed":
        return tensor.transpose(0, 1).contiguous().transpose(0, 1)
    wider = torch.zeros(*tensor.shape[:-1], tensor.shape[-1] * 2 + 1, dtype=tensor.dtype)
    wider[..., : tensor.shape[-1]] = tensor
    return wider[..., : tensor.shape[-1]]


@dataclass
class Config:
    """Two param groups and what they are made of."""

    options: dict[str, Any]
    second: dict[str, Any]
    params: list[tuple[tuple[int, ...], str, torch.dtype]]
    seed: int

    def train(self, cls: type[torch.optim.Optimizer], **extras: Any) -> torch.optim.Optimizer:
        generator = torch.Generator().manual_seed(self.seed)

        def values(number: int) -> Tensor:
            shape, arrangement, dtype = self.params[number]
            return arranged(torch.randn(shape, generator=generator, dtype=dtype), arrangement)

        params = [torch.nn.Parameter(values(number)) for number in range(len(self.params))]
        half = (len(params) + 1) // 2
        groups = [{"params": params[:half]}, {"params": params[half:], **copied(self.second)}]
        opt = cls(groups[: 1 + bool(params[half:])], **copied(self.options), **extras)
        for _ in range(STEPS):
            # Mostly there: a step count that lags behind the others' must not be lost among them.
            present = torch.rand(len(params), generator=generator) > 0.15
            # Torch's fused SGD fails where only some of the momentum buffers exist.
            if self.options.get("fused") and self.options.get("momentum"):
                present[:] = True
            for number, param in enumerate(params):
                param.grad = values(number) if present[number] else None
            opt.step()
        return opt


def copied(options: dict[str, Any]) -> dict[str, Any]:
    """No tensor is shared between two optimizers."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in options.items()}


@st.composite
def learning_rates(draw: st.DrawFn, *, tensors: bool) -> float | Tensor:
    lr = draw(st.sampled_from([0.0, 1e-3, 0.03, 1.0]))
    return torch.tensor(lr) if tensors and draw(st.integers(0, 3)) == 0 else lr


@st.composite
def rule_options(draw: st.DrawFn, name: str) -> dict[str, Any]:
    """What only some of the classes have."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    values: dict[str, list[Any]] = {
        "betas": [(0.9, 0.999), (0.5, 0.75), (0.0, 0.99)],
        "eps": [1e-8, 1e-3],
        "amsgrad": [False, True],
        "momentum_decay": [4e-3, 0.5],
        "decoupled_weight_decay": [False, True],
        "lr_decay": [0, 0.1],
        "initial_accumulator_value": [0, 0.25],
        "alpha": [0.99, 0.5],
        "centered": [False, True],
        "momentum": [0, 0.9],
    }
    options = {key: draw(st.sampled_from(v)) for key, v in values.items() if key in known}
    if name == "SGD":
        options["nesterov"] = bool(options["momentum"]) and draw(st.booleans())
        options["dampening"] = 0 if options["nesterov"] else draw(st.sampled_from([0, 0.25]))
    return options


@st.composite
def kernels(draw: st.DrawFn, name: str) -> dict[str, bool]:
    """Options that ask for one of torch's kernels."""
    known = inspect.signature(getattr(torch.optim, name)).parameters
    choices = [{"foreach": True}, {"foreach": False}]
    if "fused" in known:
        choices += [{"fused": True}, {"fused": False}, {"foreach": False, "fused": True}]
    return draw(st.sampled_from(choices))


@st.composite
def configs(draw: st.DrawFn, name: str) -> Config:
    options = draw(rule_options(name)) | draw(kernels(name))
    # Torch refuses a tensor for Adam's foreach kernels.
    tensors = not (options.get("foreach") and name in ("Adam", "AdamW"))
    decays = st.sampled_from([0, 0.01, 0.5])
    options["lr"] = draw(learning_rates(tensors=tensors))
    options["weight_decay"] = draw(decays)
    options["maximize"] = draw(st.booleans())
    second = {"lr": draw(learning_rates(tensors=tensors)), "weight_decay": draw(decays)}
    dtypes: list[torch.dtype] = [torch.float32, torch.float64]
    if not options.get("fused"):  # torch's fused kernels take real numbers only
        dtypes.append(torch.complex64)
    # Torch's fused SGD in half precision leaves parts of the momentum buffer uninitialised.
    torch_repeats_itself = not (options.get("fused") and options.get("momentum"))
    if torch_repeats_itself and draw(st.integers(0, 2)) == 0:
        dtypes = [draw(st.sampled_from(HALVES))]
    kinds = st.tuples(
        st.sampled_from(SHAPES), st.sampled_from(ARRANGEMENTS), st.sampled_from(dtypes)
    )
    params = draw(st.lists(kinds, min_size=1, max_size=4))
    return Config(options, second, params, draw(st.integers(0, 2**16)))


def params_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in opt.param_groups for param in group["params"]]


def assert_same(
    ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer, *, exactly: bool
) -> None:
    """Params and state, and there is as much of it."""
    for our_group, their_group in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert our_group.keys() - {"state_dtype"} == their_group.keys()
    for our, their in zip(params_of(ours), params_of(theirs), strict=True):
        mine, other = saved_state(ours, our), theirs.state.get(their, {})
        assert mine.keys() == other.keys()
        for name, wanted in {"param": their, **other}.items():
            found = {"param": our, **mine}[name]
            if not exactly:
                assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-11), name
                continue
            assert same_bits(found, wanted), name
            # Strides decide which of torch's kernels runs, hence the last bits of a root.
            assert found.stride() == wanted.stride(), name


@each_counterpart
@given(data=st.data())
def test_steps_are_torchs_to_the_last_bit(
    ours: type[RuleOptimizer], theirs: type[torch.optim.Optimizer], data: st.DataObject
):
    config = data.draw(configs(ours.__name__))
    # Torch's fused kernels take elements in the order of memory, whatever the strides: where param
    # and gradient lie differently, their numbers are not those of the formula.
    fused = config.options.get("fused")
    assume(not fused or all(kind == "contiguous" for _, kind, _ in config.params))
    dtype = config.params[0][2]
    extras = {"state_dtype": dtype} if dtype in HALVES else {}  # as torch keeps it
    assert_same(config.train(ours, **extras), config.train(theirs), exactly=True)


@st.composite
def default_configs(draw: st.DrawFn, name: str) -> Config:
    config = draw(configs(name))
    kernel_options = ("foreach", "fused")
    options = {k: v for k, v in config.options.items() if k not in kernel_options}
    # Torch computes a step size in the precision of its tensor.
    options["lr"], second = float(options["lr"]), {**config.second, "lr": 0.01}
    dtypes = st.sampled_from([torch.float64, torch.complex128])
    params = [(shape, kind, draw(dtypes)) for shape, kind, _ in config.params]
    return Config(options, second, params, config.seed)


@each_counterpart
@given(data=st.data())
def test_by_default_steps_are_torchs_up_to_rounding(
    ours: type[RuleOptimizer], theirs: type[torch.optim.Optimizer], data: st.DataObject
):
    config = data.draw(default_configs(ours.__name__))
    assert_same(config.train(ours), config.train(theirs), exactly=False)


@pytest.mark.parametrize(
    ("options", "engine"),
    [
        ({}, "native"),
        ({"foreach": True}, "torch"),
        ({"foreach": False}, "torch"),
        ({"fused": True}, "torch"),
        ({"fused": False}, "torch"),
        ({"engine": "reference"}, "torch"),
    ],
)
@pytest.mark.skipif(native.ext is None, reason="needs the C++ core")
def test_who_runs_a_dense_gradient(options: dict[str, Any], engine: str):
    layer = torch.nn.Linear(3, 2)
    image = torch.nn.Parameter(torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last))
    gaps = torch.nn.Parameter(torch.randn(4, 6, 8)[:, ::2, ::2])  # rows without a stride
    opt = sparsestep.AdamW([*layer.parameters(), image, gaps], **options)
    for param in params_of(opt):
        param.grad = torch.randn_like(param)
    opt.step()
    wanted = [engine] * 3 + ["torch"]
    if options.get("fused"):
        wanted[3] = "reference"  # torch's fused kernel would write into the gaps
    assert [each.engine for each in opt.explain()] == wanted


def test_a_step_that_torchs_kernel_refuses_changes_nothing():
    """Torch's fused SGD wants all momentum buffers or none; a sparse param must not go ahead."""
    old, new, table = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(3))
    opt = sparsestep.SGD([old, new, table], lr=0.1, momentum=0.9, fused=True)
    old.grad = torch.ones(4, 2)
    opt.step()
    new.grad, table.grad = torch.ones(4, 2), torch.ones(4, 2).to_sparse(1)
    before = Snapshot(Subject(opt))
    try:
        opt.step()
    except (TypeError, RuntimeError):
        before.check()
    else:
        assert same_bits(new.detach(), table.detach())


@each_counterpart
def test_gradients_flow_through_a_differentiable_step(
    ours: type[RuleOptimizer], theirs: type[torch.optim.Optimizer]
):
    """Learning to learn: the derivative of what two steps give by start and gradients."""
    derivatives = []
    for cls in (ours, theirs):
        start, *grads = (
            torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for seed in range(3)
        )
        param = start.clone()
        opt = cls([param], lr=0.1, weight_decay=0.1, differentiable=True)
        for grad in grads:
            param.grad = grad
            opt.step()
        param.square().sum().backward()
        derivatives.append([param.detach(), *(leaf.grad for leaf in (start, *grads))])
    for our, their in zip(*derivatives, strict=True):
        assert bool((their != 0).all())
        assert same_bits(our, their)


# Torch's own database of inputs that are refused; its valid ones are among those drawn above.
ERRORS = [
    (getattr(sparsestep, info.optim_cls.__name__), error)
    for info in optim_db
    if info.optim_cls.__name__ in sparsestep.__all__
    for error in info.optim_error_inputs_func(device="cpu", dtype=torch.float32)
]


@pytest.mark.parametrize(
    ("ours", "error"), ERRORS, ids=[e.optimizer_error_input.desc for _, e in ERRORS]
)
def test_error_inputs(ours: Any, error: Any):
    given = error.optimizer_error_input
    params = [torch.nn.Parameter(torch.randn(2, 3))] if given.params is None else given.params
    with pytest.raises(error.error_type, match=error.error_regex):
        ours(params, **given.kwargs).step()


# Sparse gradients: torch.optim.SparseAdam


def take_step(opt: torch.optim.Optimizer, params: list, drawn: list[Drawn | None]) -> None:
    for param, each in zip(params, drawn, strict=True):
        param.grad = None if each is None else each.grad.to(param.dtype)
    opt.step()


def comparable(case: Case) -> Case:
    """The params that both take: contiguous, and with dims, or torch leaves them as they are."""
    kept = [index for index, values in enumerate(case.start) if values.dim()]
    assume(kept)
    return replace(
        case,
        start=[case.start[index].clone(memory_format=torch.contiguous_format) for index in kept],
        steps=[[step[index] for index in kept] for step in case.steps],
    )


# Of one step: a few roundings in float32, and one of the result in half precision.
ROUNDINGS = {torch.float64: 1e-14}


@each_engine
@given(case=cases(max_steps=20, dtypes=REAL, kinds=(plain_coo,)))
def test_step_by_step_like_torch(engine: str, case: Case):
    """Both start each step from the same params; in half precision, torch computes in float32."""
    case = comparable(case)
    ours = case.params()
    is_half = ours[0].dtype in HALVES
    theirs = [
        torch.nn.Parameter(p.detach().float() if is_half else p.detach().clone()) for p in ours
    ]
    with running_on(engine) as name:
        our_opt = sparsestep.SparseAdam(case.groups(ours), **case.options, engine=name)
        their_opt = torch.optim.SparseAdam(case.groups(theirs), **case.options)
        for drawn in case.steps:
            before = [p.detach().clone() for p in theirs]
            take_step(our_opt, ours, drawn)
            take_step(their_opt, theirs, drawn)
            for our, their, old, each in zip(ours, theirs, before, drawn, strict=True):
                value, info = their.detach(), torch.finfo(our.dtype)
                room = torch.maximum(value.abs(), (value - old).abs())
                room *= ROUNDINGS.get(our.dtype, 1e-6)
                if is_half:
                    room += value.abs() * (info.eps / 2) + info.smallest_normal * info.eps
                assert bool(((our.detach().to(value.dtype) - value).abs() <= room).all())
                if each is not None:
                    kept = old[~each.held].to(our.dtype)
                    assert same_bits(our.detach()[~each.held], kept)
                if is_half:
                    their.data.copy_(our.data)
                else:
                    our.data.copy_(their.data)
        for our, their in zip(ours, theirs, strict=True):
            assert our_opt.state[our].keys() == their_opt.state[their].keys()
            for name in our_opt.state[our]:
                # The moments take no square root, so they are torch's to the last bit.
                assert torch.equal(
                    torch.as_tensor(our_opt.state[our][name]),
                    torch.as_tensor(their_opt.state[their][name]),
                )


@each_dtype
@each_engine
def test_duplicates_that_would_overflow_half_precision_are_summed_wider(
    dtype: torch.dtype, engine: str
):
    """40000 + 40000 - 40000 is 40000, though the first sum is no float16."""
    param = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    values = torch.tensor([[40000.0] * 2, [40000.0] * 2, [-40000.0] * 2], dtype=dtype)
    with running_on(engine) as name:
        opt = sparsestep.SparseAdam([param], lr=0.5, engine=name)
        param.grad = torch.sparse_coo_tensor(torch.tensor([[1, 1, 1]]), values, (3, 2))
        opt.step()
    moved = param.detach().float()
    assert torch.equal(moved[[0, 2]], torch.zeros(2, 2))
    assert torch.allclose(moved[1], torch.full((2,), -0.5), rtol=1e-2)
