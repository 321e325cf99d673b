"""A user's own formula may write into its arguments, return them and keep them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from tests.generate.layouts import Entries
from tests.optim.own_rules import SHAPE, adagrad, close, randn, table_of
from tests.properties.marks import QUIET
from tests.subject import by_hand
from tests.table import Variant, same_bits, sm3_by_rows, snapshot, unchanged

pytestmark = QUIET


@sparsestep.rule(state={"sum": 0.0})
def adagrad_in_place(param, grad, sum, *, lr, eps=1e-10):
    sum.addcmul_(grad, grad)
    grad.mul_(lr)
    return param.sub_(grad.div_(sum.sqrt().add_(eps))), sum


@sparsestep.rule(row_state={"accumulator": 0.0})
def sm3_in_place(param, grad, accumulator, *, lr=0.1, eps=1e-10):
    bound = accumulator + grad.square()
    param -= lr * grad / (bound.sqrt() + eps)
    accumulator.copy_(bound.amax(dim=1, keepdim=True))
    grad.zero_()
    return param, accumulator


@pytest.mark.parametrize("rules", [(adagrad, adagrad_in_place), (sm3_by_rows, sm3_in_place)])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_formula_may_work_in_place(rules: tuple[Any, Any], decay: float):
    """Its arguments are copies: numbers and gradients are as if it did not.

    Decay moves the whole row that a rule by rows sees, of which only what is held counts.
    """
    several = [Entries.random(SHAPE, (2, 2), 0.4, seed) for seed in range(4)]
    stored = [entries.stored(torch.float32, by_row=True) for entries in several]
    for layout in stored[0]:
        plain, in_place = (
            by_hand(Variant(rule, {"lr": 0.1}), "auto", randn(*SHAPE), weight_decay=decay)
            for rule in rules
        )
        for entries, each in zip(several, stored, strict=True):
            grad = entries.drawn(each[layout][0])
            plain.take(grad.grad)
            in_place.take(grad.grad)
            assert grad.is_as_given(), layout
        assert all(map(close, plain.tensors, in_place.tensors)), layout


@pytest.mark.parametrize("shape", [(3, 2), (4,), ()], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_what_was_written_into_arguments_is_lost_where_the_formula_then_fails(
    shape: tuple[int, ...], sparse: bool
):
    """A COO gradient with no sparse dims holds the whole parameter, like a dense one."""

    @sparsestep.rule(state={"kept": 1.0})
    def writes_and_raises(param, grad, kept, *, lr, fails=True):
        for value in (param, grad, kept):
            value.fill_(math.nan)
        if fails:
            raise ArithmeticError("too late")
        return param, kept, grad

    param = torch.nn.Parameter(torch.ones(shape))
    opt = writes_and_raises([param], lr=0.1)
    opt.materialize_state()
    before = snapshot(opt)
    dense = torch.full(shape, 2.0)
    param.grad = dense
    if sparse:
        no_dims = torch.zeros(0, 1, dtype=torch.int64)
        param.grad = torch.sparse_coo_tensor(no_dims, dense[None], shape)
    for fails, kind in ((True, ArithmeticError), (False, InputError)):
        opt.param_groups[0]["fails"] = fails
        with pytest.raises(kind):
            opt.step()
        assert unchanged(opt, before)
        assert param.grad.to_dense().eq(2).all()


def test_a_formula_may_return_and_keep_its_arguments():
    kept_by_user = []

    @sparsestep.rule(state={"last_grad": 0.0, "last_param": 0.0})
    def keeps(param, grad, last_grad, last_param, *, lr):
        kept_by_user.append(param)
        return param - lr * grad, grad, param

    param = table_of()
    start = param.detach().clone()
    opt = keeps([param], lr=0.1, engine="reference")
    param.grad = randn(*SHAPE, seed=1)
    opt.step()
    assert same_bits(opt.state[param]["last_grad"], param.grad)
    assert same_bits(opt.state[param]["last_param"], start)
    assert same_bits(kept_by_user[0].view(SHAPE), start)
    param.grad.zero_()
    assert opt.state[param]["last_grad"].ne(0).all()
