"""Masks as options of param groups: changed, given for several parameters, saved and copied."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.grads.masked_training import (
    OPTIONS,
    ROWS,
    SHAPE,
    gradient_of,
    inside,
    same,
    start_of,
    train,
)
from tests.table import each_engine, each_optimizer, running_on, same_bits

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


@pytest.mark.parametrize("change", ["mask", "order of params", "one more param"])
def test_a_list_of_masks_is_compared_in_every_step(change: str):
    """Also after steps that are done in one call, which compares what it was told."""
    results = []
    for engine in ("native", "reference"):
        params = [torch.nn.Parameter(start_of(SHAPE)) for _ in range(3)]
        group = {"params": params[:2], "mask": [ROWS.clone(), ~ROWS]}
        opt = sparsestep.AdamW([group], lr=0.1, engine=engine)
        for step in range(6):
            if step == 4:
                group = opt.param_groups[0]
                if change == "mask":
                    group["mask"][1] = torch.arange(6) > 1
                elif change == "order of params":
                    group["params"].reverse()
                else:
                    group["params"].append(params[2])
                    group["mask"].append(ROWS.clone())
            for place, param in enumerate(params):
                param.grad = gradient_of("dense", 3 * step + place).tensor(torch.float32)
            opt.step()
        results.append([param.detach().clone() for param in params])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)
