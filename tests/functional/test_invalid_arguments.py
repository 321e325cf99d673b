"""Arguments of the functions that make no sense: refused, and nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsestep.errors import InputError
from sparsestep.grads.indexed import IndexedGrad
from tests.functional.cases import (
    BASIC,
    SHAPE,
    F,
    Function,
    assert_same_bits,
    coo,
    each_function,
    each_stateful,
    gradients,
    of_two_engines,
    start,
)
from tests.table import same_bits


def spoiled(function: Function, how: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """State with the last tensor replaced."""
    state = function.state(start())
    name = list(state)[-1]
    return {**state, name: how(state[name])}


BAD_STATE: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "another shape": (lambda t: torch.zeros(*t.shape, 2), r"must have shape \("),
    "integers": (lambda t: t.long(), "must have a real float dtype. Got torch.int64"),
    "imaginary": (lambda t: t.to(torch.complex64), "must have a real float dtype. Got"),
    "elsewhere": (lambda t: t.to("meta"), "and be on cpu"),
    "shared memory": (lambda t: torch.zeros(1).expand(t.shape), "must have memory of its own"),
    "sparse": (lambda t: t.to_sparse_coo(), "must be a strided tensor"),
    "no tensor": (lambda t: 0.0, "must have a tensor"),
}


@each_stateful
@of_two_engines
@pytest.mark.parametrize("bad", BAD_STATE)
def test_state_that_does_not_fit(function: Function, engine: str, bad: str):
    how, message = BAD_STATE[bad]
    param, state = start(), spoiled(function, how)
    with pytest.raises(InputError, match=message) as raised:
        function(param, gradients()[0], state, engine=engine)
    assert str(raised.value).startswith(f"{function.call.__name__}: ")
    assert same_bits(param, start())
    fresh = function.state(param)
    for key in list(state)[:-1]:
        assert same_bits(state[key], fresh[key])


def test_state_of_a_complex_parameter_has_its_dtype():
    """Real state would be half as large as what is written."""
    param = start(torch.complex64)
    grad = torch.ones(SHAPE, dtype=torch.complex64)
    for engine in ("reference", "native"):
        with pytest.raises(InputError, match=r"^adagrad_: the state 'sum' of a torch.complex64"):
            F.adagrad_(param, grad, torch.zeros(SHAPE), step=1, engine=engine)
        rows = torch.zeros(7, dtype=torch.complex64)
        with pytest.raises(InputError, match=r"^rowwise_adagrad_: the state 'sum' of"):
            F.rowwise_adagrad_(param, grad, rows, engine=engine)
    assert same_bits(param, start(torch.complex64))


BAD_GRADIENTS: dict[str, tuple[Any, str]] = {
    "index too large": (coo([[0, 7]], torch.ones(2, 5)), r"must be in \[0, 7\). Got 7"),
    "index negative": (coo([[-1, 2]], torch.ones(2, 5)), r"must be in \[0, 7\). Got -1"),
    "second index": (coo([[1, 0], [5, 3]], torch.ones(2)), r"dim 1 must be in \[0, 5\). Got 5"),
    "another shape": (torch.ones(7, 4), r"parameter's shape, \(7, 5\). Got \(7, 4\)"),
    "imaginary": (torch.ones(SHAPE, dtype=torch.complex64), "a compatible dtype"),
    "elsewhere": (torch.ones(SHAPE, device="meta"), "on the parameter's device, cpu. Got meta"),
    "none": (None, "must be a tensor or an IndexedGrad. Got NoneType"),
    "a list": ([0.0], "must be a tensor or an IndexedGrad. Got list"),
    "by hand, floats as positions": (
        IndexedGrad(torch.ones(1), torch.ones(1, 5)),
        "positions of a",
    ),
    "by hand, too few values": (
        IndexedGrad(torch.tensor([1, 2]), torch.ones(1, 5)),
        "as many rows",
    ),
    "by hand, bad position": (IndexedGrad(torch.tensor([9]), torch.ones(1, 5)), "Got 9"),
}


@each_function
@of_two_engines
@pytest.mark.parametrize("bad", BAD_GRADIENTS)
@pytest.mark.parametrize("masked", [False, True], ids=["", "mask"])
def test_gradients_that_do_not_fit(function: Function, engine: str, bad: str, masked: bool):
    grad, message = BAD_GRADIENTS[bad]
    param = start()
    state, fresh = function.state(param), function.state(param)
    mask = torch.ones(7, dtype=torch.bool) if masked else None
    with pytest.raises(InputError, match=message) as raised:
        function(param, grad, state, engine=engine, mask=mask)
    assert str(raised.value).startswith(f"{function.call.__name__}: ")
    assert_same_bits([param, *state.values()], [start(), *fresh.values()])


ROWS = torch.ones(7, dtype=torch.bool)
BAD_OPTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "step 0": ({"step": 0}, "step must be the number of this update, counted from 1. Got 0"),
    "step -1": ({"step": torch.tensor(-1.0)}, "from 1. Got -1"),
    "step 1.5": ({"step": 1.5}, "from 1. Got 1.5"),
    "step nan": ({"step": torch.tensor(float("nan"))}, "from 1. Got nan"),
    "two steps": ({"step": torch.tensor([1, 2])}, "from 1. Got a tensor"),
    "engine": ({"engine": "quantum"}, "must be one of auto, native, reference, triton. Got 'qua"),
    "lr": ({"lr": -1.0}, "Invalid learning rate: -1.0"),
    "two lrs": ({"lr": torch.tensor([0.1, 0.2])}, "Tensor lr must be 1-element"),
    "mask of numbers": ({"mask": ROWS.float()}, "must be a bool tensor. Got torch.float32"),
    "mask of another length": ({"mask": ROWS[1:]}, r"must have shape \(7,\)"),
    "list of masks": ({"mask": [ROWS]}, "must be a bool tensor. Got list"),
}


@each_stateful
@pytest.mark.parametrize("bad", BAD_OPTIONS)
def test_options_that_make_no_sense(function: Function, bad: str):
    options, message = BAD_OPTIONS[bad]
    param = start()
    state, fresh = function.state(param), function.state(param)
    with pytest.raises(InputError, match=message) as raised:
        function(param, gradients()[0], state, **options)
    assert str(raised.value).startswith(f"{function.call.__name__}: ")
    assert_same_bits([param, *state.values()], [start(), *fresh.values()])


OWN_OPTIONS = {
    "eps": -1e-8,
    "weight_decay": -0.1,
    "betas": (0.5, 1.0),
    "lr_decay": -1.0,
    "alpha": -0.5,
    "momentum": -0.9,
    "beta": -1.0,
    "l1": -1.0,
    "l2": -1.0,
}


@each_stateful
def test_options_that_the_class_refuses_too(function: Function):
    defaults = function.optimizer([start()]).defaults
    refused = [name for name in OWN_OPTIONS if name in defaults]
    if function.call is F.rmsprop_:
        refused.remove("momentum")  # needs a buffer first
    assert refused
    for name in refused:
        with pytest.raises(InputError, match="Invalid") as by_class:
            function.cls([start()], **{name: OWN_OPTIONS[name]})
        with pytest.raises(InputError, match="Invalid") as by_function:
            function(start(), gradients()[0], function.state(start()), **{name: OWN_OPTIONS[name]})
        said = [str(raised.value).split(": ", 1) for raised in (by_function, by_class)]
        # "at least" or "greater than": SparseAdam's eps
        assert said[0][0] == function.call.__name__
        assert said[0][1].split(". ")[0] == said[1][1].split(". ")[0]


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (F.sparse_adam_, {"weight_decay": 0.1}),
        (F.sparse_adam_, {"decoupled_weight_decay": True}),
        (F.ftrl_, {"weight_decay": 0.1}),
        (F.ftrl_, {"decoupled_weight_decay": True}),
        (F.adamw_, {"decoupled_weight_decay": False}),
        (F.lion_, {"decoupled_weight_decay": False}),
        (F.adam_, {"amsgrad": True}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_options_that_a_rule_does_not_have(call: Callable[..., None], options: dict[str, Any]):
    function = next(f for f in BASIC if f.call is call)
    param = start()
    with pytest.raises(TypeError, match=next(iter(options))):
        function(param, gradients()[0], function.state(param), **options)
    assert same_bits(param, start())


def test_what_else_is_refused():
    param, grad = start(), gradients()[0]

    def zeros() -> Tensor:
        return torch.zeros(SHAPE)

    refused: list[tuple[Callable[[], None], str]] = [
        (lambda: F.sgd_(param, grad, momentum=0.9), "sgd_: momentum needs a momentum_buffer"),
        (
            lambda: F.rmsprop_(param, grad, zeros(), momentum=0.9),
            "rmsprop_: momentum needs a momentum_buffer",
        ),
        (
            lambda: F.sgd_(param, grad, zeros(), nesterov=True),
            "sgd_: Nesterov momentum requires a momentum and zero dampening",
        ),
        (
            lambda: F.sgd_(param, grad, zeros(), momentum=0.9, dampening=0.1, nesterov=True),
            "sgd_: Nesterov momentum requires a momentum and zero dampening",
        ),
        (
            lambda: F.sparse_adam_(param, grad, zeros(), zeros(), step=1, eps=0),
            "sparse_adam_: Invalid epsilon value: 0. eps must be greater than 0",
        ),
        (
            lambda: F.sparse_adam_(param.cfloat(), grad.cfloat(), zeros(), zeros(), step=1),
            "sparse_adam_: the parameter must be real. Got torch.complex64",
        ),
        (
            lambda: F.sgd_(param.long(), grad.long()),
            "sgd_: a parameter must have a real float dtype. Got torch.int64",
        ),
        (
            lambda: F.sgd_(param.to_sparse_coo(), grad),
            "sgd_: the parameter must be a strided tensor. Got torch.sparse_coo",
        ),
        (
            lambda: F.adagrad_(param, grad, zeros(), step=1 << 63),
            "adagrad_: step must be the number of this update, counted from 1. Got 92233720",
        ),
        (
            lambda: F.sgd_(param, grad, seed=torch.ones(2)),  # type: ignore[arg-type]
            "sgd_: seed must be an integer or None. Got a tensor of shape (2,)",
        ),
        (
            lambda: F.sgd_(param[:1].expand(SHAPE), grad),
            "sgd_: every element of a parameter must have memory of its own",
        ),
    ]
    for call, message in refused:
        with pytest.raises(InputError) as raised:
            call()
        assert str(raised.value).startswith(message)
    assert same_bits(param, start())
