"""``semantics="dense"`` for rules of a user's own: derived from the formula, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

import sparsestep
from sparsestep import InputError
from tests.deferred.own_rules import UNDERIVED, adam
from tests.deferred.runs import Run, assert_close, assert_dense_run, dense_run, standard
from tests.generate.cases import each_case
from tests.rules.random_formulas import Formula, computed, formulas
from tests.subject import refused

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(("cls", "message"), UNDERIVED, ids=lambda e: getattr(e, "__name__", ""))
def test_what_cannot_be_derived_is_refused_at_construction(cls: Any, message: str):
    param = torch.nn.Parameter(torch.zeros(3, 2))
    with pytest.raises(InputError, match=message):
        cls([param], semantics="dense")
    assert cls([param]).semantics == "masked"


@sparsestep.rule(state={"mean": 0.0})
def turning(param, grad, mean, *, step, lr=0.1, power=1, decay=0.5):
    """Its state decays otherwise from the tenth step on; with another power it has no motion."""
    mean = (decay if step < 10 else 0.75) * mean + grad
    return param - lr * (mean if power == 1 else mean.square()), mean


def test_a_formula_that_changes_later_and_options_that_change_meanwhile():
    run = standard(20)

    def train(opt: Any, param: Tensor) -> None:
        run.train(opt, param, range(6))
        opt.param_groups[0]["decay"] = 0.25
        run.train(opt, param, range(6, 20))

    assert_dense_run(turning, run)
    assert_dense_run(turning, run, train=train)


@pytest.mark.parametrize("gradient", [Run.sparse, Run.dense])
@pytest.mark.parametrize("is_current", [False, True])
def test_what_cannot_be_derived_any_more_is_refused_before_anything_is_written(
    gradient: Any, is_current: bool
):
    run = standard(20)
    other, param = run.param(), run.param()
    opt = turning([{"params": [other]}, {"params": [param]}], semantics="dense")
    for each in (other, param):
        run.train(opt, each, range(4))
    if is_current:
        opt.catch_up()
    opt.param_groups[1]["power"] = 2
    # A dense gradient of another parameter would make its deferred rows current earlier.
    is_free = is_current or gradient is Run.sparse
    other.grad = gradient(run, 4, param.dtype) if is_free else None
    param.grad = gradient(run, 4, param.dtype)
    with refused(opt, match="turning: param 0 of group 1: "):
        opt.step()


def test_a_number_under_the_root_that_grows_without_bound():
    run = standard(12)
    param = run.param()
    opt = adam([param], semantics="dense")
    run.train(opt, param, range(6))
    opt.param_groups[0]["eps"] = 1e306
    run.train(opt, param, range(6, 8))
    assert param.isfinite().all()
    opt.catch_up()
    opt.param_groups[0]["eps"] = float("inf")
    param.grad = run.sparse(8, param.dtype)
    with refused(opt, match="has no closed-form update"):
        opt.step()


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


def assert_dense_run_if_finite(cls: Any, run: Run) -> None:
    ours, exact = dense_run(cls, run, semantics="dense"), dense_run(cls, run)
    if all(bool(t.isfinite().all()) for each in (ours, exact) for t in each.values()):
        assert_close(ours, exact, 1e-11)


# Of an exponential it is not known how large it is.
bounded = formulas.filter(lambda formula: all(name != "exp" for name, _, _ in formula))


@each_case(examples=12, parts=PARTS, formula=bounded, seed=st.integers(0, 99))
def test_whatever_is_derived_is_the_dense_run(parts: dict[str, Any], formula: Formula, seed: int):
    assert_dense_run_if_finite(built(parts, formula), Run(8, (6, 3), seed=seed, most=2))


@each_case(examples=12, formula=formulas, seed=st.integers(0, 99))
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
    assert_dense_run_if_finite(cls, Run(6, (5, 2), seed=seed, most=2))
