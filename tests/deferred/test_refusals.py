"""What dense semantics refuses, and steps that raise: nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import OPTIMIZERS
from tests.deferred.runs import (
    DECAY,
    assert_close,
    assert_dense_run,
    coo,
    dense_run,
    kept,
    standard,
)
from tests.subject import refused
from tests.table import INSTRUCTION_SETS, PARAMETERS, WITH_COUPLED_DECAY, WITH_DENSE, Variant

pytestmark = pytest.mark.usefixtures("one_thread")
WITH_PER_ROW = [cls for cls, options in PARAMETERS.items() if "bias_correction" in options]


REFUSED: list[tuple[Any, dict[str, Any]]] = [
    *((cls, {"weight_decay": 0.1}) for cls in WITH_COUPLED_DECAY if cls in WITH_DENSE),
    *((cls, {}) for cls in OPTIMIZERS if cls not in WITH_DENSE),
    *((cls, {"bias_correction": "per_row"}) for cls in WITH_PER_ROW if cls in WITH_DENSE),
    (sparsestep.AdamW, {"lr": 0.5, "weight_decay": 2.0}),
    (sparsestep.Lion, {"lr": 1.0, "weight_decay": 1.5}),
    (sparsestep.SGD, {"lr": 10.0, **DECAY}),
    (sparsestep.AdamW, {"mask": torch.ones(3, 2) > 0}),
]


@pytest.mark.parametrize(("cls", "options"), REFUSED, ids=str)
def test_what_is_refused_at_construction(cls: Any, options: dict[str, Any]):
    """A group that is added later is refused as well, and not added."""
    param = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(InputError):
        cls([param], **options, semantics="dense")
    if cls in WITH_DENSE:
        opt = cls([torch.nn.Parameter(torch.zeros(1))], semantics="dense", lr=0.1)
        with refused(opt):
            opt.add_param_group({"params": [param], **options})


LATER: list[tuple[Any, dict[str, Any], dict[str, Any]]] = [
    (sparsestep.SGD, {"momentum": 0.9}, {"weight_decay": 0.1}),
    (sparsestep.RowwiseAdam, DECAY, {"decoupled_weight_decay": False}),
    (sparsestep.AdamW, {}, {"lr": 1.0, "weight_decay": 1.0}),
    (sparsestep.AdamW, {}, {"bias_correction": "per_row"}),
    (sparsestep.AdamW, {}, {"mask": torch.ones(24, 3) > 0}),
]


@pytest.mark.parametrize(("cls", "options", "later"), LATER, ids=str)
def test_what_is_refused_at_the_step(cls: Any, options: dict[str, Any], later: dict[str, Any]):
    """With nothing changed, and once it is taken back the run goes on as if nothing had been."""
    run = standard(20)
    variant = Variant(cls, options)
    first, param = torch.nn.Parameter(run.weight.clone()), run.param()
    opt = variant([{"params": [first]}, {"params": [param]}], lr=0.1, semantics="dense")
    first.grad = coo([1], torch.ones(1, 3).double(), (24, 3))
    run.train(opt, param, range(10))
    was = dict(opt.param_groups[1])
    opt.param_groups[1].update(later)
    param.grad = run.sparse(11, torch.float64)
    with refused(opt, match="group 1"):
        opt.step()
    opt.param_groups[1] = was
    run.train(opt, param, range(10, 20))
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(variant, run))


@pytest.mark.skipif(not INSTRUCTION_SETS, reason="there is no native engine")
def test_what_the_native_engine_cannot_run_changes_nothing():
    run = standard(20)
    param = run.param()
    odd = torch.nn.Parameter(torch.zeros(4, 3, 2).transpose(1, 2))
    opt = sparsestep.AdamW([param], semantics="dense", engine="native")
    run.train(opt, param, range(6))
    opt.add_param_group({"params": [odd]})
    param.grad = run.sparse(8, torch.float64)
    odd.grad = coo([0], torch.ones(1, 2, 3), (4, 2, 3))
    with refused(opt, match="the native engine needs CPU tensors"):
        opt.step()
    opt.catch_up()


@pytest.mark.parametrize("count", [float("nan"), -1.0, 2.0**31 - 2, 2.0**40])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_step_count_that_is_none_or_more_than_rows_can_remember(count: float, sparse: bool):
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.Adam([param], lr=0.1, semantics="dense")
    opt.materialize_state()
    opt.state[param]["step"] = torch.tensor(count, dtype=torch.float64)
    param.grad = torch.ones(4, 2).to_sparse(1) if sparse else torch.ones(4, 2)
    if count > 0 and not sparse:  # no row is deferred
        opt.step()
        return
    with refused(opt, match=r"number of steps taken|counts at most 2147483646 steps"):
        opt.step()
    if count > 0:
        opt.state[param]["step"] = torch.tensor(2.0**31 - 4, dtype=torch.float64)
        opt.step()
        opt.step()
        opt.catch_up()
        with pytest.raises(InputError, match="counts at most 2147483646 steps"):
            opt.step()


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_given_twice_takes_two_steps():
    run = standard(20)

    def twice(params: list[torch.nn.Parameter], **options: Any) -> Any:
        return sparsestep.AdamW([*params, *params], **options)

    def train(opt: Any, param: torch.Tensor) -> None:
        run.train(opt, param)
        assert int(opt.state[param]["step"]) == 40

    assert_dense_run(twice, run, train=train)
