"""Masks as options of param groups: changed, per parameter, saved, in several threads."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.grads.masks import MaskSelection
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import FEW, Variant, on_each_engine, running_on

ROWS = torch.tensor([True, False, True, True, False, False])


def grad(seed: int, *, sparse: bool = False) -> Tensor:
    found = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed))
    return found.to_sparse(1) if sparse else found


def masked(mask: Tensor | None) -> RuleOptimizer:
    """After one step."""
    param = torch.nn.Parameter(grad(99))
    group = {"params": [param], **({} if mask is None else {"mask": mask})}
    opt = sparsestep.Adam([group], lr=0.1)
    moved(opt, 0)
    return opt


def moved(opt: RuleOptimizer, seed: int, *, sparse: bool = False) -> Tensor:
    """Take a step; which rows have moved."""
    (param,) = opt.param_groups[0]["params"]
    before = param.detach().clone()
    param.grad = grad(seed, sparse=sparse)
    opt.step()
    return (param.detach() != before).any(dim=1)


@on_each_engine(FEW)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("how", ["in place", "through a view", "replaced", "inference"])
def test_a_changed_mask_is_noticed(variant: Variant, engine: str, sparse: bool, how: str):
    """From the first step on, and once steps are replayed; an inference tensor has no version."""
    with torch.inference_mode(how == "inference"):
        mask = torch.zeros(6, dtype=torch.bool)
    with running_on(engine) as name:
        group = {"params": [torch.nn.Parameter(grad(99))], "mask": mask}
        opt = variant([group], lr=0.1, engine=name)
        for step, new in enumerate([ROWS, ~ROWS, torch.arange(6) > 1] * 2):
            if how == "replaced":
                opt.param_groups[0]["mask"] = new.clone()
            elif how == "through a view":
                mask.view(2, 3).copy_(new.view(2, 3))
            else:
                with torch.inference_mode(how == "inference"):
                    mask.copy_(new)
            assert torch.equal(moved(opt, step, sparse=sparse), new)
        opt.param_groups[0]["mask"] = None
        assert bool(moved(opt, 7).all())


def test_a_replaced_mask_is_let_go():
    """A new mask for every step must not cost the memory of all of them."""
    opt = masked(ROWS.clone())
    old = weakref.ref(opt.param_groups[0]["mask"])
    opt.param_groups[0]["mask"] = (~ROWS).clone()
    opt.step()
    gc.collect()
    assert old() is None


@pytest.mark.parametrize("change", ["mask", "order of params", "one more param"])
def test_a_list_of_masks_is_compared_in_every_step(change: str):
    """Also once steps are replayed."""
    results = []
    for engine in ("native", "reference"):
        params = [torch.nn.Parameter(grad(99)) for _ in range(3)]
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
                param.grad = grad(3 * step + place)
            opt.step()
        results.append([param.detach().clone() for param in params])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_checkpoint_carries_its_mask_and_one_without_leaves_the_groups():
    plain, opt, other = (masked(mask) for mask in (None, ROWS, ~ROWS))
    saved = plain.state_dict()
    assert "mask" not in saved["param_groups"][0]
    opt.load_state_dict(saved)
    assert opt.param_groups[0]["mask"] is ROWS
    assert torch.equal(moved(opt, 1), ROWS)
    other.load_state_dict(opt.state_dict())
    assert torch.equal(moved(other, 1), ROWS)


def test_a_selection_is_whole_before_it_counts_as_up_to_date():
    """Finding the slots of a large mask lets other threads run in between."""
    mask = torch.zeros(1 << 20, dtype=torch.bool)
    mask[::2] = True
    for _ in range(3):
        selection = MaskSelection(mask, mask.shape)
        found: list[int] = []

        def look(selection: MaskSelection = selection, found: list[int] = found) -> None:
            found.append(len(selection.refresh().indices))

        threads = [threading.Thread(target=look) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [1 << 19] * 4
