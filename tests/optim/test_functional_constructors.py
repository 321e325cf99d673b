"""What the constructors of functional optimizers take."""

from __future__ import annotations

import inspect

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL, OPTIMIZERS
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.functional_cases import each_functional, start


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
    assert named | (set(cls.positional) - set(cls.only_in_torch)) == own
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
        assert name in cls.only_in_torch or by_position.param_group[name] == value


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
def test_bad_options_are_refused(cls: type[FunctionalOptimizer]):
    with pytest.raises(InputError, match="Invalid learning rate: -1"):
        cls([torch.zeros(1)], lr=-1.0)
    with pytest.raises(InputError, match="engine must be one of"):
        cls([torch.zeros(1)], engine="quantum")


@each_functional
def test_params_may_come_from_a_generator_and_need_not_require_grad(
    cls: type[FunctionalOptimizer],
):
    params = start()
    opt = cls(param for param in params)
    assert [id(p) for p in opt.param_group["params"]] == [id(p) for p in params]
    opt.step([torch.ones_like(param) for param in params])
    assert repr(opt).startswith(f"{cls.__name__} (")
