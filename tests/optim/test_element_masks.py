"""Masks over elements under rules that need whole rows: state per row, and int8 state.

State per element is packed by the mask, state per row is not.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.generate.garbage import Unusable
from tests.table import all_same_bits, same_bits, state_of

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "RowwiseAdagrad": (sparsestep.RowwiseAdagrad, {}),
    "RowwiseAdam": (sparsestep.RowwiseAdam, {}),
    "AdamW int8": (sparsestep.AdamW, {"state_dtype": torch.int8, "weight_decay": 0.0}),
    "per_row": (sparsestep.Adam, {"bias_correction": "per_row"}),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
OPTIMIZERS = {**OPTIMIZERS, "AdamW": (sparsestep.AdamW, {})}
each_engine = pytest.mark.parametrize("engine", ["native", "reference"])
MASK = torch.rand(9, 7, generator=torch.Generator().manual_seed(1)) < 0.4
MASK[3] = False


def make(name: str, weight: Tensor, **options: Any) -> tuple[Any, torch.nn.Parameter]:
    cls, given = OPTIMIZERS[name]
    param = torch.nn.Parameter(weight.clone())
    return cls([param], lr=0.1, **given, **options), param


def draw_grads(*, sparse: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    grads = [torch.randn(9, 7, generator=generator) for _ in range(4)]
    if not sparse:
        return grads
    rows = torch.tensor([[0, 4, 4, 7, 8]])
    return [torch.sparse_coo_tensor(rows, grad[:5], (9, 7)) for grad in grads]


def masked(grad: Tensor) -> Tensor:
    if not grad.is_sparse:
        return grad * MASK
    kept = grad._values() * MASK[grad._indices()[0]]
    return torch.sparse_coo_tensor(grad._indices(), kept, grad.shape)


@each_optimizer
@each_engine
@pytest.mark.parametrize("sparse", [False, True])
def test_a_row_sees_the_gradient_of_its_kept_elements(name: str, engine: str, sparse: bool):
    """Elements with zero gradients do not move here, so masking the gradient has the same bits."""
    weight = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
    ours, param = make(name, weight, mask=MASK, engine=engine)
    other, expected = make(name, weight, engine=engine)
    for grad in draw_grads(sparse=sparse):
        param.grad, expected.grad = grad, masked(grad)
        ours.step()
        other.step()
    assert same_bits(param.detach()[MASK], expected.detach()[MASK])
    assert same_bits(param.detach()[~MASK], weight[~MASK])
    touched = [row for row in (0, 4, 7, 8) if MASK[row].any()] if sparse else MASK.any(1)
    found = state_of(ours, param)
    for key, value in other.state[expected].items():
        assert same_bits(found[key].reshape(-1)[:1], value.reshape(-1)[:1])
        if value.dim():
            assert same_bits(found[key][touched], value[touched])
        if value.dim() == 2:
            assert ours.state[param][key].shape == (int(MASK.sum()),)


@each_optimizer
def test_decay_spares_what_a_mask_excludes(name: str):
    weight = torch.randn(9, 7, generator=torch.Generator().manual_seed(0))
    ours, param = make(name, weight, mask=MASK)
    ours.param_groups[0]["weight_decay"] = 0.1
    for grad in draw_grads(sparse=False):
        param.grad = grad
        ours.step()
    assert same_bits(param.detach()[~MASK], weight[~MASK])
    assert (param.detach() != weight)[MASK].all()


@each_optimizer
def test_set_mask_keeps_the_state_of_rows_and_elements_that_stay(name: str):
    ours, param = make(name, torch.ones(9, 7), mask=MASK)
    param.grad = torch.ones(9, 7)
    ours.step()
    before = {key: value.clone() for key, value in state_of(ours, param).items()}
    new = MASK.clone()
    new[0], new[1] = ~MASK[0], True  # of row 0 nothing stays, of row 1 everything
    ours.set_mask(param, new)
    for key, value in state_of(ours, param).items():
        if not value.dim():
            continue
        assert not value[0].any() or key.endswith("_scale")
        stays = MASK[1] if value.dim() == 2 else slice(None)
        assert same_bits(value[1:2][..., stays], before[key][1:2][..., stays])
        assert same_bits(value[2:], before[key][2:])
    ours.step()
    assert (param.detach()[new] != 1).all()


@each_optimizer
def test_rows_are_forgotten(name: str):
    ours, param = make(name, torch.ones(9, 7), mask=MASK)
    param.grad = torch.ones(9, 7)
    ours.step()
    before = {key: value.clone() for key, value in state_of(ours, param).items()}
    rows = torch.tensor([2, 5])
    ours.forget(param, rows)
    for key, value in state_of(ours, param).items():
        if value.dim():
            assert same_bits(value, before[key].index_fill(0, rows, 0))
            assert before[key][rows].any()


def test_packed_checkpoints_change_between_int8_and_float():
    """As dense ones do: codes have a scale for each row of the parameter."""
    for first, second in (("AdamW int8", "AdamW"), ("AdamW", "AdamW int8")):
        ours, param = make(first, torch.ones(9, 7), mask=MASK)
        for grad in draw_grads(sparse=False):
            param.grad = grad
            ours.step()
        found = []
        for packed in (False, True):
            other, weight = make(second, torch.ones(9, 7), mask=MASK)
            state = ours.state_dict(packed=packed)["state"]
            other.load_state_dict({**other.state_dict(), "state": state})
            found.append(other.state[weight])
        for key, value in found[0].items():
            assert same_bits(value, found[1][key])
        assert found[0]["exp_avg"].shape == (int(MASK.sum()),)


def test_entries_of_elements_stay_apart_within_their_row():
    """A gradient of single elements under a mask over elements, for a rule of whole rows."""
    grad = torch.sparse_coo_tensor([[0, 0, 4], [1, 2, 5]], torch.ones(3), (9, 7))
    for engine in ("native", "reference"):
        ours, param = make(
            "RowwiseAdam", torch.ones(9, 7), mask=torch.ones_like(MASK), engine=engine
        )
        ours.param_groups[0]["weight_decay"] = 0.1
        param.grad = grad
        ours.step()
        assert (param.detach() != 1).nonzero().tolist() == [[0, 1], [0, 2], [4, 5]]


def test_int8_state_that_does_not_start_at_zero_is_not_reset_by_elements():
    param = torch.nn.Parameter(torch.ones(9, 7))
    options = {"initial_accumulator_value": 0.5, "state_dtype": torch.int8, "mask": MASK}
    ours = sparsestep.Adagrad([param], lr=0.1, **options)
    param.grad = torch.ones(9, 7)
    ours.step()
    before = ours.state[param]["sum"].clone()
    with pytest.raises(sparsestep.errors.InputError, match="start at zero"):
        ours.set_mask(param, ~MASK)
    assert same_bits(ours.state[param]["sum"], before)


def test_packed_state_or_options_that_cannot_be_read_are_refused():
    """State gets another shape in ``state_dict()`` and in a step without a mask."""
    for cls, name, value in (
        (sparsestep.Adagrad, "initial_accumulator_value", 0.5),
        (sparsestep.SGD, "momentum", 0.9),
    ):
        param = torch.nn.Parameter(torch.ones(9, 7))
        opt: Any = cls([param], mask=MASK, **{name: value})
        group, param.grad = opt.param_groups[0], torch.ones(9, 7)
        opt.step()
        for wrong in ("x", torch.ones(2)):
            group[name] = wrong
            with pytest.raises(sparsestep.InputError, match=name):
                opt.state_dict()
        del group[name]
        with pytest.raises(sparsestep.InputError, match=name):
            opt.state_dict()
        group.update({"mask": None, name: value})
        (state,) = (key for key in opt.state[param] if key != "step")
        opt.state[param][state] = Unusable(opt.state[param][state])
        with pytest.raises(sparsestep.InputError, match="memory"):
            opt.step()


def test_state_dict_has_what_there_is():
    """As without a mask, state that was removed by hand is refused where it is needed, by steps."""
    for missing in ("exp_avg_sq", "step"):
        param = torch.nn.Parameter(torch.ones(9, 7))
        opt = sparsestep.RowwiseAdam([param], mask=MASK)
        param.grad = torch.ones(9, 7)
        opt.step()
        del opt.state[param][missing]
        saved = opt.state_dict()["state"][0]
        assert saved["exp_avg"].shape == (9, 7)
        assert missing not in saved
        with pytest.raises(sparsestep.InputError, match=missing):
            opt.step()


def test_masks_and_state_of_one_column_may_have_gaps():
    """Torch flattens them to views that are not contiguous."""

    def with_gaps(column: Tensor) -> Tensor:
        return torch.cat([column, ~column if column.dtype is torch.bool else column + 1], 1)[:, :1]

    found = []
    for view in (torch.clone, with_gaps):
        param = torch.nn.Parameter(torch.zeros(9, 1))
        param.grad = torch.arange(9.0).view(9, 1)
        unmasked = sparsestep.Adam([param], lr=0.1)
        unmasked.step()
        saved = unmasked.state_dict()
        for name in ("exp_avg", "exp_avg_sq"):
            saved["state"][0][name] = view(saved["state"][0][name])
        saved["param_groups"][0]["mask"] = view(torch.arange(9).view(9, 1) % 3 > 0)
        ours = sparsestep.Adam([param])
        ours.load_state_dict(saved)
        ours.step()
        state = ours.state_dict()["state"][0]
        found.append([param.detach(), state["exp_avg"], state["exp_avg_sq"]])
    assert all_same_bits(*found)
