"""``semantics="dense"``: an entry without a gradient is one whose gradient is zero."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.idle import NoDrift
from tests.deferred.runs import (
    OF_TORCH,
    VARIANTS,
    assert_close,
    coo,
    each_variant,
    kept,
    on_both_engines,
    oracle,
    room_for,
    standard,
)
from tests.table import WITH_DENSE, Variant, each_engine, on_each_engine, running_on

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_optimizer_is_covered():
    assert {variant.cls for variant in VARIANTS} == set(WITH_DENSE)
    assert all(variant.rule.idle_update is not None for variant in VARIANTS)


@on_each_engine(VARIANTS)
def test_it_is_the_dense_run(variant: Variant, engine: str):
    run = standard()
    param = run.param()
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param)
        opt.catch_up()
    assert_close(kept(opt, param), oracle(variant), room_for(variant))


@each_variant
@on_both_engines
def test_rows_are_current_wherever_one_looks(variant: Variant, engine: str):
    """Some rows after every step, all of them after some, and never all at once in the end."""
    run = standard(20)
    ours, theirs = run.param(), run.param()
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, semantics="dense", engine=name)
        dense = variant([theirs], lr=0.1)
        for t in range(20):
            run.train(opt, ours, range(t, t + 1))
            run.train(dense, theirs, range(t, t + 1))
            rows = torch.arange(24) if t == 9 else torch.tensor([0, t, 23])
            opt.catch_up(ours, rows)
            some, wanted = kept(opt, ours), kept(dense, theirs)
            some, wanted = ({k: v[rows] for k, v in each.items()} for each in (some, wanted))
            assert_close(some, wanted, room_for(variant))


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
@on_both_engines
def test_it_is_the_run_of_torch(name: str, options: dict[str, Any], engine: str):
    run = standard()
    theirs, ours = run.param(), run.param()
    dense = getattr(torch.optim, name)([theirs], lr=0.1, **options)
    run.train(dense, theirs)
    with running_on(engine) as chosen:
        opt = getattr(sparsestep, name)([ours], lr=0.1, semantics="dense", engine=chosen, **options)
        run.train(opt, ours)
        opt.catch_up()
    assert_close(kept(opt, ours), kept(dense, theirs))
    if name != "SGD":
        assert int(opt.state[ours]["step"]) == int(dense.state[theirs]["step"])


@pytest.mark.parametrize(
    "variant",
    [v for v in VARIANTS if not isinstance(v.rule.idle_update, NoDrift)],
    ids=str,
)
@on_both_engines
@pytest.mark.parametrize("missed", [1, 2, 3])
def test_a_gap(variant: Variant, engine: str, missed: int):
    """A row is touched again after so many steps, with rates that differ from step to step."""
    gradients = [0] + missed * [1] + [0] + missed * [2] + [0, 1]
    results = []
    for sparse in (True, False):
        generator = torch.Generator().manual_seed(1)
        param = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([param], lr=0.1, **more)
            for t, row in enumerate(gradients):
                opt.param_groups[0]["lr"] = 0.1 / (t + 1)
                values = torch.randn(1, 2, generator=generator, dtype=torch.float64)
                grad = coo([row], values, (4, 2))
                if sparse:
                    opt.catch_up(param, torch.tensor([row]))
                param.grad = grad if sparse else grad.to_dense()
                opt.step()
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


@each_engine
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("cls", [sparsestep.Adam, sparsestep.SparseAdam], ids=lambda c: c.__name__)
def test_squares_that_are_nothing(cls: type[RuleOptimizer], engine: str, dtype: torch.dtype):
    """Gradients so small that their squares underflow still move by their share of eps."""
    least, eps = (1e-25, 1e-20) if dtype == torch.float32 else (1e-170, 1e-160)
    results = []
    for sparse in (True, False):
        param = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype if sparse else torch.float64))
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = cls([param], lr=eps / least, eps=eps, **more)
            for row in (0, 1, 1, 0, 1, 1, 1):
                values = torch.full((1, 2), least, dtype=param.dtype)
                grad = coo([row], values, (3, 2))
                if sparse:
                    opt.catch_up(param, torch.tensor([row]))
                param.grad = grad if sparse else grad.to_dense()
                opt.step()
            opt.catch_up()
        results.append(param.detach().double())
        if sparse:
            assert not opt.state[param]["exp_avg_sq"].any()
    ours, exact = results
    assert ours[:2].abs().min() > 0.1
    # In float64 the squares of 1e-25 are there: a hundred-thousandth beside eps.
    assert torch.allclose(ours, exact, rtol=3e-5 if dtype == torch.float32 else 1e-9, atol=0)


WITHOUT_EPS = [
    Variant(sparsestep.AdamW, {"weight_decay": 0.1}),
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"amsgrad": True}),
    Variant(sparsestep.RowwiseAdam, {}),
    Variant(sparsestep.RMSprop, {"momentum": 0.9}),
    Variant(sparsestep.Adagrad, {}),
]


@pytest.mark.parametrize("variant", WITHOUT_EPS, ids=str)
@each_engine
def test_without_eps_rows_that_had_no_gradient_are_not_nan(variant: Variant, engine: str):
    """Dense steps divide zero by zero there. Here it is what any eps gives, however small."""
    run = standard(20)
    ours, theirs, tiny = run.param(), run.param(), run.param()
    with running_on(engine) as name:
        opt = variant([ours], lr=0.1, eps=0.0, semantics="dense", engine=name)
        run.train(opt, ours)
        opt.catch_up()
    dense = variant([theirs], lr=0.1, eps=0.0)
    run.train(dense, theirs)
    assert theirs[-2:].isnan().all()
    almost = variant([tiny], lr=0.1, eps=1e-200)
    run.train(almost, tiny)
    assert_close(kept(opt, ours), kept(almost, tiny))
