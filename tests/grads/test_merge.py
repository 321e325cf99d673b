"""Sums of duplicates: in order of appearance, on the CPU and elsewhere, and the host waits once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sparsestep.grads.dedup import _segment_sum, iter_sums, sum_duplicates
from sparsestep.grads.indexed import IndexedGrad
from tests.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.table import same_bits


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


def test_a_first_value_is_kept_as_it_is():
    values = torch.tensor([[-0.0], [-0.0], [1.0]])
    grad = IndexedGrad(torch.tensor([2, 2, 0]), values, 3, 1)
    assert sum_duplicates(grad)[1].signbit().tolist() == [[False], [True]]
    with elsewhere():
        there = grad._replace(indices=grad.indices.to(DEVICE), values=values.to(DEVICE))  # type: ignore[union-attr]
        total = sum_duplicates(there)[1]
    assert isinstance(total, Elsewhere)
    assert total.inner.signbit().tolist() == [[False], [True]]
