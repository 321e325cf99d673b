"""Bad input to functional optimizers: nothing has changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsestep.errors import InputError
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.functional_cases import (
    SHAPES,
    Variant,
    assert_same,
    batches,
    each_engine,
    each_functional,
    each_stateful,
    everything,
    kept,
    sparse,
    start,
)
from tests.table import same_bits

BAD: dict[str, tuple[Any, str]] = {
    "index": (
        torch.sparse_coo_tensor(torch.tensor([[0, 3]]), torch.ones(2, 2, 2), SHAPES[2]),
        r"must be in \[0, 3\). Got 3",
    ),
    "shape": (torch.ones(3, 2), r"parameter's shape, \(3, 2, 2\). Got \(3, 2\)"),
    "dtype": (torch.ones(SHAPES[2], dtype=torch.complex64), "a compatible dtype"),
    "device": (torch.ones(SHAPES[2], device="meta"), "parameter's device, cpu. Got meta"),
}


@each_stateful
@each_engine
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_bad_input_changes_nothing(variant: Variant, engine: str, bad: str, first: bool):
    grad, message = BAD[bad]
    message = f"^{variant.cls.optimizer_class.__name__}: param 2 of group 0: .*{message}"
    params = start()
    opt = variant(params, engine=engine)
    if not first:
        opt.step(batches(sparse)[0])
    before = kept(everything(opt))
    good = batches(sparse)[0][:2]
    for call in (lambda: opt.step([*good, grad]), lambda: opt.step_param(params[2], grad)):
        with pytest.raises(InputError, match=message):
            call()
        assert_same(everything(opt), before)
    opt.step(batches(sparse)[0])  # no lock is left behind
    opt.step_param(params[2], torch.ones(SHAPES[2]))


@each_stateful
@each_engine
@pytest.mark.parametrize("bad", BAD)
def test_a_param_whose_first_gradient_is_bad_is_not_taken_on(
    variant: Variant, engine: str, bad: str
):
    grad, message = BAD[bad]
    params = start()
    opt = variant(params[:2], engine=engine)
    before = kept(everything(opt))
    with pytest.raises(InputError, match=message):
        opt.step_param(params[2], grad)
    assert_same(everything(opt), before)
    assert len(opt.param_group["params"]) == 2
    assert params[2] not in opt.state
    assert same_bits(params[2], start()[2])
    opt.step(batches(sparse)[0][:2])
    opt.step_param(params[2], batches(sparse)[0][2])
    known = variant(again := start(), engine=engine)
    known.step(batches(sparse)[0])
    assert_same(params, again)


@each_functional
@pytest.mark.parametrize("count", [0, 2, 4])
def test_the_wrong_number_of_gradients(cls: type[FunctionalOptimizer], count: int):
    params = start()
    opt = cls(params)
    message = f"^{cls.__name__}: expected 3 gradients, got {count}. Pass None for"
    with pytest.raises(ValueError, match=message):
        opt.step([torch.ones(SHAPES[0])] * count)
    assert_same(params, start())


@each_functional
def test_what_is_no_parameter_is_not_taken_on(cls: type[FunctionalOptimizer]):
    opt = cls(start())
    message = rf"^{cls.__name__}: a parameter must be a tensor\. Got int\."
    with pytest.raises(InputError, match=message):
        opt.step_param(3, torch.ones(SHAPES[0]))  # type: ignore[arg-type]
    assert len(opt.param_group["params"]) == 3
