"""Bias correction row by row: rows are counted on their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.rule_gradients import ROWS, STEPS, Gradients, row_gradient, start
from tests.table import each_engine, running_on, same_bits

PER_ROW = [
    (sparsestep.SparseAdam, {}),
    (sparsestep.Adam, {}),
    (sparsestep.Adam, {"amsgrad": True}),
    (sparsestep.AdamW, {"weight_decay": 0.1}),
    (sparsestep.RowwiseAdam, {"weight_decay": 0.1}),
]
each_per_row = pytest.mark.parametrize(
    ("optimizer", "options"), PER_ROW, ids=["SparseAdam", "Adam", "AMSGrad", "AdamW", "RowwiseAdam"]
)


@each_per_row
@pytest.mark.parametrize("correction", ["per_row", "global"])
def test_a_row_first_seen_at_step_2001_moves_like_a_row_at_step_1(
    optimizer: type[RuleOptimizer], options: dict[str, Any], correction: str
):
    """Counted with the table, it would move three times as far."""
    param = torch.nn.Parameter(torch.ones(3, 4))
    values = torch.tensor([0.5, -1.0, 2.0, 0.25])
    opt = optimizer([param], lr=0.1, bias_correction=correction, **options)
    param.grad = row_gradient(0, values, param.shape)
    opt.step()
    first = param.detach()[0].clone()
    for _ in range(1999):
        opt.step()
    param.grad = row_gradient(2, values, param.shape)
    opt.step()
    assert int(opt.state[param]["step"]) == 2001
    late = param.detach()[2]
    assert same_bits(late, first) == (correction == "per_row")
    if correction == "global":
        assert bool(((late - 1).abs() > 2.5 * (first - 1).abs()).all())
    assert torch.equal(param.detach()[1], torch.ones(4))


@each_engine
@each_per_row
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str
)
def test_rows_counted_on_their_own_are_optimizers_on_their_own(
    optimizer: type[RuleOptimizer],
    options: dict[str, Any],
    engine: str,
    dtype: torch.dtype,
    precision: float,
):
    gradients = Gradients(dense=False)
    table = torch.nn.Parameter(torch.from_numpy(start()).to(dtype))
    rows = [torch.nn.Parameter(row[None].clone()) for row in table.detach()]
    counts = torch.zeros(ROWS)
    with running_on(engine) as name:
        options = {"lr": 0.1, "engine": name, **options}
        opt = optimizer([table], bias_correction="per_row", **options)
        of_rows = [optimizer([row], **options) for row in rows]
        for step in range(STEPS):
            table.grad = gradients.tensor(step).to(dtype)
            opt.step()
            for number, sums in gradients.summed(step).items():
                rows[number].grad = torch.from_numpy(sums[None]).to(dtype).to_sparse(1)
                of_rows[number].step()
                counts[number] += 1
    together = torch.cat([row.detach() for row in rows])
    assert torch.allclose(table.detach(), together, rtol=precision, atol=precision)
    assert torch.equal(opt.state[table]["row_step"], counts)


@each_engine
@each_per_row
def test_rows_are_counted_alike_for_dense_gradients(
    optimizer: type[RuleOptimizer], options: dict[str, Any], engine: str
):
    """Every row has been updated in every step, so that both counts are one."""
    results = []
    for correction in ("per_row", "global"):
        gradients = Gradients(dense=True)
        param = torch.nn.Parameter(torch.from_numpy(start()))
        with running_on(engine) as name:
            opt = optimizer([param], lr=0.1, engine=name, bias_correction=correction, **options)
            for step in range(STEPS):
                param.grad = gradients.tensor(step)
                opt.step()
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-13, atol=1e-13)
