"""Torch's own clipping, and that of trainers which call it, on compact gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import utils

import sparsestep
from sparsestep.grads.compact import CompactGrad
from tests.nn.cases import same

NORM_TYPES = (2.0, 1.0, 0.5, 3.0, math.inf, -math.inf, 0.0, -1.0)
FOREACH = (None, True, False)
IDS = torch.tensor([[1, 2, 1], [3, 2, 1]])
Ids = list[list[int]]
bags = st.lists(st.lists(st.integers(0, 9), min_size=2, max_size=2), max_size=6)


class Model(nn.Module):
    """Rows, bags, single elements, and a dense layer."""

    def __init__(self, kinds: Any, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows = kinds.Embedding(10, 3, dtype=dtype)
        self.means = kinds.EmbeddingBag(10, 3, padding_idx=2, dtype=dtype)
        self.largest = kinds.EmbeddingBag(10, 3, mode="max", dtype=dtype)
        self.out = nn.Linear(3, 1, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        found = self.rows(ids).sum(1) + self.means(ids) * 2 - self.largest(ids)
        return self.out(found).square().sum()


def after_backward(kinds: Any, ids: Tensor = IDS, dtype: torch.dtype = torch.float64) -> Model:
    model = Model(kinds, dtype)
    model(ids).backward()
    return model


def ours_and_dense(ids: Tensor = IDS) -> tuple[Model, Model]:
    return after_backward(sparsestep.nn, ids), after_backward(nn, ids)


def assert_same_gradients(ours: Model, theirs: Model) -> None:
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.to_dense(), other.grad, rtol=1e-9, atol=1e-12)


def assert_compact(model: Model) -> None:
    for table in (model.rows, model.means, model.largest):
        assert isinstance(table.weight.grad, CompactGrad)
        assert not table.weight.grad.is_materialized


def ids_of(listed: Ids) -> Tensor:
    return torch.tensor(listed, dtype=torch.int64).reshape(-1, 2)


@given(listed=bags, norm_type=st.sampled_from(NORM_TYPES), foreach=st.sampled_from(FOREACH))
def test_norm(listed: Ids, norm_type: float, foreach: bool | None):
    """Also of an empty batch."""
    ours, theirs = ours_and_dense(ids_of(listed))
    same_as_ours = after_backward(sparsestep.nn, ids_of(listed))
    total = utils.clip_grad_norm_(ours.parameters(), 0.1, norm_type, foreach=foreach)
    expected = utils.clip_grad_norm_(theirs.parameters(), 0.1, norm_type, foreach=foreach)
    torch.testing.assert_close(total, expected)
    assert_compact(ours)
    assert_same_gradients(ours, theirs)
    by_us = sparsestep.clip_grad_norm_(same_as_ours.parameters(), 0.1, norm_type, foreach=foreach)
    torch.testing.assert_close(total, by_us)


@given(
    listed=bags, clip_value=st.sampled_from((0.0, 0.3, math.inf)), foreach=st.sampled_from(FOREACH)
)
def test_value(listed: Ids, clip_value: float, foreach: bool | None):
    for function in (utils.clip_grad_value_, sparsestep.clip_grad_value_):
        ours, theirs = ours_and_dense(ids_of(listed))
        function(ours.parameters(), clip_value, foreach)
        utils.clip_grad_value_(theirs.parameters(), clip_value, foreach)
        assert_compact(ours)
        assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("foreach", FOREACH)
def test_in_two_steps(foreach: bool | None):
    """As torch's newer functions do it, and whoever logs the norm."""
    ours, theirs = ours_and_dense()
    totals = []
    for model in (ours, theirs):
        grads = [param.grad for param in model.parameters()]
        totals.append(utils.get_total_norm(grads, foreach=foreach))
        utils.clip_grads_with_norm_(model.parameters(), 0.1, totals[-1], foreach=foreach)
    torch.testing.assert_close(*totals)
    assert_compact(ours)
    assert_same_gradients(ours, theirs)


@pytest.mark.parametrize("materialized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_dtypes_and_gradients_that_were_written_out(dtype: torch.dtype, materialized: bool):
    model, other = (after_backward(kinds, dtype=dtype) for kinds in (sparsestep.nn, nn))
    grad, wanted = model.rows.weight.grad, other.rows.weight.grad
    if materialized:
        grad._values()
    near = {"rtol": 2e-2, "atol": 2e-2}
    norm = torch.linalg.vector_norm(grad)
    assert norm.dtype == dtype
    torch.testing.assert_close(norm, torch.linalg.vector_norm(wanted), **near)
    assert torch.linalg.vector_norm(grad, dtype=torch.float64).dtype == torch.float64
    assert torch._foreach_norm([grad], 2, torch.float64)[0].dtype == torch.float64
    assert grad.clamp_(-0.5, 0.25) is grad
    torch.testing.assert_close(grad.to_dense(), wanted.clamp(-0.5, 0.25), **near)


LISTS: dict[str, Callable[[Any], Any]] = {
    "mul by a number": lambda grads: torch._foreach_mul_(grads, 3.0),
    "mul by a tensor": lambda grads: torch._foreach_mul_(grads, torch.tensor(3.0)),
    "mul by numbers": lambda grads: torch._foreach_mul_(grads, [3.0, 2.0]),
    "div": lambda grads: torch._foreach_div_(grads, 3.0),
    "neg": lambda grads: torch._foreach_neg_(grads),
    "zero": lambda grads: torch._foreach_zero_(grads),
    "add": lambda grads: torch._foreach_add_(grads, [grad.clone() for grad in grads]),
    "copy": lambda grads: torch._foreach_copy_(grads, [grad * 2 for grad in grads]),
    "min": lambda grads: torch._foreach_clamp_min_(grads, -0.25),
    "max": lambda grads: torch._foreach_clamp_max_(grads, 0.25),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_gradients(name: str):
    results = []
    for kinds in (sparsestep.nn, nn):
        model = after_backward(kinds)
        grads = [model.means.weight.grad, model.out.weight.grad]
        LISTS[name](grads)
        if kinds is sparsestep.nn:
            assert not grads[0].is_materialized
        results.append([grad.to_dense() for grad in grads])
    for mine, other in zip(*results, strict=True):
        torch.testing.assert_close(mine, other)


def test_lists_that_are_made_anew():
    model = after_backward(sparsestep.nn)
    grads = [model.means.weight.grad, model.out.weight.grad]
    dense = [grad.clone().to_dense() for grad in grads]
    for made in (torch._foreach_mul(grads, 2.0), torch._foreach_clamp_max(grads, 0.1)):
        assert isinstance(made[0], CompactGrad)
        assert type(made[1]) is Tensor
    assert not grads[0].is_materialized
    assert all(map(same, [grad.to_dense() for grad in grads], dense))


def test_a_hook_that_clamps():
    results = []
    for kinds in (sparsestep.nn, nn):
        model = Model(kinds)
        for param in model.parameters():
            param.register_hook(lambda grad: grad.clamp(-0.2, 0.1))
        model(IDS).backward()
        results.append(model)
    assert_compact(results[0])
    assert_same_gradients(*results)


def test_bounds_that_would_move_what_is_not_held():
    grad = after_backward(sparsestep.nn).rows.weight.grad
    for bounds in ((0.1, None), (None, -0.1), (math.nan, 1.0)):
        with pytest.raises(sparsestep.InputError, match="0 must be within the bounds"):
            grad.clamp_(*bounds)
    assert not grad.is_materialized


def test_no_second_derivative():
    table = sparsestep.nn.Embedding(5, 2)
    loss = table(torch.tensor([1, 2])).square().sum()
    (grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    for function in (torch.linalg.vector_norm, lambda g: torch._foreach_norm([g])):
        with pytest.raises(sparsestep.InputError, match="cannot be differentiated again"):
            function(grad)
    with torch.no_grad():
        assert torch.linalg.vector_norm(grad) > 0


def test_unscaling_by_torchs_kernel():
    """GradScaler asks for the values; others hand over the gradient itself."""
    model, other = ours_and_dense()
    for each in (model, other):
        found = torch.zeros(1)
        grads = [param.grad for param in each.parameters()]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, found, torch.tensor(0.5))
        assert not found
    assert_same_gradients(model, other)
    model.rows.weight.grad.mul_(math.inf)
    torch._amp_foreach_non_finite_check_and_unscale_(
        [model.rows.weight.grad], found, torch.tensor(0.5)
    )
    assert found


@pytest.mark.parametrize("norm_type", NORM_TYPES)
@pytest.mark.parametrize("core", [True, False], ids=["core", "torch"])
def test_gradients_without_an_entry(norm_type: float, core: bool, monkeypatch: Any):
    if not core:
        monkeypatch.setattr(sparsestep.engines.native, "ext", None)
    for clip in (utils.clip_grad_norm_, sparsestep.clip_grad_norm_):
        table = sparsestep.nn.Embedding(5, 2, padding_idx=1)
        table(torch.tensor([1])).sum().backward()
        assert float(clip(table.parameters(), 1.0, norm_type)) == 0.0


def test_another_default_device():
    model, other = ours_and_dense()
    with torch.device("meta"):
        total = sparsestep.clip_grad_norm_(model.parameters(), 0.1)
        sparsestep.clip_grad_value_(model.parameters(), 0.01)
    torch.testing.assert_close(total, utils.clip_grad_norm_(other.parameters(), 0.1))
    utils.clip_grad_value_(other.parameters(), 0.01)
    assert_same_gradients(model, other)
