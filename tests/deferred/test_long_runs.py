"""Long runs and large tables: what dense semantics remembers of past steps stays small."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.deferred import history as histories
from sparsestep.deferred.history import StepHistory
from sparsestep.deferred.rows import DeferredRows
from tests.deferred.runs import (
    Run,
    assert_close,
    coo,
    dense_run,
    each_kind,
    kept,
    on_both_engines,
    oracle,
    room_for,
    standard,
)
from tests.table import Variant, running_on, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("cls", [sparsestep.AdamW, sparsestep.Lion], ids=lambda c: c.__name__)
def test_histories_longer_than_what_is_reserved(cls: Any):
    """A row that waits for 300 and one that waits for 1,100 steps."""
    results = []
    for sparse in (True, False):
        param = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        opt = cls([param], lr=0.1, **({"semantics": "dense"} if sparse else {}))
        generator = torch.Generator().manual_seed(0)
        for t in range(1105):
            row = {0: 0, 1: 1, 301: 0, 1102: 1}.get(t, 2)
            values = torch.randn(1, 2, generator=generator, dtype=torch.float64)
            opt.param_groups[0]["lr"] = 0.01 * (1 + math.cos(t / 50))
            grad = coo([row], values, (4, 2))
            opt.catch_up(param, torch.tensor([row]))
            param.grad = grad if sparse else grad.to_dense()
            opt.step()
        if sparse:
            assert opt.deferred[id(param)].history.steps == 1105
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


@each_kind
@on_both_engines
@pytest.mark.parametrize("from_the_start", [True, False])
@pytest.mark.parametrize("at_once", [False, True], ids=["a few with each step", "at once"])
def test_a_full_history_is_cleared(
    variant: Variant, engine: str, from_the_start: bool, at_once: bool, monkeypatch
):
    run = standard()
    param = run.param()
    cleared, dropped = [], []
    clear, drop = StepHistory.clear, StepHistory.drop_oldest
    monkeypatch.setattr(StepHistory, "clear", lambda h: (cleared.append(h.now), clear(h)))
    monkeypatch.setattr(StepHistory, "drop_oldest", lambda h, n: (dropped.append(n), drop(h, n)))
    if at_once:
        monkeypatch.setattr(StepHistory, "is_half_full", False)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        if from_the_start:  # then no series reaches far enough to be used
            monkeypatch.setattr(histories, "_MAX_STEPS", 13)
        run.train(opt, param, range(1))
        monkeypatch.setattr(histories, "_MAX_STEPS", 13)
        run.train(opt, param, range(1, 60))
        assert (len(cleared) > 3, len(dropped) > 3) == (at_once, not at_once)
        opt.catch_up()
    assert_close(kept(opt, param), oracle(variant), room_for(variant))


@on_both_engines
def test_no_step_waits_for_the_whole_table(engine: str, monkeypatch):
    """However long training goes on: what a step catches up is bounded by its share of the rows."""
    monkeypatch.setattr(histories, "_MAX_STEPS", 40)
    run = Run(100, (200, 2))
    param = run.param()
    variant = Variant(sparsestep.AdamW, {"weight_decay": 0.1})
    caught_up = []
    catch_up = DeferredRows.catch_up

    def counted(clock: DeferredRows, *args: Any, **options: Any) -> int:
        caught_up.append(args[2].unique().numel())
        return catch_up(clock, *args, **options)

    monkeypatch.setattr(DeferredRows, "catch_up", counted)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param)
    assert opt.deferred[id(param)].history.base >= 40
    assert max(caught_up) == 20  # 200 rows in a quarter of 40 steps
    monkeypatch.undo()
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(variant, run))


@on_both_engines
def test_rows_outside_a_mask_stay_where_they_are_when_a_history_is_long(engine: str, monkeypatch):
    monkeypatch.setattr(histories, "_MAX_STEPS", 13)
    run = standard()
    variant = Variant(sparsestep.AdamW, {"weight_decay": 0.1})
    mask = torch.arange(24) % 3 != 1
    results = []
    for sparse in (True, False):
        param = run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([{"params": [param], "mask": mask}], lr=0.1, **more)
            run.train(opt, param, range(50))
            assert not sparse or opt.deferred[id(param)].history.base >= 30
            opt.catch_up()
            assert same_bits(param[1::3].detach(), run.weight[1::3])
            opt.param_groups[0]["mask"] = ~mask  # now the others move, from where they are
            run.train(opt, param, range(50, 60))
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


@on_both_engines
def test_the_first_step_on_a_large_table_writes_nothing_but_what_it_touches(engine: str):
    """Neither its state nor what is remembered of its rows: a page for each row, no more."""
    rows = 3_000_001
    ids = torch.tensor([5, 7, 2_000_000, rows - 1, 5])
    weight = torch.nn.Parameter(torch.zeros(rows, 1))
    few = torch.nn.Parameter(torch.zeros(5, 1))
    with running_on(engine) as name:
        opts = [
            sparsestep.Adam([param], lr=0.1, semantics="dense", engine=name)
            for param in (weight, few)
        ]
        for t in range(3):
            for opt, param, at in (
                (opts[0], weight, ids),
                (opts[1], few, torch.tensor([0, 1, 2, 3, 0])),
            ):
                opt.catch_up(param, at[t:])
                param.grad = coo(at[t:], torch.ones(5 - t, 1), param.shape)
                opt.step()
        steps = opts[0].deferred[id(weight)]._steps
        assert steps.pages_left == -(-rows // 1024) - 3
        for opt in opts:
            opt.catch_up()
    assert not steps.pages_left
    assert torch.equal(weight[ids], few[[0, 1, 2, 3, 0]])
    assert torch.equal(steps.values[ids], opts[1].deferred[id(few)].last_step[[0, 1, 2, 3, 0]])
    assert (steps.values < 0).sum() == rows - 4


def test_decay_that_leaves_almost_nothing():
    """The history is cleared before numbers become too large."""
    run = Run(80, peak=0.1)
    variant = Variant(sparsestep.AdamW, {"weight_decay": 9.999})
    exact = dense_run(variant, run)
    param = run.param()
    opt = variant([param], lr=0.1, semantics="dense")
    run.train(opt, param)
    opt.catch_up()
    assert_close(kept(opt, param), exact)
