"""A table that somebody else writes while its rows are behind: said, and only then."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import sparsestep
from tests.deferred.tied_model import made, train

pytestmark = pytest.mark.usefixtures("one_thread")


def test_two_optimizers_of_one_table_are_said():
    model, opt = made(True)
    other = sparsestep.AdamW([model.table.weight], lr=0.01, semantics="dense")
    opt.track(model)
    other.track(model)

    def step(t: int) -> None:
        opt.zero_grad()
        model(t).backward()
        opt.step()
        other.step()

    step(0)
    with pytest.warns(sparsestep.StaleWarning, match="by another optimizer or by your own code"):
        step(1)
    for t in range(2, 6):  # once
        step(t)


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_a_table_that_was_written_while_rows_were_behind_is_said(how: str):
    model, opt = made(True)
    opt.track(model)
    train(model, opt, range(5))
    weight = model.table.weight
    with torch.no_grad():
        if how == "in place":
            weight /= weight.norm(dim=1, keepdim=True)
        else:
            weight.data = functional.normalize(weight.data)
    with pytest.warns(sparsestep.StaleWarning, match=r"optimizer.catch_up\(\) first"):
        train(model, opt, range(5, 6))


def test_a_table_that_was_written_when_all_was_current_is_not():
    model, opt = made(True)
    opt.track(model)
    for t in range(6):
        train(model, opt, range(t, t + 1))
        opt.catch_up()
        with torch.no_grad():
            model.table.weight.clamp_(-1, 1)


def test_rows_that_were_caught_up_by_hand_may_be_written():
    model, opt = made(True)
    opt.track(model)
    for t in range(6):
        train(model, opt, range(t, t + 1))
        opt.catch_up(model.table.weight, torch.tensor([1, 2]))
        with torch.no_grad():
            model.table.weight[1:3] = 0.1
