"""RAdam's first steps, and where they end."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.functional import radam_
from sparsestep.optim.radam import rectified
from tests.table import INSTRUCTION_SETS, each_dtype, each_engine, running_on, same_bits

BETAS = [(0.9, 0.999), (0.9, 0.95), (0.5, 0.8), (0.9, 0.5), (0.0, 0.6), (0.9, 0.0)]


@pytest.mark.parametrize("betas", BETAS, ids=str)
def test_it_divides_from_the_step_on_from_which_torch_does(betas: tuple[float, float]):
    """The gradients are small, so that it shows whether a step is divided by their size."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = torch.optim.RAdam([param], lr=1.0, betas=betas, eps=0.0)
    for step in range(1, 40):
        before = param.item()
        param.grad = torch.full((1,), 1e-3, dtype=torch.float64)
        opt.step()
        size, divides = rectified(step, 1.0, betas)
        kept = opt.state[param]
        divisor = kept["exp_avg_sq"].sqrt().item() if divides else 1.0
        moved = size * kept["exp_avg"].item() / divisor
        assert before - param.item() == pytest.approx(moved, rel=1e-12)


def test_the_usual_betas_give_five_steps_of_momentum():
    divides = [rectified(step, 1.0, (0.9, 0.999))[1] for step in range(1, 8)]
    assert divides == [False] * 5 + [True] * 2


@pytest.mark.parametrize("step", [1, 5, 6, 100])
@each_dtype
def test_every_instruction_set_has_the_same_bits(step: int, dtype: torch.dtype):
    """Before and after the switch: the property tests take too few steps to come to it."""
    results = []
    for engine in ("reference", *INSTRUCTION_SETS):
        generator = torch.Generator().manual_seed(0)
        tensors = torch.randn(4, 9, 33, generator=generator).to(dtype)
        param, values, exp_avg, exp_avg_sq = (each.clone() for each in tensors)
        grad = sparsestep.IndexedGrad(torch.tensor([3, 1, 8, 3, 0, 2, 4, 5, 7]), values)
        with running_on(engine) as name:
            options: dict[str, Any] = {"lr": 0.1, "engine": name}
            radam_(param, grad, exp_avg, exp_avg_sq.abs_(), step=step, **options)
        results.append((param, exp_avg, exp_avg_sq))
    reference, first, *others = results
    for other in others:
        assert all(map(same_bits, first, other))
    few = 4 * torch.finfo(dtype).eps
    for ours, theirs in zip(first, reference, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=few, atol=few)


@each_engine
@pytest.mark.parametrize("foreach", [None, True, False])
def test_its_rate_may_be_a_tensor_whatever_kernel_is_chosen(engine: str, foreach: bool | None):
    """Unlike Adam's foreach kernel, torch's takes one."""
    results = []
    with running_on(engine) as name:
        for cls, more in ((sparsestep.RAdam, {"engine": name}), (torch.optim.RAdam, {})):
            param = torch.nn.Parameter(torch.ones(3, 2))
            lr = torch.tensor(0.5)
            opt = cls([param], lr=lr, foreach=foreach, **more)
            for step in range(8):
                param.grad = torch.full((3, 2), step - 3.0)
                opt.step()
                lr.mul_(0.5)
            results.append(param.detach())
    assert same_bits(*results)
