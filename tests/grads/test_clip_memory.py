"""Clipping: values are written in place where nobody else has them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import utils

from sparsestep.grads import clip
from sparsestep.grads.clip import clip_grad_norm_, clip_grad_value_
from tests.grads.clipping import assert_same_gradients, coo, form, with_grad

KEPT = torch.ones(4, 3)


@pytest.mark.parametrize("function", [clip_grad_norm_, clip_grad_value_])
def test_values_are_written_in_place_where_nobody_else_has_them(function: Callable):
    table = torch.nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=False, sparse=True)
    table(torch.tensor([3, 1])).pow(2).sum().backward()
    coalesced = with_grad(table.weight.grad.coalesce().clone())
    for param in (table.weight, coalesced):
        where = param.grad._values().data_ptr()
        before = param.grad._values().clone()
        function(param, 0.1)
        assert param.grad._values().data_ptr() == where
        assert not torch.equal(param.grad._values(), before)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (lambda: torch.ones(1, 1).expand(4, 3), True),
        (lambda: torch.ones(4, 6)[:, ::2], True),
        (lambda: KEPT, True),
        (lambda: torch.ones(4, 3), False),
    ],
    ids=["expanded", "sliced", "the caller's", "torch does not tell whose"],
)
def test_other_values_are_replaced(values: Callable[[], Tensor], told: bool, monkeypatch):
    monkeypatch.setattr(clip, "_uses_if_unshared", clip._uses_if_unshared.__wrapped__)
    if not told:
        monkeypatch.delattr(torch._C, "_storage_Use_Count")
    for function, bound in ((clip_grad_norm_, math.sqrt(3)), (clip_grad_value_, 0.5)):
        param = with_grad(coo([[3, 0, 2, 1]], values(), (4, 3)))
        before = form(param)
        function(param, bound)
        torch.testing.assert_close(param.grad._values(), torch.full((4, 3), 0.5))
        assert form(param) == before
        assert torch.equal(values(), torch.ones(4, 3))


@pytest.mark.parametrize("together", [True, False])
def test_gradients_that_share_memory_are_scaled_once(together: bool):
    """Autograd gives the tables of a sum of rows the same values, each through its own gradient."""
    tables = [torch.nn.Embedding(5, 2, sparse=True) for _ in range(2)]
    params = [table.weight for table in tables]
    ids = torch.tensor([1, 2, 1])
    (tables[0](ids) + tables[1](ids + 1)).pow(2).sum().mul(10).backward()
    assert len({param.grad._values().data_ptr() for param in params}) == 1
    theirs = [with_grad(param.grad.to_dense()) for param in params]
    for part, max_norm in [(slice(2), 0.1)] if together else [(slice(1), 0.1), (slice(1, 2), 0.7)]:
        clip_grad_norm_(params[part], max_norm)
        utils.clip_grad_norm_(theirs[part], max_norm)
    assert_same_gradients(params, theirs, 1e-6)


@pytest.mark.parametrize("own", [True, False])
def test_a_param_given_twice_is_scaled_twice_like_torch(own: bool):
    values = torch.full((2, 3), 2.0)
    ours = with_grad(coo([[1, 2]], values.clone() if own else values, (4, 3)))
    theirs = with_grad(ours.grad.to_dense())
    ours_total = clip_grad_norm_([ours, ours], 1.0)
    torch.testing.assert_close(ours_total, utils.clip_grad_norm_([theirs, theirs], 1.0))
    assert_same_gradients([ours], [theirs], 1e-6)


def test_gradients_that_carry_a_graph():
    table = torch.nn.Embedding.from_pretrained(torch.ones(5, 2), freeze=False, sparse=True)
    loss = table(torch.tensor([1, 1])).pow(3).sum()
    (table.weight.grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    assert clip_grad_norm_(table.parameters(), 0.5).requires_grad is False
    assert float(table.weight.grad.detach().to_dense().norm()) == pytest.approx(0.5, rel=1e-4)
