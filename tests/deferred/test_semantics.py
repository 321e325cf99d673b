"""``semantics="dense"``: an entry without a gradient is one whose gradient is zero.

``tests/properties/test_step.py`` has the same for gradients of every layout and shape.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.deferred import history as histories
from sparsestep.deferred.history import StepHistory
from sparsestep.deferred.rows import DeferredRows
from sparsestep.errors import StaleWarning
from sparsestep.optim.optimizer import RuleOptimizer
from tests.deferred.own_rules import DERIVED
from tests.deferred.runs import (
    A_FEW,
    CONSTRAINTS,
    DECAY,
    KINDS,
    VARIANTS,
    Run,
    a_few,
    assert_close,
    assert_dense_run,
    assert_same_bits,
    bookkeeping,
    coo,
    dense_run,
    kept,
    on_both_engines,
    room_for,
    standard,
)
from tests.elsewhere import DEVICE, Elsewhere, elsewhere
from tests.table import (
    ENGINES,
    EVERYTHING,
    WITH_DENSE,
    Variant,
    running_on,
    same_bits,
    through_a_file,
)

pytestmark = pytest.mark.usefixtures("one_thread")
ADAMW = KINDS[0]


def test_every_optimizer_is_covered():
    assert {variant.cls for variant in VARIANTS} == set(WITH_DENSE)
    assert all(variant.rule.idle_update is not None for variant in VARIANTS)


CONSTRAINED = [*VARIANTS, *DERIVED] if EVERYTHING else KINDS


@pytest.mark.parametrize(
    ("variant", "more"),
    [*product([*VARIANTS, *DERIVED], [{}]), *product(CONSTRAINED, CONSTRAINTS)],
    ids=str,
)
def test_it_is_the_dense_run(variant: Variant, more: dict[str, Any]):
    """With a constraint, of every row after every step."""
    run = standard(30 if more else 60)
    exact = dense_run(variant, run, **more)
    for engine in ENGINES:
        with running_on(engine) as name:
            ours = dense_run(variant, run, semantics="dense", engine=name, **more)
        assert_close(ours, exact, max(1e-11 if more else 0.0, room_for(variant)))
        if more:
            assert ours["param"].norm(dim=1).max() < more.get("max_norm", 1.0) + 1e-12


SHORT = [
    Variant(sparsestep.AdamW, {"betas": (0.5, 0.9), "weight_decay": 0.1}),
    Variant(sparsestep.SGD, {"momentum": 0.5}),
    Variant(sparsestep.Lion, {"betas": (0.5, 0.5)}),
]


@pytest.mark.parametrize("variant", SHORT, ids=str)
@pytest.mark.parametrize("more", CONSTRAINTS, ids=str)
@on_both_engines
def test_constrained_rows_that_miss_more_steps_than_matter(
    variant: Variant, more: dict[str, Any], engine: str, monkeypatch: pytest.MonkeyPatch
):
    """Steps within the horizon one by one, the rest at once; and a history that is swept."""
    monkeypatch.setattr(histories, "MAX_STEPS", 100)
    assert_dense_run(variant, Run(120, most=1, tail=1.0), engine, **more)


def test_rows_are_constrained_if_a_mask_selects_them_and_stale_until_then():
    param = torch.nn.Parameter(torch.full((4, 2), 3.0))
    mask = torch.tensor([True, True, False, False])
    opt = sparsestep.SGD([param], lr=0.1, mask=mask, normalize=True, semantics="dense")
    param.grad = coo([0, 2], torch.ones(2, 2), (4, 2))
    opt.step()
    param.grad = coo([1], torch.ones(1, 2), (4, 2))
    with pytest.warns(StaleWarning):
        opt.step()
    opt.catch_up()
    assert torch.allclose(param[:2].norm(dim=1), torch.ones(2))
    assert torch.equal(param[2:], torch.full((2, 2), 3.0))


@on_both_engines
@pytest.mark.parametrize("cls", [sparsestep.Adam, sparsestep.SparseAdam], ids=lambda c: c.__name__)
def test_squares_that_underflow(cls: type[RuleOptimizer], engine: str):
    """Gradients so small that their squares are zero still move by their share of eps."""
    for dtype, least, eps in ((torch.float32, 1e-25, 1e-20), (torch.float64, 1e-170, 1e-160)):
        results = []
        for sparse in (True, False):
            param = torch.nn.Parameter(torch.zeros(3, 2, dtype=dtype if sparse else torch.float64))
            with running_on(engine) as name:
                more = {"semantics": "dense", "engine": name} if sparse else {}
                opt = cls([param], lr=eps / least, eps=eps, **more)
                for row in (0, 1, 1, 0, 1, 1, 1):
                    grad = coo([row], torch.full((1, 2), least, dtype=param.dtype), (3, 2))
                    opt.catch_up(param, torch.tensor([row]))
                    param.grad = grad if sparse else grad.to_dense()
                    opt.step()
                opt.catch_up()
            results.append(param.detach().double())
            assert not sparse or not opt.state[param]["exp_avg_sq"].any()
        ours, exact = results
        assert ours[:2].abs().min() > 0.1
        # In float64 the squares of 1e-25 are there: a hundred-thousandth beside eps.
        assert torch.allclose(ours, exact, rtol=3e-5 if dtype == torch.float32 else 1e-9, atol=0)


WITHOUT_EPS = [
    ADAMW,
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.AdamW, {"amsgrad": True}),
    Variant(sparsestep.RowwiseAdam, {}),
    Variant(sparsestep.RMSprop, {"momentum": 0.9}),
    Variant(sparsestep.Adagrad, {}),
]


@pytest.mark.parametrize("variant", WITHOUT_EPS, ids=str)
@on_both_engines
def test_without_eps_rows_that_had_no_gradient_are_not_nan(variant: Variant, engine: str):
    """Dense steps divide zero by zero there. Here it is what any eps gives, however small."""
    run = standard(20)
    with running_on(engine) as name:
        ours = dense_run(variant, run, eps=0.0, semantics="dense", engine=name)
    assert dense_run(variant, run, eps=0.0)["param"][-2:].isnan().all()
    assert_close(ours, dense_run(variant, run, eps=1e-200))


# Options and masks that change between steps

CHANGES: list[tuple[Any, dict[str, Any], dict[str, list[Any]]]] = [
    (sparsestep.AdamW, {}, {"betas": [(0.9, 0.999), (0.5, 0.9), (0.9, 0.5)]}),
    (sparsestep.AdamW, {}, {"eps": [1e-8, 0.5], "weight_decay": [0.0, 0.5, 0.1]}),
    (sparsestep.AdamW, {}, {"maximize": [False, True]}),
    (sparsestep.AdamW, {}, {"max_norm": [0.7, None, 0.3]}),
    (sparsestep.Adagrad, DECAY, {"lr_decay": [0.0, 0.1], "weight_decay": [0.1, 0.2]}),
    (sparsestep.SGD, {"momentum": 0.9, **DECAY}, {"momentum": [0.9, 0.5], "weight_decay": [0, 1]}),
    (sparsestep.SGD, {"momentum": 0.9}, {"dampening": [0.0, 0.5]}),
    (sparsestep.RMSprop, {"momentum": 0.9}, {"alpha": [0.99, 0.5], "momentum": [0.9, 0.1]}),
    (sparsestep.Lion, {}, {"betas": [(0.9, 0.99), (0.5, 0.5)], "weight_decay": [0.0, 0.1]}),
    (sparsestep.Ftrl, {}, {"l1": [0.0, 0.1], "l2": [0.0, 0.1], "beta": [1.0, 2.0]}),
    # Another rule, with other state: rows catch up by the rule that they have missed.
    (sparsestep.SGD, {}, {"momentum": [0.0, 0.9, 0.9, 0.9, 0.9]}),
    (sparsestep.RMSprop, {"momentum": 0.9}, {"momentum": [0.9, 0.0, 0.0, 0.0, 0.0]}),
    (sparsestep.RMSprop, {"centered": True, "eps": 0.5}, {"centered": [True] + 4 * [False]}),
    (sparsestep.AdamW, {"amsgrad": True}, {"amsgrad": [True] + 4 * [False]}),
    (sparsestep.RowwiseAdam, DECAY, {"betas": [(0.9, 0.999)] + 4 * [(0.0, 0.9)]}),
]


@pytest.mark.parametrize(("cls", "options", "changes"), CHANGES, ids=str)
@on_both_engines
def test_options_that_change_between_steps(
    cls: Any, options: dict[str, Any], changes: dict[str, list[Any]], engine: str
):
    run = Run(35)

    def change(opt: torch.optim.Optimizer, t: int) -> None:
        for name, given in changes.items():
            opt.param_groups[0][name] = given[t // 7 % len(given)]

    def train(opt: Any, param: Tensor) -> None:
        run.train(opt, param, before=change)

    assert_dense_run(Variant(cls, options), run, engine, train=train)


@on_both_engines
@pytest.mark.parametrize("how", ["constant", "in place", "another", "none in between"])
def test_a_mask(engine: str, how: str):
    """A row misses only the steps in which it might have moved; outside, it keeps its bits."""
    run = standard(30)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(24, generator=generator) < 0.5 for _ in range(3)]

    def train(opt: Any, param: Tensor) -> None:
        mask = masks[0].clone()
        opt.param_groups[0]["mask"] = mask
        for part in range(3):
            if how == "in place":
                mask.copy_(masks[part])
            elif how != "constant":
                skipped = how == "none in between" and part == 1
                opt.param_groups[0]["mask"] = None if skipped else masks[part]
            run.train(opt, param, range(10 * part, 10 * part + 10))
        opt.catch_up(param, torch.arange(24))

    ours = assert_dense_run(ADAMW, run, engine, train=train)
    outside = ~masks[0] if how == "constant" else ~(masks[0] | masks[1] | masks[2])
    assert how == "none in between" or same_bits(ours["param"][outside], run.weight[outside])


# State that is cleared or created in advance

CLEARED: dict[str, Callable[[RuleOptimizer, Tensor], None]] = {
    "all": lambda opt, param: opt.state.clear(),
    "the parameter's": lambda opt, param: opt.state[param].clear(),
    "replaced": lambda opt, param: setattr(opt, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("how", CLEARED)
@on_both_engines
def test_a_parameter_whose_state_is_cleared_starts_over(how: str, engine: str):
    """It has missed nothing, and continues as with a new optimizer."""
    run = standard(20)
    param = run.param(torch.float32)
    with running_on(engine) as name:
        opt = ADAMW([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        CLEARED[how](opt, param)
        weight = param.detach().clone()
        opt.catch_up(param, torch.tensor([0, 3]))
        opt.catch_up()
        opt.state_dict()
        assert same_bits(param.detach(), weight)
        fresh = torch.nn.Parameter(weight.clone())
        new = ADAMW([fresh], lr=0.1, semantics="dense", engine=name)
        for one, its in ((opt, param), (new, fresh)):
            run.train(one, its, range(10, 20))
            one.catch_up()
    assert_same_bits(kept(opt, param), kept(new, fresh))


def test_a_buffer_that_is_removed_starts_over_as_with_torch():
    """Torch's SGD takes ``None`` for a first step."""
    param = torch.nn.Parameter(torch.zeros(3, 1))
    opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, semantics="dense")
    param.grad = coo([0], torch.ones(1, 1), (3, 1))
    opt.step()
    opt.state[param]["momentum_buffer"] = None
    opt.catch_up()
    param.grad = coo([1], torch.ones(1, 1), (3, 1))
    opt.step()
    opt.catch_up()
    assert param.flatten().tolist() == [-1.0, -1.0, 0.0]


def test_a_resized_parameter_starts_over():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], lr=0.1, semantics="dense", **DECAY)
    for rows in (4, 6):
        param.grad = None
        param.data = torch.ones(rows, 2)
        for row in (1, 2):
            opt.catch_up(param, torch.tensor([row])) if param.grad is not None else None
            param.grad = coo([row], torch.zeros(1, 2), (rows, 2))
            opt.step()
        opt.catch_up()
        assert torch.allclose(param, torch.full((rows, 2), 0.99**2))


@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.Lion])
@on_both_engines
def test_state_created_in_advance_is_as_none(optimizer: Any, engine: str):
    """Rows without a gradient so far have missed nothing: no warning, which would be an error."""
    results = []
    for in_advance in (True, False):
        param = torch.nn.Parameter(torch.ones(6, 2))
        with running_on(engine) as name:
            opt = optimizer([param], lr=0.1, semantics="dense", engine=name)
            if in_advance:
                opt.materialize_state()
            for row in range(5):
                param.grad = coo([row], torch.ones(1, 2), (6, 2))
                opt.step()
            books = bookkeeping(opt)
            opt.catch_up()
        results.append((kept(opt, param), books[0][1:]))
    (ours, our_books), (wanted, books) = results
    assert_same_bits(ours, wanted)
    assert our_books == books


# Long runs and large tables


@a_few
@on_both_engines
@pytest.mark.parametrize("mask", [None, torch.arange(24) % 3 != 1], ids=["", "masked"])
@pytest.mark.parametrize("at_once", [False, True], ids=["a few with each step", "at once"])
def test_a_full_history_is_cleared(
    variant: Variant, engine: str, at_once: bool, mask: Any, monkeypatch: pytest.MonkeyPatch
):
    """A step catches up its share of the rows and no more, or all if the history is full."""
    run = standard()
    dropped, caught_up = [], []
    drop, catch_up = StepHistory.drop_oldest, DeferredRows.catch_up

    def counted(rows: DeferredRows, *args: Any, **options: Any) -> int:
        caught_up.append(24 if args[2] is None else args[2].unique().numel())
        return catch_up(rows, *args, **options)

    monkeypatch.setattr(StepHistory, "drop_oldest", lambda h, n: (dropped.append(n), drop(h, n)))
    monkeypatch.setattr(DeferredRows, "catch_up", counted)
    if at_once:
        monkeypatch.setattr(StepHistory, "is_half_full", StepHistory.is_full)
        monkeypatch.setattr(histories, "MAX_STEPS", 13)  # no series reaches far enough to be used

    def train(opt: Any, param: Tensor) -> None:
        run.train(opt, param, range(1))
        monkeypatch.setattr(histories, "MAX_STEPS", 13)
        run.train(opt, param, range(1, 50))
        if opt.semantics == "dense":
            assert opt.deferred[id(param)].history.base >= 30
            assert (len(dropped) > 3) == (not at_once)
            assert max(caught_up) <= (24 if at_once else 8)  # 24 rows in a quarter of 13 steps
        opt.catch_up()
        if mask is not None:
            assert same_bits(param[~mask].detach(), run.weight[~mask])
            opt.param_groups[0]["mask"] = ~mask  # now the others move, from where they are
        run.train(opt, param, range(50, 60))

    assert_dense_run(variant, run, engine, train=train, mask=mask)


@on_both_engines
def test_the_first_step_on_a_large_table_writes_only_its_rows(engine: str):
    """Of the state and of the bookkeeping, a page for each row and no more."""
    rows = 300_001
    ids = torch.tensor([5, 7, 200_000, rows - 1, 5])
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
        deferred = opts[0].deferred[id(weight)]
        assert deferred.stored_steps.count_nonzero() == 4  # zeros are never written
        for opt in opts:
            opt.catch_up()
    last_step = deferred.last_step
    assert torch.equal(weight[ids], few[[0, 1, 2, 3, 0]])
    assert torch.equal(last_step[ids], opts[1].deferred[id(few)].last_step[[0, 1, 2, 3, 0]])
    assert (last_step < 0).sum() == rows - 4


def test_decay_that_leaves_almost_nothing():
    """The history is cleared before numbers become too large."""
    assert_dense_run(Variant(sparsestep.AdamW, {"weight_decay": 9.999}), Run(80))


# Devices

ELSEWHERE = [
    *A_FEW,
    Variant(sparsestep.AdamW, {"eps": 1.0}),  # followed step by step
    Variant(sparsestep.AdamW, {"betas": (0.95, 0.9)}),  # the series does not converge
    Variant(sparsestep.SGD, {"momentum": 0.99999}),  # reaches back further than is kept
]


def trained(variant: Variant, device: torch.device, mask: Tensor | None) -> list[Tensor]:
    """Parameter and state after some steps, with sparse gradients and a dense one."""
    generator = torch.Generator().manual_seed(0)
    param = torch.nn.Parameter(torch.randn(9, 3, generator=generator).double().to(device))
    more: dict[str, Any] = {} if mask is None else {"mask": mask.to(device)}
    options = {**variant.options, **more, "lr": 0.1, "semantics": "dense", "engine": "reference"}
    opt = getattr(sparsestep, f"Functional{variant.cls.__name__}")([param], **options)
    for t in range(8):
        ids = torch.randint(0, 8, (4,), generator=generator)
        values = torch.randn(4, 3, generator=generator).double()
        opt.catch_up(param, ids if t % 2 else ids.to(device))  # ids on either device
        gradient: Any = sparsestep.IndexedGrad(ids.to(device), values.to(device))
        if t == 4:
            opt.catch_up()  # a dense gradient comes from reading all rows
            gradient = torch.zeros(9, 3).double().index_add_(0, ids, values).to(device)
        opt.step([gradient])
    opt.catch_up()
    return [param.detach(), *(v for k, v in opt.state[param].items() if k != "step")]


@pytest.mark.parametrize("variant", ELSEWHERE, ids=str)
def test_a_parameter_on_another_device(variant: Variant):
    for mask in (None, torch.arange(9) % 3 > 0):
        here = trained(variant, torch.device("cpu"), mask)
        with elsewhere():
            there = trained(variant, DEVICE, mask)
        for ours, wanted in zip(there, here, strict=True):
            assert isinstance(ours, Elsewhere)
            # Not to the bit: the dense gradient is for torch's kernel, which is another one there.
            assert torch.allclose(ours.inner, wanted, rtol=1e-13, atol=1e-15)


@a_few
@on_both_engines
def test_another_default_device_changes_nothing(variant: Variant, engine: str):
    run = standard(5)
    results = []
    for default in ("cpu", "meta"):
        param = run.param()
        grads = [run.sparse(t, torch.float64) for t in range(5)]
        with running_on(engine) as name, torch.device(default):
            opt = variant([param], lr=0.1, semantics="dense", engine=name)
            for t, grad in enumerate(grads):
                opt.catch_up(param, run.rows[t])
                param.grad = grad
                opt.step()
            opt.catch_up()
        results.append(kept(opt, param))
    assert_same_bits(*results)


OF_TORCH = [
    ("AdamW", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
@pytest.mark.parametrize("torch_first", [False, True], ids=["from ours", "from torch"])
def test_training_continues_in_the_other_class(
    name: str, options: dict[str, Any], torch_first: bool
):
    """A checkpoint is current, and is torch's."""
    run, theirs = standard(), getattr(torch.optim, name)
    classes = [theirs, partial(getattr(sparsestep, name), semantics="dense")]
    first = run.param()
    opt = classes[not torch_first]([first], lr=0.1, **options)
    run.train(opt, first, range(30))
    saved = through_a_file(opt.state_dict())
    wanted = theirs([run.param()], lr=0.1, **options).state_dict()["param_groups"][0]
    assert saved["param_groups"][0].keys() == wanted.keys()
    second = torch.nn.Parameter(first.detach().clone())
    again = classes[torch_first]([second], lr=0.1, **options)
    again.load_state_dict(saved)
    run.train(again, second, range(30, 60))
    again.state_dict()
    assert_close(kept(again, second), dense_run(theirs, run, **options))
