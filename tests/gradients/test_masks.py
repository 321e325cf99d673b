"""Masks: what lies outside keeps its bits, what lies inside moves as if there were nothing else."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.rules import OPTIMIZERS
from tests.table import (
    ENGINES,
    Gradient,
    each_engine,
    each_optimizer,
    running_on,
    same_bits,
    snapshot,
    state_tensors,
    unchanged,
)

BY_ROW = (sparsestep.RowwiseAdagrad, sparsestep.RowwiseAdam)
BY_ELEMENT = tuple(cls for cls in OPTIMIZERS if cls not in BY_ROW)
# Everything that would move an entry which has no gradient of its own.
OPTIONS: dict[type[RuleOptimizer], dict[str, Any]] = {
    sparsestep.SparseAdam: {},
    sparsestep.Adam: {"weight_decay": 0.1, "amsgrad": True},
    sparsestep.AdamW: {"weight_decay": 0.1},
    sparsestep.RAdam: {"weight_decay": 0.1},
    sparsestep.Adagrad: {"weight_decay": 0.1, "initial_accumulator_value": 0.5},
    sparsestep.RowwiseAdagrad: {"weight_decay": 0.1},
    sparsestep.RowwiseAdam: {"weight_decay": 0.1, "decoupled_weight_decay": True},
    sparsestep.SGD: {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True},
    sparsestep.RMSprop: {"weight_decay": 0.1, "momentum": 0.9, "centered": True},
    sparsestep.Lion: {"weight_decay": 0.1},
    sparsestep.Ftrl: {"l1": 0.05, "l2": 0.1},
}
SHAPE = (6, 3, 2)
LAYOUTS = ["dense", "rows", "hybrid", "elements"]
SPARSE_DIMS = {"rows": 1, "hybrid": 2, "elements": 3}


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def exact(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Values whose sums are exact in every order."""
    return torch.randint(-16, 17, shape, generator=generator) / 8


def gradient_of(
    layout: str, seed: int, shape: tuple[int, ...] = SHAPE, entries: int = 10
) -> Gradient:
    """Random, with duplicates where the layout has room for them."""
    generator = seeded(seed)
    if layout == "dense":
        return Gradient(shape, None, exact(shape, generator))
    sparse_dim = min(SPARSE_DIMS[layout], len(shape))
    if layout == "elements":
        sparse_dim = len(shape)
    indices = torch.stack(
        [
            torch.randint(0, max(1, size), (entries,), generator=generator)
            for size in shape[:sparse_dim]
        ]
    )
    return Gradient(shape, indices, exact((entries, *shape[sparse_dim:]), generator))


def inside(gradient: Gradient, mask: Tensor) -> Gradient:
    """The gradient that holds only what the mask selects, entry by entry in the same order."""
    indices, values = gradient.indices, gradient.values
    if indices is None:
        indices, values = torch.zeros(0, 1, dtype=torch.int64), values[None]
    sparse_dim, entries = indices.shape
    # Split each entry until it is as fine as the mask.
    finer = gradient.shape[sparse_dim : mask.dim()]
    within = torch.ones(finer).nonzero().t()
    pieces = within.shape[1]
    indices = torch.cat([indices.repeat_interleave(pieces, 1), within.repeat(1, entries)])
    values = values.reshape(entries * pieces, *gradient.shape[len(indices) :])
    kept = mask[tuple(indices[: mask.dim()])]
    return Gradient(gradient.shape, indices[:, kept], values[kept])


def train(
    optimizer: type[RuleOptimizer],
    gradients: list[Gradient],
    engine: str,
    dtype: torch.dtype = torch.float32,
    *,
    mask: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, RuleOptimizer]:
    shape = gradients[0].shape
    param = torch.nn.Parameter(torch.randn(shape, generator=seeded(99)).to(dtype))
    group = {"params": [param]} if mask is None else {"params": [param], "mask": mask}
    with running_on(engine) as name:
        opt = optimizer([group], lr=0.1, engine=name, **OPTIONS[optimizer], **options)
        for gradient in gradients:
            param.grad = gradient.tensor(dtype)
            opt.step()
    return param.detach(), opt


def real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def same(one: RuleOptimizer, other: RuleOptimizer) -> bool:
    """Params, state and step counts, to the last bit."""
    ours, theirs = (
        [real(t) for t in (*(p.detach() for p in o.param_groups[0]["params"]), *state_tensors(o))]
        for o in (one, other)
    )
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def start_of(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(99)).to(dtype)


ROWS = torch.tensor([True, False, True, True, False, False])
ELEMENTS = torch.rand(SHAPE, generator=seeded(7)) < 0.5
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
    for kept in masked._rule_for(masked.param_groups[0]).state:
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


@pytest.mark.parametrize("optimizer", [cls for cls in OPTIMIZERS if cls._supports_complex])
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


# All and nothing


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


# Changes


@each_optimizer
@each_engine
@pytest.mark.parametrize("layout", ["dense", "rows"])
@pytest.mark.parametrize("how", ["in place", "through a view", "replaced"])
def test_a_changed_mask_is_noticed(
    optimizer: type[RuleOptimizer], engine: str, layout: str, how: str
):
    masks = [ROWS, ~ROWS, torch.arange(6) > 1]
    gradients = [gradient_of(layout, seed) for seed in range(3)]
    param = torch.nn.Parameter(start_of(SHAPE))
    mask = torch.zeros(6, dtype=torch.bool)
    with running_on(engine) as name:
        group = {"params": [param], "mask": mask}
        opt = optimizer([group], lr=0.1, engine=name, **OPTIONS[optimizer])
        for new, gradient in zip(masks, gradients, strict=True):
            before = param.detach().clone()
            if how == "replaced":
                opt.param_groups[0]["mask"] = new.clone()
            elif how == "in place":
                mask.copy_(new)
            else:
                mask.view(2, 3).copy_(new.view(2, 3))
            param.grad = gradient.tensor(torch.float32)
            opt.step()
            assert same_bits(param.detach()[~new], before[~new])
            assert not torch.equal(param.detach()[new], before[new])
    _, alone = train(
        optimizer, [inside(g, m) for g, m in zip(gradients, masks, strict=True)], engine
    )
    assert same(opt, alone)


@each_optimizer
@pytest.mark.parametrize("how", ["set to None", "deleted"])
def test_without_its_mask_a_param_moves_as_a_whole(optimizer: type[RuleOptimizer], how: str):
    _, opt = train(optimizer, [gradient_of("dense", 0)], "reference", mask=ROWS)
    if how == "deleted":
        del opt.param_groups[0]["mask"]
    else:
        opt.param_groups[0]["mask"] = None
    assert bool(step_with(opt, 1).all())


def test_a_replaced_mask_is_let_go():
    """Whoever makes a new mask for every step must not pay for all of them."""
    param = torch.nn.Parameter(torch.zeros(6, 2))
    opt = sparsestep.SGD([{"params": [param], "mask": ROWS.clone()}], lr=0.1)
    param.grad = torch.ones(6, 2)
    opt.step()
    old = weakref.ref(opt.param_groups[0]["mask"])
    opt.param_groups[0]["mask"] = (~ROWS).clone()
    opt.step()
    gc.collect()
    assert old() is None


def test_a_mask_that_does_not_count_its_changes():
    """Made in inference mode it has no version; it is then read at every step."""
    with torch.inference_mode():
        mask = ROWS.clone()
    param = torch.nn.Parameter(torch.zeros(6, 2))
    opt = sparsestep.SGD([{"params": [param], "mask": mask}], lr=1.0)
    param.grad = torch.ones(6, 2)
    opt.step()
    assert torch.equal(param[:, 0] != 0, ROWS)


# Refusals


def bad_masks() -> dict[str, tuple[Any, str]]:
    return {
        "too short": (torch.ones(5, dtype=torch.bool), r"shape \(6,\).*Got \(5,\)"),
        "too long": (torch.ones(7, dtype=torch.bool), r"shape \(6,\).*Got \(7,\)"),
        "of columns": (torch.ones(3, 2, dtype=torch.bool), r"Got \(3, 2\)"),
        "a column": (torch.ones(6, 1, 1, dtype=torch.bool), r"Got \(6, 1, 1\)"),
        "a number": (torch.tensor(True), r"Got \(\)"),
        "of floats": (torch.ones(6), "bool tensor. Got torch.float32"),
        "of bytes": (torch.ones(6, dtype=torch.uint8), "bool tensor. Got torch.uint8"),
        "of indices": (torch.arange(6), "bool tensor. Got torch.int64"),
        "elsewhere": (torch.ones(6, dtype=torch.bool, device="meta"), "on cpu.*on meta"),
        "a list of too many": ([ROWS, None], "a list of 1. Got 2"),
        "an empty list": ([], "a list of 1. Got 0"),
        "a list of lists": ([[True] * 6], "bool tensor. Got list"),
        "a dict": ({"rows": ROWS}, "a list of 1. Got dict"),
    }


@each_optimizer
@pytest.mark.parametrize("bad", bad_masks())
def test_a_mask_that_does_not_fit_is_refused(optimizer: type[RuleOptimizer], bad: str):
    mask, message = bad_masks()[bad]
    with pytest.raises(InputError, match=message) as raised:
        optimizer([{"params": [torch.zeros(SHAPE)], "mask": mask}])
    assert str(raised.value).startswith(f"{optimizer.__name__}: mask")
    opt = optimizer([torch.zeros(2)])
    param = torch.nn.Parameter(torch.zeros(SHAPE))
    with pytest.raises(InputError, match=message):
        opt.add_param_group({"params": [param], "mask": mask})
    assert len(opt.param_groups) == 1
    opt.add_param_group({"params": [param], "mask": ROWS})  # the param is still free


@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.RowwiseAdam])
@pytest.mark.parametrize("engine", ["reference", ENGINES[-1]])
@pytest.mark.parametrize("layout", ["dense", "rows"])
@pytest.mark.parametrize("bad", bad_masks())
def test_a_mask_that_no_longer_fits_is_refused_and_nothing_changes(
    optimizer: type[RuleOptimizer], engine: str, layout: str, bad: str
):
    """A group's options are the user's to change, also wrongly."""
    _, opt = train(optimizer, [gradient_of(layout, 0)], engine, mask=ROWS)
    opt.param_groups[0]["mask"], message = bad_masks()[bad]
    before = snapshot(opt)
    with running_on(engine), pytest.raises(InputError, match=message) as raised:
        opt.step()
    assert str(raised.value).startswith(optimizer.__name__)
    assert unchanged(opt, before)


PER_ROW_COUNTS = (sparsestep.SparseAdam, sparsestep.Adam, sparsestep.AdamW)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        *((cls, {}) for cls in BY_ROW),
        *((cls, {"bias_correction": "per_row"}) for cls in (*PER_ROW_COUNTS, BY_ROW[1])),
    ],
)
def test_rules_that_keep_numbers_per_row_refuse_masks_of_elements(
    optimizer: type[RuleOptimizer], options: dict[str, Any]
):
    param = torch.nn.Parameter(torch.zeros(SHAPE))
    with pytest.raises(InputError, match=rf"^{optimizer.__name__}: mask 0 must have shape \(6,\)"):
        optimizer([{"params": [param], "mask": ELEMENTS, **options}])
    opt = optimizer([{"params": [param], "mask": ROWS, **options}])
    opt.param_groups[0]["mask"] = ELEMENTS
    param.grad = torch.ones(SHAPE)
    with pytest.raises(InputError, match=r"mask 0 must have shape \(6,\)"):
        opt.step()


@each_optimizer
@each_engine
@pytest.mark.parametrize("bad", [-1, 6, 2**31, 2**62, -(2**62)])
def test_a_bad_index_under_a_mask_is_refused_and_nothing_changes(
    optimizer: type[RuleOptimizer], engine: str, bad: int
):
    _, opt = train(optimizer, [gradient_of("rows", 0)], engine, mask=ROWS)
    (param,) = opt.param_groups[0]["params"]
    param.grad = torch.sparse_coo_tensor(
        torch.tensor([[0, bad, 2]]), torch.ones(3, 3, 2), SHAPE, check_invariants=False
    )
    before = snapshot(opt)
    with (
        running_on(engine),
        pytest.raises(InputError, match=rf"dim 0 must be in \[0, 6\). Got {bad}") as raised,
    ):
        opt.step()
    assert str(raised.value).startswith(f"{optimizer.__name__}: param 0 of group 0: ")
    assert unchanged(opt, before)


# Several params


@each_optimizer
@each_engine
def test_a_list_has_a_mask_or_none_for_each_param(optimizer: type[RuleOptimizer], engine: str):
    starts = [start_of(SHAPE), start_of((4, 2)), start_of((5,))]
    params = [torch.nn.Parameter(start.clone()) for start in starts]
    masks = [ROWS, None, torch.arange(5) == 3]
    with running_on(engine) as name:
        opt = optimizer([{"params": params, "mask": masks}], lr=0.1, engine=name)
        for param in params:
            param.grad = torch.ones(param.shape)
        opt.step()
    moved = [(p.detach() != s) for p, s in zip(params, starts, strict=True)]
    assert torch.equal(moved[0], ROWS[:, None, None].expand(SHAPE))
    assert bool(moved[1].all())
    assert torch.equal(moved[2], masks[2])


@each_optimizer
def test_groups_have_their_own_masks(optimizer: type[RuleOptimizer]):
    params = [torch.nn.Parameter(torch.ones(6, 2)) for _ in range(3)]
    opt = optimizer(
        [
            {"params": params[:1], "mask": ROWS},
            {"params": params[1:2], "mask": ~ROWS},
            {"params": params[2:]},
        ],
        lr=0.1,
    )
    for param in params:
        param.grad = torch.ones(6, 2)
    opt.step()
    moved = [(param != 1).all(dim=1) for param in params]
    assert torch.equal(moved[0], ROWS)
    assert torch.equal(moved[1], ~ROWS)
    assert bool(moved[2].all())


# Checkpoints and copies


def step_with(opt: RuleOptimizer, seed: int) -> Tensor:
    (param,) = opt.param_groups[0]["params"]
    before = param.detach().clone()
    param.grad = gradient_of("dense", seed).tensor(torch.float32)
    opt.step()
    return (param.detach() != before).flatten(1).any(dim=1)


@each_optimizer
def test_a_checkpoint_without_a_mask_leaves_the_group_its_own(optimizer: type[RuleOptimizer]):
    _, plain = train(optimizer, [gradient_of("dense", 0)], "reference")
    _, masked = train(optimizer, [gradient_of("dense", 0)], "reference", mask=ROWS)
    saved = plain.state_dict()
    assert "mask" not in saved["param_groups"][0]
    masked.load_state_dict(saved)
    assert masked.param_groups[0]["mask"] is ROWS
    assert torch.equal(step_with(masked, 1), ROWS)


@each_optimizer
def test_a_checkpoint_carries_its_mask(optimizer: type[RuleOptimizer]):
    _, masked = train(optimizer, [gradient_of("dense", 0)], "reference", mask=ROWS)
    _, other = train(optimizer, [gradient_of("dense", 0)], "reference", mask=~ROWS)
    other.load_state_dict(masked.state_dict())
    assert torch.equal(step_with(other, 1), ROWS)


@each_optimizer
@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda opt: pickle.loads(pickle.dumps(opt))],
    ids=["deepcopy", "pickle"],
)
def test_copies_have_a_mask_of_their_own(optimizer: type[RuleOptimizer], copied: Any):
    mask = ROWS.clone()
    _, opt = train(optimizer, [gradient_of("dense", 0)], "reference", mask=mask)
    again = copied(opt)
    assert torch.equal(step_with(again, 1), ROWS)
    assert torch.equal(step_with(opt, 1), ROWS)
    assert same(opt, again)
    mask.logical_not_()
    assert torch.equal(step_with(again, 2), ROWS)
    assert torch.equal(step_with(opt, 2), ~ROWS)
