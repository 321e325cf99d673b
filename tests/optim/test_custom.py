"""``sparsestep.rule``: what a formula of a user's own is given, returns, and may rely on."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import errors
from sparsestep.errors import InputError, SlowWarning
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.options import GROUP_DEFAULTS, OPTIMIZER_OPTIONS
from tests.generate.layouts import Entries
from tests.optim.own_rules import (
    SHAPE,
    adagrad,
    adagrad_formula,
    close,
    randn,
    rows_of,
    table_of,
    train,
    trained,
)
from tests.properties.marks import QUIET
from tests.subject import by_hand, refused
from tests.table import Variant, same_bits, sm3_by_rows

pytestmark = QUIET


@sparsestep.rule
def descent(param, grad, *, lr):
    return param - lr * grad


@sparsestep.rule
def sgd(param, grad, *, lr):
    """It has the name of a native kernel, and moves the other way."""
    return param + lr * grad


@sparsestep.rule(state={"v": 0.0})
def terse(w, g, v, /, *, lr):
    return w - lr * g, v


@sparsestep.rule(state={"buffer": 0.0})
def odd(param, grad, buffer, *, momentum, kind="plain", scales=(1.0, 2.0), bend=None):
    step = momentum * grad * scales[0] / scales[1]
    step = step if bend is None else bend(step)
    return param - step if kind == "plain" else param + step, buffer


@sparsestep.rule
def own_decay(param, grad, *, lr, weight_decay=0.0, maximize="no"):
    assert maximize in ("no", "yes")
    return param - lr * (grad + 2 * weight_decay * param)


@sparsestep.rule
def without_lr(param, grad, *, rate=0.5):
    return param - rate * grad


ROUNDED = {"dtype": torch.bfloat16, "stochastic_rounding": True, "rounding_seed": 3}
DECAYED = {"lr": 0.1, "weight_decay": torch.tensor(0.1)}
# A formula with options, and the class of the library that it is.
SAME: list[tuple[Any, dict[str, Any], Any, dict[str, Any]]] = [
    (descent, {"lr": 0.1, **ROUNDED}, sparsestep.SGD, {"lr": 0.1, **ROUNDED}),
    (terse, {"lr": 0.5}, sparsestep.SGD, {"lr": 0.5}),
    (sgd, {"lr": 0.5}, sparsestep.SGD, {"lr": 0.5, "maximize": True}),
    (odd, {"momentum": torch.tensor(1.0), "bend": lambda s: s}, sparsestep.SGD, {"lr": 0.5}),
    (odd, {"momentum": 1.0, "kind": "other", "maximize": True}, sparsestep.SGD, {"lr": 0.5}),
    (own_decay, {"lr": 0.1, "maximize": "yes"}, own_decay, {"lr": 0.1}),
    (own_decay, {"lr": 0.1, "weight_decay": 0.2}, sparsestep.SGD, {"lr": 0.1, "weight_decay": 0.4}),
    (without_lr, {"weight_decay": 0.1}, sparsestep.SGD, {"lr": 0.5, "weight_decay": 0.1}),
    (adagrad, {"lr": 0.1, "engine": "reference"}, sparsestep.Adagrad, {"lr": 0.1}),
    (adagrad, {**DECAYED, "engine": "native"}, sparsestep.Adagrad, DECAYED),
    (
        sparsestep.rule(adagrad_formula, state={"sum": 0.25}),
        {"lr": 0.1},
        sparsestep.Adagrad,
        {"lr": 0.1, "initial_accumulator_value": 0.25},
    ),
]


def test_formulas_that_are_an_optimizer_of_the_library():
    for formula, options, cls, same in SAME:
        ours = trained(formula, **options)
        assert close(ours, trained(cls, **same)), (formula, options)
        assert not close(ours, table_of(ours.dtype).detach())


# What the formula is given


def watched(made: Any, weight: Tensor) -> Any:
    cls = type("Watched", (FunctionalOptimizer,), {"optimizer_class": made})
    return cls([weight], engine="reference")


def test_slots_come_once_with_the_sum_of_their_entries():
    """Nothing comes for no entries."""
    seen: list[tuple[Any, ...]] = []

    @sparsestep.rule(state={"kept": 0.0})
    def by_element(param, grad, kept):
        seen.append((param.tolist(), grad.tolist()))
        return param, kept

    weight = torch.arange(6.0).view(3, 2)
    elements = torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()
    opt = watched(by_element, weight)
    opt.step([sparsestep.IndexedGrad(torch.tensor([2, 0, 2]), torch.ones(3, 2))])
    opt.step([elements])
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
    opt = watched(by_row, weight)
    opt.step([elements])
    opt.step([torch.ones(3, 2)])
    assert seen == [
        ([[0, 1], [4, 5]], [[0, 3], [4, 0]], (2, 1)),
        ([[0, 1], [2, 3], [4, 5]], [[1, 1]] * 3, (3, 1)),
    ]


@pytest.mark.parametrize(
    ("param", "state", "seen"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float32, torch.float64, torch.float64),
        (torch.float64, torch.float32, torch.float64),
    ],
    ids=str,
)
def test_arithmetic_is_in_the_widest_dtype_and_at_least_float32(
    param: torch.dtype, state: torch.dtype | None, seen: torch.dtype
):
    """Autograd does not see it."""
    found = set()

    @sparsestep.rule(state={"kept": 0.0})
    def noting(param, grad, kept):
        found.update({param.dtype, grad.dtype, kept.dtype})
        assert not torch.is_grad_enabled()
        assert not param.requires_grad
        return param, kept

    with torch.enable_grad():
        trained(noting, param, state_dtype=state, engine="reference")
    assert found == {seen}


def test_a_result_of_another_dtype_is_rounded_to_where_it_is_stored():
    @sparsestep.rule(state={"count": 0.0})
    def odd(param, grad, count, *, lr):
        return param.double() - lr * grad.double(), (count + 1).long()

    param = table_of()
    opt = odd([param], lr=0.5, engine="reference")
    train(opt, [param], range(1))
    held = rows_of(0).to_dense().ne(0).any(1)
    assert torch.equal(opt.state[param]["count"], held[:, None].expand(SHAPE).float())


def test_the_step_and_what_lies_around_the_formula_are_read_in_every_step():
    scale, seen = 1.0, []

    @sparsestep.rule
    def changing(param, grad, *, step, lr=0.5):
        seen.append(step)
        return param - scale * (2 * lr if step == 2 else lr) * grad

    ours, theirs = table_of(), table_of()
    opts = [changing([p], engine=e) for p, e in ((ours, "native"), (theirs, "reference"))]
    for step in range(4):
        scale = 2.0**-step
        for param, opt in zip((ours, theirs), opts, strict=True):
            train(opt, [param], range(step, step + 1))
        assert same_bits(ours, theirs)
    assert seen == [1, 1, 2, 2, 3, 3, 4, 4]
    assert "step" not in opts[0].defaults


# The class


def test_the_class_has_the_name_the_words_and_the_arguments_of_the_function():
    assert issubclass(adagrad, RuleOptimizer)
    assert adagrad.__name__ == adagrad.__qualname__ == "adagrad"
    assert adagrad.__module__ == adagrad_formula.__module__
    assert adagrad.__doc__ == adagrad_formula.__doc__
    first, *options = inspect.signature(adagrad).parameters.values()
    assert first.name == "params"
    assert {each.kind for each in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert [each.name for each in options if each.default is inspect.Parameter.empty] == ["lr"]
    own = {"eps": 1e-10, "maximize": False, "weight_decay": 0.0, "decoupled_weight_decay": False}
    everywhere = {**OPTIMIZER_OPTIONS, **GROUP_DEFAULTS}
    for each in options[1:]:
        assert each.default == {**everywhere, **own}[each.name]
    assert {each.name for each in options} >= {*own, "engine", "semantics", "mask", "state_dtype"}
    defaults = {"lr": 0.1, "eps": 0.5, "maximize": False, "weight_decay": 0.0}
    assert adagrad([table_of()], lr=0.1, eps=0.5).defaults == defaults
    # Libraries that list optimizers expect a module of a class; code run by exec has none.
    names = {"rule": sparsestep.rule}
    exec("rule_made = rule(state={})(lambda param, grad, *, lr: param - lr * grad)", names)
    assert isinstance(names["rule_made"].__module__, str)
    # Decoupled decay shrinks by ``lr * weight_decay``: without an lr it would do nothing.
    for made in (own_decay, without_lr):
        with pytest.raises(TypeError, match="decoupled_weight_decay"):
            made([table_of()], decoupled_weight_decay=True)


# Formulas and parameters that the core cannot run


def test_a_formula_that_cannot_be_traced_is_called_and_said_once():
    @sparsestep.rule
    def only_forward(param, grad, *, lr):
        return param - lr * grad if grad.sum() > 0 else param

    with pytest.warns(SlowWarning, match="'only_forward', .*sum other than over rows") as said:
        ours = trained(only_forward, lr=0.1)
    assert len(said) == 1
    assert same_bits(ours, trained(only_forward, lr=0.1, engine="reference"))
    compiled = sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile={"backend": "eager"})
    for made, words in ((only_forward, "sum other than over rows"), (compiled, "compile")):
        param = table_of()
        opt = made([param], lr=0.1, engine="native")
        param.grad = rows_of(0)
        with refused(opt, match=words):
            opt.step()


def test_a_formula_that_asks_for_float32_gets_it_from_float64_too():
    @sparsestep.rule(state={"sum": 0.0})
    def in_float32(param, grad, sum, *, lr=0.1):
        sum = sum + grad.float() / 3
        return param - lr * sum, sum

    assert same_bits(trained(in_float32, engine="native"), trained(in_float32, engine="reference"))
    for wide in ({"dtype": torch.float64}, {"state_dtype": torch.float64}):
        with pytest.raises(InputError, match="float64 values to float32"):
            trained(in_float32, engine="native", **wide)
        errors._warned.clear()
        with pytest.warns(SlowWarning, match="float64 values to float32"):
            found = trained(in_float32, **wide)
        assert same_bits(found, trained(in_float32, engine="reference", **wide))


# Wrong results

SPOILED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "one value too few": lambda param, kept: param,
    "one too many": lambda param, kept: (param, kept, kept),
    "nothing": lambda param, kept: None,
    "by name": lambda param, kept: {"param": param, "kept": kept},
    "not a tensor": lambda param, kept: (param, 0.0),
    "a row too few": lambda param, kept: (param[1:], kept),
    "a shape that could be broadcast": lambda param, kept: (param, kept.sum()),
    "complex": lambda param, kept: (param, kept * 1j),
    "sparse": lambda param, kept: (param.to_sparse_coo(), kept),
    "elsewhere": lambda param, kept: (param, kept.to("meta")),
}


def raises(error: type[BaseException]) -> Callable[[Tensor, Tensor], Any]:
    def raising(param: Tensor, kept: Tensor) -> Any:
        raise error("not today")

    return raising


LAST = list(product([(6, 5), ()], [False, True]))


def with_grads(last: tuple[int, ...], is_dense: bool) -> list[torch.nn.Parameter]:
    """The second gradient is dense, and that of the last parameter may be.

    A COO gradient of a number has no sparse dims, and holds the whole parameter.
    """
    params = [torch.nn.Parameter(randn(*shape)) for shape in [(6, 4), (3,), (6, 3), last]]
    for param in params:
        rows, values = torch.tensor([[2, 0]]), randn(2, *param.shape[1:], seed=1)
        if not param.dim():
            rows, values = torch.zeros(0, 1, dtype=torch.int64), torch.ones(1)
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)
        if param is params[1] or (is_dense and param is params[-1]):
            param.grad = param.grad.to_dense()
    return params


def test_a_wrong_result_or_an_exception_for_the_last_param_changes_nothing():
    """In the first step and later; what the formula has written in place is lost."""
    cases: list[tuple[Any, Any]] = [(result, InputError) for result in SPOILED.values()]
    cases += [(raises(e), e) for e in (ZeroDivisionError, InputError, KeyboardInterrupt)]
    for number, (result, error) in enumerate(cases):

        @sparsestep.rule(state={"kept": 0.0})
        def wrong(param, grad, kept, *, lr, spoil=False, result=result):
            new, kept_too = param - lr * grad, kept + 1
            if not spoil or param.shape[-1] not in (5, 30, 1):
                return new, kept_too
            for value in (param, grad, kept):
                value.fill_(math.nan)
            return result(new, kept_too)

        params = with_grads(*LAST[number % 4])
        grads = [param.grad.to_dense().clone() for param in params]
        opt = wrong([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
        for steps in range(2):
            opt.param_groups[1]["spoil"] = True
            with refused(opt, error=error, note=str(number)):
                opt.step()
            opt.param_groups[1]["spoil"] = False
            opt.step()
            assert {int(kept["step"]) for kept in opt.state.values()} == {steps + 1}
        assert all(same_bits(p.grad.to_dense(), g) for p, g in zip(params, grads, strict=True))


# Formulas that work in place


@sparsestep.rule(state={"sum": 0.0})
def adagrad_in_place(param, grad, sum, *, lr, eps=1e-10):
    sum.addcmul_(grad, grad)
    grad.mul_(lr)
    return param.sub_(grad.div_(sum.sqrt().add_(eps))), sum


@sparsestep.rule(row_state={"accumulator": 0.0})
def sm3_in_place(param, grad, accumulator, *, lr=0.1, eps=1e-10):
    bound = accumulator + grad.square()
    param -= lr * grad / (bound.sqrt() + eps)
    accumulator.copy_(bound.amax(dim=1, keepdim=True))
    grad.zero_()
    return param, accumulator


@pytest.mark.parametrize("rules", [(adagrad, adagrad_in_place), (sm3_by_rows, sm3_in_place)])
def test_a_formula_may_work_in_place(rules: tuple[Any, Any]):
    """Its arguments are copies: numbers and gradients are as if it did not.

    Decay moves the whole row that a rule by rows sees, of which only what is held counts.
    """
    several = [Entries.random(SHAPE, (2, 2), 0.4, seed) for seed in range(2)]
    stored = [entries.stored(torch.float32, by_row=True) for entries in several]
    for layout in stored[0]:
        plain, in_place = (
            by_hand(Variant(rule, {"lr": 0.1}), "auto", randn(*SHAPE), weight_decay=0.1)
            for rule in rules
        )
        for entries, each in zip(several, stored, strict=True):
            grad = entries.drawn(each[layout][0])
            plain.take(grad.grad)
            in_place.take(grad.grad)
            assert grad.is_as_given(), layout
        assert all(map(close, plain.tensors, in_place.tensors)), layout
