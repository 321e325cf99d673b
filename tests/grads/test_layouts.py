"""Storage decides nothing: the same entries give the same bits in any layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.masked import MaskedTensor, masked_tensor

from sparsestep import IndexedGrad, functional
from sparsestep.grads.layouts import Gradient as AnyGradient
from tests.generate.layouts import BY_ROW, Entries, coalesced, compress
from tests.grads.layout_runs import FEW, MARKS, Run, each_kind, each_of_a_few, randn
from tests.properties.test_properties import close, oracle_step
from tests.table import EVERY, Variant, dtypes, on_each_engine, running_on, same_bits, steps_of

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]

# There are many combinations, and each example goes through all layouts.
EXAMPLES = 5 if settings.get_current_profile_name() == "ci" else settings.default.max_examples


@dataclass
class Case:
    """A step to be taken from a state that is not the first."""

    before: Entries
    entries: Entries
    options: dict[str, Any]
    seed: int


@st.composite
def cases(draw: st.DrawFn) -> Case:
    unit = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 3), (3, 2), (1, 40)]))
    grid = draw(st.tuples(st.integers(1, 4), st.integers(1, 4) | st.just(15)))
    shape = (unit[0] * grid[0], unit[1] * grid[1])
    share = st.sampled_from([0.2, 0.5, 0.5, 1.0])
    seeds = st.integers(0, 2**16)
    before, entries = (Entries.random(shape, unit, draw(share), draw(seeds)) for _ in range(2))
    options = {"maximize": draw(st.booleans()), "lr": draw(st.sampled_from([1e-3, 0.1, 1.0]))}
    return Case(before, entries, options, draw(seeds))


@on_each_engine(EVERY)
@given(case=cases(), dtype=dtypes)
@settings(max_examples=EXAMPLES)
def test_the_layout_decides_nothing(variant: Variant, engine: str, case: Case, dtype: torch.dtype):
    """All layouts give one result, which is the rule, in float64, on what is held."""
    start = randn(tuple(case.entries.held.shape), case.seed).to(dtype)
    rule = variant.rule
    with running_on(engine) as name:
        warm = Run(variant, name, start, case.options).step(case.before.coo(dtype))
        first = warm.again()
        group = first.by_hand.param_group
        held, exact, slack = oracle_step(first.optimizer, first.param, group, case.entries.oracle())
        places = [held, *(held.any(1) if kept.per_row else held for kept in rule.state)]
        for layout, (grad, mask) in case.entries.stored(dtype, by_row=rule.by_row).items():
            run = warm.again().step(grad, mask)
            if layout == "coo":
                first = run
            assert steps_of(run.optimizer, run.param) == steps_of(first.optimizer, first.param)
            if run.engine == "native" and run is not first:
                assert run.same_as(first), layout
                continue
            names = [kept.name for kept in rule.state]
            ours = [run.param, *(run.by_hand.state[run.param][each] for each in names)]
            was = [warm.param, *(warm.by_hand.state[warm.param][each] for each in names)]
            for our, old, place, value, room in zip(ours, was, places, exact, slack, strict=True):
                value, room = value.reshape(our.shape), room.reshape(our.shape)
                assert close(our[place], value[place], room[place]), layout
                assert same_bits(our[~place], old[~place]), layout


@each_of_a_few
def test_large_gradients_in_every_layout(variant: Variant):
    """Enough for several threads, buckets of positions and rows of several tiles."""
    for shape, unit in (((24, 1200), (4, 6)), ((600, 24), (2, 24))):
        entries = Entries.random(shape, unit, 0.4, seed=0)
        stored = entries.stored(torch.float32, by_row=variant.rule.by_row)
        torch.set_num_threads(1)
        first = Run(variant, "native", randn(shape)).step(*stored["coo"])
        torch.set_num_threads(2)
        for layout, (grad, mask) in stored.items():
            assert Run(variant, "native", randn(shape)).step(grad, mask).same_as(first), layout


@each_of_a_few
@each_kind
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_random_rounding_in_every_layout(variant: Variant, engine: str, dtype: torch.dtype):
    """The random bits belong to the element, not to the place where its gradient is stored."""
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    options = {"stochastic_rounding": True, "state_dtype": dtype}
    torch.manual_seed(5)
    with running_on(engine) as name:
        first = None
        for layout, (grad, mask) in entries.stored(dtype, by_row=variant.rule.by_row).items():
            run = Run(variant, name, randn((6, 8)).to(dtype), options).step(grad, mask)
            first = first or run
            assert run.like(first), layout


NUMBERS = [v for v in FEW if v.cls.supports_complex]


@pytest.mark.parametrize("variant", NUMBERS, ids=str)
@each_kind
def test_complex_numbers_are_pairs_in_every_layout(variant: Variant, engine: str):
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    numbers = torch.complex(entries.values, -2 * entries.values)
    same = Entries(numbers, entries.held, entries.unit)
    start = torch.view_as_complex(randn((6, 8, 2)))
    pairs = coalesced(entries.held.nonzero().t(), torch.view_as_real(numbers)[same.held], (6, 8, 2))
    with running_on(engine) as name:
        real = Run(variant, name, torch.view_as_real(start)).step(pairs)
        stored = same.stored(torch.complex64, by_row=variant.rule.by_row)
        # Torch may keep for later that a tensor is to be conjugated.
        places = same.held.reshape(-1).nonzero().squeeze(1)
        later = numbers[same.held].conj_physical().conj()
        stored["conjugated"] = (IndexedGrad(places, later, 48, 1), None)
        for layout, (grad, mask) in stored.items():
            run = Run(variant, name, start).step(grad, mask)
            run.param = torch.view_as_real(run.param)
            ours = [torch.view_as_real(t) if t.is_complex() else t for t in run.tensors]
            assert all(map(torch.allclose, ours, real.tensors)), layout
            assert name == "reference" or all(map(same_bits, ours, real.tensors)), layout


@pytest.mark.parametrize("layout", ["coo", "csr", "touched", "masked", "strided"])
@each_kind
def test_signs_that_torch_keeps_for_later(layout: str, engine: str):
    """The imaginary part of what is to be conjugated is to be negated."""
    numbers = torch.complex(torch.zeros(4, 6), randn((4, 6))).conj()
    values, held = numbers.imag, torch.rand(4, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    assert values.is_neg()
    starts, columns, _ = compress(values, held, torch.sparse_csr)
    grad, mask = {
        "coo": (coalesced(held.nonzero().t(), values[held], held.shape), None),
        "csr": (torch.sparse_csr_tensor(starts, columns, values[held], held.shape), None),
        "touched": (IndexedGrad(torch.arange(24), values, 24, 1), held),
        "masked": (masked_tensor(values, held), None),
        "strided": (values, held),
    }[layout]
    param = torch.zeros(4, 6)
    with running_on(engine) as name:
        functional.sgd_(param, grad, lr=1.0, engine=name, mask=mask)
    assert same_bits(param[held], -values.resolve_neg()[held])
    assert not param[~held].any()


@each_of_a_few
@each_kind
def test_values_may_be_one_number_that_stands_for_many(variant: Variant, engine: str):
    """As autograd makes them of a sum: strides of zero."""
    entries = Entries.random((4, 6), (1, 1), 0.5, seed=0)
    entries.values.fill_(0.5)
    count = int(entries.held.sum())
    many = torch.tensor(0.5).expand(count)
    starts, columns, _ = compress(entries.values, entries.held, torch.sparse_csr)
    places = entries.held.reshape(-1).nonzero().squeeze(1)
    with running_on(engine) as name:
        first = Run(variant, name, randn((4, 6))).step(entries.coo(torch.float32))
        for grad in (
            coalesced(entries.held.nonzero().t(), many, entries.held.shape),
            torch.sparse_csr_tensor(starts, columns, many, entries.held.shape),
            IndexedGrad(places, many, 24, 1),
            IndexedGrad(places, many[:1], 24, 1, torch.zeros(count, dtype=torch.int64)),
        ):
            assert Run(variant, name, randn((4, 6))).step(grad).like(first)


@each_of_a_few
def test_a_parameter_may_have_strides(variant: Variant):
    entries = Entries.random((6, 8), (2, 2), 0.5, seed=0)
    for layout, (grad, mask) in entries.stored(torch.float32, by_row=variant.rule.by_row).items():
        plain = Run(variant, "reference", randn((6, 8))).step(grad, mask)
        turned = Run(variant, "reference", randn((6, 8)).t().contiguous().t()).step(grad, mask)
        assert not turned.param.is_contiguous()
        assert turned.like(plain), layout


@each_of_a_few
@each_kind
def test_a_gradient_is_never_written(variant: Variant, engine: str):
    entries = Entries.random((6, 8), (2, 8), 0.5, seed=0)
    with running_on(engine) as name:
        for layout, (grad, mask) in entries.stored(
            torch.float32, by_row=variant.rule.by_row
        ).items():
            before = [part.clone() for part in parts(grad)]
            Run(variant, name, randn((6, 8)), {"maximize": True}).step(grad, mask)
            after = parts(grad)
            assert all(map(same_parts, before, after)), layout


def parts(grad: AnyGradient) -> list[Tensor]:
    if isinstance(grad, IndexedGrad):
        return [part for part in grad if isinstance(part, Tensor)]
    if isinstance(grad, MaskedTensor):
        return [*parts(grad.get_data()), *parts(grad.get_mask())]
    if grad.layout is torch.strided:
        return [grad]
    if grad.layout is torch.sparse_coo:
        return [grad._indices(), grad._values()]
    by_row = grad.layout in BY_ROW
    starts = grad.crow_indices() if by_row else grad.ccol_indices()
    return [starts, grad.col_indices() if by_row else grad.row_indices(), grad.values()]


def same_parts(one: Tensor, other: Tensor) -> bool:
    return same_bits(one, other) if one.is_floating_point() else torch.equal(one, other)
