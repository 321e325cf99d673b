"""One function per rule: the optimizer's numbers, with nothing hidden between two calls."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsestep import functional
from sparsestep.engines import ENGINES, rounding
from tests.functional.cases import (
    BASIC,
    MORE,
    SHAPE,
    F,
    Function,
    assert_same_bits,
    coo,
    each_function,
    each_stateful,
    each_variant,
    gradients,
    of_two_engines,
    start,
)
from tests.table import each_engine, running_on, same_bits


def test_every_optimizer_has_its_function():
    public = {name for name in vars(functional) if name.endswith("_") and name[0] != "_"}
    assert public == {"apply_", *(function.call.__name__ for function in BASIC)}


def on(engine: str) -> AbstractContextManager[str]:
    return nullcontext(engine) if engine in ENGINES else running_on(engine)


def train_both(
    function: Function,
    grads: list[Tensor],
    engine: str,
    dtype: torch.dtype = torch.float32,
    per_step: Callable[[int], dict[str, Any]] = lambda step: {},
    class_only: dict[str, Any] | None = None,
    **both: Any,
) -> tuple[list[Tensor], list[Tensor]]:
    """Param and state after the same gradients, by the function and by the class."""
    param, kept = start(dtype), torch.nn.Parameter(start(dtype))
    state = function.state(param)
    with on(engine) as name:
        opt = function.optimizer([kept], engine=name, **both, **(class_only or {}))
        for step, grad in enumerate(grads, 1):
            given = {"step": step, **both, **per_step(step)}
            assert function(param, grad, state, engine=name, **given) is None
            kept.grad = grad
            opt.step()
    return [param, *state.values()], [kept.detach(), *(opt.state[kept][n] for n in state)]


@each_variant
@each_engine
def test_the_bits_of_the_class(function: Function, engine: str):
    ours, theirs = train_both(function, gradients(), engine)
    assert_same_bits(ours, theirs)
    assert not same_bits(ours[0], start())


@each_variant
@of_two_engines
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_the_bits_of_the_class_in_other_dtypes(function: Function, engine: str, dtype: torch.dtype):
    assert_same_bits(*train_both(function, gradients(dtype), engine, dtype))


COMPLEX = [function for function in [*BASIC, *MORE] if function.cls.supports_complex]


@pytest.mark.parametrize("function", COMPLEX, ids=str)
@of_two_engines
def test_complex_parameters(function: Function, engine: str):
    dtype = torch.complex64
    assert_same_bits(*train_both(function, gradients(dtype), engine, dtype))


@each_function
@each_engine
def test_maximize(function: Function, engine: str):
    assert_same_bits(*train_both(function, gradients(), engine, maximize=True))


@each_function
@of_two_engines
@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_a_tensor_as_learning_rate(function: Function, engine: str, shape: tuple[int, ...]):
    rate = torch.full(shape, 0.03)
    ours, theirs = train_both(function, gradients(), engine, lr=rate)
    assert_same_bits(ours, theirs)
    assert same_bits(rate, torch.full(shape, 0.03))
    numbers, _ = train_both(function, gradients(), engine, lr=rate.item())
    assert_same_bits(ours, numbers)


@each_stateful
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64], ids=str)
def test_a_tensor_as_step(function: Function, dtype: torch.dtype):
    """As the state of torch's classes holds it; it is read and not advanced."""
    params = [start(), start()]
    kept = [function.state(param) for param in params]
    count = torch.zeros((), dtype=dtype)
    for step, grad in enumerate(gradients(), 1):
        count += 1
        function(params[0], grad, kept[0], step=step)
        function(params[1], grad, kept[1], step=count)
        assert int(count) == step
    assert_same_bits(*([p, *s.values()] for p, s in zip(params, kept, strict=True)))


@each_function
@each_engine
def test_a_mask(function: Function, engine: str):
    rows = torch.tensor([True, False, True, True, False, False, True])
    masks = [rows]
    if not function.rule.needs_whole_rows:
        masks.append(torch.rand(SHAPE, generator=torch.Generator().manual_seed(3)) < 0.5)
    for mask in masks:
        dense = [torch.randn(SHAPE, generator=torch.Generator().manual_seed(9))]
        ours, theirs = train_both(function, [*gradients(), *dense], engine, mask=mask)
        assert_same_bits(ours, theirs)
        kept = ~mask if mask.dim() == 2 else ~mask[:, None].expand(SHAPE)
        assert same_bits(ours[0][kept], start()[kept])


@each_function
@each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_seed_rounds_at_random(function: Function, engine: str, dtype: torch.dtype):
    def seed(step: int) -> dict[str, Any]:
        return {"seed": rounding.step_seed(torch.initial_seed(), 0, step)}

    random = {"stochastic_rounding": True}
    ours, theirs = train_both(function, gradients(dtype), engine, dtype, seed, random)
    assert_same_bits(ours, theirs)
    nearest, _ = train_both(function, gradients(dtype), engine, dtype)
    assert function.call is F.ftrl_ or not same_bits(ours[0], nearest[0])


@each_engine
@pytest.mark.parametrize("seed", [-1, 2**64 - 1, 2**64, 2**80 + 17])
def test_any_whole_number_is_a_seed(engine: str, seed: int):
    params = [torch.ones(SHAPE, dtype=torch.bfloat16) for _ in range(2)]
    with running_on(engine) as name:
        for param, same in zip(params, (seed, seed % 2**64), strict=True):
            F.sgd_(param, torch.ones(SHAPE, dtype=torch.bfloat16), seed=same, engine=name)
    assert same_bits(*params)
    assert len(params[0].unique()) == 2


@each_engine
def test_the_first_step_of_momentum_takes_the_gradient_whole(engine: str):
    grad = coo([[1]], torch.full((1, 5), 2.0))
    with running_on(engine) as name:
        for step, expected in ((1, 2.0), (2, 1.0)):
            param, buffer = torch.zeros(SHAPE), torch.zeros(SHAPE)
            options: dict[str, Any] = {"lr": 0.5, "momentum": 0.25, "dampening": 0.5}
            F.sgd_(param, grad, buffer, step=step, engine=name, **options)
            assert buffer[1].tolist() == [expected] * 5
            assert param[1].tolist() == [-expected / 2] * 5
            # By default it is not the first.
            F.sgd_(param, grad, buffer, engine=name, **options)
            assert buffer[1].tolist() == [0.25 * expected + 1.0] * 5


def test_options_of_the_class_that_are_the_functions_defaults():
    for function in BASIC:
        defaults = function.optimizer([start()]).defaults
        given = function.call.__kwdefaults__
        for name, value in given.items():
            if name in defaults and name != "step":
                assert defaults[name] == value, (function, name)
