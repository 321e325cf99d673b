"""A traced formula computes what the formula does, to the bit, one torch operation at a time."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsestep.rules.rule import Rule, StateSpec
from sparsestep.rules.trace import OPERATIONS, Program, TraceError, trace
from tests.rules.random_formulas import Formula, computed, formulas
from tests.table import EVERY


def run(program: Program, values: list[Tensor]) -> list[Tensor]:
    """The new parameter and state, one torch operation after the other."""

    def constant(number: float) -> Tensor:
        return torch.tensor(number, dtype=torch.float64)

    def apply(name: str, given: list[Tensor]) -> Tensor:
        if name in ("wide", "narrow"):
            return given[0].to(torch.float64 if name == "wide" else values[0].dtype)
        return OPERATIONS[name](*given)

    param, _, *state = values
    found = program.evaluate(values, constant, apply)
    return [new.expand_as(old) for new, old in zip(found, [param, *state], strict=True)]


def same(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=0, atol=0, equal_nan=True)


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("step", [1, 7])
def test_every_rule_can_be_traced(step: int):
    for variant, dtype in product(EVERY, (torch.float32, torch.float64)):
        settings = variant([torch.nn.Parameter(torch.ones(3, 2))]).settings(0)
        rule: Rule = settings.rule
        if "per_row" in str(variant):  # counts in float64, which not every machine has
            with pytest.raises(TraceError, match="double"):
                trace(rule, step, settings.hyperparams)
        program = trace(rule, step, settings.hyperparams, allow_float64=True)
        draw = torch.Generator().manual_seed(step)
        columns = [4, 4, *(1 if spec.per_row else 4 for spec in rule.state)]
        values = [torch.rand(5, n, generator=draw, dtype=dtype) + 0.5 for n in columns]
        param, grad, *state = (value.clone() for value in values)
        theirs = rule.apply([param, *state], grad, step, settings.hyperparams)
        assert all(map(same, run(program, values), theirs)), variant


def test_numbers_are_no_part_of_the_structure():
    def update(param: Any, grad: Any, *, step: int, lr: float) -> Any:
        return param - lr * (2 * grad if step == 1 else grad)

    rule = Rule("mine", update)
    first, second, third = (
        trace(rule, step, {"lr": lr}) for step, lr in ((1, 0.1), (2, 0.1), (3, 0.2))
    )
    assert first.structure != second.structure
    assert second.structure == third.structure
    assert second.constants != third.constants


REFUSED: dict[str, Callable[[Any, Any], Any]] = {
    "branches on values": lambda p, g: p - g if g > 0 else p,
    "uses .shape": lambda p, g: p - g / g.shape[1],
    "rand_like": lambda p, g: p - torch.rand_like(g),
    "a Tensor that is not an argument": lambda p, g: p - g * torch.ones(2, 2),
    "a mean other than over rows": lambda p, g: p - g.mean(),
    "of order 1": lambda p, g: p - torch.linalg.vector_norm(g, 1, dim=1, keepdim=True),
    "lerp with a weight": lambda p, g: p.lerp(g, p),
    "add with out": lambda p, g: torch.add(p, g, out=p),
    "not computed from": lambda p, g: 1.0,
    "returns 2 values": lambda p, g: (p, g),
}


def test_what_has_no_form_is_refused_with_the_reason():
    for reason, formula in REFUSED.items():
        with pytest.raises(TraceError, match=reason):
            trace(Rule("mine", formula), 1, {})


FUSED: dict[str, Callable[[Any, Any], Any]] = {
    "addcmul": lambda p, g: torch.addcmul(p, p, g, value=0.5),
    "addcdiv": lambda p, g: p.addcdiv(g, g.square() + 1, value=-0.5),
    "near": lambda p, g: p.lerp(g, 0.25),
    "far": lambda p, g: p.lerp(g, 0.75),
    "norm": lambda p, g: p / (g.norm(dim=1, keepdim=True) + 1),
}


@pytest.mark.parametrize("name", FUSED)
def test_an_operation_that_torch_fuses_is_within_its_rounding(name: str):
    """Torch may leave out roundings in between; how often that is depends on the machine."""
    values = list(torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(0)))
    (ours,) = run(trace(Rule("mine", FUSED[name]), 1, {}), values)
    scale = values[0].abs() + values[1].abs() + values[0].mul(values[1]).abs()
    few = 2 * torch.finfo(torch.float32).eps * scale
    assert bool(((ours - FUSED[name](*values)).abs() <= few).all())


WAYS: dict[str, Callable[[Any, Any], Any]] = {
    "method where": lambda p, g: p.where(g > 0, p - g),
    "method where, a number": lambda p, g: p.where(g > 0, 0.5),
    "where": lambda p, g: torch.where(g > 0, p, 0.5),
    "number first": lambda p, g: 1 - 2 / (g.abs() + 1) + 2.0**p,
    "clamp": lambda p, g: p.clamp(max=0.1) + torch.clip(g, -0.5, 0.5),
    "alpha": lambda p, g: p.add(g, alpha=2).sub(g, alpha=-2),
    "lerp in place": lambda p, g: p.lerp_(g, 0.7),
    "norm": lambda p, g: p / g.norm(p=2, dim=1, keepdim=True) + torch.norm(g, dim=1, keepdim=True),
    "powers": lambda p, g: p.abs() ** -2 + p.square() + g.pow(3) + g.abs() ** 0.5,
    "conditions": lambda p, g: p * (g > 0) + torch.where(~(p >= g) | (p > 1), p, g),
    "copies": lambda p, g: p.clone().copy_(g) + g.clone().zero_() + torch.full_like(g, 0.25),
    "in place": lambda p, g: g.abs().sqrt_().neg_().mul_(p).add_(1),
    "of rows": lambda p, g: torch.mean(p, 1, True) + g.sum(dim=(1,), keepdim=True),
    "comparison methods": lambda p, g: torch.where(p.gt(g).logical_and(g.le(0.5)), p, g),
}


@pytest.mark.parametrize("way", WAYS)
def test_however_it_is_written(way: str):
    values = list(torch.randn(2, 40, 5, generator=torch.Generator().manual_seed(1)))
    (ours,) = run(trace(Rule("mine", WAYS[way]), 1, {}), values)
    theirs = WAYS[way](*(value.clone() for value in values))
    assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


@given(formula=formulas, seed=st.integers(0, 99))
def test_random_formulas_compute_what_they_say(formula: Formula, seed: int):
    def update(param: Any, grad: Any, state: Any) -> Any:
        found = computed(formula, [param, grad, state])
        return found[-1] + 0.0, found[-2] + 0.0

    values = list(torch.randn(3, 4, 5, generator=torch.Generator().manual_seed(seed)))
    program = trace(Rule("mine", update, (StateSpec("state"),)), 1, {})
    # Torch takes a norm in one go.
    alike = close if "by its row" in {name for name, _, _ in formula} else same
    assert all(map(alike, run(program, values), update(*values)))
    assert len(repr(program).splitlines()) == len(program.operations) - 1
