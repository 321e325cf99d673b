"""A gradient of few rows that many entries take, each times its factor, is one written out."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from sparsestep import Touched
from tests.table import EVERY, Variant, dtypes, each_case, on_each_engine, running_on
from tests.test_layouts import Run


@st.composite
def bags(draw: st.DrawFn) -> Touched:
    """A gradient of 7 rows, or of thirds of them, whose products have to be rounded."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    entries, rows = draw(st.integers(0, 30)), draw(st.integers(1, 6))
    block = draw(st.sampled_from([1, 5, 16, 40]))
    slots = 7 * draw(st.sampled_from([1, 3]))
    return Touched(
        torch.randint(slots, (entries,), generator=generator),
        torch.randn(rows, block, generator=generator),
        slots,
        block,
        torch.randint(rows, (entries,), generator=generator) if draw(st.booleans()) else None,
        torch.randn(entries, generator=generator) if draw(st.booleans()) else None,
    )


@on_each_engine(EVERY)
@each_case(grad=bags(), dtype=dtypes)
def test_what_is_written_out_gives_the_same_bits(
    variant: Variant, engine: str, grad: Touched, dtype: torch.dtype
):
    assert grad.positions is not None
    if grad.source is None:
        rows = torch.arange(grad.positions.numel()) % len(grad.values)
        grad = grad._replace(values=grad.values[rows])
    scale = None if grad.scale is None else grad.scale.to(dtype)
    grad = grad._replace(values=grad.values.to(dtype), scale=scale)
    start = torch.linspace(-1, 1, grad.slots * grad.block).reshape(7, -1).to(dtype)
    with running_on(engine) as name:
        ours, plain = (Run(variant, name, start) for _ in range(2))
        for _ in range(2):
            ours.step(grad)
            plain.step(grad.expanded())
        assert ours.like(plain)
