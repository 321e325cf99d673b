"""``StaleWarning``: said once where rows are read that are behind, and nowhere else."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import sparsestep
from tests.deferred.models import OneTable, each_model, finish, ids_of, made, train
from tests.table import each_engine, running_on

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_stale_read_is_said_once_with_the_remedy():
    model, opt = made(OneTable, True)
    finish(model, opt, range(1))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        finish(model, opt, range(1, 10))
    (warning,) = said
    assert warning.category is sparsestep.StaleWarning
    assert "optimizer.track(model)" in str(warning.message)
    assert "optimizer.catch_up(param, rows)" in str(warning.message)
    assert "semantics='dense'" in str(warning.message)


def test_the_warning_points_at_the_call_of_step():
    model, opt = made(OneTable, True)
    with pytest.warns(sparsestep.StaleWarning) as said:
        finish(model, opt, range(10))
    assert said[0].filename == train.__code__.co_filename


@each_model
@each_engine
def test_nothing_is_said_where_rows_are_tracked(model: Any, engine: str):
    with running_on(engine) as name:
        ours, opt = made(model, True, engine=name)
        opt.track(ours)
        finish(ours, opt, range(20))


def test_nothing_is_said_where_rows_are_caught_up_by_hand():
    model, opt = made(OneTable, True)
    for t in range(10):
        opt.catch_up(model.table.weight, ids_of(t, 2, 2))
        finish(model, opt, range(t, t + 1))


@each_engine
@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.SGD, sparsestep.Lion])
def test_rows_that_never_had_a_gradient_miss_nothing_without_decay(engine: str, optimizer: Any):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, optimizer, engine=name)
        for row in range(20):
            opt.zero_grad()
            model.table(torch.tensor([row])).sum().backward()
            opt.step()
        opt.zero_grad()
        model.table(torch.tensor([3])).sum().backward()
        with pytest.warns(sparsestep.StaleWarning):
            opt.step()


@each_engine
def test_rows_that_never_had_a_gradient_do_miss_decay(engine: str):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, engine=name)
        model.table(torch.tensor([0])).sum().backward()
        opt.step()
        opt.zero_grad()
        model.table(torch.tensor([1])).sum().backward()
        with pytest.warns(sparsestep.StaleWarning):
            opt.step()


@pytest.mark.parametrize(
    "optimizer", [sparsestep.Adagrad, sparsestep.RowwiseAdagrad, sparsestep.RMSprop]
)
@each_engine
def test_nothing_is_said_of_rules_whose_idle_rows_do_not_move(optimizer: Any, engine: str):
    with running_on(engine) as name:
        model, opt = made(OneTable, True, optimizer, engine=name)
        finish(model, opt, range(10))
