"""Each formula against a transcription of what was published, in float64 and plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.rule_gradients import (
    COLUMNS,
    ROWS,
    STEPS,
    Gradients,
    Table,
    row_gradient,
    start,
)
from tests.optim.transcriptions import (
    adagrad,
    amsgrad,
    ftrl,
    lion,
    momentum,
    radam,
    rowwise_adagrad,
    rowwise_adam,
)
from tests.table import each_engine, running_on, same_bits

Formula = Callable[..., tuple[Table, dict[str, Table]]]

B = (0.8, 0.95)
ADAM = {"lr": 0.1, "betas": B, "eps": 1e-3}
# The transcription, its numbers, our class, its options.
CASES: dict[str, tuple[Formula, dict[str, Any], type[RuleOptimizer], dict[str, Any]]] = {
    "RowwiseAdagrad": (
        rowwise_adagrad,
        {"lr": 0.1, "eps": 1e-3},
        sparsestep.RowwiseAdagrad,
        {"lr": 0.1, "eps": 1e-3},
    ),
    "RowwiseAdagrad with coupled decay": (
        rowwise_adagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "initial": 0.5},
        sparsestep.RowwiseAdagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "initial_accumulator_value": 0.5},
    ),
    "RowwiseAdagrad with decoupled decay": (
        rowwise_adagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "decoupled": True},
        sparsestep.RowwiseAdagrad,
        {"lr": 0.1, "eps": 1e-3, "weight_decay": 0.2, "decoupled_weight_decay": True},
    ),
    "RowwiseAdam": (rowwise_adam, ADAM, sparsestep.RowwiseAdam, ADAM),
    "RowwiseAdam with coupled decay": (
        rowwise_adam,
        {**ADAM, "weight_decay": 0.2},
        sparsestep.RowwiseAdam,
        {**ADAM, "weight_decay": 0.2},
    ),
    "RowwiseAdam, rows counted, with decoupled decay": (
        rowwise_adam,
        {**ADAM, "weight_decay": 0.2, "decoupled": True, "per_row": True},
        sparsestep.RowwiseAdam,
        {
            **ADAM,
            "weight_decay": 0.2,
            "decoupled_weight_decay": True,
            "bias_correction": "per_row",
        },
    ),
    "Lion": (
        lion,
        {"lr": 0.1, "betas": B},
        sparsestep.Lion,
        {"lr": 0.1, "betas": B},
    ),
    "Lion with decay": (
        lion,
        {"lr": 0.1, "betas": B, "weight_decay": 0.2},
        sparsestep.Lion,
        {"lr": 0.1, "betas": B, "weight_decay": 0.2},
    ),
    "Ftrl": (
        ftrl,
        {"lr": 0.3, "beta": 0.5, "l1": 0.7, "l2": 0.1},
        sparsestep.Ftrl,
        {"lr": 0.3, "beta": 0.5, "l1": 0.7, "l2": 0.1},
    ),
    "Ftrl without regularisation": (
        ftrl,
        {"lr": 0.3, "beta": 1.0, "l1": 0.0, "l2": 0.0, "initial": 0.25},
        sparsestep.Ftrl,
        {"lr": 0.3, "initial_accumulator_value": 0.25},
    ),
    "Adagrad": (
        adagrad,
        {"lr": 0.1, "lr_decay": 0.3, "eps": 1e-3, "weight_decay": 0.2, "initial": 0.5},
        sparsestep.Adagrad,
        {
            "lr": 0.1,
            "lr_decay": 0.3,
            "eps": 1e-3,
            "weight_decay": 0.2,
            "initial_accumulator_value": 0.5,
        },
    ),
    "SGD with damped momentum": (
        momentum,
        {"lr": 0.1, "mu": 0.9, "tau": 0.4},
        sparsestep.SGD,
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.4},
    ),
    "SGD with Nesterov's momentum": (
        momentum,
        {"lr": 0.1, "mu": 0.9, "tau": 0.0, "nesterov": True},
        sparsestep.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "RAdam": (radam, ADAM, sparsestep.RAdam, ADAM),
    "RAdam that is never rectified": (
        radam,
        {**ADAM, "betas": (0.8, 0.5), "weight_decay": 0.2},
        sparsestep.RAdam,
        {**ADAM, "betas": (0.8, 0.5), "weight_decay": 0.2},
    ),
    "RAdam with decoupled decay": (
        radam,
        {**ADAM, "betas": (0.9, 0.999), "weight_decay": 0.2, "decoupled": True},
        sparsestep.RAdam,
        {
            **ADAM,
            "betas": (0.9, 0.999),
            "weight_decay": 0.2,
            "decoupled_weight_decay": True,
        },
    ),
    "AMSGrad": (amsgrad, ADAM, sparsestep.Adam, {**ADAM, "amsgrad": True}),
}


def agree(ours: torch.Tensor, theirs: Table, precision: float) -> bool:
    return np.allclose(ours.detach().numpy(), theirs, rtol=precision, atol=precision)


@each_engine
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
@pytest.mark.parametrize("maximize", [False, True], ids=["minimize", "maximize"])
@pytest.mark.parametrize(
    ("dtype", "precision"), [(torch.float64, 1e-13), (torch.float32, 2e-5)], ids=str
)
def test_steps_are_what_was_published(
    case: str, engine: str, dense: bool, maximize: bool, dtype: torch.dtype, precision: float
):
    formula, numbers, optimizer, options = CASES[case]
    gradients = Gradients(dense=dense)
    sums = [gradients.summed(step) for step in range(STEPS)]
    if maximize:
        sums = [{row: -g for row, g in touched.items()} for touched in sums]
    table, kept = formula(sums, **numbers)
    # FTRL's weights follow from its state, so they have to begin where that begins.
    begin = np.zeros((ROWS, COLUMNS)) if optimizer is sparsestep.Ftrl else start()
    param = torch.nn.Parameter(torch.from_numpy(begin).to(dtype))
    with running_on(engine) as name:
        opt = optimizer([param], engine=name, maximize=maximize, **options)
        for step in range(STEPS):
            param.grad = gradients.tensor(step).to(dtype)
            opt.step()
    assert agree(param, table, precision)
    for name, theirs in kept.items():
        assert agree(opt.state[param][name], theirs, precision), name
    assert opt.state[param].keys() - {"step"} == kept.keys()


@each_engine
def test_sgd_takes_its_first_gradient_whole(engine: str):
    """A row that the first gradient does not hold has no first step of its own, as in torch."""
    param = torch.nn.Parameter(torch.zeros(2, 1))
    with running_on(engine) as name:
        opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, dampening=0.75, engine=name)
        param.grad = row_gradient(0, torch.ones(1), param.shape)
        opt.step()
        assert param.detach().flatten().tolist() == [-1.0, 0.0]
        param.grad = row_gradient(1, torch.ones(1), param.shape)
        opt.step()
        assert param.detach().flatten().tolist() == [-1.0, -0.25]
        param.grad = row_gradient(0, torch.ones(1), param.shape)
        opt.step()
    assert param.detach().flatten().tolist() == [-1.75, -0.25]
    assert opt.state[param]["momentum_buffer"].flatten().tolist() == [0.75, 0.25]


@each_engine
def test_adagrads_rate_falls_with_the_steps_of_the_table(engine: str):
    """With a sum that begins at 9 and a gradient of 4, the root is 5."""
    moves = []
    for earlier in (0, 3):
        param = torch.nn.Parameter(torch.zeros(2, 1))
        with running_on(engine) as name:
            opt = sparsestep.Adagrad(
                [param],
                lr=1.0,
                lr_decay=1.0,
                initial_accumulator_value=9.0,
                eps=0.0,
                engine=name,
            )
            for _ in range(earlier):
                param.grad = row_gradient(1, torch.ones(1), param.shape)
                opt.step()
            param.grad = row_gradient(0, torch.full((1,), 4.0), param.shape)
            opt.step()
        moves.append(param[0].item())
    assert moves == pytest.approx([-0.8, -0.2])


@each_engine
@pytest.mark.parametrize("correction", ["global", "per_row"])
def test_amsgrads_maximum_is_of_the_average_that_is_kept(engine: str, correction: str):
    """Not of the corrected one: that is largest at the first step, for any gradient."""
    param = torch.nn.Parameter(torch.zeros(3, 2))
    highest = torch.zeros(3, 2)
    with running_on(engine) as name:
        opt = sparsestep.Adam([param], amsgrad=True, bias_correction=correction, engine=name)
        for size in (0.1, 4.0, 0.5, 0.0, 8.0, 0.0):
            param.grad = row_gradient(1, torch.tensor([size, -size]), param.shape)
            opt.step()
            kept = opt.state[param]
            highest = torch.maximum(highest, kept["exp_avg_sq"])
            assert same_bits(kept["max_exp_avg_sq"], highest)
    assert bool((kept["max_exp_avg_sq"][1] > kept["exp_avg_sq"][1]).all())
    assert torch.equal(kept["max_exp_avg_sq"][[0, 2]], torch.zeros(2, 2))
