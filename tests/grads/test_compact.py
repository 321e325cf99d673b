"""What a compact gradient stands for: its sums, and its products with numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.dedup import iter_sums
from sparsestep.grads.indexed import IndexedGrad
from tests.grads.compact_cases import LIKE, SHAPE, dense, parts, several
from tests.nn.cases import DTYPES, plain, same


@given(some=several)
def test_what_it_stands_for(some: list[IndexedGrad]):
    grad = CompactGrad.of(some, SHAPE, LIKE)
    assert torch.allclose(plain(grad).to_dense(), dense(some))
    joined = grad.indexed()
    assert joined.num_slots * joined.slot_size == 24
    assert torch.allclose(dense([joined]), dense(some))
    rows = sum(part.values.numel() for part in some)
    assert joined.values.numel() == rows  # nothing was written out
    assert not grad.is_materialized


@given(first=several, second=several)
def test_sums(first: list[IndexedGrad], second: list[IndexedGrad]):
    wanted = dense(first) + dense(second)
    one, two = (CompactGrad.of(some, SHAPE, LIKE) for some in (first, second))
    ordinary = plain(two)
    for total in (one + two, torch.add(one, two), one + ordinary, ordinary + one):
        assert torch.allclose(plain(total).to_dense(), wanted)
    total = one + two.to_dense()
    assert type(total) is Tensor
    assert torch.allclose(total, wanted)
    assert torch.allclose(two.to_dense() + one, wanted)
    changed = one.clone()
    changed += two
    assert torch.allclose(plain(changed).to_dense(), wanted)
    assert torch.allclose(one.to_dense(), dense(first))
    changed.add_(torch.ones(SHAPE, dtype=torch.float64))
    assert (changed.is_sparse, changed.layout) == (False, torch.strided)
    assert torch.allclose(changed.to_dense(), wanted + 1)


SCALED: dict[str, tuple[Callable[[Any], Any], float]] = {
    "mul": (lambda g: g * 3, 3),
    "rmul": (lambda g: 3 * g, 3),
    "a tensor": (lambda g: g * torch.tensor(3.0), 3),
    "a tensor first": (lambda g: torch.tensor(3.0) * g, 3),
    "torch.mul": (lambda g: torch.mul(g, 3), 3),
    "mul_": (lambda g: g.mul_(3), 3),
    "imul": (lambda g: g.__imul__(3), 3),
    "mul_ by a tensor": (lambda g: g.mul_(torch.tensor(3.0)), 3),
    "div": (lambda g: g / 4, 0.25),
    "div_": (lambda g: g.div_(4), 0.25),
    "torch.div": (lambda g: torch.div(g, torch.tensor(4.0)), 0.25),
    "neg": (lambda g: -g, -1),
    "neg_": (lambda g: g.neg_(), -1),
    "detach": (lambda g: g.detach(), 1),
    "detach_": (lambda g: g.detach_(), 1),
    "clone": (lambda g: g.clone(), 1),
    "requires_grad_": (lambda g: g.requires_grad_(False), 1),
    "data": (lambda g: g.data, 1),
}


@pytest.mark.parametrize("name", SCALED)
@given(some=several, dtype=st.sampled_from(DTYPES))
def test_numbers_leave_it_compact(name: str, some: list[IndexedGrad], dtype: torch.dtype):
    function, factor = SCALED[name]
    grad = CompactGrad.of([_as(part, dtype) for part in some], SHAPE, LIKE.to(dtype))
    wanted = function(plain(grad)) if name == "data" else None
    values = [part.values.clone() for part in grad.parts]
    given_values = [part.values for part in grad.parts]
    result = function(grad)
    if name == "data":
        assert same(result.to_dense(), wanted.to_dense())
        return
    in_place = name.endswith("_") or "_ " in name or name == "imul"
    assert (result is grad) == in_place
    found = plain(result)
    assert found.dtype == dtype
    rows = [part._replace(values=part.values * factor) for part in some]
    near = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-5
    assert torch.allclose(found.to_dense().double(), dense(rows), rtol=near, atol=near)
    for before, now in zip(values, given_values, strict=True):
        assert same(before, now)  # autograd's memory is not written to


def _as(part: IndexedGrad, dtype: torch.dtype) -> IndexedGrad:
    scale = None if part.scale is None else part.scale.to(dtype)
    return part._replace(values=part.values.to(dtype), scale=scale)


@given(part=parts(), elements=st.integers(1, 60))
def test_sums_in_chunks(part: IndexedGrad, elements: int):
    found = torch.zeros(part.num_slots, part.slot_size, dtype=torch.float64)
    last = -1
    for slots, total in iter_sums(part, elements):
        assert total.numel() <= max(elements, part.slot_size)
        assert int(slots[0]) > last
        assert slots.tolist() == sorted(set(slots.tolist()))
        last = int(slots[-1])
        found[slots] = total
    assert torch.allclose(found.view(SHAPE), dense([part]))


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf"), -float("inf"), 0.0])
@pytest.mark.parametrize("whole", [False, True])
def test_clipping_in_chunks(monkeypatch: Any, norm_type: float, whole: bool):
    monkeypatch.setattr(iter_sums, "__defaults__", (8,))
    torch.manual_seed(0)
    positions = (
        torch.cat([torch.arange(6), torch.tensor([1, 3])]) if whole else torch.tensor([1, 3, 1])
    )
    values = torch.randn(len(positions), 4, dtype=torch.float64)
    weights = [nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for _ in range(2)]
    grad = CompactGrad.of([IndexedGrad(positions, values, 6, 4)], SHAPE, values)
    weights[0].grad, weights[1].grad = grad, plain(grad)
    totals = [sparsestep.clip_grad_norm_([weight], 0.5, norm_type) for weight in weights]
    assert torch.allclose(*totals)
    assert not grad.is_materialized
    assert torch.allclose(weights[0].grad.to_dense(), weights[1].grad.to_dense())
    for weight in weights:
        sparsestep.clip_grad_value_([weight], 0.1)
    assert torch.allclose(weights[0].grad.to_dense(), weights[1].grad.to_dense())
    assert weights[0].grad.is_coalesced()


def test_clipping_of_nothing():
    weight = nn.Parameter(torch.zeros(SHAPE))
    weight.grad = CompactGrad.of([], SHAPE, weight.detach())
    assert float(sparsestep.clip_grad_norm_([weight], 1.0)) == 0.0
    sparsestep.clip_grad_value_([weight], 1.0)
    assert weight.grad._nnz() == 0
