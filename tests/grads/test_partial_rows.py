"""Rows of which a gradient holds a part: rules with state per row, masks, dense semantics."""

from __future__ import annotations

import pytest
import torch

import sparsestep
from sparsestep import functional
from tests.generate.layouts import Entries
from tests.grads.layout_runs import FEW, MARKS, Run, each_kind, randn
from tests.table import Variant, running_on

pytestmark = [*MARKS, pytest.mark.usefixtures("one_thread")]


# Rules with numbers per row


@each_kind
def test_of_a_row_only_what_is_held_moves_and_all_of_it_counts(engine: str):
    """The mean is over the whole row; what is not held adds nothing to it."""
    held = torch.tensor([[False, True, False, True], [False] * 4, [True, False, False, False]])
    values = torch.tensor([[9.0, 3.0, 9.0, 4.0], [9.0] * 4, [2.0, 9.0, 9.0, 9.0]])
    mean_square = torch.tensor([25 / 4, 0.0, 4 / 4])
    entries = Entries(values, held)
    with running_on(engine) as name:
        for layout, (grad, _) in entries.stored(torch.float32, by_row=True).items():
            param, sums = torch.ones(3, 4), torch.full((3,), 0.5)
            functional.rowwise_adagrad_(param, grad, sums, lr=0.1, engine=name)
            assert torch.equal(sums, 0.5 + mean_square), layout
            expected = 1 - 0.1 * values / sums[:, None].sqrt()
            assert torch.allclose(param[held], expected[held], rtol=1e-6), layout
            assert torch.equal(param[~held], torch.ones(9)), layout

            param, mean, square = torch.ones(3, 4), torch.full((3, 4), 5.0), torch.full((3,), 2.0)
            functional.rowwise_adam_(param, grad, mean, square, step=1, lr=0.1, engine=name)
            touched_rows = torch.tensor([True, False, True])
            moved = torch.where(touched_rows, 0.999 * 2 + 0.001 * mean_square, 2.0)
            assert torch.allclose(square, moved, rtol=1e-6), layout
            assert torch.allclose(mean[held], (4.5 + 0.1 * values)[held], rtol=1e-6), layout
            assert torch.equal(mean[~held], torch.full((9,), 5.0)), layout
            assert torch.equal(param[~held], torch.ones(9)), layout


@each_kind
def test_a_row_counts_one_update_however_many_of_its_elements_are_held(engine: str):
    entries = Entries.random((6, 8), (1, 1), 0.15, seed=3)
    variant = Variant(sparsestep.SparseAdam, {"bias_correction": "per_row"})
    rows = entries.held.any(1)
    assert rows.any()
    assert not rows.all()
    with running_on(engine) as name:
        for layout, (grad, mask) in entries.stored(torch.float32, by_row=True).items():
            run = Run(variant, name, randn((6, 8))).step(grad, mask)
            counts = run.by_hand.state[run.param]["row_step"]
            assert torch.equal(counts, rows.float()), layout


# Masks beside layouts


@pytest.mark.parametrize(
    "variant", [*FEW, Variant(sparsestep.RowwiseAdagrad, {"weight_decay": 0.1})], ids=str
)
@each_kind
def test_a_mask_lets_a_part_of_any_layout_through(variant: Variant, engine: str):
    whole = Entries.random((6, 8), (2, 2), 0.6, seed=0)
    by_row = variant.rule.by_row
    for mask in (randn((6,), 1) > 0, randn((6, 8), 2) > 0):
        if by_row and mask.dim() > 1:
            continue  # refused
        inside = mask if mask.dim() > 1 else mask[:, None].expand(6, 8)
        part = Entries(whole.values, whole.held & inside).coo(torch.float32)
        with running_on(engine) as name:
            first = Run(variant, name, randn((6, 8))).step(part)
            for layout, (grad, own) in whole.stored(torch.float32, by_row=True).items():
                assert own is None
                run = Run(variant, name, randn((6, 8))).step(grad, mask)
                assert run.like(first), layout


# Dense semantics beside layouts


@pytest.mark.parametrize(
    "variant",
    [
        Variant(sparsestep.AdamW, {"lr": 0.1}),
        Variant(sparsestep.SGD, {"lr": 0.1, "momentum": 0.5}),
        Variant(sparsestep.RowwiseAdam, {"lr": 0.1}),
    ],
    ids=str,
)
@each_kind
@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
def test_what_is_not_held_is_zero_where_that_is_asked_for(variant: Variant, engine: str):
    """In any layout, the numbers of the gradient that has zeros there."""
    steps = [Entries.random((6, 8), (2, 2), 0.3, seed) for seed in range(4)]
    with running_on(engine) as name:
        dense = Run(variant, name, randn((6, 8)))
        for entries in steps:
            dense.step(torch.where(entries.held, entries.values, 0.0))
        stored = [entries.stored(torch.float32, by_row=True) for entries in steps]
        for layout in stored[0]:
            run = Run(variant, name, randn((6, 8)), {"semantics": "dense"})
            for each in stored:
                run.step(*each[layout])
            run.optimizer.catch_up()
            assert torch.allclose(run.param, dense.param, rtol=1e-5, atol=1e-6), layout
