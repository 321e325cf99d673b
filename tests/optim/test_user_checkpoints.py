"""Checkpoints and copies of an optimizer with a user's own formula."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsestep
from tests.optim.own_rules import adagrad, close, table_of, train, trained
from tests.table import same_bits, sign_sgd, sm3_by_rows, state_tensors


def test_a_checkpoint():
    straight, resumed = table_of(), table_of()
    opt = adagrad([straight], lr=0.1)
    train(opt, [straight], range(6))
    opt = adagrad([resumed], lr=0.1)
    train(opt, [resumed], range(3))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = adagrad([resumed], lr=0.5, eps=0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.param_groups[0]["lr"] == 0.1
    assert again.param_groups[0]["eps"] == 1e-10
    assert int(again.state[resumed]["step"]) == 3
    train(again, [resumed], range(3, 6))
    assert same_bits(straight.detach(), resumed.detach())


def test_a_checkpoint_goes_to_the_librarys_rule_with_the_same_state():
    ours, theirs = table_of(), table_of()
    opt = adagrad([ours], lr=0.1)
    train(opt, [ours])
    theirs.data.copy_(ours.data)
    other = sparsestep.Adagrad([theirs], lr=0.1)
    other.load_state_dict(opt.state_dict())
    train(opt, [ours], range(5, 9))
    train(other, [theirs], range(5, 9))
    assert close(ours.detach(), theirs.detach())


def test_an_older_checkpoint_without_a_new_option():
    param = table_of()
    old = adagrad([param], lr=0.1).state_dict()
    del old["param_groups"][0]["eps"]
    opt = adagrad([param], lr=0.1, eps=0.5)
    opt.load_state_dict(old)
    assert opt.param_groups[0]["eps"] == 0.5


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda whole: pickle.loads(pickle.dumps(whole))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("rule", [adagrad, sign_sgd, sm3_by_rows], ids=lambda r: r.__name__)
def test_copies_go_on_with_the_same_bits(rule: Any, copied: Callable[[Any], Any]):
    param = table_of()
    opt = rule([param], lr=0.1)
    train(opt, [param], range(3))
    other, again = copied((param, opt))
    assert type(again) is rule
    train(opt, [param], range(3, 6))
    train(again, [other], range(3, 6))
    assert same_bits(param.detach(), other.detach())
    assert all(map(same_bits, state_tensors(opt), state_tensors(again)))


def test_a_local_rule_can_be_copied_but_not_pickled():
    @sparsestep.rule
    def local(param, grad, *, lr):
        return param - lr * grad

    param = table_of()
    opt = local([param], lr=0.1)
    other, again = copy.deepcopy((param, opt))
    train(again, [other])
    assert same_bits(other.detach(), trained(local, lr=0.1))
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(opt)
