"""Stochastic rounding: the same bits everywhere, one of the two neighbours, right on average."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.engines import rounding
from sparsestep.optim.optimizer import RuleOptimizer
from tests.engines.half_precision import each_half, seeded
from tests.table import (
    ENGINES,
    INSTRUCTION_SETS,
    each_engine,
    each_optimizer,
    running_on,
    same_bits,
    state_tensors,
)

INF, NAN = math.inf, math.nan


def wide_values(count: int = 4000) -> Tensor:
    """float32 numbers of every magnitude and sign, and the odd ones."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=seeded(0)).to(torch.int32)
    usual = torch.randn(count, generator=seeded(1))
    small = torch.randn(count, generator=seeded(2)) * 2**-18  # subnormal as float16
    large = torch.rand(count, generator=seeded(3)) * 200 + 65400  # around float16's largest
    odd = torch.tensor([0.0, -0.0, INF, -INF, NAN, 2**-24, 2**-25, 65504, 65520, 65535.9, 65536])
    return torch.cat([bits.view(torch.float32), usual, small, large, odd, -odd])


def bits_of(half: Tensor) -> Tensor:
    return half.view(torch.int16).int() & 0xFFFF


def neighbours(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The numbers of the dtype next to each value, towards zero and away; infinity counts as one.

    In sign and magnitude, as bits, the next number away from zero is the next integer.
    """
    nearest = values.to(dtype)
    too_far = nearest.float().abs() > values.abs()
    lower = bits_of(nearest) - too_far.int()
    upper = lower + (lower.short().view(dtype).float() != values).int()
    return lower.short().view(dtype), upper.short().view(dtype)


def same_numbers(ours: Tensor, theirs: Tensor) -> bool:
    """Bit for bit; one NaN is as good as another."""
    return bool(((bits_of(ours) == bits_of(theirs)) | (ours.isnan() & theirs.isnan())).all())


def pushed_through(values: Tensor, dtype: torch.dtype, engine: str, seed: int = 0) -> Tensor:
    """Any float32 values, rounded by an engine: they become SGD's first momentum buffer."""
    torch.manual_seed(seed)
    param = torch.nn.Parameter(torch.zeros_like(values))
    with running_on(engine) as name:
        opt = sparsestep.SGD(
            [param],
            lr=0.0,
            momentum=0.5,
            state_dtype=dtype,
            stochastic_rounding=True,
            engine=name,
        )
        param.grad = values
        opt.step()
    return opt.state[param]["momentum_buffer"]


# The function itself


@each_half
def test_the_result_is_one_of_the_two_neighbours(dtype: torch.dtype):
    values = wide_values()
    bits = rounding.random_bits(7, 0, torch.arange(len(values)))
    ours = rounding.round_stochastic(values, dtype, bits)
    lower, upper = neighbours(values, dtype)
    finite = values.isfinite()
    hit = (bits_of(ours) == bits_of(lower)) | (bits_of(ours) == bits_of(upper))
    assert bool(hit[finite].all())
    assert same_numbers(ours[~finite], values[~finite].to(dtype))


@each_half
def test_what_is_representable_stays_whatever_the_bits(dtype: torch.dtype):
    """All 65536 numbers of the dtype, subnormals, infinities and both zeros among them."""
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    for bits in (0, 1, 0x1FFF, 0x7FFF, 0xFFFF, 0xFFFFFFFF):
        ours = rounding.round_stochastic(every.float(), dtype, torch.full((2**16,), bits))
        assert same_numbers(ours, every)


@each_half
def test_the_highest_random_number_rounds_up_and_the_lowest_down(dtype: torch.dtype):
    values = wide_values()
    values = values[values.abs() < 65536]  # from there on float16 has infinity alone
    lower, upper = neighbours(values, dtype)
    down = rounding.round_stochastic(values, dtype, torch.zeros(len(values), dtype=torch.int64))
    assert same_numbers(down, lower)
    # A value that is nearer to the lower neighbour than the random bits can tell stays there.
    far = (values - lower.float()).abs() >= (upper.float() - lower.float()).abs() * 2**-13
    up = rounding.round_stochastic(values, dtype, torch.full((len(values),), 0xFFFFFFFF))
    finite = upper.isfinite() & lower.isfinite()
    assert same_numbers(up[far & finite], upper[far & finite])


@each_half
@given(
    value=st.floats(-60000, 60000, width=32),
    seed=st.integers(0, 2**64 - 1),
    tensor=st.integers(0, 4),
)
def test_on_average_nothing_is_lost(dtype: torch.dtype, value: float, seed: int, tensor: int):
    """The mean of many roundings is the value, at any value and seed."""
    count = 20_000
    values = torch.full((count,), value)
    ours = rounding.round_stochastic(
        values, dtype, rounding.random_bits(seed, tensor, torch.arange(count))
    ).double()
    lower, upper = (n.double()[0] for n in neighbours(values[:1], dtype))
    place = (upper - lower).abs()
    share = 0.0 if place == 0 else ((values[0].double() - lower).abs() / place).item()
    error = place * math.sqrt(share * (1 - share) / count)
    # Thirteen or sixteen random bits cannot tell shares apart that are closer than this.
    granularity = place * 2**-13
    # Six standard errors: a fuzzer tries thousands of values, and some leave four by chance.
    assert (ours.mean() - values[0].double()).abs() <= 6 * error + granularity


def test_different_seeds_tensors_and_elements_get_unrelated_bits():
    count = 1 << 14
    elements = torch.arange(count)
    streams = [
        rounding.random_bits(rounding.step_seed(seed, number, step), tensor, elements)
        for seed in (0, 1)
        for number in (0, 1)
        for step in (1, 2)
        for tensor in (0, 1)
    ]
    for stream in streams:
        ones = torch.stack([(stream >> bit & 1).double().mean() for bit in range(32)])
        assert bool(((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(count)).all())
    for i, one in enumerate(streams):
        for other in streams[:i]:
            agreement = ((one ^ other) >> 15 & 1).double().mean()
            assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(count)


def test_elements_beyond_two_to_the_32_have_bits_of_their_own():
    low, high = torch.arange(1000), torch.arange(1000) + 2**32
    assert not torch.equal(rounding.random_bits(3, 0, low), rounding.random_bits(3, 0, high))


# The engines


@each_engine
@each_half
def test_an_engine_rounds_as_the_function_says(dtype: torch.dtype, engine: str):
    """State: values of every magnitude. The buffer is the second tensor of the first param."""
    values = wide_values()
    ours = pushed_through(values, dtype, engine, seed=11)
    seed = rounding.step_seed(11, 0, 1)
    bits = rounding.random_bits(seed, 1, torch.arange(len(values)))
    assert same_bits(ours, rounding.round_stochastic(values + 0.0, dtype, bits))


@each_engine
@each_half
@pytest.mark.parametrize("columns", [1, 7, 16, 600])
def test_params_are_rounded_as_the_function_says(dtype: torch.dtype, engine: str, columns: int):
    """Powers of two as learning rate keep the float32 result exact, hence equal everywhere."""
    torch.manual_seed(5)
    start = torch.randn(50, columns, generator=seeded(0)).to(dtype)
    param = torch.nn.Parameter(start.clone())
    rows = torch.randperm(50, generator=seeded(1))[:30]
    values = torch.randn(30, columns, generator=seeded(2)).to(dtype)
    with running_on(engine) as name:
        opt = sparsestep.SGD([param], lr=2**-9, stochastic_rounding=True, engine=name)
        param.grad = torch.sparse_coo_tensor(rows[None], values, start.shape)
        opt.step()
    exact = start.float()
    exact[rows] -= 2**-9 * values.float()
    elements = torch.arange(start.numel()).view(start.shape)
    bits = rounding.random_bits(rounding.step_seed(5, 0, 1), 0, elements)
    assert same_bits(param.detach(), rounding.round_stochastic(exact, dtype, bits))


@each_engine
@each_half
@pytest.mark.parametrize("layout", ["dense", "rows", "elements", "masked", "strided"])
def test_an_element_is_rounded_alike_in_every_layout(dtype: torch.dtype, engine: str, layout: str):
    """The random bits belong to the element, not to the way in which the gradient names it."""
    torch.manual_seed(5)
    start = torch.randn(12, 6, generator=seeded(0)).to(dtype)
    grad = torch.randn(12, 6, generator=seeded(2)).to(dtype)
    param = torch.nn.Parameter(start.t().contiguous().t() if layout == "strided" else start.clone())
    group: dict[str, Any] = {"params": [param]}
    if layout == "masked":
        group["mask"] = torch.ones(12, 6, dtype=torch.bool)
    with running_on(engine) as name:
        opt = sparsestep.SGD([group], lr=2**-9, stochastic_rounding=True, engine=name)
        sparse_dims = {"rows": 1, "elements": 2, "strided": 1}
        param.grad = grad.to_sparse(sparse_dims[layout]) if layout in sparse_dims else grad
        opt.step()
    bits = rounding.random_bits(
        rounding.step_seed(5, 0, 1), 0, torch.arange(start.numel()).view(start.shape)
    )
    expected = rounding.round_stochastic(start.float() - 2**-9 * grad.float(), dtype, bits)
    assert same_bits(param.detach(), expected)


def two_steps(
    optimizer: type[RuleOptimizer], dtype: torch.dtype, engine: str, rows: int, seed: int = 3
) -> list[Tensor]:
    """With duplicates, and state in half precision."""
    torch.manual_seed(seed)
    param = torch.nn.Parameter(torch.randn(rows, 24, generator=seeded(0)).to(dtype))
    indices = torch.randint(0, rows, (1, 2 * rows), generator=seeded(1))
    values = torch.randn(2 * rows, 24, generator=seeded(2)).to(dtype)
    with running_on(engine) as name:
        opt = optimizer([param], lr=0.01, state_dtype=dtype, stochastic_rounding=True, engine=name)
        for _ in range(2):
            param.grad = torch.sparse_coo_tensor(indices, values, param.shape)
            opt.step()
    return [param.detach(), *state_tensors(opt)]


@each_optimizer
@each_half
def test_bits_do_not_depend_on_threads_or_instruction_set(
    optimizer: type[RuleOptimizer], dtype: torch.dtype
):
    results = []
    for engine in INSTRUCTION_SETS:  # a table large enough that every thread gets a share
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            results.append(two_steps(optimizer, dtype, engine, 3000))
    for other in results[1:]:
        assert all(map(same_bits, results[0], other))


@each_optimizer
@each_engine
@each_half
def test_the_seed_decides(optimizer: type[RuleOptimizer], engine: str, dtype: torch.dtype):
    first, again, other = (two_steps(optimizer, dtype, engine, 100, seed) for seed in (3, 3, 4))
    assert all(map(same_bits, first, again))
    assert not same_bits(first[0], other[0])


@each_half
@pytest.mark.parametrize("engine", ["reference", ENGINES[-1]])
@pytest.mark.parametrize("value", [1 + 2**-11 / 3, -3.1, 1e-5, 3e-7, 1000.7])
def test_a_step_is_unbiased(dtype: torch.dtype, engine: str, value: float):
    """Many equal elements in one step; the mean lies within four standard errors."""
    count = 200_000
    values = torch.full((count,), value)
    ours = pushed_through(values, dtype, engine).double()
    lower, upper = (n.double()[0] for n in neighbours(values[:1], dtype))
    assert set(ours.unique().tolist()) <= {lower.item(), upper.item()}
    error = ours.std().item() / math.sqrt(count)
    assert abs(ours.mean().item() - values[0].item()) <= 4 * error


@each_engine
@each_half
@pytest.mark.parametrize("special", [NAN, INF, -INF])
def test_what_is_not_finite_stays(dtype: torch.dtype, engine: str, special: float):
    values = torch.tensor([special, 1.0, special])
    ours = pushed_through(values, dtype, engine)
    assert same_numbers(ours, values.to(dtype))
    param = torch.nn.Parameter(values.to(dtype))
    with running_on(engine) as name:
        opt = sparsestep.SGD([param], lr=1.0, stochastic_rounding=True, engine=name)
        param.grad = torch.ones(3, dtype=dtype)
        opt.step()
    assert same_numbers(param.detach(), (values - 1).to(dtype))


@each_engine
def test_float16_overflows_as_often_as_it_should(engine: str):
    """Between the largest number and the next power of two, infinity is the upper neighbour."""
    values = torch.tensor([65504.0, 65512.0, 65535.0, 65536.0, 1e30]).repeat_interleave(4000)
    ours = pushed_through(torch.cat([values, -values]), torch.float16, engine)
    share = ours.isinf().double().view(2, 5, 4000).mean(dim=2)
    assert torch.allclose(share, torch.tensor([0, 0.25, 31 / 32, 1, 1]).double(), atol=0.03)
    assert bool((ours[:20_000] > 0).all())
    assert bool((ours[20_000:] < 0).all())


@each_engine
def test_float16_subnormals_are_rounded_to_their_own_places(engine: str):
    places = torch.tensor([0.25, 0.5, 1.75, 1023.5]).repeat_interleave(4000)
    ours = pushed_through(places * 2**-24, torch.float16, engine).double() * 2**24
    means = ours.view(4, 4000).mean(dim=1)
    assert bool((ours == ours.round()).all())
    assert torch.allclose(means, torch.tensor([0.25, 0.5, 1.75, 1023.5]).double(), atol=0.04)
