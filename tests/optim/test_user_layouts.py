"""A user's own formula takes every layout, and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.layouts import (
    CASES,
    LAYOUTS,
    Given,
    each_kind,
    each_layout,
    of_compressed,
    of_masked_tensors,
)
from tests.optim.own_rules import SHAPE, close, randn, table_of, trained
from tests.table import same_bits

# What torch lets be assigned to ``param.grad`` of a strided param.
ASSIGNABLE = ["COO, rows", "COO, elements", "MaskedTensor", "strided"]


@each_layout
@each_kind
@of_masked_tensors
@of_compressed
def test_every_layout_by_hand(layout: str, kind: str):
    _, functional, oracle, name, shape = CASES[kind]
    weight = randn(*SHAPE)
    expected, kept = weight.clone(), torch.zeros(shape)
    opt = functional([weight], lr=0.1)
    for seed in range(4):
        given = LAYOUTS[layout](seed)
        expected, kept = oracle(expected, kept, given)
        opt.step([given.grad])
        assert close(weight, expected)
        assert close(opt.state[weight][name], kept)
    assert same_bits(weight, randn(*SHAPE)) is False


@pytest.mark.parametrize("layout", ASSIGNABLE)
@each_kind
@of_masked_tensors
def test_every_layout_that_torch_lets_be_a_grad(layout: str, kind: str):
    cls, _, oracle, name, shape = CASES[kind]
    param = table_of()
    expected, kept = param.detach().clone(), torch.zeros(shape)
    opt = cls([param], lr=0.1)
    for seed in range(4):
        given = LAYOUTS[layout](seed)
        expected, kept = oracle(expected, kept, given)
        param.grad = given.grad
        opt.step()
        assert close(param.detach(), expected)
        assert close(opt.state[param][name], kept)


@pytest.mark.parametrize("layout", ["strided", "COO, rows", "COO, elements"])
@pytest.mark.parametrize("by", ["row", "element"])
@each_kind
def test_a_mask(layout: str, by: str, kind: str):
    cls, _, oracle, name, shape = CASES[kind]
    mask = torch.tensor([True, True, False, False, True, False])
    if by == "element":
        mask = mask[:, None] & torch.tensor([True, False, True, True])
    param = table_of()
    if (by, kind) == ("element", "per row"):
        with pytest.raises(InputError, match=r"mask 0 must have shape \(6,\)"):
            cls([param], lr=0.1, mask=mask)
        return
    whole = mask if by == "element" else mask[:, None].expand(SHAPE)
    expected, kept = param.detach().clone(), torch.zeros(shape)
    opt = cls([param], lr=0.1, mask=mask)
    for seed in range(4):
        given = LAYOUTS[layout](seed)
        param.grad = given.grad
        given = Given(given.grad, given.total * whole, given.held & whole)
        expected, kept = oracle(expected, kept, given)
        opt.step()
        assert close(param.detach(), expected)
        assert close(opt.state[param][name], kept)
    assert same_bits(param.detach()[~whole], randn(*SHAPE)[~whole])


def test_what_the_function_sees():
    """Slots and blocks; each slot once, with the sum of its entries; nothing for no entries."""
    seen: list[tuple[Any, ...]] = []

    @sparsestep.rule(state={"kept": 0.0})
    def by_element(param, grad, kept):
        seen.append((param.tolist(), grad.tolist()))
        return param, kept

    weight = torch.arange(6.0).view(3, 2)
    opt = type("Watched", (FunctionalOptimizer,), {"optimizer_class": by_element})(
        [weight], engine="reference"
    )
    opt.step([sparsestep.IndexedGrad(torch.tensor([2, 0, 2]), torch.ones(3, 2))])
    opt.step([torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()])
    opt.step([torch.ones(3, 2)])
    opt.step([torch.zeros(3, 2).to_sparse_coo()])
    assert seen == [
        ([[0, 1], [4, 5]], [[1, 1], [2, 2]]),
        ([[1], [4]], [[3], [4]]),
        ([[0, 1, 2, 3, 4, 5]], [[1] * 6]),
    ]
    assert int(opt.state[weight]["step"]) == 4

    @sparsestep.rule(row_state={"kept": 0.0})
    def by_row(param, grad, kept):
        seen.append((param.tolist(), grad.tolist(), tuple(kept.shape)))
        return param, kept

    seen.clear()
    opt = type("Watched", (FunctionalOptimizer,), {"optimizer_class": by_row})(
        [weight], engine="reference"
    )
    opt.step([torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()])
    opt.step([torch.ones(3, 2)])
    assert seen == [
        ([[0, 1], [4, 5]], [[0, 3], [4, 0]], (2, 1)),
        ([[0, 1], [2, 3], [4, 5]], [[1, 1]] * 3, (3, 1)),
    ]


@pytest.mark.parametrize(
    ("param", "state", "seen"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_arithmetic_is_in_the_widest_dtype_and_at_least_float32(
    param: torch.dtype, state: torch.dtype | None, seen: torch.dtype
):
    found = set()

    @sparsestep.rule(state={"kept": 0.0})
    def watched(param, grad, kept):
        found.update({param.dtype, grad.dtype, kept.dtype})
        return param, kept

    trained(watched, param, state_dtype=state, engine="reference")
    assert found == {seen}
