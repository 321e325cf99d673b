"""Sums and norms of duplicates; values that several entries share."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsestep import IndexedGrad, InputError, _native
from sparsestep.grads.dedup import _segment_sum, iter_sums, slot_norms, sum_duplicates
from tests.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.generate.cases import each_case
from tests.subject import by_hand
from tests.table import (
    FEW,
    INSTRUCTION_SETS,
    Variant,
    dtypes,
    on_each_engine,
    running_on,
    same_bits,
)


def in_order(positions: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """One addition after the other."""
    found: dict[int, Tensor] = {}
    for position, row in zip(positions.tolist(), values.float(), strict=True):
        found[position] = found[position] + row if position in found else row
    slots = sorted(found)
    return torch.tensor(slots), torch.stack([found[slot] for slot in slots])


entries = st.lists(st.integers(0, 8), min_size=1, max_size=40)


@given(slots=entries, seed=st.integers(0, 99), elements=st.sampled_from([1, 9, 1 << 20]))
def test_sums_are_in_order_of_appearance(slots: list[int], seed: int, elements: int):
    draw = torch.Generator().manual_seed(seed)
    values = torch.randn(len(slots), 3, generator=draw) * 10 ** torch.randn(
        len(slots), 1, generator=draw
    )
    values[values.abs() < 0.1] = -0.0  # a first value keeps its sign
    positions = torch.tensor(slots)
    wanted = in_order(positions, values)
    chunks = list(iter_sums(IndexedGrad(positions, values, 9, 3), elements))
    assert torch.equal(torch.cat([some for some, _ in chunks]), wanted[0])
    assert same_bits(torch.cat([total for _, total in chunks]), wanted[1])
    with elsewhere():
        there = IndexedGrad(positions.to(DEVICE), values.to(DEVICE), 9, 3)
        found, total = sum_duplicates(there)
    assert isinstance(found, Elsewhere)
    assert isinstance(total, Elsewhere)
    assert torch.equal(found.inner, wanted[0])
    assert same_bits(total.inner, wanted[1])


def test_where_a_device_has_no_such_sums(monkeypatch: pytest.MonkeyPatch):
    def missing(*args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError

    rows = torch.randn(12, 5, generator=torch.Generator().manual_seed(0)) * 1e3
    begins = torch.tensor([0, 1, 6, 8, 12])
    wanted = _segment_sum(rows, begins)
    monkeypatch.setattr(torch, "segment_reduce", missing)
    assert same_bits(_segment_sum(rows, begins), wanted)


@st.composite
def bags(draw: st.DrawFn) -> IndexedGrad:
    """A gradient of 7 rows, or of thirds of them, whose products have to be rounded."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    entries, rows = draw(st.integers(0, 30)), draw(st.integers(1, 6))
    block = draw(st.sampled_from([1, 5, 16, 40]))
    slots = 7 * draw(st.sampled_from([1, 3]))
    return IndexedGrad(
        torch.randint(slots, (entries,), generator=generator),
        torch.randn(rows, block, generator=generator),
        slots,
        block,
        torch.randint(rows, (entries,), generator=generator) if draw(st.booleans()) else None,
        torch.randn(entries, generator=generator) if draw(st.booleans()) else None,
    )


def of_dtype(grad: IndexedGrad, dtype: torch.dtype) -> IndexedGrad:
    """The same in another precision; with a row for each entry where there is no source."""
    if grad.value_index is None:
        rows = torch.arange(grad.indices.numel()) % len(grad.values)
        grad = grad._replace(values=grad.values[rows])
    scale = None if grad.scale is None else grad.scale.to(dtype)
    return grad._replace(values=grad.values.to(dtype), scale=scale)


@on_each_engine(FEW)
@each_case(grad=bags(), dtype=dtypes)
def test_what_is_written_out_gives_the_same_bits(
    variant: Variant, engine: str, grad: IndexedGrad, dtype: torch.dtype
):
    grad = of_dtype(grad, dtype)
    start = torch.linspace(-1, 1, grad.num_slots * grad.slot_size).reshape(7, -1).to(dtype)
    with running_on(engine) as name:
        ours, plain = (by_hand(variant, name, start) for _ in range(2))
        for _ in range(2):
            ours.take(grad)
            plain.take(grad.materialize_values())
        assert ours.same_as(plain)


# The norms of the slots, which clipping by norm needs

needs_core = pytest.mark.skipif(_native.ext is None, reason="installed without the native core")


@needs_core
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
@given(grad=bags(), dtype=dtypes)
def test_norms_are_those_of_the_sums(order: float, grad: IndexedGrad, dtype: torch.dtype):
    grad = of_dtype(grad, dtype)
    slots, total = sum_duplicates(grad)
    wanted = torch.linalg.vector_norm(total.double(), order, dim=1)
    found = []
    for engine in INSTRUCTION_SETS:
        with running_on(engine):
            found.append(slot_norms((grad,), order))
    assert all(same_bits(found[0], other) for other in found[1:])
    first = [grad.indices.tolist().index(slot) for slot in slots.tolist()]
    torch.testing.assert_close(found[0][first], wanted, rtol=1e-12, atol=0)
    found[0][first] = 0
    assert not found[0].any()


@needs_core
def test_the_bits_of_norms_do_not_depend_on_how_many_threads_share_them():
    generator = torch.Generator().manual_seed(0)
    positions = torch.randint(3_000, (40_000,), generator=generator)
    positions[::3] = 7  # a chain that would be shared out if columns could be
    grad = IndexedGrad(positions, torch.randn(40_000, 40, generator=generator), 3_000, 40)
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        found.append(slot_norms((grad,), 2.0))
    assert all(same_bits(found[0], other) for other in found[1:])


@needs_core
@pytest.mark.parametrize("order", [1.0, 2.0, math.inf])
def test_norms_of_what_is_not_finite_and_of_what_overflows(order: float):
    values = torch.tensor([[math.nan, 1.0], [math.inf, 2.0], [3e38, 3e38]])
    norms = slot_norms((IndexedGrad(torch.tensor([2, 0, 1]), values, 3, 2),), order)
    assert norms[0].isnan()
    assert norms[1] == math.inf
    # In float64, which holds what would overflow in float32.
    wanted = torch.linalg.vector_norm(values[2].double(), order)
    torch.testing.assert_close(norms[2], wanted, rtol=1e-12, atol=0)


@needs_core
def test_norms_that_the_core_refuses_and_declines():
    """Where it declines, callers go another way; all else above must have an answer."""
    grad = IndexedGrad(torch.tensor([0, 3]), torch.ones(2, 2), 3, 2)
    with pytest.raises(InputError):
        slot_norms((grad,), 2.0)
    assert slot_norms((grad._replace(num_slots=4),), 3.0) is None
    assert slot_norms((grad._replace(values=grad.values.cfloat()),), 2.0) is None
