"""Masks that do not fit, and bad gradients under a mask: refused, and nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.optimizer import RuleOptimizer
from tests.grads.masked_training import BY_ROW, ELEMENTS, ROWS, SHAPE, gradient_of, train
from tests.table import ENGINES, each_engine, each_optimizer, running_on, snapshot, unchanged


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
    assert str(raised.value).startswith(f"{optimizer.__name__}: param group 0: mask")
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
    with pytest.raises(
        InputError, match=rf"^{optimizer.__name__}: param group 0: mask 0 must have shape \(6,\)"
    ):
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
