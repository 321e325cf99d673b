"""``sparsestep.rule``: what a user's own formula can rely on."""

from __future__ import annotations

import copy
import inspect
import io
import math
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer
from tests.table import same_bits, sign_sgd, sm3_by_rows, snapshot, state_tensors, unchanged
from tests.torch_versions import needs_graphs_for_any_number, uses_torchscript

SHAPE = (6, 4)


def adagrad_formula(param, grad, sum, *, lr, eps=1e-10):
    """Adagrad, as one writes it in a notebook."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


@sparsestep.rule(state={"sum": 0.0})
def adagrad(param, grad, sum, *, lr, eps=1e-10):
    """Adagrad, as one writes it in a notebook."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


class FunctionalAdagrad(FunctionalOptimizer):
    optimizer_class = adagrad


class FunctionalSm3(FunctionalOptimizer):
    optimizer_class = sm3_by_rows


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=seeded(seed)).to(dtype)


def table_of(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(randn(*SHAPE, dtype=dtype))


def rows_of(seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient that holds some rows, one of them twice."""
    rows = torch.randint(0, SHAPE[0], (1, 3), generator=seeded(seed))
    rows = torch.cat([rows, rows[:, :1]], dim=1)
    return torch.sparse_coo_tensor(rows, randn(4, 4, seed=seed, dtype=dtype), SHAPE)


def train(opt: torch.optim.Optimizer, params: list[Tensor], steps: range = range(5)) -> None:
    for step in steps:
        for param in params:
            param.grad = rows_of(step, param.dtype)
        opt.step()


def trained(make: Callable[..., Any], dtype: torch.dtype = torch.float32, **options: Any) -> Tensor:
    param = table_of(dtype)
    train(make([param], **options), [param])
    return param.detach()


def close(ours: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


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
    opt = counted([param], lr=1.0)
    rows = torch.tensor([[4, 1, 4]])
    values = torch.complex(randn(3, 4), randn(3, 4, seed=1))
    param.grad = torch.sparse_coo_tensor(rows, values, SHAPE)
    opt.step()
    assert shapes == [[(2, 8), (2, 8), (2, 8), (2, 1)]]
    assert torch.allclose(param, -param.grad.to_dense())
    assert opt.state[param]["sum"].dtype == torch.complex64
    assert opt.state[param]["count"].tolist() == [0, 1, 0, 0, 1, 0]


def test_a_parameter_that_is_not_contiguous():
    plain, turned = table_of(), torch.nn.Parameter(randn(*SHAPE).t().contiguous().t())
    assert not turned.is_contiguous()
    for param in (plain, turned):
        opt = adagrad([param], lr=0.1)
        train(opt, [param])
        param.grad = randn(*SHAPE, seed=9)
        opt.step()
    assert same_bits(plain.detach(), turned.detach())


# Every layout


@dataclass
class Given:
    """A gradient, and the same as a sum of all its entries and what it holds."""

    grad: Any
    total: Tensor
    held: Tensor


def exact(*shape: int, seed: int) -> Tensor:
    """Values whose sums are exact in every order, none of them zero."""
    values = torch.randint(1, 17, shape, generator=seeded(seed)) / 8
    return values * (1 - 2 * torch.randint(0, 2, shape, generator=seeded(seed + 1)))


def some_rows(seed: int) -> Given:
    rows = torch.tensor([[4, 1, 4]])
    grad = torch.sparse_coo_tensor(rows, exact(3, 4, seed=seed), SHAPE)
    held = torch.zeros(SHAPE, dtype=torch.bool)
    held[[1, 4]] = True
    return Given(grad, grad.to_dense(), held)


def elements(seed: int) -> Tensor:
    """A dense tensor that is zero in many places; a different one for each seed."""
    return exact(*SHAPE, seed=seed) * torch.randint(0, 2, SHAPE, generator=seeded(seed + 2))


def converted(convert: Callable[[Tensor], Tensor]) -> Callable[[int], Given]:
    def make(seed: int) -> Given:
        total = elements(seed)
        return Given(convert(total), total, total != 0)

    return make


def in_blocks(convert: Callable[..., Tensor]) -> Callable[[int], Given]:
    """Of a blocked layout, whole blocks are held."""

    def make(seed: int) -> Given:
        total = elements(seed) * torch.tensor([1.0, 1, 0, 0, 1, 1])[:, None]
        total[:2, 2:] = 0
        held = total.unfold(0, 2, 2).unfold(1, 2, 2).ne(0).any(-1).any(-1)
        held = held.repeat_interleave(2, 0).repeat_interleave(2, 1)
        return Given(convert(total, (2, 2)), total, held)

    return make


def masked(seed: int) -> Given:
    values, held = exact(*SHAPE, seed=seed), elements(seed) != 0
    return Given(torch.masked.masked_tensor(values, held), values * held, held)


def strided(seed: int) -> Given:
    total = exact(*SHAPE, seed=seed)
    return Given(total, total, torch.ones(SHAPE, dtype=torch.bool))


def by_hand(seed: int) -> Given:
    same = some_rows(seed)
    grad = sparsestep.Touched(same.grad._indices()[0], same.grad._values())
    return Given(grad, same.total, same.held)


LAYOUTS: dict[str, Callable[[int], Given]] = {
    "COO, rows": some_rows,
    "COO, elements": converted(Tensor.to_sparse_coo),
    "CSR": converted(Tensor.to_sparse_csr),
    "CSC": converted(Tensor.to_sparse_csc),
    "BSR": in_blocks(Tensor.to_sparse_bsr),
    "BSC": in_blocks(Tensor.to_sparse_bsc),
    "MaskedTensor": masked,
    "strided": strided,
    "Touched": by_hand,
}
# What torch lets be assigned to ``param.grad`` of a strided param.
ASSIGNABLE = ["COO, rows", "COO, elements", "MaskedTensor", "strided"]

each_layout = pytest.mark.parametrize("layout", LAYOUTS)
of_masked_tensors = pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
of_compressed = pytest.mark.filterwarnings("ignore:Sparse .* tensor support is in beta")


def adagrad_oracle(param: Tensor, kept: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    new, sum = adagrad_formula(param, given.total, kept, lr=0.1)
    return torch.where(given.held, new, param), torch.where(given.held, sum, kept)


def sm3_oracle(param: Tensor, kept: Tensor, given: Given) -> tuple[Tensor, Tensor]:
    bound = kept[:, None] + given.total.square()
    new = param - 0.1 * given.total / (bound.sqrt() + 1e-10)
    held = given.held
    return torch.where(held, new, param), torch.where(held.any(1), bound.amax(1), kept)


CASES = {
    "per element": (adagrad, FunctionalAdagrad, adagrad_oracle, "sum", SHAPE),
    "per row": (sm3_by_rows, FunctionalSm3, sm3_oracle, "accumulator", SHAPE[:1]),
}
each_kind = pytest.mark.parametrize("kind", CASES)


@each_layout
@each_kind
@of_masked_tensors
@of_compressed
def test_every_layout_by_hand(layout: str, kind: str):
    _, functional, oracle, name, shape = CASES[kind]
    weight = randn(*SHAPE)
    expected, kept = weight.clone(), torch.zeros(shape)
    opt = functional([weight], lr=0.1)
    for seed in range(4):
        given = LAYOUTS[layout](seed)
        expected, kept = oracle(expected, kept, given)
        opt.step([given.grad])
        assert close(weight, expected)
        assert close(opt.state[weight][name], kept)
    assert same_bits(weight, randn(*SHAPE)) is False


@pytest.mark.parametrize("layout", ASSIGNABLE)
@each_kind
@of_masked_tensors
def test_every_layout_that_torch_lets_be_a_grad(layout: str, kind: str):
    cls, _, oracle, name, shape = CASES[kind]
    param = table_of()
    expected, kept = param.detach().clone(), torch.zeros(shape)
    opt = cls([param], lr=0.1)
    for seed in range(4):
        given = LAYOUTS[layout](seed)
        expected, kept = oracle(expected, kept, given)
        param.grad = given.grad
        opt.step()
        assert close(param.detach(), expected)
        assert close(opt.state[param][name], kept)


@pytest.mark.parametrize("layout", ["strided", "COO, rows", "COO, elements"])
@pytest.mark.parametrize("by", ["row", "element"])
@each_kind
def test_a_mask(layout: str, by: str, kind: str):
    cls, _, oracle, name, shape = CASES[kind]
    mask = torch.tensor([True, True, False, False, True, False])
    if by == "element":
        mask = mask[:, None] & torch.tensor([True, False, True, True])
    param = table_of()
    if (by, kind) == ("element", "per row"):
        with pytest.raises(InputError, match=r"mask 0 must have shape \(6,\)"):
            cls([param], lr=0.1, mask=mask)
        return
    whole = mask if by == "element" else mask[:, None].expand(SHAPE)
    expected, kept = param.detach().clone(), torch.zeros(shape)
    opt = cls([param], lr=0.1, mask=mask)
    for seed in range(4):
        given = LAYOUTS[layout](seed)
        param.grad = given.grad
        given = Given(given.grad, given.total * whole, given.held & whole)
        expected, kept = oracle(expected, kept, given)
        opt.step()
        assert close(param.detach(), expected)
        assert close(opt.state[param][name], kept)
    assert same_bits(param.detach()[~whole], randn(*SHAPE)[~whole])


def test_what_the_function_sees():
    """Slots and blocks; each slot once, with the sum of its entries; nothing for no entries."""
    seen: list[tuple[Any, ...]] = []

    @sparsestep.rule(state={"kept": 0.0})
    def by_element(param, grad, kept):
        seen.append((param.tolist(), grad.tolist()))
        return param, kept

    weight = torch.arange(6.0).view(3, 2)
    opt = type("Watched", (FunctionalOptimizer,), {"optimizer_class": by_element})([weight])
    opt.step([sparsestep.Touched(torch.tensor([2, 0, 2]), torch.ones(3, 2))])
    opt.step([torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()])
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
    opt = type("Watched", (FunctionalOptimizer,), {"optimizer_class": by_row})([weight])
    opt.step([torch.tensor([[0.0, 3], [0, 0], [4, 0]]).to_sparse_coo()])
    opt.step([torch.ones(3, 2)])
    assert seen == [
        ([[0, 1], [4, 5]], [[0, 3], [4, 0]], (2, 1)),
        ([[0, 1], [2, 3], [4, 5]], [[1, 1]] * 3, (3, 1)),
    ]


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
    found = set()

    @sparsestep.rule(state={"kept": 0.0})
    def watched(param, grad, kept):
        found.update({param.dtype, grad.dtype, kept.dtype})
        return param, kept

    trained(watched, param, state_dtype=state)
    assert found == {seen}


# Options


def test_the_step_is_passed_to_those_who_ask():
    seen = []

    @sparsestep.rule
    def asks(param, grad, *, step, lr=1.0):
        seen.append(step)
        return param - lr / step * grad

    @sparsestep.rule
    def does_not_ask(param, grad, *, lr=1.0):
        return param - lr * grad

    params = [table_of(), table_of()]
    opt = asks(params)
    train(opt, params[:1], range(2))
    train(opt, params, range(1))
    assert seen == [1, 2, 3, 1]
    assert "step" not in opt.defaults
    assert same_bits(trained(does_not_ask), trained(sparsestep.SGD, lr=1.0))


def test_options_have_the_functions_defaults():
    opt = adagrad([table_of()], lr=0.1)
    expected = {"lr": 0.1, "eps": 1e-10, "maximize": False, "weight_decay": 0.0}
    assert opt.defaults == expected
    assert adagrad([table_of()], lr=0.1, eps=0.5).defaults == {**expected, "eps": 0.5}


def test_an_option_without_a_default_must_be_given():
    message = r"^adagrad needs lr. Got eps. Pass it by name, or give every param group its own.$"
    with pytest.raises(InputError, match=message):
        adagrad([table_of()])
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        adagrad([{"params": [table_of()], "lr": 0.1}, {"params": [table_of()]}])

    @sparsestep.rule
    def needs_two(param, grad, *, first, second):
        return param - first * second * grad

    with pytest.raises(InputError, match=r"needs first, second. Got no options."):
        needs_two([table_of()])
    with pytest.raises(InputError, match=r"needs first. Got second."):
        needs_two([table_of()], second=1.0)


def test_every_param_group_may_bring_it():
    params = [table_of(), table_of()]
    opt = adagrad([{"params": params[:1], "lr": 0.1}, {"params": params[1:], "lr": 0.2}])
    with pytest.raises(InputError, match=r"^adagrad needs lr"):
        opt.add_param_group({"params": [table_of()]})
    assert len(opt.param_groups) == 2
    train(opt, params)
    assert same_bits(params[0].detach(), trained(adagrad, lr=0.1))
    assert same_bits(params[1].detach(), trained(adagrad, lr=0.2))
    again = adagrad([{"params": params[:1], "lr": 0.5}, {"params": params[1:], "lr": 0.5}])
    again.load_state_dict(opt.state_dict())
    assert [group["lr"] for group in again.param_groups] == [0.1, 0.2]


def test_param_groups_have_their_own_options():
    params = [table_of(), table_of(), table_of()]
    groups = [
        {"params": params[:1]},
        {"params": params[1:2], "lr": 0.5, "eps": 0.25},
        {"params": params[2:], "weight_decay": 0.1, "maximize": True},
    ]
    opt = adagrad(groups, lr=0.1)
    train(opt, params)
    own: list[dict[str, Any]] = [{}, {"lr": 0.5, "eps": 0.25}]
    own.append({"weight_decay": 0.1, "maximize": True})
    for param, options in zip(params, own, strict=True):
        assert same_bits(param.detach(), trained(adagrad, **{"lr": 0.1, **options}))


def test_a_required_option_with_the_name_of_somebody_elses():
    @sparsestep.rule(state={"buffer": 0.0})
    def heavy_ball(param, grad, buffer, *, momentum):
        buffer = momentum * buffer + grad
        return param - 0.1 * buffer, buffer

    param = table_of()
    opt = heavy_ball([{"params": [param], "momentum": 0.5}])
    train(opt, [param])
    assert same_bits(param.detach(), trained(heavy_ball, momentum=0.5))


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match=r"adagrad.* unexpected keyword argument 'momentum'"):
        adagrad([table_of()], lr=0.1, momentum=0.9)
    with pytest.raises(
        InputError, match=r"adagrad: a param group may set lr, eps, .* Got momentum"
    ):
        adagrad([{"params": [table_of()], "momentum": 0.9}], lr=0.1)


def test_an_option_may_be_anything():
    @sparsestep.rule
    def odd(param, grad, *, lr, kind="plain", scales=(1.0, 2.0), bend=None):
        step = lr * grad * scales[0] / scales[1]
        step = step if bend is None else bend(step)
        return param - step if kind == "plain" else param + step

    sgd = trained(sparsestep.SGD, lr=0.5)
    assert same_bits(trained(odd, lr=1.0), sgd)
    assert same_bits(trained(odd, lr=torch.tensor(1.0), bend=lambda step: step), sgd)
    assert same_bits(trained(odd, lr=1.0, kind="other", maximize=True), sgd)


@pytest.mark.parametrize(
    "options",
    [
        {"maximize": True},
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "maximize": True},
        {"weight_decay": 0.1, "decoupled_weight_decay": True},
        {"weight_decay": torch.tensor(0.1)},
    ],
    ids=str,
)
def test_maximizing_and_decay_come_for_free(options: dict[str, Any]):
    ours = trained(adagrad, lr=0.1, **options)
    assert close(ours, trained(sparsestep.Adagrad, lr=0.1, **options))
    assert not close(ours, trained(adagrad, lr=0.1))


def test_they_are_the_formulas_own_where_it_takes_them():
    @sparsestep.rule
    def own(param, grad, *, lr, weight_decay=0.0, maximize="no"):
        assert maximize in ("no", "yes")
        return param - lr * (grad + 2 * weight_decay * param)

    assert same_bits(trained(own, lr=0.1, maximize="yes"), trained(own, lr=0.1))
    theirs = trained(sparsestep.SGD, lr=0.1, weight_decay=0.5)
    assert close(trained(own, lr=0.1, weight_decay=0.25), theirs)
    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        own([table_of()], lr=0.1, decoupled_weight_decay=True)


def test_negative_decay_is_refused():
    with pytest.raises(InputError, match="adagrad: Invalid weight_decay value: -1"):
        adagrad([table_of()], lr=0.1, weight_decay=-1)


def test_decoupled_decay_needs_a_rate():
    """It shrinks by ``lr * weight_decay``: without an lr it would silently do nothing."""

    @sparsestep.rule
    def without_lr(param, grad, *, rate=0.5):
        return param - rate * grad

    with pytest.raises(TypeError, match="decoupled_weight_decay"):
        without_lr([table_of()], weight_decay=0.1, decoupled_weight_decay=True)
    theirs = trained(sparsestep.SGD, lr=0.5, weight_decay=0.1)
    assert close(trained(without_lr, weight_decay=0.1), theirs)


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
    opt = odd([param], lr=0.5)
    train(opt, [param], range(1))
    plain = table_of()
    train(sparsestep.SGD([plain], lr=0.5), [plain], range(1))
    assert close(param.detach(), plain.detach())
    held = rows_of(0).to_dense().ne(0).any(1)
    assert torch.equal(opt.state[param]["count"], held[:, None].expand(SHAPE).float())


# Checkpoints and copies


def test_a_checkpoint():
    straight, resumed = table_of(), table_of()
    opt = adagrad([straight], lr=0.1)
    train(opt, [straight], range(6))
    opt = adagrad([resumed], lr=0.1)
    train(opt, [resumed], range(3))
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    again = adagrad([resumed], lr=0.5, eps=0.5)
    again.load_state_dict(torch.load(file, weights_only=True))
    assert again.param_groups[0]["lr"] == 0.1
    assert again.param_groups[0]["eps"] == 1e-10
    assert int(again.state[resumed]["step"]) == 3
    train(again, [resumed], range(3, 6))
    assert same_bits(straight.detach(), resumed.detach())


def test_a_checkpoint_goes_to_the_librarys_rule_with_the_same_state():
    ours, theirs = table_of(), table_of()
    opt = adagrad([ours], lr=0.1)
    train(opt, [ours])
    theirs.data.copy_(ours.data)
    other = sparsestep.Adagrad([theirs], lr=0.1)
    other.load_state_dict(opt.state_dict())
    train(opt, [ours], range(5, 9))
    train(other, [theirs], range(5, 9))
    assert close(ours.detach(), theirs.detach())


def test_an_older_checkpoint_without_a_new_option():
    param = table_of()
    old = adagrad([param], lr=0.1).state_dict()
    del old["param_groups"][0]["eps"]
    opt = adagrad([param], lr=0.1, eps=0.5)
    opt.load_state_dict(old)
    assert opt.param_groups[0]["eps"] == 0.5


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda whole: pickle.loads(pickle.dumps(whole))],
    ids=["copy", "pickle"],
)
@pytest.mark.parametrize("rule", [adagrad, sign_sgd, sm3_by_rows], ids=lambda r: r.__name__)
def test_copies_go_on_with_the_same_bits(rule: Any, copied: Callable[[Any], Any]):
    param = table_of()
    opt = rule([param], lr=0.1)
    train(opt, [param], range(3))
    other, again = copied((param, opt))
    assert type(again) is rule
    train(opt, [param], range(3, 6))
    train(again, [other], range(3, 6))
    assert same_bits(param.detach(), other.detach())
    assert all(map(same_bits, state_tensors(opt), state_tensors(again)))


def test_a_local_rule_can_be_copied_but_not_pickled():
    @sparsestep.rule
    def local(param, grad, *, lr):
        return param - lr * grad

    param = table_of()
    opt = local([param], lr=0.1)
    other, again = copy.deepcopy((param, opt))
    train(again, [other])
    assert same_bits(other.detach(), trained(local, lr=0.1))
    with pytest.raises((AttributeError, pickle.PicklingError), match="local"):
        pickle.dumps(opt)


# What a wrong rule does: nothing

SPOILED: dict[str, tuple[Callable[[Tensor, Tensor], Any], str]] = {
    "one value too few": (lambda param, kept: param, r"must return 2 values: param, kept. Got 1"),
    "one too many": (lambda param, kept: (param, kept, kept), "must return 2 values.* Got 3"),
    "nothing": (
        lambda param, kept: None,
        "must return a tensor or a tuple of tensors. Got NoneType",
    ),
    "a number": (lambda param, kept: 1.0, "must return a tensor or a tuple of tensors. Got float"),
    "by name": (
        lambda param, kept: {"param": param, "kept": kept},
        "must return a tensor or a tuple of tensors. Got dict",
    ),
    "not a tensor": (
        lambda param, kept: (param, 0.0),
        r"must return kept in its shape.* Got float",
    ),
    "None instead of state": (
        lambda param, kept: (param, None),
        "kept in its shape.* Got NoneType",
    ),
    "a row too few": (
        lambda param, kept: (param[1:], kept),
        r"param in its shape, \(2, 5\).*\(1, 5\)",
    ),
    "a shape that could be broadcast": (
        lambda param, kept: (param, kept.sum()),
        r"kept in its shape, \(2, 5\). Got \(\)",
    ),
    "transposed": (lambda param, kept: (param, kept.t()), r"\(2, 5\). Got \(5, 2\)"),
    "complex": (lambda param, kept: (param, kept * 1j), "must return real strided tensors"),
    "sparse": (lambda param, kept: (param.to_sparse_coo(), kept), "real strided tensors on cpu"),
    "elsewhere": (lambda param, kept: (param, kept.to("meta")), "on cpu. Got .* on meta"),
}


def spoiled_for_the_last(result: Callable[[Tensor, Tensor], Any], **kwargs: Any) -> Any:
    """A rule that goes wrong where rows have five elements."""

    @sparsestep.rule(state={"kept": 0.0}, **kwargs)
    def wrong(param, grad, kept, *, lr, spoil=False):
        new, kept = param - lr * grad, kept + 1
        return result(new, kept) if spoil and param.shape[-1] == 5 else (new, kept)

    return wrong


def several() -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(randn(*shape)) for shape in [(6, 4), (3,), (6, 3), (6, 5)]]


def give_gradients(params: list[torch.nn.Parameter]) -> None:
    """A dense one for the second, sparse ones for the others."""
    for param in params:
        values = randn(2, *param.shape[1:], seed=1)
        coo = torch.sparse_coo_tensor(torch.tensor([[2, 0]]), values, param.shape)
        param.grad = coo.to_dense() if param.dim() == 1 else coo


@pytest.mark.parametrize("spoiled", SPOILED)
@pytest.mark.parametrize("first_step", [True, False], ids=["first step", "later step"])
def test_a_wrong_result_for_the_last_param_changes_nothing(spoiled: str, first_step: bool):
    result, message = SPOILED[spoiled]
    params = several()
    opt = spoiled_for_the_last(result)([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    give_gradients(params)
    if not first_step:
        opt.step()
    opt.param_groups[1]["spoil"] = True
    before, versions = snapshot(opt), [param._version for param in params]
    with pytest.raises(InputError, match=message) as raised:
        opt.step()
    assert str(raised.value).startswith("wrong: param 1 of group 1: rule 'wrong' must return ")
    assert unchanged(opt, before)
    assert [param._version for param in params] == versions
    opt.param_groups[1]["spoil"] = False
    opt.step()
    assert {int(kept["step"]) for kept in opt.state.values()} == {1 if first_step else 2}


@pytest.mark.parametrize("kind", [ZeroDivisionError, InputError, KeyboardInterrupt])
@pytest.mark.parametrize("first_step", [True, False], ids=["first step", "later step"])
def test_an_exception_inside_the_rule_changes_nothing(kind: type[BaseException], first_step: bool):
    def raises(param: Tensor, kept: Tensor) -> Any:
        raise kind("not today")

    params = several()
    opt = spoiled_for_the_last(raises)(params, lr=0.1)
    give_gradients(params)
    if not first_step:
        opt.step()
    opt.param_groups[0]["spoil"] = True
    before = snapshot(opt)
    with pytest.raises(kind, match="not today"):
        opt.step()
    assert unchanged(opt, before)


# Formulas that write into their arguments


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


class FunctionalInPlace(FunctionalOptimizer):
    optimizer_class = adagrad_in_place


class FunctionalSm3InPlace(FunctionalOptimizer):
    optimizer_class = sm3_in_place


@each_layout
@each_kind
@of_masked_tensors
@of_compressed
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_a_formula_may_work_in_place(layout: str, kind: str, decay: float):
    """Its arguments are copies: numbers and gradients are as if it did not.

    Decay moves the whole row that a rule by rows sees, of which only what is held counts.
    """
    in_place = {"per element": FunctionalInPlace, "per row": FunctionalSm3InPlace}[kind]
    _, functional, _, name, _ = CASES[kind]
    weights = [randn(*SHAPE), randn(*SHAPE)]
    options = {"lr": 0.1, "weight_decay": decay}
    opts = [functional([weights[0]], **options), in_place([weights[1]], **options)]
    for seed in range(4):
        given = [LAYOUTS[layout](seed) for _ in range(3)]
        for opt, each in zip(opts, given, strict=False):
            opt.step([each.grad])
        assert close(*weights)
        assert close(*(opt.state[w][name] for opt, w in zip(opts, weights, strict=True)))
        if layout == "strided":
            assert same_bits(given[1].grad, given[2].grad)


@pytest.mark.parametrize("shape", [(3, 2), (4,), ()], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
def test_what_was_written_into_arguments_is_lost_where_the_formula_then_fails(
    shape: tuple[int, ...], sparse: bool
):
    """A COO gradient with no sparse dims holds the whole parameter, like a dense one."""

    @sparsestep.rule(state={"kept": 1.0})
    def writes_and_raises(param, grad, kept, *, lr, fails=True):
        for value in (param, grad, kept):
            value.fill_(math.nan)
        if fails:
            raise ArithmeticError("too late")
        return param, kept, grad

    param = torch.nn.Parameter(torch.ones(shape))
    opt = writes_and_raises([param], lr=0.1)
    opt.materialize_state()
    before = snapshot(opt)
    dense = torch.full(shape, 2.0)
    param.grad = dense
    if sparse:
        no_dims = torch.zeros(0, 1, dtype=torch.int64)
        param.grad = torch.sparse_coo_tensor(no_dims, dense[None], shape)
    for fails, kind in ((True, ArithmeticError), (False, InputError)):
        opt.param_groups[0]["fails"] = fails
        with pytest.raises(kind):
            opt.step()
        assert unchanged(opt, before)
        assert param.grad.to_dense().eq(2).all()


def test_a_formula_may_return_and_keep_its_arguments():
    kept_by_user = []

    @sparsestep.rule(state={"last_grad": 0.0, "last_param": 0.0})
    def keeps(param, grad, last_grad, last_param, *, lr):
        kept_by_user.append(param)
        return param - lr * grad, grad, param

    param = table_of()
    start = param.detach().clone()
    opt = keeps([param], lr=0.1)
    param.grad = randn(*SHAPE, seed=1)
    opt.step()
    assert same_bits(opt.state[param]["last_grad"], param.grad)
    assert same_bits(opt.state[param]["last_param"], start)
    assert same_bits(kept_by_user[0].view(SHAPE), start)
    param.grad.zero_()
    assert opt.state[param]["last_grad"].ne(0).all()


# What cannot be a rule


def takes_no_grad(param, *, lr):
    return param


def takes_unnamed_state(param, grad, sum, *, lr):
    return param, sum


def takes_state_in_another_order(param, grad, second, first, *, lr):
    return param, first, second


def takes_options_by_position(param, grad, sum, lr, eps=1e-10):
    return param, sum


def takes_any_number(param, grad, *state, lr):
    return param


def takes_any_option(param, grad, **options):
    return param


def takes_a_mask(param, grad, *, lr, mask=None):
    return param


def takes_bias_correction(param, grad, *, lr, bias_correction=True, engine="auto"):
    return param


def takes_step_as_state(param, grad, step):
    return param, step


TAKES = r"must take \(param, grad, "
BAD_RULES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no gradient": (
        takes_no_grad,
        {},
        r"rule 'takes_no_grad' must take \(param, grad, \*, options",
    ),
    "state that is not named": (takes_unnamed_state, {}, r"Got \(param, grad, sum, \*, lr\)"),
    "state that is not taken": (takes_any_option, {"state": {"sum": 0.0}}, TAKES + "sum, "),
    "state under another name": (takes_unnamed_state, {"state": {"square": 0.0}}, TAKES + "square"),
    "another order": (
        takes_state_in_another_order,
        {"state": {"first": 0.0}, "row_state": {"second": 0.0}},
        TAKES + "first, second",
    ),
    "options by position": (
        takes_options_by_position,
        {"state": {"sum": 0.0}},
        r"Got \(param, grad, sum, lr, eps=1e-10\). .* its options come after a \*",
    ),
    "any number of states": (takes_any_number, {}, r"Got \(param, grad, \*state, lr\)"),
    "any option": (takes_any_option, {}, r"Got \(param, grad, \*\*options\)"),
    "an option of every optimizer": (takes_a_mask, {}, "another meaning. Got mask. Rename it"),
    "several such options": (takes_bias_correction, {}, "Got bias_correction, engine. Rename it"),
    "step as state": (takes_step_as_state, {"state": {"step": 0.0}}, "name of the step count"),
    "names without values": (takes_unnamed_state, {"state": ["sum"]}, "must map names to first"),
    "a tensor as first value": (
        takes_unnamed_state,
        {"row_state": {"sum": torch.zeros(1)}},
        "row_state must map names to first values",
    ),
    "no function": ({"sum": 0.0}, {}, "rule must be given a function. Got {'sum': 0.0}"),
    "no signature": (torch.add, {}, "rule 'add' must have a signature"),
    "compile that is no option": (
        takes_unnamed_state,
        {"state": {"sum": 0.0}, "compile": "inductor"},
        "compile must be True, False or a mapping of torch.compile's options. Got 'inductor'",
    ),
}


@pytest.mark.parametrize("bad", BAD_RULES)
def test_what_cannot_be_a_rule_is_refused_when_it_is_decorated(bad: str):
    function, options, message = BAD_RULES[bad]
    with pytest.raises(InputError, match=message):
        sparsestep.rule(function, **options)
    with pytest.raises(InputError, match=message):
        sparsestep.rule(**options)(function)


def test_param_and_grad_may_have_any_name():
    @sparsestep.rule(state={"v": 0.0})
    def terse(w, g, v, /, *, lr):
        return w - lr * g, v

    assert same_bits(trained(terse, lr=0.5), trained(sparsestep.SGD, lr=0.5))


# The class


def test_the_class_has_the_name_the_words_and_the_arguments_of_the_function():
    assert issubclass(adagrad, RuleOptimizer)
    assert issubclass(adagrad, torch.optim.Optimizer)
    assert adagrad.__name__ == adagrad.__qualname__ == "adagrad"
    assert adagrad.__module__ == __name__
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


def test_the_native_engine_is_refused():
    message = "adagrad: the native engine takes rules that have a C.. twin. Got rule 'adagrad'. Use"
    with pytest.raises(InputError, match=message):
        adagrad([table_of()], lr=0.1, engine="native")
    param = table_of()
    opt = adagrad([param], lr=0.1)
    opt.engine = "native"
    param.grad = rows_of(0)
    before = snapshot(opt)
    with pytest.raises(InputError, match="adagrad: param 0 of group 0: the native engine takes"):
        opt.step()
    assert unchanged(opt, before)


def test_dense_semantics_is_refused():
    with pytest.raises(InputError, match=r"semantics='dense' needs a rule that says .* 'adagrad'"):
        adagrad([table_of()], lr=0.1, semantics="dense")


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_nobody_is_told_that_it_is_slow(engine: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same_bits(trained(adagrad, lr=0.1, engine=engine), trained(adagrad, lr=0.1))


# torch.compile


@pytest.fixture
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Counting:
    """A backend that compiles nothing and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        self.count += 1
        return graph.forward


def adam_formula(param, grad, mean, square, *, step, lr, betas=(0.9, 0.999), eps=1e-8):
    mean = mean + (1 - betas[0]) * (grad - mean)
    square.mul_(betas[1]).add_((1 - betas[1]) * grad * grad)
    root = (square / (1 - betas[1] ** step)).sqrt() + eps
    return param - lr / (1 - betas[0] ** step) * mean / root, mean, square


def trained_under_a_schedule(steps: int = 12, **how: Any) -> Tensor:
    """As many rows as it comes, dense gradients in between, and another rate in each step."""
    made = sparsestep.rule(adam_formula, state={"mean": 0.0, "square": 0.0}, **how)
    param = torch.nn.Parameter(randn(12, 4))
    opt = made([param], lr=0.1)
    for step in range(steps):
        opt.param_groups[0]["lr"] *= 0.9
        rows = torch.randint(0, 12, (1, 2 + step % 5), generator=seeded(step))
        values = randn(rows.shape[1], 4, seed=step)
        param.grad = torch.sparse_coo_tensor(rows, values, param.shape)
        if step % 4 == 3:
            param.grad = param.grad.to_dense()
        opt.step()
    return param.detach()


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize(
    "backend", ["eager", pytest.param("aot_eager", marks=needs_graphs_for_any_number)]
)
def test_a_compiled_rule_has_the_same_numbers(backend: str):
    compiled = trained_under_a_schedule(compile={"backend": backend, "fullgraph": True})
    assert torch.allclose(compiled, trained_under_a_schedule(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("_fresh_compiler")
@uses_torchscript
def test_a_rule_compiled_by_inductor_has_the_same_numbers():
    compiled = trained_under_a_schedule(3, compile=True)
    assert torch.allclose(compiled, trained_under_a_schedule(3), rtol=1e-5, atol=1e-6)


def test_what_torch_compile_is_told(monkeypatch: pytest.MonkeyPatch):
    told = []
    monkeypatch.setattr(torch, "compile", lambda called, **options: told.append(options) or called)
    for how in (False, True, {}, {"backend": "eager", "dynamic": True}):
        trained(sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile=how), lr=0.1)
    assert told == [{}, {}, {"backend": "eager", "dynamic": True}]


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_rule_is_compiled_a_few_times_however_many_steps_there_are():
    """Not for every rate, count and number of rows: torch gives up on a function after eight."""
    counter = Counting()
    trained_under_a_schedule(compile={"backend": counter})
    assert 1 <= counter.count <= 4


@pytest.mark.usefixtures("_fresh_compiler")
def test_many_rules_are_compiled_each_for_itself():
    for _ in range(10):
        counter = Counting()
        made = sparsestep.rule(adagrad_formula, state={"sum": 0.0}, compile={"backend": counter})
        trained(made, lr=0.1)
        assert counter.count >= 1


@pytest.mark.usefixtures("_fresh_compiler")
@pytest.mark.parametrize("spoiled", ["one value too few", "not a tensor", "transposed"])
def test_a_compiled_rule_is_checked_too(spoiled: str):
    result, message = SPOILED[spoiled]
    params = several()
    opt = spoiled_for_the_last(result, compile={"backend": "eager"})(params, lr=0.1, spoil=True)
    give_gradients(params)
    before = snapshot(opt)
    with pytest.raises(InputError, match=message):
        opt.step()
    assert unchanged(opt, before)


@pytest.mark.usefixtures("_fresh_compiler")
def test_a_compiled_formula_may_work_in_place():
    @sparsestep.rule(state={"sum": 0.0}, compile={"backend": "aot_eager"})
    def compiled(param, grad, sum, *, lr, eps=1e-10):
        sum.addcmul_(grad, grad)
        grad.mul_(lr)
        return param.sub_(grad.div_(sum.sqrt().add_(eps))), sum

    params = [table_of(), table_of()]
    for param, rule in zip(params, (compiled, adagrad), strict=True):
        opt = rule([param], lr=0.1)
        train(opt, [param])
        param.grad = dense = randn(*SHAPE, seed=1)
        opt.step()
        assert same_bits(dense, randn(*SHAPE, seed=1))
    assert close(*(param.detach() for param in params))


# Training loops


def model_of() -> torch.nn.Module:
    model = torch.nn.Sequential(torch.nn.Embedding(9, 4, sparse=True), torch.nn.Linear(4, 2))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(randn(*param.shape, seed=number))
    return model


def loss_of(model: torch.nn.Module, step: int) -> Tensor:
    return model(torch.randint(0, 9, (7,), generator=seeded(step))).square().mean()


def bits_of(model: torch.nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def test_a_scheduler_drives_it():
    runs = []
    for make in (adagrad, torch.optim.Adagrad):
        model = model_of()
        opt = make(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=5)
        for step in range(5):
            opt.zero_grad()
            loss_of(model, step).backward()
            opt.step()
            schedule.step()
        assert opt.param_groups[0]["lr"] == pytest.approx(0.0)
        runs.append(bits_of(model))
    assert all(map(close, *runs))


def test_a_cycle_drives_its_momentum():
    model = model_of()
    opt = sign_sgd(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=0.1, total_steps=6)
    seen = set()
    for step in range(5):
        opt.zero_grad()
        loss_of(model, step).backward()
        opt.step()
        schedule.step()
        seen.add(opt.param_groups[0]["momentum"])
    assert len(seen) > 3


def test_a_scaler_skips_what_overflowed_and_changes_nothing_else():
    scaled, plain = model_of(), model_of()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
    opts = [adagrad(model.parameters(), lr=0.1) for model in (scaled, plain)]
    for step in range(4):
        overflows = step == 1
        before = snapshot(opts[0])
        opts[0].zero_grad()
        scaler.scale(loss_of(scaled, step) * (math.inf if overflows else 1.0)).backward()
        scaler.step(opts[0])
        scaler.update()
        assert unchanged(opts[0], before) == overflows
        if not overflows:
            opts[1].zero_grad()
            loss_of(plain, step).backward()
            opts[1].step()
    assert all(map(same_bits, bits_of(scaled), bits_of(plain)))


def test_a_closure():
    closed, plain = model_of(), model_of()
    opts = [adagrad(model.parameters(), lr=0.1) for model in (closed, plain)]

    def closure() -> Tensor:
        opts[0].zero_grad()
        loss = loss_of(closed, 0)
        loss.backward()
        return loss

    loss = opts[0].step(closure)
    loss_of(plain, 0).backward()
    opts[1].step()
    assert loss.item() == loss_of(model_of(), 0).item()
    assert all(map(same_bits, bits_of(closed), bits_of(plain)))


def test_it_steps_in_backward():
    watched, plain = model_of(), model_of()
    opts = [adagrad(model.parameters(), lr=0.1) for model in (watched, plain)]
    handle = opts[0].step_in_backward()
    for step in range(3):
        loss_of(watched, step).backward()
        opts[1].zero_grad()
        loss_of(plain, step).backward()
        opts[1].step()
    handle.remove()
    assert all(map(same_bits, bits_of(watched), bits_of(plain)))


def test_autograd_does_not_see_the_formula():
    seen = set()

    @sparsestep.rule
    def watched(param, grad, *, lr):
        new = param - lr * grad
        seen.add((param.requires_grad, new.requires_grad, torch.is_grad_enabled()))
        return new

    with torch.enable_grad():
        trained(watched, lr=0.1)
    assert seen == {(False, False, False)}
