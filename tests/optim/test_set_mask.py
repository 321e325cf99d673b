"""``set_mask``: state of entries that stay is kept, all other state starts over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import storage
from tests.optim.test_int8 import LARGEST
from tests.subject import refused
from tests.table import EVERY, FEW, WITH_DENSE, Variant, same_bits, state_of

SHAPE = (9, 4)
CHANGES = 14


def mask_of(change: int, *, by_row: bool) -> Tensor | None:
    """Masks over rows, over elements, and none at all."""
    if change % 7 == 6:
        return None
    generator = torch.Generator().manual_seed(change)
    shape = SHAPE[:1] if by_row or change % 3 == 2 else SHAPE
    return torch.rand(shape, generator=generator) < 0.5


def gradient(step: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    if step % 2:
        return torch.randn(SHAPE, generator=generator).to(dtype)
    rows = torch.randint(0, SHAPE[0], (1, 6), generator=generator)
    values = torch.randn(6, SHAPE[1], generator=generator).to(dtype)
    return torch.sparse_coo_tensor(rows, values, SHAPE, check_invariants=True)


def over_elements(mask: Tensor | None) -> Tensor:
    if mask is None:
        return torch.ones(SHAPE, dtype=torch.bool)
    return mask if mask.dim() > 1 else mask.view(-1, 1).expand(SHAPE)


def edited_by_hand(
    make: Any, opt: Any, param: Tensor, old: Tensor | None, new: Tensor | None
) -> tuple[Any, Tensor]:
    """Another optimizer with the new mask, and the state of what both masks have."""
    other = torch.nn.Parameter(param.detach().clone())
    fresh = make(other, new)
    fresh.materialize_state()
    initial, same = state_of(fresh, other), over_elements(old) == over_elements(new)
    found = {}
    for name, value in state_of(opt, param).items():
        if name == "step":
            found[name] = value.clone() if isinstance(value, Tensor) else value
            continue
        begun = initial.get(name, torch.zeros_like(value))
        kept = same if value.dim() > 1 else same.all(1)
        found[name] = torch.where(kept, value, begun)
    if found:
        fresh.state[other] = found
    return fresh, other


CASES = [
    *((variant, {}) for variant in EVERY),
    *((variant, {"engine": "reference"}) for variant in FEW),
    *((variant, {"state_dtype": torch.bfloat16}) for variant in FEW),
    *((variant, {"state_dtype": torch.int8, "rounding_seed": 5}) for variant in LARGEST.values()),
]


@pytest.mark.parametrize(("variant", "options"), CASES, ids=lambda each: str(each))
def test_it_equals_an_optimizer_whose_state_was_edited(variant: Variant, options: dict[str, Any]):

    def make(param: Tensor, mask: Tensor | None) -> Any:
        return variant([param], **options, **({} if mask is None else {"mask": mask}))

    param: Tensor = torch.nn.Parameter(torch.linspace(-1, 1, 36).view(SHAPE))
    opt, old, changed = make(param, None), None, 0
    by_row = opt.stored_rule_for(opt.param_groups[0]).needs_whole_rows
    for change in range(CHANGES):
        new = mask_of(change, by_row=by_row)
        if param in opt.state:
            other, expected = edited_by_hand(make, opt, param, old, new)
        else:
            expected = torch.nn.Parameter(param.detach().clone())
            other = make(expected, new)
        before = param.detach().clone()
        opt.set_mask(param, new)
        assert same_bits(param, before)
        if change % 5 == 4:  # the mask is part of the checkpoint
            again = make(param, None)
            again.load_state_dict(opt.state_dict())
            opt = again
        for step in range(2):
            for each in (param, expected):
                each.grad = gradient(2 * change + step)
            opt.step()
            other.step()
        assert same_bits(param, expected), change
        changed += not torch.equal(before, param)
        assert torch.equal(param[~over_elements(new)], before[~over_elements(new)])
        found = state_of(opt, param)
        for name, value in state_of(other, expected).items():
            assert same_bits(torch.as_tensor(found[name]), torch.as_tensor(value)), name
        old = new
    assert changed > CHANGES // 2


@pytest.mark.parametrize("cls", WITH_DENSE, ids=lambda cls: cls.__name__)
def test_with_dense_semantics_rows_catch_up_first(cls: Any):
    """Masked semantics with dense gradients takes every step of every selected row."""
    options = {"weight_decay": 0.1} if cls is sparsestep.AdamW else {}
    options |= {"momentum": 0.9} if cls is sparsestep.SGD else {}
    params = [torch.nn.Parameter(torch.linspace(-1, 1, 36).double().view(SHAPE)) for _ in range(2)]
    sparse = cls([params[0]], lr=0.1, semantics="dense", **options)
    dense = cls([params[1]], lr=0.1, **options)
    for change in range(CHANGES):
        mask = mask_of(change, by_row=True)
        sparse.set_mask(params[0], mask)
        dense.set_mask(params[1], mask)
        for step in range(4):
            grad = gradient(2 * (4 * change + step), torch.float64)
            sparse.catch_up(params[0], grad._indices()[0])
            params[0].grad, params[1].grad = grad, grad.to_dense()
            sparse.step()
            dense.step()
        if change % 4 == 3:
            sparse.catch_up()
            torch.testing.assert_close(*params)
    sparse.catch_up()
    torch.testing.assert_close(*params, rtol=1e-9, atol=1e-12)


def test_other_shapes_layouts_and_parameters_that_share_a_group():
    transposed = torch.nn.Parameter(torch.ones(4, 6).t())
    imaginary = torch.nn.Parameter(torch.ones(3, 2, dtype=torch.complex64))
    number = torch.nn.Parameter(torch.tensor(1.0))
    vector = torch.nn.Parameter(torch.ones(5))
    params = [transposed, imaginary, number, vector]
    opt = sparsestep.Adagrad(params, lr=0.1, initial_accumulator_value=0.5)
    for param in params:
        param.grad = torch.ones_like(param)
    opt.step()
    states = {param: opt.state[param]["sum"].clone() for param in params}
    for param in params:
        mask = torch.rand(param.shape, generator=torch.Generator().manual_seed(1)) < 0.5
        opt.set_mask(param, mask)
        begun = 0.5 * (1 + 1j) if param.is_complex() else 0.5
        assert torch.equal(state_of(opt, param)["sum"], states[param].masked_fill(~mask, begun))
    assert len(opt.param_groups[0]["mask"]) == 4
    for param in params:
        opt.set_mask(param, None)
    assert "mask" not in opt.param_groups[0]


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_listed_twice_has_one_mask():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    opt = sparsestep.SGD([param, param], lr=1.0)
    opt.set_mask(param, torch.tensor([True, False, False]))
    param.grad = torch.ones(3, 2)
    opt.step()
    assert param[:, 0].tolist() == [-2.0, 0.0, 0.0]


def test_the_mask_is_copied_and_may_be_changed_and_set_again():
    param, mask = torch.nn.Parameter(torch.zeros(2, 2)), torch.tensor([True, True])
    opt = sparsestep.Adagrad([param], lr=1.0)
    opt.set_mask(param, mask)
    param.grad = torch.ones(2, 2)
    opt.step()
    mask[0] = False
    opt.step()
    assert opt.state[param]["sum"].tolist() == [[2.0, 2.0], [2.0, 2.0]]
    opt.set_mask(param, mask)
    opt.step()
    assert opt.state[param]["sum"].tolist() == [[0.0, 0.0], [3.0, 3.0]]


@pytest.mark.parametrize("by_row", [True, False])
def test_tables_in_files(tmp_path: Path, by_row: bool):
    table = storage.mapped(tmp_path / "table", (50, 4), optimizer=sparsestep.Adagrad)
    param = torch.nn.Parameter(table)
    opt = sparsestep.Adagrad([param], lr=0.1)
    param.grad = torch.ones(50, 4)
    opt.step()
    mask = torch.rand((50,) if by_row else (50, 4)) < 0.5
    opt.set_mask(param, mask)
    kept = mask.view(50, -1).expand(50, 4).float()
    assert torch.equal(opt.state[param]["sum"], kept)


def test_a_refusal_changes_nothing():
    param = torch.nn.Parameter(torch.ones(3, 2))
    opt = sparsestep.Adam([param], mask=torch.tensor([True, True, False]))
    param.grad = torch.ones(3, 2)
    opt.step()
    mask = opt.param_groups[0]["mask"]
    for wrong in (torch.ones(2, dtype=torch.bool), torch.ones(3), "mask", [True] * 3, mask):
        with refused(opt, match="set_mask: .*mask"):
            opt.set_mask(param, wrong)
    with refused(opt, match="set_mask: .*parameter"):
        opt.set_mask(torch.ones(3, 2), mask.clone())
    assert opt.param_groups[0]["mask"] is mask


@pytest.mark.parametrize("by_row", [True, False])
def test_new_entries_start_over_whatever_a_checkpoint_had_for_them(by_row: bool):
    param, mask = torch.nn.Parameter(torch.zeros(SHAPE)), mask_of(0, by_row=by_row)
    whole = sparsestep.Adagrad([param], lr=0.1)
    param.grad = torch.ones(SHAPE)
    whole.step()
    for new in (None, torch.ones(SHAPE, dtype=torch.bool)):
        opt = sparsestep.Adagrad([param], lr=0.1, mask=mask)
        opt.load_state_dict(whole.state_dict())
        opt.set_mask(param, new)
        assert torch.equal(state_of(opt, param)["sum"], over_elements(mask).float())
