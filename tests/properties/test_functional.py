"""Functional forms: the class, its functional class and its function come to the same bits."""

from __future__ import annotations

import inspect
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsestep import InputError, functional
from sparsestep.engines import rounding
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.cases import Case, cases, each_case
from tests.generate.grads import coo, masked, strided
from tests.properties.marks import QUIET
from tests.properties.test_refusals import fresh_state
from tests.subject import NOT_NATIVE, by_hand_class
from tests.table import (
    FEW,
    FUNCTIONS,
    VARIANTS,
    Variant,
    all_same_bits,
    each_engine,
    on_each_engine,
    randn,
    running_on,
    same_bits,
    state_of,
)

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]
each_function = pytest.mark.parametrize("cls", FUNCTIONS, ids=lambda cls: cls.__name__)
SHAPE = (7, 5)


def given_to(function: Any, options: dict[str, Any]) -> dict[str, Any]:
    """The options that a function takes; others select the state that it is passed."""
    takes = inspect.signature(function).parameters
    return {name: value for name, value in options.items() if name in takes}


def call(variant: Variant, param: Tensor, grad: Any, state: dict[str, Tensor], **more: Any) -> None:
    function = FUNCTIONS[variant.cls]
    options = given_to(function, {**variant.options, **more})
    assert function(param, grad, **state, **options) is None


def close(one: Tensor, other: Tensor) -> bool:
    is_short = one.dtype in (torch.float16, torch.bfloat16)
    return torch.allclose(one, other, rtol=1e-2 if is_short else 1e-5, atol=1e-6, equal_nan=True)


@on_each_engine(VARIANTS)
@each_case(examples=6, case=cases(max_steps=3, kinds=(coo, strided, masked)))
def test_all_forms_have_the_bits_of_the_class(variant: Variant, engine: str, case: Case):
    """By step, by step_param, and by the function, with masks; ``.grad`` is left alone."""
    if not case.applies(variant):
        return
    with running_on(engine) as name:
        optimizer = case.subject(variant, name, masked=True)
        (group, *more) = optimizer.groups
        if more:  # functional forms have one group
            for group in more:
                group["lr"] = case.options["lr"]
        masks = [optimizer.mask_of(group, index) for group, index, _ in optimizer.each()]
        options = {**variant.options, **case.options, "engine": name}
        by_step, by_param = (
            by_hand_class(variant.cls)([p.detach() for p in case.params()], **options)
            for _ in range(2)
        )
        for each in (by_step, by_param):
            each.param_group["mask"] = masks
        with_function = [(p.detach(), fresh_state(variant, p.detach())) for p in case.params()]
        function = FUNCTIONS[variant.cls]
        has_function = not with_function[0][1].keys() - inspect.signature(function).parameters
        counts = [0] * len(masks)
        for drawn in case.steps:
            optimizer.give(drawn)
            try:
                optimizer.step()
            except InputError as error:
                if NOT_NATIVE not in str(error):
                    raise
                return  # test_step has the strides that the native engine does not take
            grads = [None if each is None else each.grad for each in drawn]
            by_step.step(grads)
            for place, (param, grad) in enumerate(
                zip(by_param.param_group["params"], grads, strict=True)
            ):
                by_param.step_param(param, grad)
                if has_function and grad is not None:
                    counts[place] += 1
                    mine, state = with_function[place]
                    more_options = {**case.options, "engine": name, "mask": masks[place]}
                    call(variant, mine, grad, state, step=counts[place], **more_options)
        # The class leaves dense gradients to torch's kernel here, which rounds in its own way.
        agree = close if name == "reference" and variant.cls.has_torch_kernel() else same_bits
        for place, (_, _, param) in enumerate(optimizer.each()):
            others = [front.param_group["params"][place] for front in (by_step, by_param)]
            assert all(same_bits(param.detach(), other) for other in others)
            if has_function:
                assert agree(with_function[place][0], param.detach())
            for spec in variant.rule.state:
                wanted = optimizer.record(param).get(spec.name)
                if wanted is None:
                    continue
                for front, other in zip((by_step, by_param), others, strict=False):
                    assert same_bits(state_of(front.optimizer, other)[spec.name], wanted)
                if has_function:
                    assert agree(with_function[place][1][spec.name], wanted)


@each_function
def test_defaults_are_those_of_the_class(cls: type[RuleOptimizer]):
    defaults = cls([torch.zeros(1)]).defaults
    for name, value in FUNCTIONS[cls].__kwdefaults__.items():
        if name in defaults and name != "step":
            assert defaults[name] == value, name


# Numbers that may be tensors


@each_function
def test_a_tensor_as_learning_rate_or_step(cls: type[RuleOptimizer]):
    """Read, and not written."""
    variant = Variant(cls, {})
    results = []
    for rate, step in ((0.03125, 2), (torch.tensor([0.03125]), torch.tensor(2.0))):
        param, state = randn(SHAPE), fresh_state(variant, randn(SHAPE))
        call(variant, param, randn(SHAPE, 1), state, lr=rate, step=step)
        results.append([param, *state.values()])
    assert all_same_bits(*results)
    assert step == 2
    assert rate.item() == 0.03125


@pytest.mark.parametrize("cls", [variant.cls for variant in FEW[:3]])
@each_engine
def test_a_seed_rounds_at_random(cls: type[RuleOptimizer], engine: str):
    """As the class rounds with the seed of its step; any integer is a seed."""
    half = torch.bfloat16
    variant = Variant(cls, {"lr": 0.01})
    param, kept = randn(SHAPE).to(half), torch.nn.Parameter(randn(SHAPE).to(half))
    state = fresh_state(variant, param)
    with running_on(engine) as name:
        opt = variant([kept], stochastic_rounding=True, engine=name)
        for step in range(1, 4):
            kept.grad = randn(SHAPE, step).to(half)
            seed = rounding.step_seed(torch.initial_seed(), 0, step) + step * 2**64
            call(variant, param, kept.grad.to_sparse(1), state, step=step, seed=seed, engine=name)
            kept.grad = kept.grad.to_sparse(1)
            opt.step()
    assert same_bits(param, kept.detach())


@each_engine
def test_the_first_step_of_momentum_takes_the_gradient_whole(engine: str):
    grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.full((1, 5), 2.0), SHAPE)
    with running_on(engine) as name:
        for step, expected in ((1, 2.0), (2, 1.0)):
            param, buffer = torch.zeros(SHAPE), torch.zeros(SHAPE)
            options: dict[str, Any] = {"lr": 0.5, "momentum": 0.25, "dampening": 0.5}
            functional.sgd_(param, grad, buffer, step=step, engine=name, **options)
            assert buffer[1].tolist() == [expected] * 5
            assert param[1].tolist() == [-expected / 2] * 5
            # By default it is not the first.
            functional.sgd_(param, grad, buffer, engine=name, **options)
            assert buffer[1].tolist() == [0.25 * expected + 1.0] * 5


# Autograd


@each_function
def test_no_graph_is_made_and_versions_advance(cls: type[RuleOptimizer]):
    """Also in a repeated call, which the core runs by itself."""
    variant = Variant(cls, {})
    leaf = randn(SHAPE).requires_grad_()
    grads = (leaf.square(), randn(SHAPE).to_sparse(1))
    for grad, engine in product(grads, ("reference", "native")):
        results = []
        for _ in range(3):
            leaf, state = randn(SHAPE).requires_grad_(), fresh_state(variant, randn(SHAPE))
            versions = [leaf._version, *(tensor._version for tensor in state.values())]
            call(variant, leaf, grad, state, engine=engine, step=1)
            assert leaf.is_leaf
            assert leaf.grad is None
            assert not any(tensor.requires_grad for tensor in state.values())
            for tensor, before in zip([leaf, *state.values()], versions, strict=True):
                assert tensor._version > before
            results.append([leaf.detach(), *state.values()])
        for repeated in results[1:]:
            assert all_same_bits(repeated, results[0])
