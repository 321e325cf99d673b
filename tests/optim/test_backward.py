"""Steps within backward: the numbers of backward and step, with one gradient at a time."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

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
from tests.table import (
    Variant,
    each_optimizer,
    each_variant,
    same_bits,
    snapshot,
    steps_of,
    unchanged,
)

each_engine = pytest.mark.parametrize("engine", ["reference", "native"])


# The numbers


@each_variant
@each_engine
def test_the_bits_of_backward_and_step(variant: Variant, engine: str):
    ours, theirs = pair(variant, engine=engine)
    ours[1].step_in_backward()
    for number in range(STEPS):
        loss_of(ours[0], number).backward()
        assert has_no_gradients(ours[0])
    train(*theirs, range(STEPS))
    assert_same(ours, theirs)


LOOPS: dict[str, Callable[[RuleOptimizer, Callable[[], Tensor]], Any]] = {
    "zero_grad, backward, step": lambda opt, backward: (opt.zero_grad(), backward(), opt.step()),
    "backward, step, zero_grad": lambda opt, backward: (backward(), opt.step(), opt.zero_grad()),
    "backward, step": lambda opt, backward: (backward(), opt.step()),
    "zero_grad, backward": lambda opt, backward: (opt.zero_grad(), backward()),
    "backward": lambda opt, backward: backward(),
    "zeros, backward, step": lambda opt, backward: (
        opt.zero_grad(set_to_none=False),
        backward(),
        opt.step(),
    ),
    "closure": lambda opt, backward: opt.step(backward),
    "zero_grad, closure": lambda opt, backward: (opt.zero_grad(), opt.step(backward)),
}


@each_stateful
@pytest.mark.parametrize("loop", LOOPS)
def test_any_loop_that_steps_once_per_backward(variant: Variant, loop: str):
    """What is left for step() is nothing, and it counts nothing."""
    ours, theirs = pair(variant)
    ours[1].step_in_backward()
    for number in range(STEPS):

        def backward(number: int = number) -> Tensor:
            loss = loss_of(ours[0], number)
            loss.backward()
            return loss.detach()

        LOOPS[loop](ours[1], backward)
    train(*theirs, range(STEPS))
    assert_same(ours, theirs)


@each_stateful
def test_a_closure_gives_its_loss(variant: Variant):
    (model, opt), (other, _) = pair(variant)
    opt.step_in_backward()

    def closure() -> Any:
        opt.zero_grad()
        loss = loss_of(model, 0)
        loss.backward()
        return loss.detach()

    assert same_bits(opt.step(closure), loss_of(other, 0).detach())


@each_optimizer
def test_schedulers(optimizer: type[RuleOptimizer]):
    ours, theirs = pair(optimizer)
    ours[1].step_in_backward()
    for model, opt in (ours, theirs):
        scheduler = lr_scheduler.ExponentialLR(opt, gamma=0.5)
        for number in range(STEPS):
            opt.zero_grad()
            loss_of(model, number).backward()
            opt.step()
            scheduler.step()
    assert_same(ours, theirs)
    assert ours[1].param_groups[1]["lr"] == 0.05 * 0.5**STEPS


def test_stochastic_rounding_has_the_same_bits():
    """They depend on a parameter's place among all of the optimizer's."""
    results = []
    for in_backward in (False, True):
        torch.manual_seed(5)
        tables = [torch.nn.Embedding(6, 4, sparse=True, dtype=torch.bfloat16) for _ in range(4)]
        for table in tables:
            torch.nn.init.ones_(table.weight)
        params = [table.weight for table in tables]
        groups = [{"params": params[:2]}, {"params": params[2:3]}, {"params": params[3:]}]
        opt = sparsestep.Adam(groups, lr=1e-4, stochastic_rounding=True)
        if in_backward:
            opt.step_in_backward()
        for _ in range(20):
            sum(table(torch.arange(6)).sum() for table in tables).backward()  # type: ignore[union-attr]
            opt.step()
            opt.zero_grad()
        results.append([param.detach() for param in params])
    for ours, theirs in zip(*results, strict=True):
        assert same_bits(ours, theirs)
    assert not same_bits(results[0][0], results[0][2])


def test_masks():
    ours, theirs = pair(sparsestep.AdamW)
    ours[1].step_in_backward()
    for model, opt in (ours, theirs):
        opt.param_groups[0]["mask"] = [torch.arange(12) % 3 == 0, torch.ones(4, 4) > 0, None]
        train(model, opt, range(STEPS))
    assert_same(ours, theirs)
    assert same_bits(ours[0].sparse.weight.detach()[1], Model().sparse.weight.detach()[1])


def test_dense_semantics():
    ours, theirs = pair(sparsestep.AdamW, semantics="dense")
    ours[1].step_in_backward()
    for model, opt in (ours, theirs):
        tracking = opt.track(model)
        train(model, opt, range(STEPS))
        opt.catch_up()
        tracking.remove()
    assert_same(ours, theirs)


def test_a_table_that_is_tied_to_a_layer():
    """Its two gradients, sparse and dense, arrive as one."""
    results = []
    for in_backward in (False, True):
        table = torch.nn.Embedding(6, 4, sparse=True)
        layer = torch.nn.Linear(4, 6, bias=False)
        layer.weight = table.weight
        with torch.no_grad():
            table.weight.copy_(torch.arange(24.0).view(6, 4) / 8)
        opt = sparsestep.Adam(table.parameters())
        if in_backward:
            opt.step_in_backward()
        for _ in range(3):
            layer(table(torch.tensor([1, 4, 1]))).square().mean().backward()
            opt.step()
            opt.zero_grad()
        assert steps_of(opt, table.weight) == 3
        results.append(table.weight.detach())
    assert same_bits(*results)


# Memory


@each_stateful
def test_gradients_are_freed_one_by_one(variant: Variant):
    """When a gradient arrives, that of the parameter before it is gone."""
    model, opt = pair(variant)[0]
    seen: list[int] = []

    def count(_: Tensor) -> None:
        seen.append(sum(param.grad is not None for param in model.parameters()))

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(count)
    opt.step_in_backward()
    loss_of(model, 0).backward()
    assert seen == [1] * 6
    assert has_no_gradients(model)


def test_a_gradient_is_kept_by_nobody():
    layer = torch.nn.Linear(4, 3)
    opt = sparsestep.Adam(layer.parameters())
    grads: list[weakref.ref[Tensor]] = []

    def watch(param: Tensor) -> None:
        assert param.grad is not None
        grads.append(weakref.ref(param.grad))

    for param in layer.parameters():
        param.register_post_accumulate_grad_hook(watch)
    handle = opt.step_in_backward()
    layer(torch.ones(2, 4)).sum().backward()
    assert len(grads) == 2
    assert not any(grad() is not None for grad in grads)
    handle.remove()


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


# What goes wrong


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


@each_stateful
@each_engine
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
def test_a_bad_index(variant: Variant, engine: str, backwards: int, first: bool):
    weight = torch.nn.Parameter(torch.ones(5, 3))
    opt = variant([weight], engine=engine)
    opt.step_in_backward(backwards=backwards)

    def good() -> None:
        rows = torch.tensor([1, 3])
        for _ in range(backwards):
            torch.nn.functional.embedding(rows, weight, sparse=True).sum().backward()

    if not first:
        good()
    opt.zero_grad()
    before = snapshot(opt)
    for _ in range(backwards - 1):
        Bad.apply(weight).sum().backward()
    name = variant.cls.__name__
    with pytest.raises(InputError, match=rf"^{name}: param 0 of group 0: .* \[0, 5\). Got 5"):
        Bad.apply(weight).sum().backward()
    assert unchanged(opt, before)
    assert weight.grad is None
    good()  # as if it had not been
    other = torch.nn.Parameter(torch.ones(5, 3))
    theirs = variant([other], engine=engine)
    for _ in range(1 if first else 2):
        rows = torch.tensor([[1, 3] * backwards])
        other.grad = torch.sparse_coo_tensor(rows, torch.ones(2 * backwards, 3), (5, 3))
        theirs.step()
    assert same_bits(weight.detach(), other.detach())


@each_optimizer
def test_checkpoints_and_copies_do_not_know_of_it(optimizer: type[RuleOptimizer]):
    ours, theirs = pair(optimizer)
    ours[1].step_in_backward()
    for number in range(2):
        loss_of(ours[0], number).backward()
    train(*theirs, range(2))
    assert ours[1].state_dict()["param_groups"] == theirs[1].state_dict()["param_groups"]
    copied = copy.deepcopy(ours[1])
    assert not copied.__dict__.keys() - ours[1].__dict__.keys()
    # A checkpoint may be loaded meanwhile.
    ours[1].load_state_dict(copy.deepcopy(theirs[1].state_dict()))
    loss_of(ours[0], 2).backward()
    train(*theirs, range(2, 3))
    assert_same(ours, theirs)
