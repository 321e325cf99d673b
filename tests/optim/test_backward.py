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
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import STATEFUL, Variant, same_bits, snapshot, state_tensors, steps_of, unchanged

FEW = [v for v in STATEFUL if v.cls.__name__ in ("SGD", "Adam", "RowwiseAdagrad")]
each_stateful = pytest.mark.parametrize("variant", FEW, ids=str)
each_optimizer = pytest.mark.parametrize("optimizer", [sparsestep.SGD, sparsestep.Adam])

STEPS = 4


class Model(torch.nn.Module):
    """Tables with sparse and dense gradients, one of them looked up twice, and layers."""

    def __init__(self) -> None:
        super().__init__()
        self.sparse = torch.nn.Embedding(12, 4, sparse=True)
        self.dense = torch.nn.Embedding(12, 4)
        self.layer = torch.nn.Linear(4, 4)
        self.last = torch.nn.Linear(4, 2)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for param in self.parameters():
                param.copy_(torch.randn(param.shape, generator=generator))

    def forward(self, ids: Tensor) -> Tensor:
        looked_up = self.sparse(ids) + self.dense(ids) * self.sparse(ids + 1)
        return self.last(self.layer(looked_up).tanh() + self.layer(looked_up))


def loss_of(model: Model, number: int) -> Tensor:
    ids = torch.randint(0, 10, (7,), generator=torch.Generator().manual_seed(number))
    return model(ids).square().mean()


def pair(make: Callable[..., RuleOptimizer], **options: Any) -> list[tuple[Model, RuleOptimizer]]:
    """Two equal models, each with its optimizer: two groups with learning rates of their own."""
    found = []
    for _ in range(2):
        model = Model()
        first = [*model.sparse.parameters(), *model.layer.parameters()]
        second = [*model.dense.parameters(), *model.last.parameters()]
        groups = [{"params": first}, {"params": second, "lr": 0.05}]
        found.append((model, make(groups, **options)))
    return found


def assert_same(one: tuple[Model, RuleOptimizer], other: tuple[Model, RuleOptimizer]) -> None:
    ours, theirs = (
        [*(param.detach() for param in model.parameters()), *state_tensors(opt)]
        for model, opt in (one, other)
    )
    assert len(ours) == len(theirs)
    for number, (mine, its) in enumerate(zip(ours, theirs, strict=True)):
        assert same_bits(mine, its), number
    for mine, its in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert steps_of(one[1], mine) == steps_of(other[1], its)


def train(model: Model, opt: RuleOptimizer, numbers: range) -> None:
    """As usual."""
    for number in numbers:
        opt.zero_grad()
        loss_of(model, number).backward()
        opt.step()


def has_no_gradients(model: Model) -> bool:
    return all(param.grad is None for param in model.parameters())


each_engine = pytest.mark.parametrize("engine", ["reference", "native"])


# Loops


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


# Which parameters, and until when


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


# Several backwards


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
