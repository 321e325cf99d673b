"""Steps within backward: for which parameters, and until when."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.model_pairs import (
    STEPS,
    Model,
    assert_same,
    each_stateful,
    has_no_gradients,
    loss_of,
    pair,
    train,
)
from tests.table import Variant, each_optimizer, same_bits, snapshot, steps_of, unchanged


@each_stateful
def test_removing_the_handle_undoes_it(variant: Variant):
    ours, theirs = pair(variant)
    handle = ours[1].step_in_backward()
    loss_of(ours[0], 0).backward()
    handle.remove()
    handle.remove()
    before = snapshot(ours[1])
    loss_of(ours[0], 1).backward()
    assert unchanged(ours[1], before)
    assert not has_no_gradients(ours[0])
    ours[1].step()
    train(*theirs, range(2))
    assert_same(ours, theirs)
    # And once more.
    ours[1].zero_grad()
    ours[1].step_in_backward()
    loss_of(ours[0], 2).backward()
    train(*theirs, range(2, 3))
    assert_same(ours, theirs)


@each_stateful
def test_some_parameters_only(variant: Variant):
    ours, theirs = pair(variant)
    chosen = [ours[0].sparse.weight, ours[0].last.bias]
    ours[1].step_in_backward(iter(chosen))
    others = [p for p in ours[0].parameters() if not any(p is c for c in chosen)]
    for number in range(STEPS):
        ours[1].zero_grad()
        before = [param.detach().clone() for param in others]
        loss_of(ours[0], number).backward()
        assert all(param.grad is None for param in chosen)
        assert all(param.grad is not None for param in others)
        assert all(map(same_bits, [param.detach() for param in others], before))
        ours[1].step()
    train(*theirs, range(STEPS))
    assert_same(ours, theirs)


def test_several_optimizers_have_a_part_each():
    ours, theirs = Model(), Model()
    for model in (ours, theirs):
        first = sparsestep.Adam(model.sparse.parameters(), lr=0.1)
        rest = [p for p in model.parameters() if p is not model.sparse.weight]
        second = sparsestep.SGD(rest, lr=0.1, momentum=0.9)
        if model is ours:
            first.step_in_backward()
            second.step_in_backward()
        for number in range(STEPS):
            loss_of(model, number).backward()
            first.step()
            second.step()
            model.zero_grad()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert same_bits(mine.detach(), its.detach())


@each_stateful
def test_asking_twice_does_nothing_more(variant: Variant):
    ours, theirs = pair(variant)
    handles = [ours[1].step_in_backward() for _ in range(2)]
    for number in range(STEPS):
        ours[1].zero_grad()
        loss_of(ours[0], number).backward()
    train(*theirs, range(STEPS))
    assert_same(ours, theirs)
    handles[0].remove()
    ours[1].zero_grad()
    loss_of(ours[0], STEPS).backward()
    assert has_no_gradients(ours[0])


@each_stateful
def test_what_requires_no_gradient_is_left_out(variant: Variant):
    model, opt = pair(variant)[0]
    model.dense.weight.requires_grad_(False)
    opt.step_in_backward()
    before = model.dense.weight.detach().clone()
    loss_of(model, 0).backward()
    assert same_bits(model.dense.weight.detach(), before)
    assert has_no_gradients(model)
    assert steps_of(opt, model.dense.weight) in (None, 0)


@each_stateful
def test_a_parameter_that_backward_does_not_reach(variant: Variant):
    model, opt = pair(variant)[0]
    opt.step_in_backward()
    before = model.last.weight.detach().clone()
    model.sparse(torch.tensor([1, 2])).sum().backward()
    assert same_bits(model.last.weight.detach(), before)
    assert steps_of(opt, model.last.weight) in (None, 0)


@each_optimizer
def test_it_begins_without_gradients(optimizer: type[RuleOptimizer]):
    model, opt = pair(optimizer)[0]
    loss_of(model, 0).backward()
    message = (
        f"^{optimizer.__name__}: step_in_backward must start without gradients, .* Call zero_grad"
    )
    with pytest.raises(InputError, match=message):
        opt.step_in_backward()
    opt.zero_grad()
    before = snapshot(opt)
    loss_of(model, 0).backward()  # no hook was left behind
    assert unchanged(opt, before)
    assert not has_no_gradients(model)
    opt.zero_grad()
    opt.step_in_backward()


@each_optimizer
def test_parameters_of_others_are_refused(optimizer: type[RuleOptimizer]):
    model, opt = pair(optimizer)[0]
    other = torch.nn.Parameter(torch.ones(3, 2))
    message = (
        f"^{optimizer.__name__}: step_in_backward needs parameters of this optimizer. "
        r"Got another, of shape \(3, 2\)"
    )
    with pytest.raises(InputError, match=message):
        opt.step_in_backward([model.sparse.weight, other])
    for what, got in (("sparse", "a str"), ([1], "a int"), (3, "TypeError: 'int' object")):
        with pytest.raises(InputError, match=f"step_in_backward needs .* Got {got}"):
            opt.step_in_backward(what)  # type: ignore[arg-type]
    before = snapshot(opt)
    loss_of(model, 0).backward()
    assert unchanged(opt, before)


@pytest.mark.parametrize("backwards", [0, -1, 1.5, None])
def test_how_many_backwards_is_a_whole_number(backwards: Any):
    opt = pair(sparsestep.Adam)[0][1]
    message = r"^Adam: backwards must be an integer, at least 1\. Got"
    with pytest.raises(InputError, match=message):
        opt.step_in_backward(backwards=backwards)
