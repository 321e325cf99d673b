"""Masks: what lies outside keeps its bits, what lies inside moves as if there were nothing else."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from tests.grads.masked_training import (
    BY_ROW,
    ELEMENTS,
    OPTIONS,
    ROWS,
    SHAPE,
    gradient_of,
    inside,
    real,
    same,
    seeded,
    start_of,
    train,
)
from tests.table import ENGINES, each_engine, each_optimizer, running_on, same_bits

LAYOUTS = ["dense", "rows", "hybrid", "elements"]
COMBINATIONS = [
    pytest.param(optimizer, layout, mask, id=f"{optimizer.__name__}-{layout}-{kind}")
    for optimizer in OPTIMIZERS
    for layout in LAYOUTS
    for kind, mask in (("row mask", ROWS), ("element mask", ELEMENTS))
    if optimizer not in BY_ROW or (layout in ("dense", "rows") and mask is ROWS)
]
each_combination = pytest.mark.parametrize(("optimizer", "layout", "mask"), COMBINATIONS)


@each_combination
@each_engine
def test_outside_keeps_its_bits_and_inside_is_a_gradient_of_the_inside_alone(
    optimizer: type[RuleOptimizer], layout: str, mask: Tensor, engine: str
):
    gradients = [gradient_of(layout, seed) for seed in range(4)]
    param, masked = train(optimizer, gradients, engine, mask=mask)
    _, alone = train(optimizer, [inside(gradient, mask) for gradient in gradients], engine)
    assert same(masked, alone)
    assert same_bits(param[~mask], start_of(SHAPE)[~mask])
    assert not torch.equal(param[mask], start_of(SHAPE)[mask])


@each_optimizer
@given(data=st.data())
def test_masks_of_any_shape(optimizer: type[RuleOptimizer], data: st.DataObject):
    """The same as a property; what is outside also keeps the state that it began with."""
    shape = data.draw(
        st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple)
        | st.sampled_from([(40,), (7, 33), (4, 600), (2, 16), (0, 4)])
    )
    by_row = optimizer in BY_ROW
    layouts = ["dense", "rows"] if by_row else LAYOUTS
    generator = seeded(data.draw(st.integers(0, 2**16)))
    share = data.draw(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]))
    of_rows = by_row or data.draw(st.booleans())
    mask = torch.rand(shape[:1] if of_rows else shape, generator=generator) < share
    entries = data.draw(st.integers(0, 12)) if shape[0] else 0
    gradients = [
        gradient_of(data.draw(st.sampled_from(layouts)), seed, shape, entries)
        for seed in range(data.draw(st.integers(1, 3)))
    ]
    engine = data.draw(st.sampled_from(ENGINES))
    maximize = data.draw(st.booleans())
    param, masked = train(optimizer, gradients, engine, mask=mask, maximize=maximize)
    _, alone = train(optimizer, [inside(g, mask) for g in gradients], engine, maximize=maximize)
    assert same(masked, alone)
    assert same_bits(param[~mask], start_of(shape)[~mask])
    for kept in masked.rule_for(masked.param_groups[0]).state:
        tensor = masked.state[masked.param_groups[0]["params"][0]][kept.name]
        initial = masked.param_groups[0].get("initial_accumulator_value", 0)
        expected = initial if isinstance(kept.initial, str) else kept.initial
        outside = tensor[~mask]
        assert torch.equal(outside, torch.full_like(outside, expected))


@each_optimizer
@each_engine
def test_a_masked_table_moves_like_a_table_of_the_selected_rows(
    optimizer: type[RuleOptimizer], engine: str
):
    """Dense gradients: of the whole table with a mask, and of the smaller table without one."""
    gradients = [gradient_of("dense", seed) for seed in range(4)]
    param, masked = train(optimizer, gradients, engine, mask=ROWS)
    small = torch.nn.Parameter(start_of(SHAPE)[ROWS])
    with running_on(engine) as name:
        opt = optimizer([small], lr=0.1, engine=name, **OPTIONS[optimizer])
        for gradient in gradients:
            small.grad = gradient.values[ROWS]
            opt.step()
    assert torch.allclose(param[ROWS], small.detach(), rtol=1e-5, atol=1e-6)
    large = masked.state[masked.param_groups[0]["params"][0]]
    for name, tensor in opt.state[small].items():
        of_rows = large[name] if name == "step" else large[name][ROWS]
        assert torch.allclose(torch.as_tensor(of_rows), torch.as_tensor(tensor), rtol=1e-5), name


@each_optimizer
@each_engine
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_masks_in_every_dtype(optimizer: type[RuleOptimizer], engine: str, dtype: torch.dtype):
    gradients = [gradient_of(layout, seed) for seed, layout in enumerate(["dense", "rows"] * 2)]
    param, masked = train(optimizer, gradients, engine, dtype, mask=ROWS)
    _, alone = train(optimizer, [inside(g, ROWS) for g in gradients], engine, dtype)
    assert same(masked, alone)
    assert same_bits(param[~ROWS], start_of(SHAPE, dtype)[~ROWS])


@pytest.mark.parametrize("optimizer", [cls for cls in OPTIMIZERS if cls.supports_complex])
@each_engine
def test_masks_of_complex_params(optimizer: type[RuleOptimizer], engine: str):
    mask = ROWS if optimizer in BY_ROW else ELEMENTS
    gradients = [gradient_of(layout, seed) for seed, layout in enumerate(["dense", "rows"] * 2)]
    for gradient in gradients:
        gradient.values = gradient.values * (1 - 0.5j)
    dtype = torch.complex64
    param, masked = train(optimizer, gradients, engine, dtype, mask=mask)
    _, alone = train(optimizer, [inside(g, mask) for g in gradients], engine, dtype)
    assert same(masked, alone)
    assert same_bits(real(param[~mask]), real(start_of(SHAPE, dtype)[~mask]))


@each_optimizer
@each_engine
@pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")
def test_masks_and_params_of_any_strides(optimizer: type[RuleOptimizer], engine: str):
    """A transposed table under a mask that is a view of something larger."""
    mask = ROWS if optimizer in BY_ROW else ELEMENTS[..., 0]
    spread = torch.zeros(*mask.shape, 2, dtype=torch.bool)
    spread[..., 1] = mask
    results = []
    for strided in (False, True):
        start = start_of((6, 3))
        param = torch.nn.Parameter(start.t().contiguous().t() if strided else start)
        with running_on(engine) as name:
            name = "auto" if name == "native" else name  # not every layout has a native way
            group = {"params": [param], "mask": spread[..., 1] if strided else mask}
            opt = optimizer([group], lr=0.1, engine=name, **OPTIONS[optimizer])
            for seed in range(4):
                layout = "dense" if seed % 2 else "rows"
                param.grad = gradient_of(layout, seed, (6, 3)).tensor(torch.float32)
                opt.step()
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-5, atol=1e-6)
    assert same_bits(results[1][~mask], start_of((6, 3))[~mask])


@each_optimizer
@each_engine
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_a_mask_that_selects_nothing_counts_the_step_and_changes_nothing_else(
    optimizer: type[RuleOptimizer], engine: str, layout: str
):
    gradients = [gradient_of(layout, seed) for seed in range(3)]
    param, opt = train(optimizer, gradients, engine, mask=torch.zeros(6, dtype=torch.bool))
    assert same_bits(param, start_of(SHAPE))
    state = opt.state[opt.param_groups[0]["params"][0]]
    if optimizer is not sparsestep.SGD:
        assert state["step"] == 3
    for name, tensor in state.items():
        if name != "step":
            assert bool((tensor == tensor.flatten()[0]).all())


@each_optimizer
@each_engine
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_a_mask_that_selects_everything_is_no_mask(
    optimizer: type[RuleOptimizer], engine: str, layout: str
):
    gradients = [gradient_of(layout, seed) for seed in range(3)]
    masked, _ = train(optimizer, gradients, engine, mask=torch.ones(6, dtype=torch.bool))
    plain, _ = train(optimizer, gradients, engine)
    assert torch.allclose(masked, plain, rtol=1e-5, atol=1e-6)


@each_optimizer
@each_engine
@pytest.mark.parametrize("selected", [True, False])
def test_the_mask_of_a_single_number(optimizer: type[RuleOptimizer], engine: str, selected: bool):
    param = torch.nn.Parameter(torch.tensor(1.0))
    with running_on(engine) as name:
        group = {"params": [param], "mask": torch.tensor(selected)}
        opt = optimizer([group], lr=0.1, engine=name)
        param.grad = torch.tensor(1.0)
        opt.step()
    assert (param.item() != 1.0) == selected


@each_optimizer
@each_engine
@pytest.mark.parametrize("layout", ["dense", "rows"])
def test_a_mask_over_rows_without_elements(
    optimizer: type[RuleOptimizer], engine: str, layout: str
):
    gradients = [gradient_of(layout, seed, (6, 0)) for seed in range(2)]
    _, masked = train(optimizer, gradients, engine, mask=ROWS)
    _, alone = train(optimizer, gradients, engine)
    assert same(masked, alone)
