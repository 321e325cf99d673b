"""Checkpoints go back and forth between our classes and torch's."""

from __future__ import annotations

import copy
import io

import pytest
import torch

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import STATEFUL, Variant, each_optimizer, each_stateful, same_bits


def table_of(dtype: torch.dtype = torch.float32) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.randn(20, 4, generator=seeded(1)).to(dtype))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def train(
    param: torch.nn.Parameter, opt: torch.optim.Optimizer, steps: range, sparse: bool = True
) -> None:
    for step in steps:
        rows = torch.randperm(20, generator=seeded(step))[None, :7]
        values = torch.randn(7, 4, generator=seeded(step)).to(param.dtype)
        grad = torch.sparse_coo_tensor(rows, values, param.shape)
        param.grad = grad if sparse else grad.to_dense()
        opt.step()


def through_a_file(state_dict: dict) -> dict:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


CLASSES = [sparsestep.SparseAdam, torch.optim.SparseAdam]


@pytest.mark.parametrize("first", CLASSES, ids=["ours", "torch's"])
@pytest.mark.parametrize("second", CLASSES, ids=["ours", "torch's"])
def test_training_goes_on_after_the_change(first, second):
    straight = table_of()
    train(straight, first([straight], lr=0.1), range(20))
    changed = table_of()
    opt = first([changed], lr=0.1)
    train(changed, opt, range(8))
    saved = through_a_file(opt.state_dict())
    resumed = torch.nn.Parameter(changed.detach().clone())
    second_opt = second([resumed], lr=0.5)
    second_opt.load_state_dict(saved)
    assert second_opt.param_groups[0]["lr"] == 0.1
    train(resumed, second_opt, range(8, 20))
    assert second_opt.state[resumed]["step"] == 20
    if first is second:
        assert same_bits(resumed.detach(), straight.detach())
    assert torch.allclose(resumed, straight, rtol=1e-6, atol=1e-7)


OF_TORCH = [v for v in STATEFUL if hasattr(torch.optim, v.cls.__name__)]


@pytest.mark.parametrize("variant", OF_TORCH, ids=str)
def test_a_live_state_dict_of_torch_is_not_shared(variant: Variant):
    """Loading copies: both may go on from there without disturbing each other."""
    sparse = variant.cls is sparsestep.SparseAdam
    theirs, ours = table_of(), table_of()
    their_opt = getattr(torch.optim, variant.cls.__name__)([theirs], lr=0.1, **variant.options)
    train(theirs, their_opt, range(3), sparse)
    ours.data.copy_(theirs.data)
    our_opt = variant([ours], lr=0.1)
    our_opt.load_state_dict(their_opt.state_dict())
    train(ours, our_opt, range(3, 9), sparse)
    train(theirs, their_opt, range(3, 9), sparse)
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("variant", OF_TORCH, ids=str)
def test_torch_goes_on_from_our_checkpoint(variant: Variant):
    """From sparse and from dense steps of ours to dense steps of torch's, and the numbers agree."""
    sparse = variant.cls is sparsestep.SparseAdam
    first, second = table_of(), table_of()
    opt = variant([first], lr=0.1)
    train(first, opt, range(2))
    train(first, opt, range(2, 5), sparse)
    saved = through_a_file(opt.state_dict())
    second.data.copy_(first.data)
    theirs = getattr(torch.optim, variant.cls.__name__)([second], lr=0.5, **variant.options)
    theirs.load_state_dict(saved)
    train(first, opt, range(5, 9), sparse)
    train(second, theirs, range(5, 9), sparse)
    assert torch.allclose(first, second, rtol=1e-6, atol=1e-7)
    if not sparse:
        assert same_bits(first.detach(), second.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_moments_of_half_precision_params_stay_float32(dtype):
    straight, resumed = table_of(dtype), table_of(dtype)
    opt = sparsestep.SparseAdam([straight], lr=0.1)
    train(straight, opt, range(5))
    saved = through_a_file(opt.state_dict())
    train(straight, opt, range(5, 10))
    first = sparsestep.SparseAdam([resumed], lr=0.1)
    train(resumed, first, range(5))
    again = sparsestep.SparseAdam([resumed], lr=0.1)
    again.load_state_dict(saved)
    assert again.state[resumed]["exp_avg"].dtype == torch.float32
    train(resumed, again, range(5, 10))
    assert same_bits(resumed.detach(), straight.detach())


def test_moments_from_a_half_precision_checkpoint_of_torch_become_float32():
    param = table_of(torch.bfloat16)
    theirs = torch.optim.SparseAdam([param], lr=0.1)
    train(param, theirs, range(2))
    ours = sparsestep.SparseAdam([param], lr=0.1)
    ours.load_state_dict(theirs.state_dict())
    assert ours.state[param]["exp_avg_sq"].dtype == torch.float32
    train(param, ours, range(2, 4))


@each_optimizer
def test_an_old_checkpoint_without_a_key_gets_the_default(optimizer: type[RuleOptimizer]):
    param = table_of()
    opt = optimizer([param], lr=0.1)
    train(param, opt, range(2))
    old = opt.state_dict()
    del old["param_groups"][0]["maximize"]
    opt = optimizer([param], lr=0.5)
    opt.load_state_dict(old)
    assert opt.param_groups[0]["maximize"] is False
    assert opt.param_groups[0]["lr"] == 0.1
    train(param, opt, range(2, 4))


def test_a_step_count_that_is_a_tensor_is_read():
    param = table_of()
    opt = sparsestep.SparseAdam([param], lr=0.1)
    train(param, opt, range(4))
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][0]["step"] = torch.tensor(4.0)
    opt.load_state_dict(saved)
    assert opt.state[param]["step"] == 4


def test_hooks_see_and_may_change_what_is_loaded():
    param = table_of()
    opt = sparsestep.SparseAdam([param], lr=0.1)
    train(param, opt, range(2))
    seen = []

    def double(optimizer, state_dict):
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["exp_avg"] *= 2
        return state_dict

    opt.register_load_state_dict_pre_hook(double)
    opt.register_load_state_dict_post_hook(
        lambda optimizer: seen.append(optimizer.state[param]["exp_avg"].clone())
    )
    before = opt.state[param]["exp_avg"].clone()
    opt.load_state_dict(opt.state_dict())
    assert torch.equal(seen[0], 2 * before)
    assert torch.equal(opt.state[param]["exp_avg"], 2 * before)


@each_stateful
def test_a_checkpoint_that_does_not_fit_changes_nothing(variant: Variant):
    param = table_of()
    opt = variant([param], lr=0.1)
    train(param, opt, range(2))
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    after = opt.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for name, value in before["state"][0].items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(after["state"][0][name]))


@each_stateful
def test_distributed_checkpoints_can_materialise_the_state(variant: Variant):
    """What torch.distributed.checkpoint does before it loads into an optimizer without state."""
    model = torch.nn.Embedding(20, 4, sparse=True)
    opt = variant(model.parameters(), lr=0.1)
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    before = model.weight.detach().clone()
    state = get_optimizer_state_dict(model, opt)
    assert {spec.name for spec in variant.rule.state} <= state["state"]["weight"].keys()
    assert same_bits(model.weight.detach(), before)
