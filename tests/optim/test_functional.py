"""Functional optimizers: constructors, state, checkpoints, and what they leave alone."""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL, OPTIMIZERS
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.functional_cases import (
    Variant,
    assert_same,
    batches,
    dense,
    each_functional,
    each_stateful,
    everything,
    kept,
    sparse,
    start,
    train,
)
from tests.table import same_bits, steps_of

# What it leaves alone


class Aloof(torch.nn.Parameter):
    """A param that must not be asked for its gradient, nor given one."""

    @property
    def grad(self) -> Any:  # type: ignore[override]
        raise AssertionError("param.grad was read")

    @grad.setter
    def grad(self, value: Any) -> None:
        raise AssertionError("param.grad was written")


@each_stateful
def test_param_grad_is_neither_read_nor_written(variant: Variant):
    params = [Aloof(param) for param in start()]
    opt = variant(params)
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


@each_stateful
def test_a_param_that_is_given_twice_gets_both_gradients(variant: Variant):
    twice, once = start()[0], start()[0]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = variant([twice, twice])
    other = variant([once])
    grads = [batch[0] for batch in batches(sparse) if batch[0] is not None]
    opt.step(grads[:2])
    for grad in grads[:2]:
        other.step([grad])
    assert same_bits(twice, once)


# Constructors


def test_every_optimizer_has_a_functional_one():
    assert [cls.optimizer_class for cls in FUNCTIONAL] == list(OPTIMIZERS)
    for cls in FUNCTIONAL:
        assert cls.__name__ == f"Functional{cls.optimizer_class.__name__}"
        assert getattr(sparsestep, cls.__name__) is cls
        assert cls.__name__ in sparsestep.__all__


@each_functional
def test_the_signature_is_what_the_constructor_takes(cls: type[FunctionalOptimizer]):
    signature = inspect.signature(cls)
    assert inspect.signature(cls.__init__).parameters["self"]
    options = list(signature.parameters.values())[1:]
    assert not [option for option in options if option.kind is option.VAR_KEYWORD]
    named = {o.name for o in options if o.kind is o.KEYWORD_ONLY}
    placed = [o.name for o in options if o.kind is o.POSITIONAL_OR_KEYWORD]
    assert placed == [*cls.positional, "_allow_empty_param_list"]
    own = set(inspect.signature(cls.optimizer_class).parameters) - {"params"}
    assert named | (set(cls.positional) - set(cls.torch_only)) == own
    cls([torch.zeros(1)], **{option.name: option.default for option in options})


OTHERS = {
    "lr": 0.5,
    "betas": (0.5, 0.75),
    "eps": 0.25,
    "weight_decay": 0.125,
    "amsgrad": True,
    "maximize": True,
    "foreach": False,
    "fused": False,
    "lr_decay": 0.5,
    "initial_accumulator_value": 2.0,
    "warmup_lr_multiplier": 1.0,
    "warmup_num_iters": 0.0,
    "coalesce_grad": True,
    "momentum": 0.5,
    "dampening": 0.25,
    "nesterov": False,
    "alpha": 0.5,
    "centered": True,
    "beta": 0.5,
    "l1": 0.25,
    "l2": 0.125,
}


@each_functional
def test_options_by_position_are_options_by_name(cls: type[FunctionalOptimizer]):
    values = [OTHERS[name] for name in cls.positional]
    by_position = cls([torch.zeros(1)], *values)
    by_name = cls([torch.zeros(1)], **dict(zip(cls.positional, values, strict=True)))
    assert by_position.defaults == by_name.defaults
    for name, value in zip(cls.positional, values, strict=True):
        assert name in cls.torch_only or by_position.param_group[name] == value


@each_functional
def test_too_many_options_or_one_twice(cls: type[FunctionalOptimizer]):
    values = [OTHERS[name] for name in cls.positional]
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) takes at most \d+ options by pos"):
        cls([torch.zeros(1)], *values, False, 1.0)
    with pytest.raises(TypeError, match=rf"^{cls.__name__}\(\) got multiple values for argument"):
        cls([torch.zeros(1)], 0.1, lr=0.1)
    with pytest.raises(TypeError, match="unexpected keyword argument 'warmup'"):
        cls([torch.zeros(1)], warmup=1.0)


@each_functional
def test_an_empty_parameter_list(cls: type[FunctionalOptimizer]):
    message = f"^{cls.__name__}: optimizer got an empty parameter list"
    with pytest.raises(ValueError, match=message):
        cls([])
    with pytest.raises(InputError, match=message):
        cls(iter([]), _allow_empty_param_list=False)
    opt = cls([], _allow_empty_param_list=True)
    opt.step([])
    assert opt.param_group["params"] == []
    values = [OTHERS[name] for name in cls.positional]
    assert cls([], *values, True).param_group["params"] == []


@each_functional
def test_params_may_come_from_a_generator_and_need_not_require_grad(
    cls: type[FunctionalOptimizer],
):
    params = start()
    opt = cls(param for param in params)
    assert [id(p) for p in opt.param_group["params"]] == [id(p) for p in params]
    opt.step([torch.ones_like(param) for param in params])
    assert repr(opt).startswith(f"{cls.__name__} (")
