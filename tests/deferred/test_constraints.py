"""``max_norm`` and ``normalize`` under ``semantics="dense"``: every row, after every step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.deferred import history as histories
from sparsestep.errors import StaleWarning
from tests.deferred.own_rules import DERIVED
from tests.deferred.runs import (
    VARIANTS,
    Run,
    assert_close,
    assert_dense_run,
    assert_same_bits,
    coo,
    dense_run,
    each_kind,
    on_both_engines,
    standard,
)
from tests.table import INSTRUCTION_SETS, Variant, on_each_engine, running_on

pytestmark = pytest.mark.usefixtures("one_thread")
each_constraint = pytest.mark.parametrize("more", [{"max_norm": 0.7}, {"normalize": True}], ids=str)


@on_each_engine(VARIANTS)
@each_constraint
def test_it_is_the_dense_run(variant: Variant, engine: str, more: dict[str, Any]):
    ours = assert_dense_run(variant, standard(), engine, **more)
    norms = ours["param"].norm(dim=1)
    assert norms.max() < (0.7 if "max_norm" in more else 1.0) + 1e-12


SHORT = [
    Variant(sparsestep.AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.1}),
    Variant(sparsestep.SGD, {"momentum": 0.5}),
    Variant(sparsestep.Lion, {"betas": (0.5, 0.5)}),
]


@pytest.mark.parametrize("variant", SHORT, ids=str)
@each_constraint
@on_both_engines
def test_rows_that_miss_more_steps_than_matter(
    variant: Variant, more: dict[str, Any], engine: str, monkeypatch: pytest.MonkeyPatch
):
    """Steps within the horizon one by one, the rest at once; and a history that is swept."""
    monkeypatch.setattr(histories, "MAX_STEPS", 100)
    assert_dense_run(variant, Run(120, most=1, tail=1.0), engine, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@each_constraint
@on_both_engines
def test_lower_precision_is_close(dtype: torch.dtype, more: dict[str, Any], engine: str):
    run, adamw = standard(), Variant(sparsestep.AdamW, {"weight_decay": 0.1})
    with running_on(engine) as name:
        ours = dense_run(adamw, run, dtype, semantics="dense", engine=name, **more)
    exact = dense_run(adamw, run, **more)
    room = 1e-5 if dtype is torch.float32 else 0.03
    assert_close({"param": ours["param"]}, {"param": exact["param"]}, room)


@each_kind
@each_constraint
def test_bits_do_not_depend_on_threads_or_instruction_set(variant: Variant, more: dict[str, Any]):
    run, results = Run(20, (40, 600), most=60), []
    for name in INSTRUCTION_SETS:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            with running_on(name) as engine:
                options = {"semantics": "dense", "engine": engine, **more}
                results.append(dense_run(variant, run, torch.float32, **options))
    for other in results[1:]:
        assert_same_bits(other, results[0])


def test_the_constraint_may_change():
    """Rows catch up under the constraint of the steps that they have missed."""

    def change(opt: Any, t: int) -> None:
        opt.param_groups[0]["max_norm"] = (0.7, None, 0.3)[t // 20]

    run = standard()
    adamw = Variant(sparsestep.AdamW, {"weight_decay": 0.1, "max_norm": 0.7})
    assert_dense_run(adamw, run, train=lambda opt, param: run.train(opt, param, before=change))


def test_only_selected_rows_are_constrained():
    param = torch.nn.Parameter(torch.full((4, 2), 3.0))
    mask = torch.tensor([True, True, False, False])
    opt = sparsestep.SGD([param], lr=0.1, mask=mask, normalize=True, semantics="dense")
    param.grad = coo([0, 2], torch.ones(2, 2), (4, 2))
    opt.step()
    opt.catch_up()
    assert torch.allclose(param[:2].norm(dim=1), torch.ones(2))
    assert torch.equal(param[2:], torch.full((2, 2), 3.0))


def test_rows_that_were_read_before_they_were_constrained_are_stale():
    param = torch.nn.Parameter(torch.full((4, 2), 3.0))
    opt = sparsestep.SGD([param], lr=0.1, normalize=True, semantics="dense")
    for row in (0, 1):
        param.grad = coo([row], torch.ones(1, 2), (4, 2))
        if row:
            with pytest.warns(StaleWarning):
                opt.step()
        else:
            opt.step()


@pytest.mark.parametrize("variant", [Variant(*each) for each in DERIVED], ids=str)
@each_constraint
@on_both_engines
def test_custom_rules(variant: Variant, more: dict[str, Any], engine: str):
    assert_dense_run(variant, standard(), engine, room=1e-11, **more)
