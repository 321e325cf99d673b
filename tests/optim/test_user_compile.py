"""A user's own formula under ``torch.compile``."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.optim.own_rules import (
    SHAPE,
    adagrad,
    adagrad_formula,
    close,
    randn,
    seeded,
    table_of,
    train,
    trained,
)
from tests.optim.spoiled_rules import SPOILED, give_gradients, several, spoiled_for_the_last
from tests.table import same_bits, snapshot, unchanged
from tests.torch_versions import needs_graphs_for_any_number, uses_torchscript


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that compiles nothing and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def adam_formula(param, grad, mean, square, *, step, lr, betas=(0.9, 0.999), eps=1e-8):
    mean = mean + (1 - betas[0]) * (grad - mean)
    square.mul_(betas[1]).add_((1 - betas[1]) * grad * grad)
    root = (square / (1 - betas[1] ** step)).sqrt() + eps
    return param - lr / (1 - betas[0] ** step) * mean / root, mean, square


def trained_under_a_schedule(steps: int = 12, **how: Any) -> Tensor:
    """As many rows as it comes, dense gradients in between, and another rate in each step."""
    made = sparsestep.rule(adam_formula, state={"mean": 0.0, "square": 0.0}, **how)
    param = torch.nn.Parameter(randn(12, 4))
    opt = made([param], lr=0.1)
    for step in range(steps):
        opt.param_groups[0]["lr"] *= 0.9
        rows = torch.randint(0, 12, (1, 2 + step % 5), generator=seeded(step))
        values = randn(rows.shape[1], 4, seed=step)
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)
        if step % 4 == 3:
            param.grad = param.grad.to_dense()
        opt.step()
    return param.detach()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("aot_eager", marks=needs_graphs_for_any_number)]
)
def test_a_compiled_rule_has_the_same_numbers(backend: str):
    compiled = trained_under_a_schedule(compile={"backend": backend, "fullgraph": True})
    assert torch.allclose(compiled, trained_under_a_schedule(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_fresh_compiler")
@uses_torchscript
@pytest.mark.skipif(not shutil.which("c++"), reason="inductor needs a C++ compiler")
def test_a_rule_compiled_by_inductor_has_the_same_numbers():
    compiled = trained_under_a_schedule(3, compile=True)
    assert torch.allclose(compiled, trained_under_a_schedule(3), rtol=1e-5, atol=1e-6)


def test_what_torch_compile_is_told(monkeypatch: pytest.MonkeyPatch):
    told = []
    monkeypatch.setattr(torch, "compile", lambda called, **options: told.append(options) or called)
    for how in (False, True, {}, {"backend": "eager", "dynamic": True}):
        trained(sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile=how), lr=0.1)
    assert told == [{}, {}, {"backend": "eager", "dynamic": True}]


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_rule_is_compiled_a_few_times_however_many_steps_there_are():
    """Not for every rate, count and number of rows: torch gives up on a function after eight."""
    counter = Counting()
    trained_under_a_schedule(compile={"backend": counter})
    assert 1 <= counter.count <= 4


@pytest.mark.usefixtures("_fresh_compiler")
def test_many_rules_are_compiled_each_for_itself():
    for _ in range(10):
        counter = Counting()
        made = sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile={"backend": counter})
        trained(made, lr=0.1)
        assert counter.count >= 1


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("spoiled", ["one value too few", "not a tensor", "transposed"])
def test_a_compiled_rule_is_checked_too(spoiled: str):
    result, message = SPOILED[spoiled]
    params = several()
    opt = spoiled_for_the_last(result, compile={"backend": "eager"})(params, lr=0.1, spoil=True)
    give_gradients(params)
    before = snapshot(opt)
    with pytest.raises(InputError, match=message):
        opt.step()
    assert unchanged(opt, before)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_formula_may_work_in_place():
    @sparsestep.rule(state={"sum": 0.0}, compile={"backend": "aot_eager"})
    def compiled(param, grad, sum, *, lr, eps=1e-10):
        sum.addcmul_(grad, grad)
        grad.mul_(lr)
        return param.sub_(grad.div_(sum.sqrt().add_(eps))), sum

    params = [table_of(), table_of()]
    for param, rule in zip(params, (compiled, adagrad), strict=True):
        opt = rule([param], lr=0.1)
        train(opt, [param])
        param.grad = dense = randn(*SHAPE, seed=1)
        opt.step()
        assert same_bits(dense, randn(*SHAPE, seed=1))
    assert close(*(param.detach() for param in params))
