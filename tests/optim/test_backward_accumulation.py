"""Steps within backward that come after several backwards."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.optim.model_pairs import (
    STEPS,
    Model,
    assert_same,
    each_stateful,
    has_no_gradients,
    loss_of,
    pair,
)
from tests.table import Variant, each_variant, snapshot, unchanged


@each_variant
def test_several_backwards_make_a_step(variant: Variant):
    ours, theirs = pair(variant)
    ours[1].step_in_backward(backwards=3)
    for step in range(STEPS):
        for number in range(3 * step, 3 * step + 3):
            assert has_no_gradients(ours[0]) == (number % 3 == 0)
            loss_of(ours[0], number).backward()
            loss_of(theirs[0], number).backward()
        assert has_no_gradients(ours[0])
        theirs[1].step()
        theirs[1].zero_grad()
    assert_same(ours, theirs)


def parts(model: Model, number: int) -> Tensor:
    """A loss that reaches only some of the parameters, others in each call."""
    ids = torch.tensor([number % 5, 2])
    tables = [model.sparse, model.dense]
    if number % 3 == 0:
        return loss_of(model, number)
    return tables[number % 2](ids).square().sum()


@each_stateful
@pytest.mark.parametrize("loop", ["step, zero_grad", "zero_grad first"])
def test_parameters_that_only_some_of_the_backwards_reach(variant: Variant, loop: str):
    """Those that had too few gradients are left to step(), and begin anew afterwards."""
    ours, theirs = pair(variant)
    ours[1].step_in_backward(backwards=2)
    for model, opt in (ours, theirs):
        for step in range(6):
            if loop == "zero_grad first":
                opt.zero_grad()
            parts(model, 2 * step).backward()
            parts(model, 2 * step + 1).backward()
            opt.step()
            if loop != "zero_grad first":
                opt.zero_grad()
    assert_same(ours, theirs)


@each_stateful
@pytest.mark.parametrize("backwards", [1, 2])
def test_one_backward_too_many_is_refused(variant: Variant, backwards: int):
    ours, theirs = pair(variant)
    model, opt = ours
    opt.step_in_backward(backwards=backwards)
    for _ in range(2):
        opt.zero_grad()
        for number in range(backwards):
            loss_of(model, number).backward()
        before = snapshot(opt)
        message = (
            f"^{variant.cls.__name__}: step_in_backward frees a gradient as soon as it is used, "
            r"so .* cannot be accumulated. Got .* before step\(\) or zero_grad\(\). Pass back"
        )
        with pytest.raises(InputError, match=message):
            loss_of(model, 7).backward()
        assert unchanged(opt, before)
        assert has_no_gradients(model)
    for _ in range(2):  # the training goes on as if it had not been
        theirs[1].zero_grad()
        for number in range(backwards):
            loss_of(theirs[0], number).backward()
        theirs[1].step()
    assert_same(ours, theirs)


@each_stateful
@pytest.mark.parametrize("call", ["step", "zero_grad"])
def test_it_is_refused_also_where_the_loop_calls_only_one_of_the_two(variant: Variant, call: str):
    model, opt = pair(variant)[0]
    opt.step_in_backward()
    for number in range(2):
        loss_of(model, number).backward()
        getattr(opt, call)()
    loss_of(model, 2).backward()
    before = snapshot(opt)
    with pytest.raises(InputError, match="cannot be accumulated"):
        loss_of(model, 3).backward()
    assert unchanged(opt, before)
    getattr(opt, call)()
    loss_of(model, 3).backward()


def test_gradients_of_one_backward_may_come_in_parts():
    """Two losses, one backward: every parameter's gradient is complete when it arrives."""
    ours, theirs = pair(sparsestep.Adam)
    ours[1].step_in_backward()
    for model, opt in (ours, theirs):
        opt.zero_grad()
        torch.autograd.backward([loss_of(model, 0), loss_of(model, 1)])
        opt.step()
    assert_same(ours, theirs)
