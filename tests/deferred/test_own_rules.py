"""``semantics="dense"`` for rules of a user's own: derived from the formula, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import InputError
from tests.deferred.own_rules import DERIVED, UNDERIVED, momentum
from tests.deferred.runs import Run, assert_close, coo, kept, on_both_engines, standard
from tests.rules.random_formulas import Formula, computed, formulas
from tests.table import running_on, snapshot, unchanged

pytestmark = pytest.mark.usefixtures("one_thread")
each_rule = pytest.mark.parametrize(
    ("cls", "options"), DERIVED, ids=lambda each: getattr(each, "__name__", str(each))
)


def both(
    make: Any, run: Run, *, engine: str = "auto", dtype: torch.dtype = torch.float64
) -> list[dict[str, Tensor]]:
    """What the run comes to by catching up, and with zeros written out."""
    results = []
    for more in ({"semantics": "dense", "engine": engine}, {}):
        param = run.param(dtype)
        opt = make([param], **more)
        run.train(opt, param)
        opt.catch_up()
        results.append(kept(opt, param))
    return results


@each_rule
@on_both_engines
def test_it_is_the_dense_run(cls: Any, options: dict[str, Any], engine: str):
    with running_on(engine) as name:
        ours, exact = both(lambda p, **more: cls(p, **options, **more), standard(), engine=name)
    assert_close(ours, exact)


@each_rule
@pytest.mark.parametrize("missed", [1, 2, 3])
def test_a_gap(cls: Any, options: dict[str, Any], missed: int):
    gradients = [0] + missed * [1] + [0] + missed * [2] + [0, 1]
    results = []
    for more in ({"semantics": "dense"}, {}):
        param = torch.nn.Parameter(torch.ones(4, 2, dtype=torch.float64))
        opt = cls([param], **options, **more)
        for t, row in enumerate(gradients):
            opt.param_groups[0]["lr"] = 0.1 / (t + 1)
            opt.catch_up(param, torch.tensor([row]))
            grad = coo([row], torch.full((1, 2), 0.3 + t, dtype=torch.float64), (4, 2))
            param.grad = grad if more else grad.to_dense()
            opt.step()
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


@pytest.mark.parametrize(("cls", "message"), UNDERIVED, ids=lambda e: getattr(e, "__name__", ""))
def test_what_cannot_be_derived_is_refused_at_construction(cls: Any, message: str):
    param = torch.nn.Parameter(torch.zeros(3, 2))
    name = cls.__name__
    with pytest.raises(InputError, match=f"^{name}: .*rule '{name}': .*{message}") as raised:
        cls([param], semantics="dense")
    assert "Use semantics='masked'" in str(raised.value)
    assert cls([param]).semantics == "masked"


@sparsestep.rule(state={"mean": 0.0})
def turning(param, grad, mean, *, step, lr=0.1, power=1, decay=0.5):
    """Its state decays otherwise from the tenth step on; with another power it has no motion."""
    mean = (decay if step < 10 else 0.75) * mean + grad
    return param - lr * (mean if power == 1 else mean.square()), mean


def test_a_formula_that_changes_later():
    assert_close(*both(lambda p, **more: turning(p, **more), standard(20)))


def test_options_that_change_meanwhile():
    results = []
    for more in ({"semantics": "dense"}, {}):
        run = standard(20)
        param = run.param()
        opt = turning([param], **more)
        run.train(opt, param, range(6))
        opt.param_groups[0]["decay"] = 0.25
        run.train(opt, param, range(6, 20))
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


def test_what_cannot_be_derived_any_more_is_refused_before_anything_is_written():
    run = standard(20)
    other, param = run.param(), run.param()
    opt = turning([{"params": [other]}, {"params": [param]}], semantics="dense")
    for each in (other, param):
        run.train(opt, each, range(4))
    opt.catch_up()
    opt.param_groups[1]["power"] = 2
    other.grad, param.grad = run.sparse(4, param.dtype), run.sparse(4, param.dtype)
    before = snapshot(opt)
    message = "turning: param 0 of group 1: .*param has no closed-form update"
    with pytest.raises(InputError, match=message):
        opt.step()
    assert unchanged(opt, before)


def test_a_checkpoint_goes_on():
    run = standard(20)
    results = []
    for more in ({"semantics": "dense"}, {}):
        param = run.param()
        opt = momentum([param], **more)
        run.train(opt, param, range(10))
        saved = opt.state_dict()
        opt = momentum([param], **more)
        opt.load_state_dict(saved)
        run.train(opt, param, range(10, 20))
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)


PARTS = st.fixed_dictionaries(
    {
        "decay": st.sampled_from([0.0, 0.3, 0.9, 1.0]),
        "weight": st.sampled_from([-0.5, 0.25, 1.0]),
        "shrink": st.sampled_from([1.0, 0.99, 0.5]),
        "move": st.sampled_from(["state", "sign", "quotient", "none", "old"]),
        "first": st.sampled_from(["same", "gradient"]),
    }
)


def built(parts: dict[str, Any], formula: Formula) -> Any:
    """A rule whose parts each say what they do without a gradient; the formula gets it alone."""

    def update(param, grad, mean, square, row, *, step, lr=0.1):
        mixed = computed(formula, [grad, mean, square])[-1]
        square = 0.9 * square + (mixed * grad).square()
        old = mean.clone()
        if parts["first"] == "gradient" and step == 1:
            mean = grad * 1.0
        else:
            mean = parts["decay"] * mean + parts["weight"] * grad
        moves = {
            "state": mean + 0.5 * grad,
            "sign": (0.5 * mean).sign(),
            "quotient": mean / (0.5 * square.sqrt() + 0.25),
            "none": grad / (square.abs() + 1),
            "old": old * (parts["decay"] != 0),  # of what is forgotten nothing is known
        }
        row = 0.5 * row + mixed.mean(1, keepdim=True) * 0
        return parts["shrink"] * param - lr * moves[parts["move"]], mean, square, row

    return sparsestep.rule(update, state={"mean": 0.0, "square": 0.0}, row_state={"row": 1.0})


def finite(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return all(bool(t.isfinite().all()) for each in (ours, theirs) for t in each.values())


# Of an exponential it is not known how large it is.
bounded = formulas.filter(lambda formula: all(name != "exp" for name, _, _ in formula))


@given(parts=PARTS, formula=bounded, seed=st.integers(0, 99))
def test_whatever_is_derived_is_the_dense_run(parts: dict[str, Any], formula: Formula, seed: int):
    ours, exact = both(built(parts, formula), Run(8, (6, 3), seed=seed, most=2))
    if finite(ours, exact):
        assert_close(ours, exact, 1e-11)


@given(formula=formulas, seed=st.integers(0, 99))
def test_random_formulas_are_derived_right_or_refused(formula: Formula, seed: int):
    def update(param, grad, first, row, *, lr=0.1):
        found = computed(formula, [param, grad, first, row])
        largest = (found[-1] + grad).square().amax(1, keepdim=True)
        row = largest * grad.mean(1, keepdim=True) + row
        return param - 0.1 * found[-1], 0.9 * first + 0.1 * found[-2], row

    cls = sparsestep.rule(update, state={"first": 0.0}, row_state={"row": 0.5})
    try:
        cls([torch.nn.Parameter(torch.zeros(5, 2))], semantics="dense")
    except InputError:
        return
    ours, exact = both(cls, Run(6, (5, 2), seed=seed, most=2))
    if finite(ours, exact):
        assert_close(ours, exact, 1e-11)
