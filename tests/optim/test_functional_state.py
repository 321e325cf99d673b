"""Functional optimizers: their state, their checkpoints, and what they leave alone."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.functional_cases import (
    Variant,
    assert_same,
    batches,
    dense,
    each_engine,
    each_functional,
    each_stateful,
    each_variant,
    everything,
    kept,
    sparse,
    start,
    train,
)
from tests.table import steps_of

# What it leaves alone


class Aloof(torch.nn.Parameter):
    """A param that must not be asked for its gradient, nor given one."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        raise AssertionError("param.grad was read")

    @grad.setter
    def grad(self, value: Any) -> None:
        raise AssertionError("param.grad was written")


@each_variant
@each_engine
def test_param_grad_is_neither_read_nor_written(variant: Variant, engine: str):
    params = [Aloof(param) for param in start()]
    opt = variant(params, engine=engine)
    for make in (sparse, dense):
        for grads in batches(make):
            opt.step(grads)
            for param, grad in zip(params, grads, strict=True):
                opt.step_param(param, grad)
    new = Aloof(torch.ones(3))
    opt.step_param(new, torch.ones(3))
    opt.load_state_dict(opt.state_dict())


@each_functional
def test_the_gradients_in_param_grad_stay_as_they_are(cls: type[FunctionalOptimizer]):
    leaf = torch.nn.Parameter(torch.ones(3, 2))
    leaf.grad = torch.full((3, 2), 7.0)
    grad = torch.ones(3, 2)
    cls([leaf], maximize=True).step([grad])
    assert torch.equal(leaf.grad, torch.full((3, 2), 7.0))
    assert torch.equal(grad, torch.ones(3, 2))
    assert leaf.is_leaf
    assert leaf.requires_grad


@each_stateful
@each_engine
def test_no_graph_is_made_and_versions_advance(variant: Variant, engine: str):
    for grad in (batches(sparse)[0][0], batches(dense)[0][0]):
        leaf = torch.nn.Parameter(start()[0])
        opt = variant([leaf], engine=engine)
        before = leaf._version
        opt.step([grad])
        opt.step_param(leaf, grad)
        assert leaf._version >= before + 2
        assert leaf.grad_fn is None
        tensors = [t for t in opt.state[leaf].values() if isinstance(t, Tensor)]
        assert not any(tensor.requires_grad for tensor in tensors)


@each_functional
def test_nothing_warns(cls: type[FunctionalOptimizer]):
    """Torch's functional classes warn of TorchScript, when imported and when made."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        params = start()
        opt = cls(params)
        for grads in batches(sparse):
            opt.step(grads)
        opt.step_param(params[0], None)
        opt.load_state_dict(opt.state_dict())
    assert not said


# State


@each_stateful
def test_state_is_found_by_the_param(variant: Variant):
    params = start()
    opt = variant(params)
    opt.step(batches(sparse)[1])  # nothing for the first
    rule = opt.optimizer_class.rule_for(opt.param_group)
    for spec in rule.state:
        assert opt.state[params[1]][spec.name].shape == (
            params[1].shape[:1] if spec.per_row else params[1].shape
        )
    if opt.optimizer_class is not sparsestep.Adagrad:  # which makes it at once, as torch's does
        assert not opt.state.get(params[0])
    assert steps_of(opt.optimizer, params[1]) == (1 if rule.counts_steps else None)


@each_stateful
def test_none_for_a_gradient_changes_nothing(variant: Variant):
    params = start()
    opt = variant(params)
    opt.step(batches(sparse)[0])
    before = kept(everything(opt))
    opt.step([None, None, None])
    for param in params:
        opt.step_param(param, None)
    assert_same(everything(opt), before)


@each_stateful
def test_a_param_is_taken_on_by_its_first_step(variant: Variant):
    params, others = start(), start()
    opt, known = variant([], _allow_empty_param_list=True), variant(others)
    opt.step_param(params[0], None)  # also without a gradient
    assert [id(p) for p in opt.param_group["params"]] == [id(params[0])]
    for grads in batches(sparse):
        for param, grad in zip(params, grads, strict=True):
            opt.step_param(param, grad)
        known.step(grads)
    assert_same(everything(opt), everything(known))
    assert [id(p) for p in opt.param_group["params"]] == [id(p) for p in params]
    opt.step(batches(sparse)[0])  # and is one of those that step() is for


@each_functional
def test_params_that_cannot_be_taken_on(cls: type[FunctionalOptimizer]):
    param = torch.ones(3, 2)
    opt = cls([param])
    message = f"^{cls.__name__}: Sparse params at indices .* requires dense parameter tensors"
    with pytest.raises(InputError, match=message):
        opt.step_param(torch.eye(3).to_sparse_coo(), torch.ones(3, 3))
    masked = cls([param], mask=torch.tensor([True, False, True]))
    with pytest.raises(InputError, match=f"^{cls.__name__}: with a mask, all parameters must be"):
        masked.step_param(torch.ones(3, 2), torch.ones(3, 2))
    masked.step([torch.ones(3, 2)])
    assert len(opt.param_group["params"]) == len(masked.param_group["params"]) == 1


@each_functional
def test_params_with_names_are_named_in_messages(cls: type[FunctionalOptimizer]):
    layer = torch.nn.Linear(2, 3)
    opt = cls(layer.named_parameters())
    with pytest.raises(InputError, match=r"param 1 of group 0 \(bias\): the gradient must have"):
        opt.step_param(layer.bias, torch.ones(4))
    new = torch.ones(2)
    opt.step_param(new, torch.ones(2))
    with pytest.raises(InputError, match=r"param 2 of group 0 \(.*\): the gradient must have"):
        opt.step_param(new, torch.ones(4))


# Checkpoints, pickles, copies


@each_stateful
@pytest.mark.parametrize("direction", ["from the class", "to the class", "between functional ones"])
def test_checkpoints_go_back_and_forth(variant: Variant, direction: str):
    steps = batches(sparse)
    leaves = [torch.nn.Parameter(param) for param in start()]
    params = start()
    cls = variant.optimizer(leaves)
    first: Any = variant(params) if direction != "from the class" else cls
    for grads in steps[:3]:
        if isinstance(first, FunctionalOptimizer):
            first.step(grads)
        else:
            train(first, leaves, [grads])
    saved = copy.deepcopy(first.state_dict())
    copies: list[Tensor] = [p.detach().clone() for p in (params if first is not cls else leaves)]
    if direction == "to the class":
        copies = [torch.nn.Parameter(param) for param in copies]
    second: Any = (variant if direction != "to the class" else variant.optimizer)(copies)
    second.load_state_dict(saved)
    for grads in steps[3:]:
        for each, tensors in ((first, params if first is not cls else leaves), (second, copies)):
            if isinstance(each, FunctionalOptimizer):
                each.step(grads)
            else:
                train(each, tensors, [grads])
    assert_same(everything(first), everything(second))
    assert first.state_dict()["param_groups"] == second.state_dict()["param_groups"]


@each_stateful
@pytest.mark.parametrize(
    "copied",
    [lambda x: pickle.loads(pickle.dumps(x)), copy.deepcopy],
    ids=["pickle", "deepcopy"],
)
def test_copies_go_on_by_themselves(variant: Variant, copied: Callable[[Any], Any]):
    steps = batches(sparse)
    params = start()
    opt = variant(params[:2], engine="reference")
    opt.step_param(params[2], steps[0][2])  # taken on: the copy knows it as well
    for grads in steps[:3]:
        opt.step(grads)
    other = copied(opt)
    before = kept(everything(opt))
    for grads in steps[3:]:
        other.step(grads)
    assert_same(everything(opt), before)
    for grads in steps[3:]:
        opt.step(grads)
    assert_same(everything(opt), everything(other))
    assert other.optimizer.engine == "reference"
    mine = other.param_group["params"][2]
    other.step_param(mine, steps[0][2])
    assert len(other.param_group["params"]) == 3
