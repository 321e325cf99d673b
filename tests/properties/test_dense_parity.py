"""With dense gradients: torch's numbers and state; bit for bit if you ask for torch's kernel."""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import _native as native
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import (
    PARAMETERS,
    each_counterpart,
    each_engine,
    running_on,
    same_bits,
    saved_state,
    snapshot,
    unchanged,
)

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

    @property
    def extras(self) -> dict[str, Any]:
        """Torch's classes keep the state of half-precision params in half precision."""
        dtype = self.params[0][2]
        return {"state_dtype": dtype} if dtype in HALVES else {}

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


def bits(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def assert_same(ours: torch.optim.Optimizer, theirs: torch.optim.Optimizer) -> None:
    """Params and state are the same bits, and there is as much of it."""
    groups = zip(ours.param_groups, theirs.param_groups, strict=True)
    for ours_group, theirs_group in groups:
        assert ours_group.keys() - {"state_dtype"} == theirs_group.keys()
        pairs = zip(ours_group["params"], theirs_group["params"], strict=True)
        for our, their in pairs:
            assert same_bits(bits(our), bits(their))
            mine, other = saved_state(ours, our), theirs.state.get(their, {})
            assert mine.keys() == other.keys()
            for name, tensor in other.items():
                assert same_bits(bits(mine[name]), bits(tensor)), name
                # Strides decide which of torch's kernels runs, hence the last bits of a root.
                assert mine[name].stride() == tensor.stride(), name


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
    assert_same(config.train(ours, **config.extras), config.train(theirs))


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
    our_opt, their_opt = config.train(ours), config.train(theirs)
    for our, their in zip(params_of(our_opt), params_of(their_opt), strict=True):
        mine, other = saved_state(our_opt, our), their_opt.state.get(their, {})
        assert mine.keys() == other.keys()
        pairs = {"param": (our, their)} | {k: (mine[k], other[k]) for k in other}
        for key, (found, wanted) in pairs.items():
            assert torch.allclose(found, wanted, rtol=1e-9, atol=1e-11), key


def params_of(opt: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in opt.param_groups for param in group["params"]]


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


@each_engine
@pytest.mark.parametrize("layout", [torch.strided, torch.sparse_coo], ids=str)
def test_sgd_without_momentum_keeps_no_record_of_a_param(engine: str, layout: torch.layout):
    """Torch's checkpoint of it has an empty state; so has ours."""
    param = torch.nn.Parameter(torch.ones(3, 2))
    with running_on(engine) as name:
        opt = sparsestep.SGD([param], lr=0.1, engine=name)
        param.grad = torch.ones(3, 2).to_sparse(1) if layout is torch.sparse_coo else param.detach()
        opt.step()
    assert opt.state_dict()["state"] == {}


def test_a_step_that_torchs_kernel_refuses_changes_nothing():
    """Torch's fused SGD wants all momentum buffers or none; a sparse param must not go ahead."""
    old, new, table = (torch.nn.Parameter(torch.ones(4, 2)) for _ in range(3))
    opt = sparsestep.SGD([old, new, table], lr=0.1, momentum=0.9, fused=True)
    old.grad = torch.ones(4, 2)
    opt.step()
    new.grad, table.grad = torch.ones(4, 2), torch.ones(4, 2).to_sparse(1)
    before = snapshot(opt)
    try:
        opt.step()
    except (TypeError, RuntimeError):
        assert unchanged(opt, before)
    else:
        assert same_bits(new.detach(), table.detach())


SOME = {
    "lr": 0.1,
    "weight_decay": 0.1,
    "amsgrad": True,
    "lr_decay": 0.1,
    "momentum": 0.9,
    "nesterov": True,
    "centered": True,
}


def options_of(cls: type[RuleOptimizer]) -> dict[str, Any]:
    """Something of everything that the class has."""
    return {name: value for name, value in SOME.items() if name in PARAMETERS[cls]}


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@each_engine
@each_counterpart
@pytest.mark.parametrize("sparse_first", [True, False])
def test_sparse_and_dense_gradients_share_one_state(
    ours: type[RuleOptimizer],
    theirs: type[torch.optim.Optimizer],
    engine: str,
    sparse_first: bool,
):
    """Every row is held, so that the sparse steps are torch's dense ones in another layout."""
    seeded = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 3, generator=seeded)
    our, their = torch.nn.Parameter(weight.clone()), torch.nn.Parameter(weight.clone())
    with running_on(engine) as name:
        our_opt = ours([our], **options_of(ours), engine=name)
        their_opt = theirs([their], **options_of(ours))
        kept: dict[str, int] = {}
        for step in range(6):
            their.grad = torch.randn(6, 3, generator=seeded)
            is_sparse = (step % 2 == 0) == sparse_first
            our.grad = their.grad.to_sparse(1) if is_sparse else their.grad.clone()
            our_opt.step()
            their_opt.step()
            addresses = {k: v.data_ptr() for k, v in our_opt.state[our].items()}
            assert addresses == (kept or addresses)
            kept = addresses
    mine = saved_state(our_opt, our)
    assert mine.keys() == their_opt.state[their].keys()
    for name, tensor in their_opt.state[their].items():
        assert close(mine[name], tensor), name
    assert close(our, their)


@each_engine
@each_counterpart
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_half_precision_with_float32_state_is_torch_in_float32_rounded_once(
    ours: type[RuleOptimizer],
    theirs: type[torch.optim.Optimizer],
    engine: str,
    dtype: torch.dtype,
):
    """Both start each step from the same half-precision params and keep float32 state."""
    seeded = torch.Generator().manual_seed(0)
    our = torch.nn.Parameter(torch.randn(12, 5, generator=seeded).to(dtype))
    their = torch.nn.Parameter(our.detach().float())
    info = torch.finfo(dtype)
    with running_on(engine) as name:
        our_opt = ours([our], **options_of(ours), engine=name)
        their_opt = theirs([their], **options_of(ours))
        for _ in range(STEPS):
            before = their.detach().clone()
            our.grad = torch.randn(12, 5, generator=seeded).to(dtype)
            their.grad = our.grad.float()
            our_opt.step()
            their_opt.step()
            wide = their.detach()
            half_place = wide.abs() * (info.eps / 2) + info.smallest_normal * info.eps
            roundings = 1e-5 * torch.maximum(wide.abs(), (wide - before).abs())
            assert bool(((our.detach().float() - wide).abs() <= half_place + roundings).all())
            their.data.copy_(our.data)
    for name, tensor in their_opt.state[their].items():
        mine = saved_state(our_opt, our)[name]
        assert mine.dtype == torch.float32
        assert math.isclose(float((mine - tensor).abs().max()), 0, abs_tol=1e-5), name


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
