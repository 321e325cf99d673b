"""What is particular to SparseAdam's formula."""

from __future__ import annotations

import pytest
import torch

import sparsestep
from tests.table import each_engine, running_on


@each_engine
def test_eps_is_added_before_bias_correction(engine: str):
    """With eps = g the two conventions are far apart; this class keeps SparseAdam's."""
    moves = {}
    for name, make in (
        ("ours", lambda p, name: sparsestep.SparseAdam([p], eps=1e-2, engine=name)),
        ("Adam", lambda p, _: torch.optim.Adam([p], eps=1e-2)),
    ):
        param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
        param.grad = torch.full((1,), 1e-2, dtype=torch.float64)
        with running_on(engine) as engine_name:
            make(param, engine_name).step()
        moves[name] = param.item()
    assert moves["ours"] == pytest.approx(-3.1e-5, rel=0.02)
    assert moves["Adam"] == pytest.approx(-5.0e-4, rel=0.02)


@each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_half_precision_params_do_not_stall(engine: str, dtype: torch.dtype):
    """In bfloat16 the second moment of g = 1 would stop at 0.25."""
    param = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    with running_on(engine) as name:
        opt = sparsestep.SparseAdam([param], lr=0.0, engine=name)
        for _ in range(1500):
            param.grad = torch.sparse_coo_tensor(
                torch.tensor([[1]]), torch.ones(1, dtype=dtype), (2,)
            )
            opt.step()
    expected = 1 - 0.999**1500
    assert opt.state[param]["exp_avg_sq"][1].item() == pytest.approx(expected, rel=1e-4)
    assert opt.state[param]["exp_avg_sq"][0].item() == 0
