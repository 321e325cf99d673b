"""Each formula against what was published, and what is particular to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsestep
from tests.optim import transcriptions
from tests.optim.transcriptions import COLUMNS, ROWS, STEPS, Gradients, Table, start
from tests.table import each_engine, running_on

ADAM = {"lr": 0.1, "betas": (0.8, 0.95), "eps": 1e-3}
ROOT = {"lr": 0.1, "eps": 1e-3}
LION = {"lr": 0.1, "betas": (0.8, 0.95)}
COUPLED = {"weight_decay": 0.2}
DECOUPLED = {"weight_decay": 0.2, "decoupled_weight_decay": True}
# The class, which has the transcription's name in another spelling, and the options of both.
PUBLISHED: list[tuple[str, dict[str, Any]]] = [
    ("RowwiseAdagrad", ROOT),
    ("RowwiseAdagrad", {**ROOT, **COUPLED, "initial_accumulator_value": 0.5}),
    ("RowwiseAdagrad", {**ROOT, **DECOUPLED}),
    ("RowwiseAdam", ADAM),
    ("RowwiseAdam", {**ADAM, **COUPLED}),
    ("RowwiseAdam", {**ADAM, "betas": (0.0, 0.95)}),
    ("RowwiseAdam", {**ADAM, "betas": (0.0, 0.95), "bias_correction": "per_row"}),
    ("RowwiseAdam", {**ADAM, **DECOUPLED, "bias_correction": "per_row"}),
    ("Lion", LION),
    ("Lion", {**LION, **COUPLED}),
    ("Ftrl", {"lr": 0.3, "beta": 0.5, "l1": 0.7, "l2": 0.1}),
    ("Ftrl", {"lr": 0.3, "initial_accumulator_value": 0.25}),
]
# Dense gradients or sparse ones, maximized or not, wide or not: each pair once.
PAIRS = [
    (False, False, torch.float64),
    (True, True, torch.float64),
    (False, True, torch.float32),
    (True, False, torch.float32),
]
PRECISION = {torch.float64: 1e-13, torch.float32: 2e-5}


def named(value: Any) -> str:
    return value if isinstance(value, str) else "-".join(value)


@each_engine
@pytest.mark.parametrize(("name", "options"), PUBLISHED, ids=named)
def test_steps_are_what_was_published(name: str, options: dict[str, Any], engine: str):
    cls = getattr(sparsestep, name)
    # FTRL's weights follow from its state, so they have to begin where that begins.
    begin = np.zeros((ROWS, COLUMNS)) if name == "Ftrl" else start()
    for dense, maximize, dtype in PAIRS:
        gradients = Gradients(dense=dense)
        sums = [gradients.summed(step) for step in range(STEPS)]
        if maximize:
            sums = [{row: -g for row, g in each.items()} for each in sums]
        table, kept = getattr(transcriptions, cls.__module__.rpartition(".")[2])(sums, **options)
        param = torch.nn.Parameter(torch.from_numpy(begin).to(dtype, copy=True))
        with running_on(engine) as running:
            opt = cls([param], engine=running, maximize=maximize, **options)
            for step in range(STEPS):
                param.grad = gradients.tensor(step).to(dtype)
                opt.step()
        assert opt.state[param].keys() - {"step"} == kept.keys()
        for ours, theirs in ((param, table), *((opt.state[param][k], kept[k]) for k in kept)):
            assert agree(ours, theirs, PRECISION[dtype]), (dense, maximize, dtype)


def test_torchs_kernel_has_the_numbers_of_the_rule_under_another_default_dtype():
    """Torch keeps the product of NAdam's momentum in the default dtype."""
    params = [torch.nn.Parameter(torch.from_numpy(start())) for _ in range(2)]
    options: list[dict[str, Any]] = [{"foreach": True}, {}]
    optimizers = [
        sparsestep.NAdam([param], lr=0.1, **each)
        for param, each in zip(params, options, strict=True)
    ]
    torch.set_default_dtype(torch.float64)
    try:
        for param, optimizer in [*zip(params, optimizers, strict=True)] * 3:
            param.grad = torch.ones_like(param)
            optimizer.step()
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(*params, rtol=1e-13, atol=1e-13)


def agree(ours: Tensor, theirs: Table, precision: float) -> bool:
    return np.allclose(ours.detach().numpy(), theirs, rtol=precision, atol=precision)
