"""Each formula against what was published, and what is particular to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.radam import rectified
from tests.optim import transcriptions
from tests.optim.transcriptions import COLUMNS, ROWS, STEPS, Gradients, Result, Table, start
from tests.table import (
    ENGINES,
    each_engine,
    running_on,
    same_bits,
    state_tensors,
)

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
TRANSCRIPTIONS: dict[str, Callable[..., Result]] = {
    "RowwiseAdagrad": transcriptions.rowwise_adagrad,
    "RowwiseAdam": transcriptions.rowwise_adam,
    "Lion": transcriptions.lion,
    "Ftrl": transcriptions.ftrl,
}
# Classes of torch's, and options that select another formula.
TORCHS: list[tuple[str, dict[str, Any]]] = [
    ("Adagrad", {**ROOT, **COUPLED, "lr_decay": 0.3, "initial_accumulator_value": 0.5}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.4}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("RMSprop", {**ROOT, "alpha": 0.9, "centered": True, "momentum": 0.9}),
    ("RAdam", ADAM),
    ("RAdam", {**ADAM, **COUPLED, "betas": (0.8, 0.5)}),  # is never rectified
    ("RAdam", {**ADAM, **DECOUPLED, "betas": (0.9, 0.999)}),
    ("Adam", ADAM),
    ("Adam", {**ADAM, **COUPLED, "amsgrad": True}),
    ("AdamW", {**ADAM, **COUPLED}),
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


def row_gradient(row: int, values: Tensor, shape: torch.Size) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[row]]), values[None], shape)


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
        table, kept = TRANSCRIPTIONS[name](sums, **options)
        param = torch.nn.Parameter(torch.from_numpy(begin).to(dtype, copy=True))
        with running_on(engine) as running:
            opt = cls([param], engine=running, maximize=maximize, **options)
            for step in range(STEPS):
                param.grad = gradients.tensor(step).to(dtype)
                opt.step()
        assert opt.state[param].keys() - {"step"} == kept.keys()
        for ours, theirs in ((param, table), *((opt.state[param][k], kept[k]) for k in kept)):
            assert agree(ours, theirs, PRECISION[dtype]), (dense, maximize, dtype)


@each_engine
@pytest.mark.parametrize(("name", "options"), TORCHS, ids=named)
def test_sparse_gradients_of_all_rows_are_torchs_dense_ones(
    name: str, options: dict[str, Any], engine: str
):
    gradients = Gradients(dense=True)
    params = [torch.nn.Parameter(torch.from_numpy(start())) for _ in range(2)]
    with running_on(engine) as running:
        ours = getattr(sparsestep, name)(params[:1], engine=running, **options)
        theirs = getattr(torch.optim, name)(params[1:], **options)
        for step in range(2 * STEPS):
            grad = gradients.tensor(step % STEPS)
            params[0].grad, params[1].grad = grad.to_sparse(1), grad
            ours.step()
            theirs.step()
    torch.testing.assert_close(*params, rtol=1e-12, atol=1e-12)
    for ours_state, theirs_state in zip(state_tensors(ours), state_tensors(theirs), strict=True):
        torch.testing.assert_close(ours_state, theirs_state, rtol=1e-12, atol=1e-12)


def agree(ours: Tensor, theirs: Table, precision: float) -> bool:
    return np.allclose(ours.detach().numpy(), theirs, rtol=precision, atol=precision)


# Momentum, rates, maxima, eps


@each_engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_half_precision_params_do_not_stall(engine: str, dtype: torch.dtype):
    """In bfloat16 the second moment of g = 1 would stop at 0.25."""
    param = torch.nn.Parameter(torch.zeros(2, dtype=dtype))
    param.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), torch.ones(1, dtype=dtype), (2,))
    with running_on(engine) as name:
        opt = sparsestep.SparseAdam([param], lr=0.0, engine=name)
        for _ in range(1500):
            opt.step()
    expected = [0, 1 - 0.999**1500]
    assert opt.state[param]["exp_avg_sq"].tolist() == pytest.approx(expected, rel=1e-4)


# Weight decay


# Bias correction row by row


PER_ROW: list[tuple[Any, dict[str, Any]]] = [
    (sparsestep.SparseAdam, {}),
    (sparsestep.Adam, {}),
    (sparsestep.Adam, {"amsgrad": True}),
    (sparsestep.AdamW, {"weight_decay": 0.1}),
    (sparsestep.RowwiseAdam, {"weight_decay": 0.1}),
]
each_per_row = pytest.mark.parametrize(
    ("cls", "options"), PER_ROW, ids=["SparseAdam", "Adam", "AMSGrad", "AdamW", "RowwiseAdam"]
)


@pytest.mark.parametrize(("cls", "options"), [PER_ROW[0], PER_ROW[-1]])
def test_a_row_first_seen_at_step_2001_moves_like_a_row_at_step_1(cls: Any, options: dict):
    """Counted with the table, it would move three times as far."""
    values = torch.tensor([0.5, -1.0, 2.0, 0.25])
    for correction in ("per_row", "global"):
        param = torch.nn.Parameter(torch.ones(3, 4))
        opt = cls([param], lr=0.1, bias_correction=correction, **options)
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


@each_per_row
@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_rows_counted_on_their_own_are_optimizers_on_their_own(
    cls: Any, options: dict[str, Any], dense: bool
):
    for engine in ENGINES:
        gradients = Gradients(dense=dense)
        table = torch.nn.Parameter(torch.from_numpy(start()))
        rows = [torch.nn.Parameter(row[None].clone()) for row in table.detach()]
        counts = torch.zeros(ROWS)
        with running_on(engine) as name:
            opt = cls([table], lr=0.1, engine=name, bias_correction="per_row", **options)
            of_rows = [cls([row], lr=0.1, engine=name, **options) for row in rows]
            for step in range(STEPS):
                table.grad = gradients.tensor(step)
                opt.step()
                for number, sums in gradients.summed(step).items():
                    rows[number].grad = torch.from_numpy(sums[None]).to_sparse(1)
                    of_rows[number].step()
                    counts[number] += 1
        together = torch.cat([row.detach() for row in rows])
        assert torch.allclose(table.detach(), together, rtol=1e-13, atol=1e-13)
        assert torch.equal(opt.state[table]["row_step"], counts)


# RAdam's first steps, and where they end


@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.5, 0.8), (0.9, 0.5), (0.9, 0.0)], ids=str)
def test_radam_divides_from_the_step_on_from_which_torch_does(betas: tuple[float, float]):
    """The gradients are small, so that it shows whether a step is divided by their size."""
    param = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    opt = torch.optim.RAdam([param], lr=1.0, betas=betas, eps=0.0)
    for step in range(1, 40):
        before = param.item()
        param.grad = torch.full((1,), 1e-3, dtype=torch.float64)
        opt.step()
        size, divides = rectified(step, 1.0, betas)
        if betas == (0.9, 0.999):
            assert divides == (step > 5)
        kept = opt.state[param]
        divisor = kept["exp_avg_sq"].sqrt().item() if divides else 1.0
        moved = size * kept["exp_avg"].item() / divisor
        assert before - param.item() == pytest.approx(moved, rel=1e-12)
