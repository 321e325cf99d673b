"""Steps within backward: parameters, handles, memory, refusals. tests/loops.py has the numbers."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.loops import Model, Training, plain
from tests.subject import Snapshot, Subject, refused
from tests.table import all_same_bits, same_bits, steps_of

STEPS = 4


def pair(make: Callable[..., Any] = sparsestep.Adam, **options: Any) -> list[Training]:
    return [Training.of(Model(several=True), make, **options) for _ in range(2)]


def has_no_gradients(training: Training) -> bool:
    return all(param.grad is None for param in training.model.parameters())


LOOPS: list[Callable[[Any, Callable[[], Tensor]], Any]] = [
    lambda opt, backward: (opt.zero_grad(), backward(), opt.step()),
    lambda opt, backward: (backward(), opt.step(), opt.zero_grad()),
    lambda opt, backward: (opt.zero_grad(), backward()),
    lambda opt, backward: backward(),
    lambda opt, backward: (opt.zero_grad(set_to_none=False), backward(), opt.step()),
    lambda opt, backward: opt.step(backward),
    lambda opt, backward: (opt.zero_grad(), opt.step(backward)),
]


def test_any_loop_that_steps_once_per_backward():
    """What is left for step() is nothing, and it counts nothing. One of the tables has a mask."""
    theirs, *others = (Training.of(Model(several=True), sparsestep.AdamW) for _ in range(8))
    for each in (theirs, *others):
        each.optimizer.param_groups[0]["mask"] = [torch.arange(30) % 3 == 0, None, None]
    theirs.run(plain, STEPS)
    assert same_bits(theirs.model.sums.weight[1], Model().sums.weight[1])
    for ours, loop in zip(others, LOOPS, strict=True):
        ours.optimizer.step_in_backward()
        for number in range(STEPS):

            def backward(ours: Training = ours, number: int = number) -> Tensor:
                loss = ours.model(number)
                loss.backward()
                return loss.detach()

            loop(ours.optimizer, backward)
        assert ours.same_as(theirs)


def test_stochastic_rounding_has_the_same_bits():
    """They depend on a parameter's place among all of the optimizer's."""
    results = []
    for in_backward in (False, True):
        torch.manual_seed(5)
        tables = [torch.nn.Embedding(6, 4, sparse=True, dtype=torch.bfloat16) for _ in range(4)]
        params = [torch.nn.init.ones_(table.weight) for table in tables]
        groups = [{"params": params[:2]}, {"params": params[2:3]}, {"params": params[3:]}]
        opt = sparsestep.Adam(groups, lr=1e-4, stochastic_rounding=True)
        if in_backward:
            opt.step_in_backward()
        for _ in range(20):
            torch.stack([table(torch.arange(6)).sum() for table in tables]).sum().backward()
            opt.step()
            opt.zero_grad()
        results.append([param.detach() for param in params])
    assert all_same_bits(*results)
    assert not same_bits(results[0][0], results[0][2])


def test_gradients_are_freed_one_by_one():
    """When a gradient arrives, that of the parameter before it is gone."""
    training = pair()[0]
    seen: list[int] = []
    grads: list[weakref.ref[Tensor]] = []

    def watch(param: Tensor) -> None:
        assert param.grad is not None
        seen.append(sum(each.grad is not None for each in training.model.parameters()))
        grads.append(weakref.ref(param.grad))

    for param in training.model.parameters():
        param.register_post_accumulate_grad_hook(watch)
    training.optimizer.step_in_backward()
    training.backward(0)
    assert seen == [1] * 5
    assert has_no_gradients(training)
    assert not any(grad() is not None for grad in grads)


def test_everything_is_freed_once_it_was_removed():
    table = torch.nn.Embedding(6, 4, sparse=True)
    opt = sparsestep.Adam(table.parameters())
    handle = opt.step_in_backward()
    table(torch.tensor([1])).sum().backward()
    handle.remove()
    watched = [weakref.ref(table.weight), weakref.ref(opt), weakref.ref(handle)]
    del table, opt, handle
    gc.collect()
    assert not any(ref() is not None for ref in watched)


# Refusals


class Bad(torch.autograd.Function):
    """Looks up rows, and names one that does not exist in its gradient."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor) -> Tensor:
        ctx.shape = weight.shape
        return weight[:2].clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        rows = torch.tensor([[1, ctx.shape[0]]])
        return torch.sparse_coo_tensor(rows, grad, ctx.shape)


@pytest.mark.parametrize("backwards", [1, 2])
def test_a_bad_index_changes_nothing(backwards: int):
    weight = torch.nn.Parameter(torch.ones(5, 3))
    opt = sparsestep.Adam([weight])
    opt.step_in_backward(backwards=backwards)
    for steps in (1, 2):
        opt.zero_grad()
        for _ in range(backwards - 1):
            Bad.apply(weight).sum().backward()
        with refused(opt):
            Bad.apply(weight).sum().backward()
        assert weight.grad is None
        rows = torch.tensor([1, 3])
        for _ in range(backwards):  # training goes on
            torch.nn.functional.embedding(rows, weight, sparse=True).sum().backward()
        assert steps_of(opt, weight) == steps


def test_checkpoints_and_copies_do_not_know_of_it():
    ours, theirs = pair()
    ours.optimizer.step_in_backward()
    for number in range(2):
        ours.backward(number)
    theirs.run(plain, 2)
    saved = theirs.optimizer.state_dict()
    assert ours.optimizer.state_dict()["param_groups"] == saved["param_groups"]
    copied = copy.deepcopy(ours.optimizer)
    assert not vars(copied).keys() - vars(ours.optimizer).keys()
    ours.optimizer.load_state_dict(copy.deepcopy(saved))  # it may be loaded meanwhile
    ours.backward(2)
    plain(theirs)(2)
    assert ours.same_as(theirs)


# Which parameters, and until when


def test_removing_the_handle_undoes_it():
    """Asking twice does nothing more, and has a handle of its own."""
    ours, theirs = pair()
    handles = [ours.optimizer.step_in_backward() for _ in range(2)]
    for number in range(2):
        ours.optimizer.zero_grad()
        ours.backward(number)
        assert has_no_gradients(ours)
        handles[0].remove()
    handles[1].remove()
    handles[1].remove()
    before = Snapshot(Subject(ours.optimizer))
    ours.backward(2)
    before.check()
    assert not has_no_gradients(ours)
    with refused(ours.optimizer):
        ours.optimizer.step_in_backward()  # while there are gradients
    ours.optimizer.step()
    ours.optimizer.zero_grad()
    ours.optimizer.step_in_backward()  # and once more
    ours.backward(3)
    assert ours.same_as(theirs.run(plain, 4))


def test_some_parameters_only():
    ours, theirs = pair()
    chosen = [ours.model.sums.weight, ours.model.out.bias]
    ours.optimizer.step_in_backward(iter(chosen))
    others = [p for p in ours.model.parameters() if not any(p is c for c in chosen)]
    for number in range(STEPS):
        ours.optimizer.zero_grad()
        before = [param.detach().clone() for param in others]
        ours.backward(number)
        assert all(param.grad is None for param in chosen)
        assert all(param.grad is not None for param in others)
        assert all_same_bits(others, before)
        ours.optimizer.step()
    assert ours.same_as(theirs.run(plain, STEPS))


def test_parameters_that_are_frozen_or_that_backward_does_not_reach():
    training = pair()[0]
    frozen, unreached = training.model.sums.weight, training.model.means.weight
    frozen.requires_grad_(False)
    training.optimizer.step_in_backward()
    before = [frozen.detach().clone(), unreached.detach().clone()]
    training.model.rows(torch.tensor([1, 2])).sum().backward()
    assert all_same_bits([frozen, unreached], before)
    assert has_no_gradients(training)
    assert not steps_of(training.optimizer, frozen)
    assert not steps_of(training.optimizer, unreached)
    assert steps_of(training.optimizer, training.model.rows.weight) == 1


# Several backwards


def parts(model: Any, number: int) -> Tensor:
    """A loss that reaches only some of the parameters, others in each call."""
    if number % 3 == 0:
        return model(number)
    table = (model.rows, model.means)[number % 2]
    return table(torch.tensor([[number % 5, 2]])).square().sum()


@pytest.mark.parametrize("zero_first", [False, True], ids=["step, zero_grad", "zero_grad first"])
def test_parameters_that_only_some_of_the_backwards_reach(zero_first: bool):
    """Those that had too few gradients are left to step(), and start over afterwards."""
    ours, theirs = pair()
    ours.optimizer.step_in_backward(backwards=2)
    for each in (ours, theirs):
        for step in range(6):
            if zero_first:
                each.optimizer.zero_grad()
            parts(each.model, 2 * step).backward()
            parts(each.model, 2 * step + 1).backward()
            each.optimizer.step()
            if not zero_first:
                each.optimizer.zero_grad()
    assert ours.same_as(theirs)


@pytest.mark.parametrize("call", ["step", "zero_grad"])
@pytest.mark.parametrize("backwards", [1, 2])
def test_one_backward_too_many_is_refused(backwards: int, call: str):
    """A loop may call only one of the two; training goes on as if it had not been."""
    ours, theirs = pair()
    ours.optimizer.step_in_backward(backwards=backwards)
    for too_many in (False, True, True):
        for number in range(backwards):
            ours.backward(number)
            theirs.backward(number)
        if too_many:
            with refused(ours.optimizer):
                ours.backward(7)
        assert has_no_gradients(ours)
        getattr(ours.optimizer, call)()
        theirs.optimizer.step()
        theirs.optimizer.zero_grad()
    assert ours.same_as(theirs)
