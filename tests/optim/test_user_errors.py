"""A user's own formula that is wrong: refused, or nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.optim.own_rules import trained
from tests.optim.spoiled_rules import SPOILED, give_gradients, several, spoiled_for_the_last
from tests.table import same_bits, snapshot, unchanged

# What a wrong rule does: nothing


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("first_step", [True, False], ids=["first step", "later step"])
def test_a_wrong_result_for_the_last_param_changes_nothing(spoiled: str, first_step: bool):
    result, message = SPOILED[spoiled]
    params = several()
    opt = spoiled_for_the_last(result)([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    give_gradients(params)
    if not first_step:
        opt.step()
    opt.param_groups[1]["spoil"] = True
    before, versions = snapshot(opt), [param._version for param in params]
    with pytest.raises(InputError, match=message) as raised:
        opt.step()
    assert str(raised.value).startswith("wrong: param 1 of group 1: rule 'wrong' must return ")
    assert unchanged(opt, before)
    assert [param._version for param in params] == versions
    opt.param_groups[1]["spoil"] = False
    opt.step()
    assert {int(kept["step"]) for kept in opt.state.values()} == {1 if first_step else 2}


@pytest.mark.parametrize("kind", [ZeroDivisionError, InputError, KeyboardInterrupt])
@pytest.mark.parametrize("first_step", [True, False], ids=["first step", "later step"])
def test_an_exception_inside_the_rule_changes_nothing(kind: type[BaseException], first_step: bool):
    def raises(param: Tensor, kept: Tensor) -> Any:
        raise kind("not today")

    params = several()
    opt = spoiled_for_the_last(raises)(params, lr=0.1)
    give_gradients(params)
    if not first_step:
        opt.step()
    opt.param_groups[0]["spoil"] = True
    before = snapshot(opt)
    with pytest.raises(kind, match="not today"):
        opt.step()
    assert unchanged(opt, before)


# What cannot be a rule


def takes_no_grad(param, *, lr):
    return param


def takes_unnamed_state(param, grad, sum, *, lr):
    return param, sum


def takes_state_in_another_order(param, grad, second, first, *, lr):
    return param, first, second


def takes_options_by_position(param, grad, sum, lr, eps=1e-10):
    return param, sum


def takes_any_number(param, grad, *state, lr):
    return param


def takes_any_option(param, grad, **options):
    return param


def takes_a_mask(param, grad, *, lr, mask=None):
    return param


def takes_bias_correction(param, grad, *, lr, bias_correction=True, engine="auto"):
    return param


def takes_step_as_state(param, grad, step):
    return param, step


TAKES = r"must take \(param, grad, "
BAD_RULES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no gradient": (
        takes_no_grad,
        {},
        r"rule 'takes_no_grad' must take \(param, grad, \*, options",
    ),
    "state that is not named": (takes_unnamed_state, {}, r"Got \(param, grad, sum, \*, lr\)"),
    "state that is not taken": (takes_any_option, {"state": {"sum": 0.0}}, TAKES + "sum, "),
    "state under another name": (takes_unnamed_state, {"state": {"square": 0.0}}, TAKES + "square"),
    "another order": (
        takes_state_in_another_order,
        {"state": {"first": 0.0}, "row_state": {"second": 0.0}},
        TAKES + "first, second",
    ),
    "options by position": (
        takes_options_by_position,
        {"state": {"sum": 0.0}},
        r"Got \(param, grad, sum, lr, eps=1e-10\). .* its options come after a \*",
    ),
    "any number of states": (takes_any_number, {}, r"Got \(param, grad, \*state, lr\)"),
    "any option": (takes_any_option, {}, r"Got \(param, grad, \*\*options\)"),
    "an option of every optimizer": (
        takes_a_mask,
        {},
        "redefine what every optimizer has. Got mask. Rename it",
    ),
    "several such options": (takes_bias_correction, {}, "Got bias_correction, engine. Rename it"),
    "step as state": (takes_step_as_state, {"state": {"step": 0.0}}, "name of the step count"),
    "names without values": (takes_unnamed_state, {"state": ["sum"]}, "must map names to initial"),
    "a tensor as first value": (
        takes_unnamed_state,
        {"row_state": {"sum": torch.zeros(1)}},
        "row_state must map names to initial values",
    ),
    "no function": ({"sum": 0.0}, {}, "rule must get a function. Got {'sum': 0.0}"),
    "no signature": (torch.add, {}, "rule 'add' must have a signature"),
    "compile that is no option": (
        takes_unnamed_state,
        {"state": {"sum": 0.0}, "compile": "inductor"},
        "compile must be True, False or a mapping of torch.compile's options. Got 'inductor'",
    ),
}


@pytest.mark.parametrize("bad", BAD_RULES)
def test_what_cannot_be_a_rule_is_refused_when_it_is_decorated(bad: str):
    function, options, message = BAD_RULES[bad]
    with pytest.raises(InputError, match=message):
        sparsestep.rule(function, **options)
    with pytest.raises(InputError, match=message):
        sparsestep.rule(**options)(function)


def test_a_group_that_is_no_dict_is_refused_as_torch_does():
    @sparsestep.rule
    def plain(param, grad, *, lr):
        return (param - lr * grad,)

    optimizer = plain([torch.zeros(2, requires_grad=True)], lr=0.5)
    with pytest.raises(TypeError, match="param_group must be a dict"):
        optimizer.add_param_group("params")


def test_param_and_grad_may_have_any_name():
    @sparsestep.rule(state={"v": 0.0})
    def terse(w, g, v, /, *, lr):
        return w - lr * g, v

    assert same_bits(trained(terse, lr=0.5), trained(sparsestep.SGD, lr=0.5))
