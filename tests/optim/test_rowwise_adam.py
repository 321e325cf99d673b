"""RowwiseAdam with a first beta of zero: no first moment, and the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.table import each_engine, randn, running_on, same_bits

ROWS, DIM = 12, 5


def take_step(optimizer: Any, param: Tensor, step: int) -> None:
    rows = torch.tensor([[step % ROWS, 3, 3, 2 * step % ROWS]])
    param.grad = torch.sparse_coo_tensor(rows, randn((4, DIM), step), (ROWS, DIM))
    optimizer.step()


def made(**options: Any) -> tuple[torch.nn.Parameter, sparsestep.RowwiseAdam]:
    param = torch.nn.Parameter(randn((ROWS, DIM), seed=7))
    return param, sparsestep.RowwiseAdam([param], lr=0.1, **options)


@pytest.mark.parametrize("bias_correction", ["global", "per_row"])
@each_engine
def test_it_has_the_bits_of_a_first_moment_that_starts_over(bias_correction: Any, engine: str):
    """With a beta of zero, a first moment of zeros takes the gradient whole."""
    with running_on(engine) as name:
        options = {"bias_correction": bias_correction, "engine": name, "weight_decay": 0.1}
        ours, without = made(betas=(0.0, 0.9), **options)
        # The size of a step is that of a first beta of zero, in double and to the bit.
        theirs, kept = made(betas=(1e-300, 0.9), **options)
        for step in range(1, 8):
            if step > 1:
                kept.state[theirs]["exp_avg"].zero_()
            take_step(without, ours, step)
            take_step(kept, theirs, step)
    assert same_bits(ours.detach(), theirs.detach())
    names = {"exp_avg_sq"} | ({"row_step"} if bias_correction == "per_row" else set())
    assert without.state[ours].keys() == {"step", *names}
    for each in names:
        assert same_bits(without.state[ours][each], kept.state[theirs][each])
        assert without.state[ours][each].nbytes == 4 * ROWS


@pytest.mark.parametrize("semantics", ["masked", "dense"])
@each_engine
def test_momentum_may_end_and_runs_may_be_resumed(semantics: Any, engine: str):
    """A first moment that is left over has no effect, in a checkpoint either."""
    with running_on(engine) as name:
        runs = []
        for is_resumed in (False, True):
            param, optimizer = made(betas=(0.9, 0.9), semantics=semantics, engine=name)
            for step in range(1, 9):
                if step == 4:
                    optimizer.param_groups[0]["betas"] = (0.0, 0.9)
                if step == 6 and is_resumed:
                    optimizer.catch_up()
                    assert "exp_avg" in optimizer.state[param]
                    optimizer.state[param]["exp_avg"].fill_(torch.nan)
                    saved = optimizer.state_dict()
                    param = torch.nn.Parameter(param.detach().clone())
                    optimizer = sparsestep.RowwiseAdam([param], semantics=semantics, engine=name)
                    optimizer.load_state_dict(saved)
                take_step(optimizer, param, step)
            optimizer.catch_up()
            runs.append((param.detach(), optimizer.state[param]["exp_avg_sq"]))
        for ours, theirs in zip(*runs, strict=True):
            torch.testing.assert_close(ours, theirs)
        del optimizer.state[param]["exp_avg"]
        take_step(optimizer, param, 9)
        saved = optimizer.state_dict()
        param = torch.nn.Parameter(param.detach().clone())
        optimizer = sparsestep.RowwiseAdam([param], semantics=semantics, engine=name)
        optimizer.load_state_dict(saved)
        assert optimizer.state[param].keys() == {"step", "exp_avg_sq"}
        optimizer.param_groups[0]["betas"] = (0.9, 0.9)
        with pytest.raises(sparsestep.InputError, match="must have a tensor 'exp_avg'"):
            take_step(optimizer, param, 10)
