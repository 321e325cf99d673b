"""Dense semantics with options that change on the way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import sparsestep
from tests.deferred.runs import (
    DECAY,
    KINDS,
    Run,
    assert_close,
    dense_run,
    kept,
    on_both_engines,
    room_for,
    standard,
)
from tests.table import Variant, running_on

pytestmark = pytest.mark.usefixtures("one_thread")


def changing(**values: list[Any]) -> Callable[[torch.optim.Optimizer, int], None]:
    """Another value every seven steps."""

    def change(opt: torch.optim.Optimizer, t: int) -> None:
        for name, given in values.items():
            opt.param_groups[0][name] = given[t // 7 % len(given)]

    return change


CHANGES: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = [
    (sparsestep.AdamW, {}, {"betas": [(0.9, 0.999), (0.5, 0.9), (0.9, 0.5)]}),
    (sparsestep.AdamW, {}, {"eps": [1e-8, 0.5]}),
    (sparsestep.AdamW, {}, {"weight_decay": [0.0, 0.5, 0.1]}),
    (sparsestep.AdamW, {}, {"maximize": [False, True]}),
    (sparsestep.SparseAdam, {}, {"betas": [(0.9, 0.999), (0.5, 0.9)], "eps": [1e-8, 0.5]}),
    (sparsestep.Adagrad, DECAY, {"lr_decay": [0.0, 0.1], "weight_decay": [0.1, 0.2]}),
    (sparsestep.SGD, {"momentum": 0.9, **DECAY}, {"momentum": [0.9, 0.5], "weight_decay": [0, 1]}),
    (sparsestep.SGD, {"momentum": 0.9}, {"dampening": [0.0, 0.5]}),
    (sparsestep.SGD, {"momentum": 0.9}, {"nesterov": [False, True]}),
    (sparsestep.RMSprop, {"momentum": 0.9}, {"alpha": [0.99, 0.5], "momentum": [0.9, 0.1]}),
    (sparsestep.Lion, {}, {"betas": [(0.9, 0.99), (0.5, 0.5)], "weight_decay": [0.0, 0.1]}),
    (sparsestep.Ftrl, {}, {"l1": [0.0, 0.1], "l2": [0.0, 0.1], "beta": [1.0, 2.0]}),
    (sparsestep.RowwiseAdam, DECAY, {"betas": [(0.9, 0.999), (0.5, 0.9)]}),
]
# The rule itself is another, with other state.
OTHER_RULES: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = [
    (sparsestep.SGD, {}, {"momentum": [0.0, 0.9, 0.5]}),
    (sparsestep.SGD, {"momentum": 0.9, **DECAY}, {"momentum": [0.9, 0.0, 0.0]}),
    (sparsestep.RMSprop, {"momentum": 0.9}, {"momentum": [0.9, 0.0]}),
    (sparsestep.RMSprop, {"centered": True, "eps": 0.5}, {"centered": [True, False, False]}),
    (sparsestep.AdamW, {"amsgrad": True}, {"amsgrad": [True, False, False, False]}),
]


def assert_same_with_changes(
    cls: Any, options: dict[str, Any], changes: dict[str, list[Any]], engine: str, steps: int
) -> None:
    run = Run(steps)
    variant = Variant(cls, options)
    exact = dense_run(variant, run, before=changing(**changes))
    param = run.param()
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, before=changing(**changes))
        opt.catch_up()
    assert_close(kept(opt, param), exact, room_for(variant))


@pytest.mark.parametrize(("cls", "options", "changes"), CHANGES, ids=str)
@on_both_engines
def test_options_that_change_between_steps(cls, options, changes, engine: str):
    assert_same_with_changes(cls, options, changes, engine, steps=35)


@pytest.mark.parametrize(("cls", "options", "changes"), OTHER_RULES, ids=str)
@on_both_engines
def test_options_that_select_another_rule(cls, options, changes, engine: str):
    """What was missed is made up for by the rule that was missed, with its own state."""
    assert_same_with_changes(cls, options, changes, engine, steps=14)


@on_both_engines
def test_groups_with_values_of_their_own(engine: str):
    run = standard(30)
    results = []
    for sparse in (True, False):
        params = [run.param() for _ in range(3)]
        groups = [
            {"params": params[:1], "betas": (0.5, 0.9), "weight_decay": 0.5},
            {"params": params[1:2], "lr": 0.01, "amsgrad": True},
            {"params": params[2:], "eps": 0.5},
        ]
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = sparsestep.AdamW(groups, lr=0.1, **more)
            for t in range(30):
                opt.param_groups[2]["lr"] = run.rates[t]
                opt.catch_up()
                for number, param in enumerate(params):
                    grad = run.sparse((t + number) % 30, torch.float64)
                    param.grad = grad if sparse else grad.to_dense()
                opt.step()
            opt.catch_up()
        results.append([kept(opt, param) for param in params])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact)


def test_a_learning_rate_that_is_a_tensor():
    run = standard(20)
    exact = dense_run(KINDS[0], run)
    param, rate = run.param(), torch.tensor(0.0, dtype=torch.float64)
    opt = KINDS[0]([param], lr=rate, semantics="dense")
    for t in range(20):
        rate.fill_(run.rates[t])
        opt.catch_up(param, run.rows[t])
        param.grad = run.sparse(t, torch.float64)
        opt.step()
    opt.catch_up()
    assert_close(kept(opt, param), exact)
