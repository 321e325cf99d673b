"""Functional optimizers and torch's functional classes: arguments, numbers, checkpoints."""

from __future__ import annotations

import inspect
import warnings
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from tests.optim.functional_cases import (
    assert_same,
    batches,
    dense,
    everything,
    sparse,
    start,
    train,
)
from tests.table import same_bits

TORCH = ["Adam", "AdamW", "Adagrad", "SGD", "RMSprop"]


@pytest.fixture(scope="module")
def of_torch() -> dict[str, Any]:
    """Torch's functional classes; importing them warns of TorchScript."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.distributed.optim import (
            functional_adagrad,
            functional_adam,
            functional_adamw,
            functional_rmsprop,
            functional_sgd,
        )
    modules = (
        *(functional_adagrad, functional_adam, functional_adamw),
        *(functional_rmsprop, functional_sgd),
    )
    return {
        name: getattr(m, f"_Functional{name}")
        for m in modules
        for name in TORCH
        if hasattr(m, f"_Functional{name}")
    }


@pytest.mark.parametrize("name", TORCH)
def test_positions_and_defaults_are_those_of_torchs_functional_class(
    name: str, of_torch: dict[str, Any]
):
    cls = getattr(sparsestep, f"Functional{name}")
    signature = inspect.signature(of_torch[name].__init__).parameters
    names = [n for n in signature if n not in ("self", "params")]
    assert (*cls.positional, "_allow_empty_param_list") == tuple(names)
    ours = cls([torch.zeros(1)])
    for option in cls.positional:
        theirs = signature[option].default
        if option in cls.torch_only:
            assert cls.torch_only[option] == theirs
        elif option in ("foreach", "fused"):
            assert not ours.defaults[option]
        elif (name, option) == ("SGD", "lr"):  # torch's two classes differ
            assert (ours.defaults[option], theirs) == (
                torch.optim.SGD([torch.zeros(1)]).defaults["lr"],
                1e-2,
            )
        else:
            assert ours.defaults[option] == theirs


@pytest.mark.parametrize(
    ("option", "value"),
    [("warmup_lr_multiplier", 2.0), ("warmup_num_iters", 10.0), ("coalesce_grad", False)],
)
def test_what_only_torch_has_is_refused_unless_it_changes_nothing(option: str, value: Any):
    usual = sparsestep.FunctionalAdagrad.torch_only[option]
    message = f"^FunctionalAdagrad: {option} is an option of torch's class only and must be {usual}"
    with pytest.raises(InputError, match=message):
        sparsestep.FunctionalAdagrad([torch.zeros(1)], **{option: value})
    opt = sparsestep.FunctionalAdagrad([torch.zeros(1)], **{option: usual})
    assert option not in opt.defaults
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
        sparsestep.FunctionalAdam([torch.zeros(1)], **{option: usual})


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.parametrize("by_param", [False, True], ids=["step", "step_param"])
def test_dense_gradients_have_torchs_bits(name: str, by_param: bool):
    cls = getattr(sparsestep, f"Functional{name}")
    leaves = [torch.nn.Parameter(param) for param in start()]
    theirs = getattr(torch.optim, name)(leaves)
    params = start()
    opt = cls(params)
    for grads in batches(dense):
        if by_param:
            for param, grad in zip(params, grads, strict=True):
                opt.step_param(param, grad)
        else:
            opt.step(grads)
    train(theirs, leaves, batches(dense))
    assert_same(everything(opt), everything(theirs))


@pytest.mark.parametrize("name", TORCH)
def test_dense_gradients_have_the_bits_of_torchs_functional_class(
    name: str, of_torch: dict[str, Any]
):
    ours, theirs = start(), start()
    opt = getattr(sparsestep, f"Functional{name}")(ours, 0.01)
    with warnings.catch_warnings(record=True):
        peer = of_torch[name](theirs, 0.01)
    for grads in batches(dense):
        if any(grad is None for grad in grads):
            continue  # some of torch's take the gradients for those of other params then
        opt.step(grads)
        peer.step(grads)
    assert_same(ours, theirs)
    assert not same_bits(ours[0], start()[0])


@pytest.mark.parametrize("name", [*TORCH, "SparseAdam"])
def test_checkpoints_of_torchs_classes(name: str):
    make = sparse if name == "SparseAdam" else dense
    steps = batches(make)
    options = {"momentum": 0.9} if name == "SGD" else {}
    leaves = [torch.nn.Parameter(param) for param in start()]
    theirs = getattr(torch.optim, name)(leaves, **options)
    train(theirs, leaves, steps[:3])
    params = [leaf.detach().clone() for leaf in leaves]
    opt = getattr(sparsestep, f"Functional{name}")(params, **options)
    opt.load_state_dict(theirs.state_dict())
    for grads in steps[3:]:
        opt.step(grads)
    train(theirs, leaves, steps[3:])
    if make is dense:
        assert_same(everything(opt), everything(theirs))
    else:
        torch.testing.assert_close(everything(opt), everything(theirs))
    # And back.
    again = [torch.nn.Parameter(param) for param in params]
    other = getattr(torch.optim, name)(again, **options)
    other.load_state_dict(opt.state_dict())
    train(other, again, steps[:1])
    train(theirs, leaves, steps[:1])
    torch.testing.assert_close(everything(other), everything(theirs))
