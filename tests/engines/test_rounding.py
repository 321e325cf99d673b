"""Stochastic rounding: the same bits everywhere, one of the two neighbors, right on average."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.engines import rounding
from sparsestep.optim import OPTIMIZERS
from tests.generate.layouts import Entries
from tests.optim.own_rules import seeded
from tests.properties.marks import QUIET
from tests.subject import by_hand
from tests.table import Variant, all_same_bits, each_engine, running_on, same_bits

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]
HALVES = [torch.bfloat16, torch.float16]
each_half = pytest.mark.parametrize("dtype", HALVES, ids=str)
INF, NAN = math.inf, math.nan


def wide_values(count: int = 4000) -> Tensor:
    """float32 numbers of every magnitude and sign, and the odd ones."""
    bits = torch.randint(-(2**31), 2**31, (count,), generator=seeded(0)).to(torch.int32)
    ordinary = torch.randn(count, generator=seeded(1))
    small = torch.randn(count, generator=seeded(2)) * 2**-18  # subnormal as float16
    large = torch.rand(count, generator=seeded(3)) * 200 + 65400  # around float16's largest
    odd = torch.tensor([0.0, -0.0, INF, -INF, NAN, 2**-24, 2**-25, 65504, 65520, 65535.9, 65536])
    return torch.cat([bits.view(torch.float32), ordinary, small, large, odd, -odd])


def bits_of(half: Tensor) -> Tensor:
    return half.view(torch.int16).int() & 0xFFFF


def neighbors(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
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


# The function itself


@each_half
def test_what_is_representable_stays_whatever_the_bits(dtype: torch.dtype):
    """All 65536 numbers of the dtype, subnormals, infinities and both zeros among them."""
    every = torch.arange(2**16).to(torch.int16).view(dtype)
    for bits in (0, 1, 0x1FFF, 0x7FFF, 0xFFFF, 0xFFFFFFFF):
        ours = rounding.round_stochastic(every.float(), dtype, torch.full((2**16,), bits))
        assert same_numbers(ours, every)


@each_half
def test_it_is_one_of_two_neighbors_the_upper_for_the_highest_random_number(dtype: torch.dtype):
    values = wide_values()
    finite = values.isfinite()
    lower, upper = neighbors(values, dtype)
    at_random = rounding.round_stochastic(
        values, dtype, rounding.random_bits(7, 0, torch.arange(len(values)))
    )
    hit = [bits_of(at_random) == bits_of(neighbor) for neighbor in (lower, upper)]
    assert bool((hit[0] | hit[1])[finite].all())
    assert same_numbers(at_random[~finite], values[~finite].to(dtype))
    small = values.abs() < 65536  # from there on float16 has infinity alone
    values, lower, upper = values[small], lower[small], upper[small]
    down = rounding.round_stochastic(values, dtype, torch.zeros(len(values), dtype=torch.int64))
    assert same_numbers(down, lower)
    # A value that is nearer to the lower neighbor than the random bits can tell stays there.
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
    lower, upper = (n.double()[0] for n in neighbors(values[:1], dtype))
    place = (upper - lower).abs()
    share = 0.0 if place == 0 else ((values[0].double() - lower).abs() / place).item()
    error = place * math.sqrt(share * (1 - share) / count)
    # Thirteen or sixteen random bits cannot tell shares apart that are closer than this.
    granularity = place * 2**-13
    # Six standard errors: a fuzzer tries thousands of values, and some leave four by chance.
    assert (ours.mean() - values[0].double()).abs() <= 6 * error + granularity


def test_different_seeds_tensors_and_elements_get_unrelated_bits():
    count = 1 << 14
    low, high = torch.arange(count), torch.arange(count) + 2**32
    streams = [
        rounding.random_bits(rounding.step_seed(seed, number, step), tensor, elements)
        for seed, number, step, tensor, elements in product(
            (0, 1), (0, 1), (1, 2), (0, 1), (low, high)
        )
    ]
    for stream in streams:
        ones = torch.stack([(stream >> bit & 1).double().mean() for bit in range(32)])
        assert bool(((ones - 0.5).abs() < 5 * 0.5 / math.sqrt(count)).all())
    for i, one in enumerate(streams):
        for other in streams[:i]:
            agreement = ((one ^ other) >> 15 & 1).double().mean()
            assert abs(agreement - 0.5) < 5 * 0.5 / math.sqrt(count)


# The engines


@each_engine
@each_half
def test_an_engine_rounds_state_as_the_function_says(dtype: torch.dtype, engine: str):
    """Values of every magnitude become the momentum buffer, the param's second tensor."""
    values = wide_values()
    param = torch.nn.Parameter(torch.zeros_like(values))
    torch.manual_seed(11)
    options: dict[str, Any] = {"momentum": 0.5, "state_dtype": dtype, "stochastic_rounding": True}
    with running_on(engine) as name:
        opt = sparsestep.SGD([param], lr=0.0, engine=name, **options)
        param.grad = values
        opt.step()
    bits = rounding.random_bits(rounding.step_seed(11, 0, 1), 1, torch.arange(len(values)))
    expected = rounding.round_stochastic(values + 0.0, dtype, bits)
    assert same_bits(opt.state[param]["momentum_buffer"], expected)


@each_engine
@each_half
@pytest.mark.parametrize("columns", [2, 8, 16, 600])
def test_an_element_is_rounded_alike_in_every_layout(dtype: torch.dtype, engine: str, columns: int):
    """The random bits belong to the element, not to the way in which the gradient names it.

    Powers of two as learning rate keep the float32 result exact, hence equal everywhere.
    """
    torch.manual_seed(5)
    entries = Entries.random((12, columns), (2, 2), 0.5, seed=0)
    start = torch.randn(12, columns, generator=seeded(0)).to(dtype)
    elements = torch.arange(start.numel()).view(start.shape)
    bits = rounding.random_bits(rounding.step_seed(5, 0, 1), 0, elements)
    moved = rounding.round_stochastic(start.float() - 2**-9 * entries.values, dtype, bits)
    expected = torch.where(entries.held, moved, start)
    sgd = Variant(sparsestep.SGD, {"lr": 2**-9, "stochastic_rounding": True})
    with running_on(engine) as name:
        for layout, (grad, mask) in entries.stored(dtype).items():
            run = by_hand(sgd, name, start).take(grad, mask)
            assert same_bits(run.tensors[0], expected), layout
        turned = by_hand(sgd, name, start.t().contiguous().t()).take(entries.coo(dtype))
        assert same_bits(turned.tensors[0], expected)


def table_of(dtype: torch.dtype, rows: int = 20) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(rows, 8, generator=seeded(1)).to(dtype))


def train(params: list[torch.nn.Parameter], opt: torch.optim.Optimizer, steps: range) -> None:
    """Rows with duplicates; every third gradient is dense."""
    for step in steps:
        for number, param in enumerate(params):
            draw, count = seeded(10 * step + number), len(param) // 2
            rows = torch.randint(0, len(param), (1, count), generator=draw)
            values = torch.randn(count, 8, generator=draw).to(param.dtype)
            grad = torch.sparse_coo_tensor(rows, values, param.shape)
            param.grad = grad.to_dense() if step % 3 == 2 else grad
        opt.step()


# Optimizers


@each_engine
def test_wide_params_are_not_affected(engine: str):
    """Sparse gradients: dense ones are torch's business where nothing is rounded at random."""
    for cls in OPTIMIZERS:
        results = []
        for on in (False, True):
            param = table_of(torch.float32)
            with running_on(engine) as name:
                opt = cls([param], lr=0.1, stochastic_rounding=on, engine=name)
                train([param], opt, range(2))
            state = [value for name, value in opt.state[param].items() if name != "step"]
            results.append([param.detach(), *state])
        assert all_same_bits(*results), cls


def test_keys_and_counts_are_there_only_where_they_are_needed():
    """Torch's SGD has no count; the others have one anyway."""
    keys = {"stochastic_rounding", "rounding_seed"}
    for cls in OPTIMIZERS:
        for on in (False, True):
            param = table_of(torch.bfloat16)
            opt = cls([{"params": [param], **({"stochastic_rounding": True} if on else {})}])
            assert keys & opt.param_groups[0].keys() == (keys if on else set())
            train([param], opt, range(3))
            counted = on or cls is not sparsestep.SGD
            assert ("step" in opt.state[param]) == counted
            assert not counted or int(opt.state[param]["step"]) == 3


def test_it_may_be_switched_on_later_and_outlasts_a_checkpoint_without_it():
    param = table_of(torch.bfloat16)
    plain = sparsestep.Adam([param], lr=1e-3)
    train([param], plain, range(2))
    for options in ({"stochastic_rounding": True}, {}):
        group = {"params": [param], "stochastic_rounding": True}
        opt = sparsestep.Adam([param] if options else [group], lr=1e-3, **options)
        opt.load_state_dict(plain.state_dict())
        train([param], opt, range(2, 4))
        assert opt.param_groups[0]["stochastic_rounding"] is True
    plain.param_groups[0]["stochastic_rounding"] = True
    before = param.detach().clone()
    train([param], plain, range(2, 5))
    assert not same_bits(param, before)
