"""Options of a user's own formula."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from tests.optim.own_rules import adagrad, close, table_of, train, trained
from tests.table import same_bits


def test_the_step_is_passed_to_those_who_ask():
    seen = []

    @sparsestep.rule
    def asks(param, grad, *, step, lr=1.0):
        seen.append(step)
        return param - lr / step * grad

    @sparsestep.rule
    def does_not_ask(param, grad, *, lr=1.0):
        return param - lr * grad

    params = [table_of(), table_of()]
    opt = asks(params)
    train(opt, params[:1], range(2))
    train(opt, params, range(1))
    assert seen == [1, 2, 3, 1]
    assert "step" not in opt.defaults
    assert same_bits(trained(does_not_ask), trained(sparsestep.SGD, lr=1.0))


def test_options_have_the_functions_defaults():
    opt = adagrad([table_of()], lr=0.1)
    expected = {"lr": 0.1, "eps": 1e-10, "maximize": False, "weight_decay": 0.0}
    assert opt.defaults == expected
    assert adagrad([table_of()], lr=0.1, eps=0.5).defaults == {**expected, "eps": 0.5}


def test_an_option_without_a_default_must_be_given():
    message = r"^adagrad needs lr. Got eps. Pass it by name, or give every param group its own.$"
    with pytest.raises(InputError, match=message):
        adagrad([table_of()])
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        adagrad([{"params": [table_of()], "lr": 0.1}, {"params": [table_of()]}])

    @sparsestep.rule
    def needs_two(param, grad, *, first, second):
        return param - first * second * grad

    with pytest.raises(InputError, match=r"needs first, second. Got no options."):
        needs_two([table_of()])
    with pytest.raises(InputError, match=r"needs first. Got second."):
        needs_two([table_of()], second=1.0)


def test_every_param_group_may_bring_it():
    params = [table_of(), table_of()]
    opt = adagrad([{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}])
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        opt.add_param_group({"params": [table_of()]})
    assert len(opt.param_groups) == 2
    train(opt, params)
    assert same_bits(params[0].detach(), trained(adagrad, lr=0.1))
    assert same_bits(params[1].detach(), trained(adagrad, lr=0.2))
    again = adagrad([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.5}])
    again.load_state_dict(opt.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.2]


def test_param_groups_have_their_own_options():
    params = [table_of(), table_of(), table_of()]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "lr": 0.5, "eps": 0.25},
        {"params": params[2:], "weight_decay": 0.1, "maximize": True},
    ]
    opt = adagrad(groups, lr=0.1)
    train(opt, params)
    own: list[dict[str, Any]] = [{}, {"lr": 0.5, "eps": 0.25}]
    own.append({"weight_decay": 0.1, "maximize": True})
    for param, options in zip(params, own, strict=True):
        assert same_bits(param.detach(), trained(adagrad, **{"lr": 0.1, **options}))


def test_a_required_option_with_the_name_of_somebody_elses():
    @sparsestep.rule(state={"buffer": 0.0})
    def heavy_ball(param, grad, buffer, *, momentum):
        buffer = momentum * buffer + grad
        return param - 0.1 * buffer, buffer

    param = table_of()
    opt = heavy_ball([{"params": [param], "momentum": 0.5}])
    train(opt, [param])
    assert same_bits(param.detach(), trained(heavy_ball, momentum=0.5))


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"adagrad.* unexpected keyword argument 'momentum'"):
        adagrad([table_of()], lr=0.1, momentum=0.9)
    with pytest.raises(
        InputError, match=r"adagrad: param group 0: it may only set lr, eps, .* Got momentum"
    ):
        adagrad([{"params": [table_of()], "momentum": 0.9}], lr=0.1)


def test_an_option_may_be_anything():
    @sparsestep.rule
    def odd(param, grad, *, lr, kind="plain", scales=(1.0, 2.0), bend=None):
        step = lr * grad * scales[0] / scales[1]
        step = step if bend is None else bend(step)
        return param - step if kind == "plain" else param + step

    sgd = trained(sparsestep.SGD, lr=0.5)
    assert same_bits(trained(odd, lr=1.0), sgd)
    assert same_bits(trained(odd, lr=torch.tensor(1.0), bend=lambda step: step), sgd)
    assert same_bits(trained(odd, lr=1.0, kind="other", maximize=True), sgd)


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_maximizing_and_decay_come_for_free(options: dict[str, Any]):
    ours = trained(adagrad, lr=0.1, **options)
    assert close(ours, trained(sparsestep.Adagrad, lr=0.1, **options))
    assert not close(ours, trained(adagrad, lr=0.1))


def test_they_are_the_formulas_own_where_it_takes_them():
    @sparsestep.rule
    def own(param, grad, *, lr, weight_decay=0.0, maximize="no"):
        assert maximize in ("no", "yes")
        return param - lr * (grad + 2 * weight_decay * param)

    assert same_bits(trained(own, lr=0.1, maximize="yes"), trained(own, lr=0.1))
    theirs = trained(sparsestep.SGD, lr=0.1, weight_decay=0.5)
    assert close(trained(own, lr=0.1, weight_decay=0.25), theirs)
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        own([table_of()], lr=0.1, decoupled_weight_decay=True)


def test_negative_decay_is_refused():
    with pytest.raises(InputError, match="adagrad: Invalid weight_decay value: -1"):
        adagrad([table_of()], lr=0.1, weight_decay=-1)


def test_decoupled_decay_needs_a_rate():
    """It shrinks by ``lr * weight_decay``: without an lr it would silently do nothing."""

    @sparsestep.rule
    def without_lr(param, grad, *, rate=0.5):
        return param - rate * grad

    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        without_lr([table_of()], weight_decay=0.1, decoupled_weight_decay=True)
    theirs = trained(sparsestep.SGD, lr=0.5, weight_decay=0.1)
    assert close(trained(without_lr, weight_decay=0.1), theirs)
