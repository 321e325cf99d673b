"""``optimizer.load_state_dict``: a checkpoint that does not fit is refused, and nothing changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import OPTIMIZERS
from tests.table import same_bits, snapshot, unchanged


def coo(rows: list[int]) -> Tensor:
    values = torch.arange(1.0, 3 * len(rows) + 1).view(-1, 3)
    return torch.sparse_coo_tensor([rows], values, (5, 3), check_invariants=True)


def trained(semantics: str = "dense", **options: Any) -> tuple[sparsestep.AdamW, list[Tensor]]:
    """Two groups of one table each, with rows that are behind."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    opt = sparsestep.AdamW(groups, lr=0.1, semantics=semantics, **options)
    for rows in ([0, 1], [2], [3, 3]):
        for param in params:
            opt.catch_up(param, torch.tensor(rows))
            param.grad = coo(rows)
        opt.step()
    return opt, params


Change = Callable[[dict[str, Any]], Any]


def put(*path: Any) -> Change:
    """Replace what is at a path by its last part."""

    def change(saved: dict[str, Any]) -> dict[str, Any]:
        at: Any = saved
        for key in path[:-2]:
            at = at[key]
        at[path[-2]] = path[-1]
        return saved

    return change


def without(*path: Any) -> Change:
    def change(saved: dict[str, Any]) -> dict[str, Any]:
        at: Any = saved
        for key in path[:-1]:
            at = at[key]
        del at[path[-1]]
        return saved

    return change


# In the second group: when it is found, the first could be loaded already.
BAD: dict[str, tuple[Change, str]] = {
    "no checkpoint": (
        lambda saved: None,
        "with the keys 'state' and 'param_groups'. Got a NoneType",
    ),
    "a list": (lambda saved: [saved], "with the keys 'state' and 'param_groups'. Got a list"),
    "no groups": (without("param_groups"), "'state' and 'param_groups'. Got the keys 'state'"),
    "no state": (without("state"), "Got the keys 'param_groups'"),
    "a list of state": (put("state", []), "'state' of a checkpoint must be a dict. Got a list"),
    "groups that are a dict": (put("param_groups", {}), "must be a list. Got a dict"),
    "a group that is a list": (
        put("param_groups", 1, [1]),
        "group 1 .* a list 'params'. Got a list",
    ),
    "a group without params": (
        without("param_groups", 1, "params"),
        "with a list 'params'. Got the keys 'lr', 'betas'",
    ),
    "nothing": (lambda saved: {}, "'state' and 'param_groups'. Got an empty dict. Pass what"),
    "one group": (without("param_groups", 1), "different number of parameter groups"),
    "two params": (put("param_groups", 1, "params", [1, 2]), "doesn't match the size"),
    "bad betas": (put("param_groups", 1, "betas", (0.9, 1.5)), "group 1 of the checkpoint: .*1.5"),
    "betas that are none": (put("param_groups", 1, "betas", 0.9), "group 1 of the checkpoint: "),
    "lr that is a word": (put("param_groups", 1, "lr", "fast"), "group 1 of the checkpoint: "),
    "no dense form": (
        put("param_groups", 1, "stochastic_rounding", True),
        "group 1 of the checkpoint: semantics='dense' does not support stochastic_rounding",
    ),
    "a mask": (put("param_groups", 1, "mask", torch.ones(4) > 0), r"mask 0 must have shape \(5,\)"),
    "state that is a tensor": (put("state", 1, torch.ones(5, 3)), "a dict. Got Tensor"),
    "another shape": (
        put("state", 1, "exp_avg_sq", torch.ones(3, 5)),
        r"param 0 of group 1: its state 'exp_avg_sq' must have shape \(5, 3\).*Got \(3, 5\)",
    ),
    "integers": (put("state", 1, "exp_avg", torch.ones(5, 3).long()), "must be float.*int64"),
    "complex": (put("state", 1, "exp_avg", torch.ones(5, 3) * 1j), "must be float.*complex64"),
    "a list of numbers": (put("state", 1, "exp_avg", [1.0]), "have a tensor 'exp_avg'. Got .1.0"),
    "no average": (without("state", 1, "exp_avg"), "'exp_avg'. Got one with step, exp_avg_sq"),
    "no count": (
        without("state", 1, "step"),
        "'step', the number of steps taken. Got one with exp_avg, exp_avg_sq",
    ),
    "a count that is a word": (
        put("state", 1, "step", "three"),
        "'step', the number of steps taken. Got 'three'",
    ),
    "a count that is nothing": (
        put("state", 1, "step", float("nan")),
        "'step', the number of steps taken. Got nan",
    ),
    "a negative count": (
        put("state", 1, "step", torch.tensor(-1.0)),
        "'step', the number of steps taken. Got -1.0",
    ),
    "many counts": (
        put("state", 1, "step", torch.ones(2)),
        r"'step', the number of steps taken. Got a tensor of shape \(2,\)",
    ),
}


def everything(opt: sparsestep.AdamW) -> list[Any]:
    idle = [
        (key, clock, clock.last_step.clone(), clock.history.base, clock.history.steps)
        for key, clock in opt.deferred.items()
    ]
    return [id(opt.param_groups), id(opt.state), copy.deepcopy(opt.defaults), idle]


@pytest.mark.parametrize("bad", BAD)
def test_a_checkpoint_that_does_not_fit_changes_nothing(bad: str):
    change, message = BAD[bad]
    opt, _ = trained()
    other, _ = trained()
    other.param_groups[0]["lr"] = 0.7
    saved = change(copy.deepcopy(other.state_dict()))
    before, books = snapshot(opt), everything(opt)
    groups = [dict(group) for group in opt.param_groups]
    with pytest.raises(ValueError, match=message) as raised:
        opt.load_state_dict(saved)
    assert isinstance(raised.value, InputError) or bad in ("one group", "two params")
    assert "\n" not in str(raised.value)
    assert unchanged(opt, before)
    for group, was in zip(opt.param_groups, groups, strict=True):
        assert group.keys() == was.keys()
        assert all(group[name] is value for name, value in was.items())
    for ours, wanted in zip(everything(opt)[3], books[3], strict=True):
        assert ours[:2] == wanted[:2]
        assert torch.equal(ours[2], wanted[2])
        assert ours[3:] == wanted[3:]
    assert everything(opt)[:3] == books[:3]


def test_what_a_hook_makes_of_it_is_what_must_fit():
    opt, _ = trained()
    saved = copy.deepcopy(trained()[0].state_dict())
    opt.register_load_state_dict_pre_hook(lambda _, saved: {"state": saved["state"]})
    before = snapshot(opt)
    with pytest.raises(InputError, match="AdamW: a checkpoint must be a dict with the keys"):
        opt.load_state_dict(saved)
    assert unchanged(opt, before)


def test_parameters_that_missed_something_are_brought_up_to_date_first():
    """They are no part of a checkpoint: they go on from where dense training has brought them."""
    opt, params = trained()
    fresh, _ = trained()
    exact, theirs = trained()
    exact.catch_up()
    behind = [param.detach().clone() for param in params]
    opt.load_state_dict(copy.deepcopy(fresh.state_dict()))
    for param, stale, wanted in zip(params, behind, theirs, strict=True):
        assert not torch.allclose(param, stale, rtol=0, atol=1e-3)
        assert same_bits(param.detach(), wanted.detach())
    opt.catch_up()
    assert same_bits(params[0].detach(), theirs[0].detach())


@pytest.mark.parametrize("how", ["in place", "other memory"])
def test_parameters_that_were_loaded_before_stand(how: str):
    """Of a model that is not tracked: whoever loads it first must not find old updates in it."""
    opt, params = trained()
    saved = copy.deepcopy(trained()[0].state_dict())
    loaded = torch.ones(5, 3)
    with torch.no_grad():
        if how == "in place":
            params[0].copy_(loaded)
        else:
            params[0].data = loaded.clone()
    opt.load_state_dict(saved)
    opt.catch_up()
    assert same_bits(params[0].detach(), loaded)


def test_hooks_see_options_that_the_checkpoint_does_not_know():
    opt, _ = trained("masked", state_dtype=torch.float64)
    saved = copy.deepcopy(trained("masked")[0].state_dict())
    del saved["param_groups"][0]["amsgrad"]
    seen = []
    opt.register_load_state_dict_post_hook(lambda opt: seen.append(dict(opt.param_groups[0])))
    opt.load_state_dict(saved)
    assert seen[0]["amsgrad"] is False
    assert seen[0]["state_dtype"] == torch.float64
    assert opt.state[opt.param_groups[0]["params"][0]]["exp_avg"].dtype == torch.float64


# Classes that load each other's checkpoints as long as these hold no state.
FAMILIES = [
    {"SparseAdam", "Adam", "AdamW", "RAdam", "RowwiseAdam"},
    {"Adagrad", "RowwiseAdagrad"},
]


@pytest.mark.parametrize("loads", OPTIMIZERS, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("saves", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_a_fresh_checkpoint_of_another_class(saves: Any, loads: Any):
    saved = copy.deepcopy(saves([torch.nn.Parameter(torch.ones(4, 2))], lr=0.7).state_dict())
    opt = loads([torch.nn.Parameter(torch.ones(4, 2))], lr=0.1)
    names = {saves.__name__, loads.__name__}
    fits = len(names) == 1 or any(names <= family for family in FAMILIES)
    if saves is sparsestep.AdamW and loads is sparsestep.SparseAdam:
        fits = False  # it has a weight decay
    if saves is sparsestep.Adagrad and loads is sparsestep.RowwiseAdagrad:
        fits = False  # it has state before the first step
    if saves is sparsestep.Lion and loads.__name__ in FAMILIES[0] - {"SparseAdam"}:
        fits = True  # it has fewer options, as checkpoints of old releases have
    if fits:
        opt.load_state_dict(saved)
        opt.param_groups[0]["params"][0].grad = torch.eye(4)[:, :2].to_sparse(1)
        opt.step()
        assert opt.param_groups[0]["lr"] == 0.7
    else:
        message = f"^{loads.__name__}: .*(its options must be|it may only set|must have shape)"
        with pytest.raises(InputError, match=message):
            opt.load_state_dict(saved)
        assert opt.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("module", [torch.optim, sparsestep])
def test_a_fresh_checkpoint_of_sgd_is_not_adamws(module: Any):
    saved = module.SGD([torch.nn.Parameter(torch.ones(4, 2))], lr=0.7).state_dict()
    opt = sparsestep.AdamW([torch.nn.Parameter(torch.ones(4, 2))])
    message = (
        "^AdamW: group 0 of the checkpoint: its options must be those of AdamW, with betas, eps. "
        "Got dampening, momentum, nesterov. Load it into the optimizer class that saved it.$"
    )
    with pytest.raises(InputError, match=message):
        opt.load_state_dict(saved)


@pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)
def test_options_that_a_checkpoint_does_not_have_keep_their_values(cls: Any):
    """Torch's classes got new options over time."""
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = cls([param], lr=0.1)
    for name in opt.state_dict()["param_groups"][0]:
        saved = copy.deepcopy(opt.state_dict())
        if name == "params":
            continue
        del saved["param_groups"][0][name]
        opt.load_state_dict(saved)
        assert opt.param_groups[0][name] == opt.defaults[name]


def test_a_switch_that_is_neither_true_nor_false():
    opt = sparsestep.Adam([torch.nn.Parameter(torch.ones(4, 2))])
    saved = opt.state_dict()
    saved["param_groups"][0]["capturable"] = torch.zeros(2)
    with pytest.raises(InputError, match="capturable must be True or False"):
        opt.load_state_dict(saved)


def test_a_count_of_none_where_nothing_is_counted():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], momentum=0.5)
    opt.materialize_state()
    saved = opt.state_dict()
    saved["state"][0]["step"] = None
    opt.load_state_dict(saved)
    assert opt.state[param]["step"] is None


def test_a_count_of_the_wrong_kind_is_refused_before_anything_is_written():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], momentum=0.5, lr=0.1)
    opt.materialize_state()
    opt.state[param]["step"] = torch.tensor(True)
    param.grad = torch.eye(4)[:, :2].to_sparse(1)
    with pytest.raises(InputError, match="'step' must be a number"):
        opt.step()
    assert bool((param == 1).all())
