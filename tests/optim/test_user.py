"""``sparsestep.rule``: what a user's own formula can rely on."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep import errors
from sparsestep.errors import InputError, SlowWarning
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.own_rules import (
    SHAPE,
    adagrad,
    adagrad_formula,
    close,
    randn,
    rows_of,
    seeded,
    table_of,
    train,
    trained,
)
from tests.table import same_bits, snapshot, unchanged

# The numbers


@pytest.mark.parametrize("theirs", [sparsestep.Adagrad, torch.optim.Adagrad])
def test_a_notebooks_adagrad_is_adagrad(theirs: Callable[..., Any]):
    assert close(trained(adagrad, lr=0.1), trained(theirs, lr=0.1))
    assert not same_bits(trained(adagrad, lr=0.1), table_of().detach())


def test_dense_and_sparse_gradients_in_one_optimizer():
    """Against torch's Adagrad, which takes both as well."""
    models = []
    for make in (adagrad, torch.optim.Adagrad):
        model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
        with torch.no_grad():
            for number, param in enumerate(model.parameters()):
                param.copy_(randn(*param.shape, seed=number))
        opt = make(model.parameters(), lr=0.1)
        for step in range(5):
            opt.zero_grad()
            model(torch.randint(0, 9, (7,), generator=seeded(step))).square().sum().backward()
            opt.step()
        models.append(model)
    for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_rule_without_state_may_return_a_bare_tensor():
    @sparsestep.rule
    def descent(param, grad, *, lr):
        return param - lr * grad

    assert same_bits(trained(descent, lr=0.5), trained(sparsestep.SGD, lr=0.5))


def test_a_rule_with_the_name_of_a_native_one_is_still_the_users():
    @sparsestep.rule
    def sgd(param, grad, *, lr):
        return param + lr * grad

    assert same_bits(trained(sgd, lr=0.5), trained(sparsestep.SGD, lr=0.5, maximize=True))


def test_state_that_does_not_begin_with_zero():
    @sparsestep.rule(state={"sum": 0.25})
    def from_a_quarter(param, grad, sum, *, lr, eps=1e-10):
        return adagrad_formula(param, grad, sum, lr=lr, eps=eps)

    theirs = trained(sparsestep.Adagrad, lr=0.1, initial_accumulator_value=0.25)
    assert close(trained(from_a_quarter, lr=0.1), theirs)


def test_a_complex_parameter_comes_as_pairs():
    shapes = []

    @sparsestep.rule(state={"sum": 0.0}, row_state={"count": 0.0})
    def counted(param, grad, sum, count, *, lr):
        shapes.append([tuple(value.shape) for value in (param, grad, sum, count)])
        return param - lr * grad, sum + grad.square(), count + 1

    param = torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.complex64))
    opt = counted([param], lr=1.0, engine="reference")
    rows = torch.tensor([[4, 1, 4]])
    values = torch.complex(randn(3, 4), randn(3, 4, seed=1))
    param.grad = torch.sparse_coo_tensor(rows, values, SHAPE)
    opt.step()
    assert shapes == [[(2, 8), (2, 8), (2, 8), (2, 1)]]
    assert torch.allclose(param, -param.grad.to_dense())
    assert opt.state[param]["sum"].dtype == torch.complex64
    assert opt.state[param]["count"].tolist() == [0, 1, 0, 0, 1, 0]


@pytest.mark.filterwarnings("ignore::sparsestep.SlowWarning")
def test_a_parameter_that_is_not_contiguous():
    plain, turned = table_of(), torch.nn.Parameter(randn(*SHAPE).t().contiguous().t())
    assert not turned.is_contiguous()
    for param in (plain, turned):
        opt = adagrad([param], lr=0.1)
        train(opt, [param])
        param.grad = randn(*SHAPE, seed=9)
        opt.step()
    assert close(plain.detach(), turned.detach())  # of different engines


# Precision


def test_the_dtype_of_the_state():
    param = table_of()
    opt = adagrad([param], lr=0.1, state_dtype=torch.bfloat16)
    train(opt, [param])
    assert opt.state[param]["sum"].dtype == torch.bfloat16
    theirs = trained(sparsestep.Adagrad, lr=0.1, state_dtype=torch.bfloat16)
    assert torch.allclose(param, theirs, rtol=1e-2)
    half = table_of(torch.bfloat16)
    opt = adagrad([half], lr=0.1)
    train(opt, [half])
    assert opt.state[half]["sum"].dtype == torch.float32


def test_stochastic_rounding():
    @sparsestep.rule
    def descent(param, grad, *, lr):
        return param - lr * grad

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
    assert close(param.detach(), plain.detach())
    held = rows_of(0).to_dense().ne(0).any(1)
    assert torch.equal(opt.state[param]["count"], held[:, None].expand(SHAPE).float())


# The class


def test_the_class_has_the_name_the_words_and_the_arguments_of_the_function():
    assert issubclass(adagrad, RuleOptimizer)
    assert issubclass(adagrad, torch.optim.Optimizer)
    assert adagrad.__name__ == adagrad.__qualname__ == "adagrad"
    assert adagrad.__module__ == adagrad_formula.__module__
    assert adagrad.__doc__ == adagrad_formula.__doc__
    assert repr(adagrad([table_of()], lr=0.1)).startswith("adagrad (\nParameter Group 0\n")
    arguments = inspect.signature(adagrad).parameters
    assert {name: each.default for name, each in arguments.items()} == {
        **{"params": inspect.Parameter.empty, "lr": inspect.Parameter.empty, "eps": 1e-10},
        **{"maximize": False, "weight_decay": 0.0, "decoupled_weight_decay": False},
        **{"engine": "auto", "semantics": "masked", "mask": None, "state_dtype": None},
        **{"stochastic_rounding": False, "rounding_seed": None},
    }
    assert {each.kind for name, each in arguments.items() if name != "params"} == {
        inspect.Parameter.KEYWORD_ONLY
    }


def test_a_rule_can_be_made_without_the_decorator():
    made = sparsestep.rule(adagrad_formula, state={"sum": 0.0})
    assert same_bits(trained(made, lr=0.1), trained(adagrad, lr=0.1))
    assert adagrad_formula(torch.zeros(1), torch.ones(1), torch.zeros(1), lr=1.0)[1] == 1


def test_the_native_engine_runs_it():
    param = table_of()
    opt = adagrad([param], lr=0.1, engine="native")
    train(opt, [param])
    assert same_bits(param.detach(), trained(sparsestep.Adagrad, lr=0.1, engine="native"))
    assert close(param.detach(), trained(adagrad, lr=0.1, engine="reference"))


def test_what_cannot_be_recorded_is_called_and_said_once():
    @sparsestep.rule
    def only_forward(param, grad, *, lr):
        return param - lr * grad if grad.sum() > 0 else param

    reason = "where it takes a sum other than over rows"
    with pytest.warns(SlowWarning, match=f"'only_forward', .*{reason}") as said:
        ours = trained(only_forward, lr=0.1)
    assert len(said) == 1
    assert same_bits(ours, trained(only_forward, lr=0.1, engine="reference"))
    param = table_of()
    opt = only_forward([param], lr=0.1, engine="native")
    param.grad = rows_of(0)
    before = snapshot(opt)
    with pytest.raises(InputError, match=f"only_forward: param 0 of group 0: the nat.*{reason}"):
        opt.step()
    assert unchanged(opt, before)


def test_a_compiled_formula_is_not_recorded():
    made = sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile={"backend": "eager"})
    param = table_of()
    opt = made([param], lr=0.1, engine="native")
    param.grad = rows_of(0)
    with pytest.raises(InputError, match=r"with compile\. Leave out compile"):
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
        assert same_bits(ours.detach(), theirs.detach())


TURNED: dict[str, Callable[[], Tensor]] = {
    "dense": lambda: torch.ones(2, 3, 4),
    "rows": lambda: torch.ones(2, 3, 4).to_sparse(1),
    "elements": lambda: torch.ones(2, 3, 4).to_sparse(),
}


@pytest.mark.parametrize("kind", TURNED)
def test_memory_that_the_core_cannot_reach_is_said_once_with_what_to_do(kind: str):
    made = sparsestep.rule(adagrad_formula, state={"sum": 0.0})
    param = torch.nn.Parameter(torch.zeros(4, 3, 2).permute(2, 1, 0))
    opt = made([param], lr=0.1)
    errors._warned.clear()
    param.grad = TURNED[kind]()
    with pytest.warns(SlowWarning, match=r"reference engine .* Make the parameter contiguous\.$"):
        opt.step()
    opt.step()  # warnings are errors here
    (only,) = opt.explain()
    assert only.engine == "reference"
    assert "Make the parameter contiguous" in only.reason


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_nobody_is_told_that_it_is_slow(engine: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_bits(trained(adagrad, lr=0.1, engine=engine), trained(adagrad, lr=0.1))


def test_a_formula_that_asks_for_float32_gets_it_from_float64_too():
    @sparsestep.rule
    def in_float32(param, grad, *, lr=0.1):
        return param - lr * (grad.float() / 3)

    def moved(dtype: torch.dtype, engine: str) -> torch.Tensor:
        weight = torch.nn.Parameter(torch.ones(3, 2, dtype=dtype))
        optimizer = in_float32([weight], engine=engine)
        weight.grad = torch.full((3, 2), 0.7, dtype=dtype)
        optimizer.step()
        return weight.detach()

    assert same_bits(moved(torch.float32, "native"), moved(torch.float32, "reference"))
    with pytest.raises(InputError, match="float64 values to float32"):
        moved(torch.float64, "native")
    with pytest.warns(SlowWarning, match="float64 values to float32"):
        found = moved(torch.float64, "auto")
    assert same_bits(found, moved(torch.float64, "reference"))
