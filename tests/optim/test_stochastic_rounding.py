"""``stochastic_rounding=True``: optimizers whose small steps arrive, and checkpoints of them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.engines.half_precision import each_half, seeded
from tests.table import each_engine, each_optimizer, running_on, same_bits


def table_of(dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(20, 4, generator=seeded(1)).to(dtype))


def gradient(param: Tensor, seed: int) -> Tensor:
    """Rows with duplicates; every third one dense."""
    rows = torch.randint(0, 20, (1, 9), generator=seeded(seed))
    values = torch.randn(9, 4, generator=seeded(seed)).to(param.dtype)
    coo = torch.sparse_coo_tensor(rows, values, param.shape)
    return coo.to_dense() if seed % 3 == 2 else coo


def train(param: torch.nn.Parameter, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        param.grad = gradient(param, step)
        opt.step()


@each_optimizer
@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_wide_params_are_not_affected(
    optimizer: type[RuleOptimizer], engine: str, dtype: torch.dtype
):
    """Sparse gradients: dense ones are torch's business where nothing is rounded at random."""
    results = []
    with running_on(engine) as name:
        for on in (False, True):
            param = table_of(dtype)
            opt = optimizer([param], lr=0.1, stochastic_rounding=on, engine=name)
            train(param, opt, range(2))
            state = [v for k, v in opt.state[param].items() if k != "step"]
            results.append([param.detach(), *state])
    assert len(results[0]) == len(results[1])
    assert all(map(same_bits, *results))


@each_optimizer
@each_engine
@each_half
def test_training_resumes_with_the_same_bits(
    optimizer: type[RuleOptimizer], engine: str, dtype: torch.dtype
):
    """Seed and step count travel in the checkpoint, whatever seed the new process has."""

    def made(tables: list[torch.nn.Parameter]) -> RuleOptimizer:
        groups = [{"params": tables[:2]}, {"params": tables[2:], "lr": 0.2}]
        return optimizer(groups, lr=0.1, state_dtype=dtype, stochastic_rounding=True, engine=name)

    def trained(tables: list[torch.nn.Parameter], opt: RuleOptimizer, steps: range) -> None:
        for step in steps:
            for number, table in enumerate(tables):
                table.grad = gradient(table, 10 * step + number)
            opt.step()

    with running_on(engine) as name:
        torch.manual_seed(1)
        straight, changed = ([table_of(dtype) for _ in range(4)] for _ in range(2))
        trained(straight, made(straight), range(8))
        first = made(changed)
        trained(changed, first, range(4))
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        file.seek(0)
        torch.manual_seed(2)
        again = made(changed)
        again.load_state_dict(torch.load(file, weights_only=True))
        trained(changed, again, range(4, 8))
    assert again.param_groups[1]["rounding_seed"] == 1
    for ours, theirs in zip(changed, straight, strict=True):
        assert same_bits(ours.detach(), theirs.detach())


@each_optimizer
def test_a_copy_goes_on_with_the_same_bits(optimizer: type[RuleOptimizer]):
    param = table_of(torch.bfloat16)
    opt = optimizer([param], lr=0.1, stochastic_rounding=True)
    train(param, opt, range(3))
    again = copy.deepcopy(opt)
    (other,) = again.param_groups[0]["params"]
    train(param, opt, range(3, 6))
    train(other, again, range(3, 6))
    assert same_bits(param.detach(), other.detach())


@each_optimizer
def test_params_and_steps_are_rounded_independently(optimizer: type[RuleOptimizer]):
    """Two equal params in two groups, with equal gradients, do not move in lockstep."""
    params = [torch.nn.Parameter(torch.ones(50, 8, dtype=torch.bfloat16)) for _ in range(2)]
    opt = optimizer([{"params": [p]} for p in params], lr=1e-3, stochastic_rounding=True)
    for _ in range(2):
        before = [p.detach().clone() for p in params]
        for param in params:
            param.grad = torch.ones(50, 8, dtype=torch.bfloat16)
        opt.step()
        assert not same_bits(params[0].detach(), params[1].detach())
        assert not torch.equal(params[0].detach(), before[0])


@each_optimizer
@pytest.mark.parametrize("on", [False, True], ids=["off", "on"])
def test_only_a_rounded_sgd_counts_its_steps(optimizer: type[RuleOptimizer], on: bool):
    """Torch's SGD has no count; the others have one anyway."""
    param = table_of(torch.bfloat16)
    opt = optimizer([param], stochastic_rounding=on)
    train(param, opt, range(3))
    counted = on or optimizer is not sparsestep.SGD
    assert ("step" in opt.state[param]) == counted
    assert not counted or int(opt.state[param]["step"]) == 3


@each_optimizer
def test_keys_are_there_only_where_somebody_sets_them(optimizer: type[RuleOptimizer]):
    keys = {"stochastic_rounding", "rounding_seed"}
    assert not keys & optimizer([torch.zeros(2)]).param_groups[0].keys()
    assert keys <= optimizer([torch.zeros(2)], stochastic_rounding=True).param_groups[0].keys()
    opt = optimizer([{"params": [torch.zeros(2)], "stochastic_rounding": True}])
    assert keys <= opt.param_groups[0].keys()


@each_optimizer
def test_it_may_be_switched_on_in_a_group_later(optimizer: type[RuleOptimizer]):
    param = table_of(torch.bfloat16)
    opt = optimizer([param], lr=1e-6)
    train(param, opt, range(2))
    opt.param_groups[0]["stochastic_rounding"] = True
    train(param, opt, range(2, 5))
    opt.param_groups[0]["stochastic_rounding"] = False
    train(param, opt, range(5, 6))


@each_optimizer
def test_a_checkpoint_from_before_leaves_it_on(optimizer: type[RuleOptimizer]):
    param = table_of(torch.bfloat16)
    plain = optimizer([param], lr=0.1)
    train(param, plain, range(2))
    for options in ({}, {"stochastic_rounding": True}):
        groups = [{"params": [param], "stochastic_rounding": True}] if not options else [param]
        opt = optimizer(groups, lr=0.1, **options)
        opt.load_state_dict(plain.state_dict())
        train(param, opt, range(2, 4))
        assert opt.param_groups[0]["stochastic_rounding"] is True


@pytest.mark.parametrize("value", [1, "yes", None])
def test_it_is_either_on_or_off(value: Any):
    with pytest.raises(sparsestep.InputError, match="stochastic_rounding must be True or False"):
        sparsestep.SGD([torch.zeros(2)], stochastic_rounding=value)


# The promise


def test_five_thousand_small_steps_arrive():
    """A table in bfloat16 whose every update is far smaller than half of its last place."""
    gradients = []
    for step in range(10):
        rows = (torch.arange(32) * 2 + step % 2)[None]
        values = torch.full((32, 16), 1 + (step % 5 - 2) / 16)
        gradients.append(torch.sparse_coo_tensor(rows, values, (64, 16)))

    def displacement(dtype: torch.dtype, **options: Any) -> float:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.ones(64, 16, dtype=dtype))
        opt = sparsestep.SGD([param], lr=2e-4, **options)
        converted = [gradient.to(dtype) for gradient in gradients]
        for step in range(5000):
            param.grad = converted[step % 10]
            opt.step()
        return param.detach().double().mean().item() - 1

    wide = displacement(torch.float32)
    assert wide == pytest.approx(-0.5, rel=1e-3)
    at_random = displacement(torch.bfloat16, stochastic_rounding=True)
    assert at_random == pytest.approx(wide, rel=0.02)
    assert displacement(torch.bfloat16) == 0.0  # to nearest it never leaves the start


@each_half
def test_state_in_half_precision_does_not_stall(dtype: torch.dtype):
    """A second moment of g = 1: to nearest it stops far below what it should be."""

    def second_moment(**options: Any) -> float:
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.zeros(32, 16))
        param.grad = torch.ones(32, 16).to_sparse(1)
        opt = sparsestep.Adam([param], lr=0.0, state_dtype=dtype, **options)
        for _ in range(3000):
            opt.step()
        return opt.state[param]["exp_avg_sq"].double().mean().item()

    expected = 1 - 0.999**3000
    assert second_moment(stochastic_rounding=True) == pytest.approx(expected, rel=0.02)
    assert second_moment() < 0.9 * expected
