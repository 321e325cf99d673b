"""from_torch: training goes on as if torch's optimizer had stayed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import lr_scheduler

import sparsestep
from tests.table import COUNTERPARTS, OPTIONS, same_bits

# Options that torch's class has as well.
CASES = [
    (ours, theirs, options)
    for ours, theirs in [*COUNTERPARTS, (sparsestep.SparseAdam, torch.optim.SparseAdam)]
    for options in [{}, *OPTIONS.get(ours, [])]
    if options.keys() <= theirs([torch.zeros(1)]).defaults.keys()
]


def model(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
        for shape in ((7, 3), (4,))
    ]


def train(
    optimizer: Any, params: list[torch.nn.Parameter], steps: range, *, sparse: bool = False
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            grad = torch.randn(param.shape, generator=generator).to(param.dtype)
            param.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    table, bias = params
    return [
        {"params": [("table", table)], "lr": torch.tensor(0.02), "initial_lr": 0.5, "mine": "kept"},
        {"params": [("bias", bias)]},
    ]


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"), CASES, ids=[f"{c[0].__name__}-{c[2]}" for c in CASES]
)
def test_training_goes_on_with_the_same_numbers(
    ours: type, theirs: type, options: dict[str, Any], before: int
):
    sparse = theirs is torch.optim.SparseAdam
    params, expected = model(), model()
    if not sparse:
        options = {**options, "foreach": False}  # torch's own kernel, with its bits
    old, whole = theirs(groups(params), **options), theirs(groups(expected), **options)
    train(old, params, range(before), sparse=sparse)
    if before == 3:
        old.load_state_dict(old.state_dict())
    memory = {
        value.data_ptr()
        for param_state in old.state.values()
        for name, value in param_state.items()
        if isinstance(value, Tensor) and value.numel() > 1
    }
    optimizer = sparsestep.from_torch(old)
    assert type(optimizer) is ours
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert optimizer.param_groups[0]["mine"] == "kept"
    assert optimizer.param_groups[1]["param_names"] == ["bias"]
    type(optimizer)(params, **optimizer.defaults)
    held = {
        v.data_ptr() for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)
    }
    assert memory <= held  # not copied
    train(optimizer, params, range(before, 6), sparse=sparse)
    train(whole, expected, range(6), sparse=sparse)
    for one, another in zip(params, expected, strict=True):
        if sparse:  # torch's square root
            torch.testing.assert_close(one, another)
        else:
            assert same_bits(one, another)
    reloaded = theirs(groups(params), **options)
    reloaded.load_state_dict(optimizer.state_dict())  # and back


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize(
    "options",
    [
        {"semantics": "dense"},
        {"engine": "reference"},
        {"state_dtype": torch.bfloat16},
        {"state_dtype": torch.int8, "rounding_seed": 3},
    ],
    ids=str,
)
def test_options_are_those_of_an_optimizer_that_loads_the_checkpoint(
    options: dict[str, Any], before: int
):
    params, expected = model(), model()
    old = torch.optim.AdamW(params, lr=0.1)
    train(old, params, range(before))
    with torch.no_grad():
        for one, another in zip(params, expected, strict=True):
            another.copy_(one)
    other = sparsestep.AdamW(expected, lr=0.1, **options)
    other.load_state_dict(old.state_dict())
    optimizer = sparsestep.from_torch(old, **options)
    for each, trained in ((optimizer, params), (other, expected)):
        train(each, trained, range(9), sparse=True)
        each.catch_up()
    assert optimizer.semantics == options.get("semantics", "masked")
    assert all(map(same_bits, params, expected))
    first, second = optimizer.state_dict(), other.state_dict()
    assert first["param_groups"] == second["param_groups"]
    for index, values in first["state"].items():
        assert all(same_bits(v, second["state"][index][name]) for name, v in values.items())


def test_state_of_half_precision_parameters_becomes_float32():
    params = model(dtype=torch.bfloat16)
    old = torch.optim.Adam(params)
    train(old, params, range(2))
    before = old.state[params[0]]["exp_avg"].clone()
    after = sparsestep.from_torch(old).state[params[0]]["exp_avg"]
    assert after.dtype == torch.float32
    assert torch.equal(after, before.float())


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_listed_twice_is_updated_twice():
    results = []
    for convert in (False, True):
        (param, _) = model()
        optimizer: Any = torch.optim.SGD([param, param], lr=0.1, momentum=0.9, foreach=False)
        train(optimizer, [param], range(1))
        if convert:
            optimizer = sparsestep.from_torch(optimizer)
        train(optimizer, [param], range(1, 3))
        results.append(param.detach())
    assert same_bits(*results)


@pytest.mark.parametrize("before", [0, 1])
def test_a_scheduler_that_was_created_before_goes_on(before: int):
    """Where torch's optimizer has never stepped, torch warns of the order of calls."""
    params = model()
    old = torch.optim.SGD(params, lr=1.0)
    scheduler = lr_scheduler.StepLR(old, step_size=1, gamma=0.5)
    train(old, params, range(before))
    optimizer = sparsestep.from_torch(old)
    train(optimizer, params, range(1))
    if before:
        scheduler.step()
    else:
        with pytest.warns(UserWarning, match=r"before `optimizer\.step"):
            scheduler.step()
    expected = [param.detach().clone() for param in params]
    train(optimizer, params, range(1))
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param, value - 0.5 * param.grad)


def test_hooks_get_the_new_optimizer_and_their_handles_remove_them():
    params = model()
    old = torch.optim.Adagrad(params)
    called: list[Any] = []
    handles = [
        old.register_step_pre_hook(lambda optimizer, *_: called.append(optimizer)),
        old.register_step_post_hook(lambda optimizer, *_: called.append(optimizer)),
        old.register_state_dict_pre_hook(lambda optimizer: called.append(optimizer)),
    ]
    optimizer = sparsestep.from_torch(old)
    assert called == []
    train(optimizer, params, range(1))
    optimizer.state_dict()
    assert called == [optimizer] * 3
    for handle in handles:
        handle.remove()
    train(optimizer, params, range(1))
    assert len(called) == 3


def test_a_refusal_leaves_the_old_optimizer_as_it_was():
    params = model()
    old = torch.optim.Adam(params)
    train(old, params, range(1))
    before = [dict(group) for group in old.param_groups]
    with pytest.raises(sparsestep.InputError, match="row_step"):
        sparsestep.from_torch(old, bias_correction="per_row")
    assert old.param_groups == before
