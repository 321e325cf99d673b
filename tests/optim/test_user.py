"""``sparsestep.rule``: what a user's own formula is given, and what it can rely on."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import sparsestep
from sparsestep import errors
from sparsestep.errors import InputError, SlowWarning
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
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
from tests.subject import refused
from tests.table import same_bits, sign_sgd


@sparsestep.rule
def descent(param, grad, *, lr):
    return param - lr * grad


# The numbers; tests/properties has sparse, dense and masked gradients


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"maximize": True},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": torch.tensor(0.1)},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
    ],
    ids=str,
)
def test_a_notebooks_adagrad_is_adagrad(options: dict[str, Any]):
    ours = trained(adagrad, lr=0.1, **options)
    assert close(ours, trained(sparsestep.Adagrad, lr=0.1, **options))
    assert not options or not close(ours, trained(adagrad, lr=0.1))
    # A parameter that is not contiguous has another engine.
    turned = torch.nn.Parameter(randn(*SHAPE).t().contiguous().t())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowWarning)
        train(adagrad([turned], lr=0.1, **options), [turned])
    assert close(turned, ours)


def test_a_rule_without_state_may_return_a_bare_tensor():
    assert same_bits(trained(descent, lr=0.5), trained(sparsestep.SGD, lr=0.5))


def test_param_and_grad_may_have_any_name():
    @sparsestep.rule(state={"v": 0.0})
    def terse(w, g, v, /, *, lr):
        return w - lr * g, v

    assert same_bits(trained(terse, lr=0.5), trained(sparsestep.SGD, lr=0.5))


def test_a_rule_with_the_name_of_a_native_one_is_still_the_users():
    @sparsestep.rule
    def sgd(param, grad, *, lr):
        return param + lr * grad

    assert same_bits(trained(sgd, lr=0.5), trained(sparsestep.SGD, lr=0.5, maximize=True))


def test_state_that_does_not_begin_with_zero():
    from_a_quarter = sparsestep.rule(adagrad_formula, state={"sum": 0.25})
    theirs = trained(sparsestep.Adagrad, lr=0.1, initial_accumulator_value=0.25)
    assert close(trained(from_a_quarter, lr=0.1), theirs)


def test_a_scheduler_cycles_rate_and_momentum():
    runs = []
    for momentum in (sign_sgd, torch.optim.SGD):
        param = table_of()
        opt = momentum([param], lr=0.1, momentum=0.5)
        schedule = lr_scheduler.OneCycleLR(opt, max_lr=0.2, total_steps=8)
        seen = []
        for step in range(6):
            param.grad = rows_of(step)
            before = param.detach().clone()
            opt.step()
            moved = (param.detach() - before).abs().max()
            group = opt.param_groups[0]
            seen.append((group["lr"], group["momentum"]))
            if momentum is sign_sgd:
                assert moved.item() == pytest.approx(group["lr"], rel=1e-4)
            schedule.step()
        runs.append(seen)
    assert runs[0] == runs[1]
    assert len(set(runs[0])) == 6


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


def test_a_complex_parameter_comes_as_pairs():
    shapes = []

    @sparsestep.rule(state={"sum": 0.0}, row_state={"count": 0.0})
    def counted(param, grad, sum, count, *, lr):
        shapes.append([tuple(value.shape) for value in (param, grad, sum, count)])
        return param - lr * grad, sum + grad.square(), count + 1

    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.complex64))
    opt = counted([param], lr=1.0, engine="reference")
    values = torch.complex(randn(3, 4), randn(3, 4, seed=1))
    param.grad = torch.sparse_coo_tensor(torch.tensor([[4, 1, 4]]), values, SHAPE)
    opt.step()
    assert shapes == [[(2, 8), (2, 8), (2, 8), (2, 1)]]
    assert torch.allclose(param, -param.grad.to_dense())
    assert opt.state[param]["sum"].dtype == torch.complex64
    assert opt.state[param]["count"].tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize(
    ("param", "state", "seen"),
    [
        (torch.bfloat16, None, torch.float32),
        (torch.float16, torch.bfloat16, torch.float32),
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


def test_stochastic_rounding():
    torch.manual_seed(3)
    options = {"lr": 0.1, "stochastic_rounding": True}
    ours = trained(descent, torch.bfloat16, **options)
    assert same_bits(ours, trained(sparsestep.SGD, torch.bfloat16, **options))
    assert not same_bits(ours, trained(descent, torch.bfloat16, lr=0.1))


def test_a_result_of_another_dtype_is_rounded_to_where_it_is_stored():
    @sparsestep.rule(state={"count": 0.0})
    def odd(param, grad, count, *, lr):
        return param.double() - lr * grad.double(), (count + 1).long()

    param = table_of()
    opt = odd([param], lr=0.5, engine="reference")
    train(opt, [param], range(1))
    plain = table_of()
    train(sparsestep.SGD([plain], lr=0.5), [plain], range(1))
    assert close(param, plain)
    held = rows_of(0).to_dense().ne(0).any(1)
    assert torch.equal(opt.state[param]["count"], held[:, None].expand(SHAPE).float())


# The class


def test_the_class_has_the_name_the_words_and_the_arguments_of_the_function():
    assert issubclass(adagrad, RuleOptimizer)
    assert adagrad.__name__ == adagrad.__qualname__ == "adagrad"
    assert adagrad.__module__ == adagrad_formula.__module__
    assert adagrad.__doc__ == adagrad_formula.__doc__
    assert repr(adagrad([table_of()], lr=0.1)).startswith("adagrad (\nParameter Group 0\n")
    first, *options = inspect.signature(adagrad).parameters.values()
    assert first.name == "params"
    assert {each.kind for each in options} == {inspect.Parameter.KEYWORD_ONLY}
    assert [each.name for each in options if each.default is inspect.Parameter.empty] == ["lr"]
    assert {each.name: each.default for each in options if each.name != "lr"} == {
        "eps": 1e-10,
        "maximize": False,
        "weight_decay": 0.0,
        "decoupled_weight_decay": False,
        "engine": "auto",
        "semantics": "masked",
        "mask": None,
        "state_dtype": None,
        "stochastic_rounding": False,
        "rounding_seed": None,
    }


# Engines


def test_the_native_engine_runs_it():
    native = trained(adagrad, lr=0.1, engine="native")
    assert same_bits(native, trained(sparsestep.Adagrad, lr=0.1, engine="native"))
    assert same_bits(native, trained(adagrad, lr=0.1))
    assert close(native, trained(adagrad, lr=0.1, engine="reference"))


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


def test_a_formula_that_changes_with_the_step_and_with_what_lies_around_it():
    scale = 1.0

    @sparsestep.rule
    def changing(param, grad, *, step, lr):
        return param - scale * (2 * lr if step == 2 else lr) * grad

    ours, theirs = table_of(), table_of()
    opts = [changing([p], lr=0.5, engine=e) for p, e in ((ours, "native"), (theirs, "reference"))]
    for step in range(4):
        scale = 2.0**-step
        for param, opt in zip((ours, theirs), opts, strict=True):
            train(opt, [param], range(step, step + 1))
        assert same_bits(ours, theirs)


def test_memory_that_the_core_cannot_reach_is_said_once_with_a_remedy():
    whole = torch.ones(2, 3, 4)
    for grad in (whole, whole.to_sparse(1), whole.to_sparse()):
        made = sparsestep.rule(adagrad_formula, state={"sum": 0.0})
        param = torch.nn.Parameter(torch.zeros(4, 3, 2).permute(2, 1, 0))
        opt = made([param], lr=0.1)
        errors._warned.clear()
        param.grad = grad
        with pytest.warns(SlowWarning, match="reference engine .*contiguous"):
            opt.step()
        opt.step()  # warnings are errors here
        (only,) = opt.explain()
        assert only.engine == "reference"
        assert "contiguous" in only.reason


def test_a_formula_that_asks_for_float32_gets_it_from_float64_too():
    @sparsestep.rule(state={"sum": 0.0})
    def in_float32(param, grad, sum, *, lr=0.1):
        sum = sum + grad.float() / 3
        return param - lr * sum, sum

    def moved(engine: str, dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
        weight = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        opt = in_float32([weight], engine=engine, **options)
        for _ in range(4):
            weight.grad = torch.full((3, 2), 0.7, dtype=dtype).to_sparse(1)
            opt.step()
        return weight.detach()

    assert same_bits(moved("native"), moved("reference"))
    for wide in ({"dtype": torch.float64}, {"state_dtype": torch.float64}):
        with pytest.raises(InputError, match="float64 values to float32"):
            moved("native", **wide)
        errors._warned.clear()
        with pytest.warns(SlowWarning, match="float64 values to float32"):
            found = moved("auto", **wide)
        assert same_bits(found, moved("reference", **wide))


# Options


def test_the_step_is_passed_to_formulas_that_take_it():
    seen = []

    @sparsestep.rule
    def asks(param, grad, *, step, lr=1.0):
        seen.append(step)
        return param - lr / step * grad

    params = [table_of(), table_of()]
    opt = asks(params)
    train(opt, params[:1], range(2))
    train(opt, params, range(1))
    assert seen == [1, 2, 3, 1]
    assert "step" not in opt.defaults


def test_options_have_the_functions_defaults_or_must_be_given():
    defaults = {"lr": 0.1, "eps": 0.5, "maximize": False, "weight_decay": 0.0}
    assert adagrad([table_of()], lr=0.1, eps=0.5).defaults == defaults
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        adagrad([table_of()])
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        adagrad([{"params": [table_of()], "lr": 0.1}, {"params": [table_of()]}])


def test_param_groups_have_their_own_options():
    own: list[dict[str, Any]] = [
        {"lr": 0.1},
        {"lr": 0.5, "eps": 0.25},
        {"lr": 0.1, "weight_decay": 0.1, "maximize": True},
    ]
    params = [table_of() for _ in own]
    opt = adagrad([{"params": [param], **each} for param, each in zip(params, own, strict=True)])
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        opt.add_param_group({"params": [table_of()]})
    assert len(opt.param_groups) == 3
    train(opt, params)
    for param, options in zip(params, own, strict=True):
        assert same_bits(param, trained(adagrad, **options))
    again = adagrad([{"params": [param], "lr": 0.5} for param in params])
    again.load_state_dict(opt.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.5, 0.1]


def test_an_option_may_be_anything():
    @sparsestep.rule(state={"buffer": 0.0})
    def odd(param, grad, buffer, *, momentum, kind="plain", scales=(1.0, 2.0), bend=None):
        step = momentum * grad * scales[0] / scales[1]
        step = step if bend is None else bend(step)
        return param - step if kind == "plain" else param + step, buffer

    sgd = trained(sparsestep.SGD, lr=0.5)
    assert same_bits(trained(odd, momentum=1.0), sgd)
    assert same_bits(trained(odd, momentum=torch.tensor(1.0), bend=lambda step: step), sgd)
    assert same_bits(trained(odd, momentum=1.0, kind="other", maximize=True), sgd)


def test_unknown_and_negative_options_are_refused():
    with pytest.raises(TypeError, match=r"adagrad.*'momentum'"):
        adagrad([table_of()], lr=0.1, momentum=0.9)
    with pytest.raises(InputError, match=r"adagrad: .*momentum"):
        adagrad([{"params": [table_of()], "momentum": 0.9}], lr=0.1)
    with pytest.raises(InputError, match=r"adagrad: .*weight_decay"):
        adagrad([table_of()], lr=0.1, weight_decay=-1)


def test_decay_and_maximize_are_the_formulas_own_where_it_takes_them():
    @sparsestep.rule
    def own(param, grad, *, lr, weight_decay=0.0, maximize="no"):
        assert maximize in ("no", "yes")
        return param - lr * (grad + 2 * weight_decay * param)

    assert same_bits(trained(own, lr=0.1, maximize="yes"), trained(own, lr=0.1))
    theirs = trained(sparsestep.SGD, lr=0.1, weight_decay=0.5)
    assert close(trained(own, lr=0.1, weight_decay=0.25), theirs)
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        own([table_of()], lr=0.1, decoupled_weight_decay=True)


def test_decoupled_decay_needs_a_rate():
    """It shrinks by ``lr * weight_decay``: without an lr it would silently do nothing."""

    @sparsestep.rule
    def without_lr(param, grad, *, rate=0.5):
        return param - rate * grad

    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        without_lr([table_of()], weight_decay=0.1, decoupled_weight_decay=True)
    theirs = trained(sparsestep.SGD, lr=0.5, weight_decay=0.1)
    assert close(trained(without_lr, weight_decay=0.1), theirs)


# Checkpoints and copies


@pytest.mark.parametrize("resumes", [adagrad, sparsestep.Adagrad])
def test_a_checkpoint_goes_on_also_in_the_librarys_rule_with_the_same_state(resumes: Any):
    param = table_of()
    opt = adagrad([param], lr=0.1)
    train(opt, [param], range(3))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = resumes([param], lr=0.5, eps=0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.param_groups[0]["lr"] == 0.1
    assert again.param_groups[0]["eps"] == 1e-10
    assert int(again.state[param]["step"]) == 3
    train(again, [param], range(3, 5))
    assert close(param, trained(adagrad, lr=0.1))


def test_copies_are_of_the_same_class_and_a_local_rule_cannot_be_pickled():
    """The bits of copies are a property of tests/properties."""

    @sparsestep.rule
    def local(param, grad, *, lr):
        return param - lr * grad

    opt = local([table_of()], lr=0.1)
    assert type(copy.deepcopy(opt)) is local
    assert type(pickle.loads(pickle.dumps(adagrad([table_of()], lr=0.1)))) is adagrad
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(opt)
