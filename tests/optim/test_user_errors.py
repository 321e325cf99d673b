"""A user's own formula that is wrong is refused; one that works in place does no harm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.generate.layouts import Entries
from tests.optim.own_rules import SHAPE, adagrad, close, randn
from tests.properties.marks import QUIET
from tests.subject import by_hand, refused
from tests.table import Variant, sm3_by_rows

pytestmark = QUIET

# Wrong results

SPOILED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "one value too few": (lambda param, kept: param, "2 values"),
    "one too many": (lambda param, kept: (param, kept, kept), "2 values"),
    "nothing": (lambda param, kept: None, "NoneType"),
    "a number": (lambda param, kept: 1.0, "float"),
    "by name": (lambda param, kept: {"param": param, "kept": kept}, "dict"),
    "not a tensor": (lambda param, kept: (param, 0.0), "kept in its shape"),
    "a row too few": (lambda param, kept: (param[1:], kept), "param in its shape"),
    "a shape that could be broadcast": (lambda param, kept: (param, kept.sum()), "kept in its"),
    "transposed": (lambda param, kept: (param, kept.t()), "kept in its shape"),
    "complex": (lambda param, kept: (param, kept * 1j), "real strided"),
    "sparse": (lambda param, kept: (param.to_sparse_coo(), kept), "real strided"),
    "elsewhere": (lambda param, kept: (param, kept.to("meta")), "on meta"),
}


def spoiled(result: Callable[[Tensor, Tensor], Any], **options: Any) -> Any:
    """A rule that goes wrong where rows have five elements."""

    @sparsestep.rule(state={"kept": 0.0}, **options)
    def wrong(param, grad, kept, *, lr, spoil=False):
        new, kept = param - lr * grad, kept + 1
        return result(new, kept) if spoil and param.shape[-1] == 5 else (new, kept)

    return wrong


def several() -> list[torch.nn.Parameter]:
    """With gradients: a dense one for the second, sparse ones for the others."""
    params = [torch.nn.Parameter(randn(*shape)) for shape in [(6, 4), (3,), (6, 3), (6, 5)]]
    for param in params:
        values = randn(2, *param.shape[1:], seed=1)
        coo = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), values, param.shape)
        param.grad = coo.to_dense() if param.dim() == 1 else coo
    return params


@pytest.mark.parametrize("kind", SPOILED)
def test_a_wrong_result_for_the_last_param_changes_nothing(kind: str):
    result, words = SPOILED[kind]
    params = several()
    opt = spoiled(result)([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    for steps in range(2):  # in the first step, and later
        opt.param_groups[1]["spoil"] = True
        with refused(opt, match=f"^wrong: param 1 of group 1: rule 'wrong' must return .*{words}"):
            opt.step()
        opt.param_groups[1]["spoil"] = False
        opt.step()
        assert {int(kept["step"]) for kept in opt.state.values()} == {steps + 1}


def test_a_compiled_rule_is_checked_too():
    torch.compiler.reset()
    params = several()
    made = spoiled(SPOILED["transposed"][0], compile={"backend": "eager"})
    opt = made(params, lr=0.1, spoil=True)
    with refused(opt, match="kept in its shape"):
        opt.step()
    torch.compiler.reset()


@pytest.mark.parametrize("kind", [ZeroDivisionError, InputError, KeyboardInterrupt])
def test_an_exception_inside_the_rule_changes_nothing(kind: type[BaseException]):
    def raises(param: Tensor, kept: Tensor) -> Any:
        raise kind("not today")

    opt = spoiled(raises)(several(), lr=0.1)
    for _ in range(2):
        opt.param_groups[0]["spoil"] = True
        with refused(opt, error=kind, match="not today"):
            opt.step()
        opt.param_groups[0]["spoil"] = False
        opt.step()


# Functions that cannot be rules


# tests/messages.txt has more.


# Formulas that work in place


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
def test_writes_into_arguments_are_lost_where_the_formula_then_fails(
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
    param.grad = dense = torch.full(shape, 2.0)
    if sparse:
        no_dims = torch.zeros(0, 1, dtype=torch.int64)
        param.grad = torch.sparse_coo_tensor(no_dims, dense[None], shape)
    for fails, kind in ((True, ArithmeticError), (False, InputError)):
        opt.param_groups[0]["fails"] = fails
        with refused(opt, error=kind):
            opt.step()
        assert param.grad.to_dense().eq(2).all()
