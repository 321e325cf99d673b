"""Compact gradients of every kind, for hypothesis, and what they stand for."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from sparsestep.grads.compact import CompactGrad
from sparsestep.grads.indexed import IndexedGrad

SHAPE = torch.Size([6, 4])


@st.composite
def parts(draw: st.DrawFn, dtype: torch.dtype = torch.float64) -> IndexedGrad:
    """Rows or elements; with and without ``source`` and ``scale``."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    slots, block = draw(st.sampled_from([(6, 4), (24, 1)]))
    entries, rows = draw(st.integers(0, 12)), draw(st.integers(1, 4))
    source = draw(st.booleans())
    return IndexedGrad(
        torch.randint(slots, (entries,), generator=generator),
        torch.randn(rows if source else entries, block, generator=generator).to(dtype),
        slots,
        block,
        torch.randint(rows, (entries,), generator=generator) if source else None,
        torch.randn(entries, generator=generator).to(dtype) if draw(st.booleans()) else None,
    )


several = st.lists(parts(), max_size=3)
LIKE = torch.zeros(0, dtype=torch.float64)


def dense(some: list[IndexedGrad]) -> Tensor:
    """In plain loops."""
    total = torch.zeros(SHAPE, dtype=torch.float64)
    for part in some:
        assert part.indices is not None
        for entry, slot in enumerate(part.indices.tolist()):
            row = entry if part.value_index is None else int(part.value_index[entry])
            factor = 1.0 if part.scale is None else float(part.scale[entry])
            total.view(part.num_slots, part.slot_size)[slot] += factor * part.values[row].double()
    return total


def example() -> CompactGrad:
    bags = torch.tensor([0, 0, 1])
    values = torch.tensor([[1.0, 2.0, 3.0, 4.0], [-1.0, 0.5, 0.0, 2.0]])
    part = IndexedGrad(torch.tensor([3, 1, 3]), values, 6, 4, bags, torch.tensor([1.0, 2.0, 3.0]))
    return CompactGrad.of([part], SHAPE, values)
