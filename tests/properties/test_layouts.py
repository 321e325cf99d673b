"""Storage decides nothing: the same entries give the same bits in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from tests.generate.cases import each_case
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.subject import Snapshot, by_hand
from tests.table import (
    DTYPES,
    PLAIN,
    Variant,
    each_engine,
    on_each_engine,
    randn,
    running_on,
    same_bits,
)

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


@dataclass
class Steps:
    """A step to be taken from a state that is not the first."""

    before: Entries
    entries: Entries
    options: dict[str, Any]
    start: Tensor


@st.composite
def steps(draw: st.DrawFn) -> Steps:
    unit = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 40)]))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4) | st.just(15)))
    shape = (unit[0] * grid[0], unit[1] * grid[1])
    share = st.sampled_from([0.2, 0.5, 0.5, 1.0])
    seeds = st.integers(0, 2**16)
    before, entries = (Entries.random(shape, unit, draw(share), draw(seeds)) for _ in range(2))
    options = {"maximize": draw(st.booleans()), "lr": draw(st.sampled_from([1e-3, 0.1, 1.0]))}
    dtype = draw(st.sampled_from(DTYPES))
    return Steps(before, entries, options, randn(shape, draw(seeds)).to(dtype))


@on_each_engine(PLAIN)
@each_case(examples=5, case=steps())
def test_the_layout_decides_nothing(variant: Variant, engine: str, case: Steps):
    """All layouts give one result, which is the rule, in float64, on what is held."""
    dtype, entries = case.start.dtype, case.entries
    with running_on(engine) as name:
        warm = by_hand(variant, name, case.start, **case.options)
        warm.take(case.before.coo(dtype))
        wanted, before = warm.wanted([entries.drawn(None)]), Snapshot(warm)
        first = warm.copy().take(entries.coo(dtype))
        for layout, (grad, mask) in entries.stored(
            dtype, by_row=variant.rule.needs_whole_rows
        ).items():
            drawn = entries.drawn(grad)
            run = warm.copy().take(grad, mask)
            if run.optimizer.engine == "native":
                assert run.same_as(first), layout
            run.check([drawn], wanted, before)


# One of each kind: per element, with decay, with numbers per row, without any state.
WITH_OPTIONS = [
    Variant(sparsestep.Adam, {"amsgrad": True, "weight_decay": 0.1}),
    Variant(sparsestep.SparseAdam, {"bias_correction": "per_row"}),
    Variant(sparsestep.RowwiseAdagrad, {}),
    Variant(sparsestep.RowwiseAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    Variant(sparsestep.SGD, {}),
]
each_of_a_few = pytest.mark.parametrize("variant", WITH_OPTIONS, ids=str)


@each_of_a_few
def test_large_gradients_in_every_layout(variant: Variant):
    """Enough for several threads, buckets of positions and rows of several tiles."""
    for shape, unit in (((24, 1200), (4, 6)), ((600, 24), (2, 24))):
        entries = Entries.random(shape, unit, 0.4, seed=0)
        stored = entries.stored(torch.float32, by_row=variant.rule.needs_whole_rows)
        torch.set_num_threads(1)
        first = by_hand(variant, "native", randn(shape)).take(*stored["coo"])
        torch.set_num_threads(2)
        for layout, (grad, mask) in stored.items():
            run = by_hand(variant, "native", randn(shape)).take(grad, mask)
            assert run.same_as(first), layout


@each_of_a_few
@each_engine
def test_random_rounding_in_every_layout(variant: Variant, engine: str):
    """The random bits belong to the element, not to the place where its gradient is stored."""
    dtype = torch.bfloat16
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    start, options = randn((6, 8)).to(dtype), {"stochastic_rounding": True, "state_dtype": dtype}
    torch.manual_seed(5)
    with running_on(engine) as name:
        first = by_hand(variant, name, start, **options).take(entries.coo(dtype))
        for layout, (grad, mask) in entries.stored(
            dtype, by_row=variant.rule.needs_whole_rows
        ).items():
            run = by_hand(variant, name, start, **options).take(grad, mask)
            if name == "native":
                assert run.same_as(first), layout
            else:  # torch's square root depends on where in a tensor a number stands
                assert all(map(close, run.tensors, first.tensors)), layout


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-2, atol=1e-7)


@pytest.mark.parametrize("variant", [v for v in WITH_OPTIONS if v.cls.supports_complex], ids=str)
@each_engine
def test_complex_numbers_are_pairs_in_every_layout(variant: Variant, engine: str):
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    numbers = torch.complex(entries.values, -2 * entries.values)
    same = Entries(numbers, entries.held, entries.unit)
    start = torch.view_as_complex(randn((6, 8, 2)))
    pairs = torch.sparse_coo_tensor(
        entries.held.nonzero().t(), torch.view_as_real(numbers)[same.held], (6, 8, 2)
    )
    with running_on(engine) as name:
        real = by_hand(variant, name, torch.view_as_real(start)).take(pairs).tensors
        stored = same.stored(torch.complex64, by_row=variant.rule.needs_whole_rows)
        for layout, (grad, mask) in stored.items():
            run = by_hand(variant, name, start).take(grad, mask)
            ours = [torch.view_as_real(t) if t.is_complex() else t for t in run.tensors]
            assert all(map(torch.allclose, ours, real)), layout
            assert name == "reference" or all(map(same_bits, ours, real)), layout


@pytest.mark.parametrize(
    "variant",
    [
        Variant(sparsestep.AdamW, {"weight_decay": 0.1}),
        Variant(sparsestep.SGD, {"momentum": 0.5}),
        Variant(sparsestep.RowwiseAdam, {}),
        Variant(sparsestep.Lion, {}),
        Variant(sparsestep.Ftrl, {"l1": 0.01}),
    ],
    ids=str,
)
@each_engine
@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
def test_dense_semantics_take_what_is_not_held_for_zero(variant: Variant, engine: str):
    """In any layout, the numbers of the gradient that has zeros there."""
    several = [Entries.random((6, 8), (2, 2), 0.3, seed) for seed in range(4)]
    with running_on(engine) as name:
        dense = by_hand(variant, name, randn((6, 8)).double(), lr=0.1)
        for entries in several:
            dense.take(torch.where(entries.held, entries.values, 0.0).double())
        stored = [entries.stored(torch.float64, by_row=True) for entries in several]
        for layout in stored[0]:
            run = by_hand(variant, name, randn((6, 8)).double(), semantics="dense", lr=0.1)
            for each in stored:
                run.optimizer.catch_up()
                run.take(*each[layout])
            run.optimizer.catch_up()
            for ours, theirs in zip(run.tensors, dense.tensors, strict=True):
                assert torch.allclose(ours, theirs, rtol=1e-9, atol=1e-11), layout
