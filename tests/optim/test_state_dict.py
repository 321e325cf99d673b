"""``state_dict`` and ``load_state_dict``: round trips, torch's classes, refusals, torch's DCP."""

from __future__ import annotations

import copy
import pickle
from collections import defaultdict
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    _init_optim_state,
    get_state_dict,
    set_state_dict,
)
from torch.optim import lr_scheduler

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from tests.optim.own_rules import seeded
from tests.subject import Subject, refused
from tests.table import (
    COUNTERPARTS,
    OPTIONS,
    Variant,
    all_same_bits,
    same_bits,
    sm3_by_rows,
    state_tensors,
    steps_of,
    through_a_file,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
    pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning"),
]


def two_params(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    shapes = ((7, 3), (4,))
    return [nn.Parameter(torch.randn(shape, generator=seeded(1)).to(dtype)) for shape in shapes]


def train_all(optimizer: Any, params: Any, steps: range, *, sparse: bool = False) -> None:
    for step in steps:
        for param in params:
            grad = torch.randn(param.shape, generator=seeded(step)).to(param.dtype)
            param.grad = grad.to_sparse(1) if sparse else grad
        optimizer.step()


def copies_of(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [nn.Parameter(param.detach().clone()) for param in params]


def test_moments_of_half_precision_params_are_float32():
    """From a checkpoint of torch's, whose are not, as well, and by ``from_torch``."""
    params = two_params(torch.bfloat16)
    old = torch.optim.Adam(params)
    train_all(old, params, range(2))
    before = [value.float() for value in state_tensors(old) if value.dim()]
    after = [value for value in state_tensors(sparsestep.from_torch(old)) if value.dim()]
    assert all_same_bits(after, before)
    for module in (sparsestep, torch.optim):
        opt = module.SparseAdam(params, lr=0.1)
        train_all(opt, params, range(2), sparse=True)
        again = sparsestep.SparseAdam(params, lr=0.1)
        again.load_state_dict(opt.state_dict())
        assert all_same_bits(state_tensors(again), [v.float() for v in state_tensors(opt)])
        assert steps_of(again, params[0]) == 2


# Which checkpoints without state a class loads, and which it refuses.
FRESH = [
    *((cls.__name__, cls.__name__, True) for cls in OPTIMIZERS),
    ("RAdam", "SparseAdam", True),
    ("Lion", "Adam", True),  # it has fewer options, as checkpoints of old releases have
    ("AdamW", "SparseAdam", False),  # it has a weight decay
    ("SGD", "Adam", False),
    ("Adagrad", "RowwiseAdagrad", False),  # it has state before the first step
]


def test_a_fresh_checkpoint_of_another_class():
    for saves, loads, fits in FRESH:
        for module in (sparsestep, torch.optim):
            if not hasattr(module, saves):
                continue
            saving = getattr(module, saves)([nn.Parameter(torch.ones(4, 2))], lr=0.7)
            saved = copy.deepcopy(saving.state_dict())
            opt = getattr(sparsestep, loads)([nn.Parameter(torch.ones(4, 2))], lr=0.1)
            if not fits:
                with refused(opt, note=saves):
                    opt.load_state_dict(saved)
                continue
            opt.load_state_dict(saved)
            opt.param_groups[0]["params"][0].grad = torch.eye(4)[:, :2].to_sparse(1)
            opt.step()
            assert opt.param_groups[0]["lr"] == 0.7


def test_options_that_a_checkpoint_does_not_have_keep_their_values():
    """Torch's classes got new options over time."""
    for cls in OPTIMIZERS:
        opt = cls([nn.Parameter(torch.ones(4, 2))], lr=0.1)
        for name in opt.state_dict()["param_groups"][0].keys() - {"params"}:
            saved = copy.deepcopy(opt.state_dict())
            del saved["param_groups"][0][name]
            opt.load_state_dict(saved)
            assert opt.param_groups[0][name] == opt.defaults[name]


def test_hooks_see_and_may_change_what_is_loaded():
    opt, (param, _) = trained("masked", state_dtype=torch.float64)
    saved = copy.deepcopy(trained("masked")[0].state_dict())
    del saved["param_groups"][0]["amsgrad"]
    seen = []

    def double(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        state_dict = copy.deepcopy(state_dict)
        state_dict["state"][0]["exp_avg"] *= 2
        return state_dict

    opt.register_load_state_dict_pre_hook(double)
    opt.register_load_state_dict_post_hook(lambda opt: seen.append(dict(opt.param_groups[0])))
    before = opt.state[param]["exp_avg"].clone()
    opt.load_state_dict(saved)
    assert torch.allclose(opt.state[param]["exp_avg"], 2 * before)
    assert opt.state[param]["exp_avg"].dtype == torch.float64
    assert seen[0]["amsgrad"] is False
    assert seen[0]["state_dtype"] == torch.float64
    opt.register_load_state_dict_pre_hook(lambda _, saved: {"state": saved["state"]})
    with refused(opt):
        opt.load_state_dict(saved)


# Checkpoints that do not fit


def coo(rows: list[int]) -> Tensor:
    values = torch.arange(1.0, 3 * len(rows) + 1).view(-1, 3)
    return torch.sparse_coo_tensor([rows], values, (5, 3), check_invariants=True)


def trained(semantics: str = "dense", **options: Any) -> tuple[sparsestep.AdamW, list[Tensor]]:
    """Two groups of one table each, with deferred rows."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5, 3)) for _ in range(2)]
    groups = [{"params": [param]} for param in params]
    opt = sparsestep.AdamW(groups, lr=0.1, semantics=semantics, **options)
    for rows in ([0, 1], [2], [3, 3]):
        for param in params:
            opt.catch_up(param, torch.tensor(rows))
            param.grad = coo(rows)
        opt.step()
    return opt, params


GONE = object()
# In the second group: when it is found, the first could be loaded already.
BAD: list[tuple[Any, ...]] = [
    *(("param_groups", GONE), ("state", GONE), ("state", []), ("param_groups", {})),
    *(("param_groups", 1, [1]), ("param_groups", 1, "params", GONE), ("param_groups", 1, GONE)),
    *(("param_groups", 1, "params", [1, 2]), ("param_groups", 1, "betas", (0.9, 1.5))),
    *(("param_groups", 1, "lr", "fast"), ("param_groups", 1, "mask", torch.ones(4) > 0)),
    ("param_groups", 1, "stochastic_rounding", True),  # has no dense form
    ("state", 1, torch.ones(5, 3)),
    *(("state", 1, "exp_avg_sq", torch.ones(3, 5)), ("state", 1, "exp_avg", GONE)),
    *(("state", 1, "exp_avg", torch.ones(5, 3, dtype=d)) for d in (torch.int64, torch.complex64)),
    *(("state", 1, "exp_avg", [1.0]), ("state", 1, "step", GONE), ("state", 1, "step", "three")),
    *(("state", 1, "step", float("nan")), ("state", 1, "step", torch.tensor(-1.0))),
    ("state", 1, "step", torch.ones(2)),
]


def test_a_checkpoint_that_does_not_fit_changes_nothing():
    opt, other = trained()[0], trained()[0]
    other.param_groups[0]["lr"] = 0.7
    for wrong in (None, [other.state_dict()], {}):
        with refused(opt, note=str(wrong)):
            opt.load_state_dict(wrong)
    for *keys, key, value in BAD:
        saved = copy.deepcopy(other.state_dict())
        place = reduce(getitem, keys, saved)
        place[key] = value
        if value is GONE:
            del place[key]
        with refused(opt, error=ValueError, note=str([*keys, key, value])):
            opt.load_state_dict(saved)


def test_deferred_rows_catch_up_before_a_checkpoint_is_loaded():
    """They are no part of a checkpoint: they go on from where dense training has brought them."""
    opt, params = trained()
    exact, theirs = trained()
    exact.catch_up()
    stale = [param.detach().clone() for param in params]
    opt.load_state_dict(copy.deepcopy(trained()[0].state_dict()))
    for param, was, wanted in zip(params, stale, theirs, strict=True):
        assert not torch.allclose(param, was, rtol=0, atol=1e-3)
        assert same_bits(param, wanted)
    opt.catch_up()
    assert same_bits(params[0], theirs[0])


def test_parameters_that_were_loaded_before_stand():
    """Of a model that is not tracked: old updates must not be applied to loaded weights."""
    for in_place in (True, False):
        opt, params = trained()
        saved = copy.deepcopy(trained()[0].state_dict())
        loaded = torch.ones(5, 3)
        if in_place:
            with torch.no_grad():
                params[0].copy_(loaded)
        else:
            params[0].data = loaded.clone()
        opt.load_state_dict(saved)
        opt.catch_up()
        assert same_bits(params[0], loaded)


def test_counts_where_nothing_is_counted():
    param = nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], momentum=0.5, lr=0.1)
    opt.materialize_state()
    saved = opt.state_dict()
    saved["state"][0]["step"] = None
    opt.load_state_dict(saved)
    assert opt.state[param]["step"] is None
    opt.state[param]["step"] = torch.tensor(True)
    param.grad = torch.eye(4)[:, :2].to_sparse(1)
    with pytest.raises(InputError, match="'step'"):
        opt.step()
    assert bool((param == 1).all())


# torch.distributed.checkpoint: state exists when it is asked for, without a step


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used = nn.Embedding(6, 4, sparse=True)
        self.unused = nn.Embedding(5, 4, sparse=True)
        self.layer = nn.Linear(4, 1)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def train_model(model: Model, opt: RuleOptimizer, steps: range, table: str = "used") -> None:
    for step in steps:
        opt.zero_grad()
        rows = getattr(model, table)(torch.tensor([step % 5, 1, 1]))
        model.layer(rows).square().sum().backward()
        opt.step()


def tensors_of(model: Model, opt: RuleOptimizer) -> list[Tensor]:
    """But for what is frozen, whose state torch does not load."""
    params = [param for param in model.parameters() if param.requires_grad]
    state = (opt.state.get(param, {}) for param in params)
    found = [torch.as_tensor(value) for each in state for _, value in sorted(each.items())]
    return [*(param.detach() for param in params), *found]


SAVED = [
    Variant(sparsestep.Adam, {"amsgrad": True}),
    Variant(sparsestep.SGD, {"momentum": 0.9, "semantics": "dense"}),
    Variant(sparsestep.SGD, {}),
    Variant(sparsestep.Adagrad, {"initial_accumulator_value": 0.25}),
    Variant(sparsestep.RowwiseAdam, {"bias_correction": "per_row"}),
    Variant(sm3_by_rows, {}),
]


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize(("steps", "flat"), [(0, True), (3, False)], ids=["0-flat", "3-nested"])
def test_the_loaded_optimizer_goes_on(steps: int, flat: bool, tmp_path: Path):
    """Before its first step, or with a table that no step has touched yet."""
    options, names = StateDictOptions(flatten_optimizer_state_dict=flat), ("model", "optim")
    for variant in SAVED:
        models = [Model() for _ in range(3)]
        pairs = [(model, variant(model.parameters(), lr=0.1)) for model in models]
        saved, loaded, never = pairs
        train_model(*saved, range(steps))
        train_model(*never, range(steps))
        path = tmp_path / str(variant)
        state = get_state_dict(*saved, options=options)
        checkpoint.save(dict(zip(names, state, strict=True)), checkpoint_id=path)
        template = dict(zip(names, get_state_dict(*loaded, options=options), strict=True))
        checkpoint.load(template, checkpoint_id=path)
        given = {f"{name}_state_dict": value for name, value in template.items()}
        set_state_dict(*loaded, **given, options=options)
        for train_more in (False, True):
            for each in pairs if train_more else ():
                train_model(*each, range(steps, steps + 2))
                train_model(*each, range(steps, steps + 2), table="unused")
            for _, opt in pairs:
                opt.catch_up()
            for other in (loaded, never)[: 1 + train_more]:
                pair = zip(tensors_of(*other), tensors_of(*saved), strict=True)
                assert all(same_bits(*each) for each in pair), variant


def test_state_that_a_checkpoint_asks_for_is_made():
    model = Model()
    opt = sparsestep.Adam(model.parameters())
    assert opt.state_dict()["state"] == {}, "a plain checkpoint is torch's"
    assert not opt.state, "others ask whether there was a step, as PyKEEN does"
    assert len(opt.state) == 0
    _init_optim_state(opt)
    assert opt.state
    assert not opt.state[model.frozen]
    assert opt.state[model.unused.weight].keys() == {"step", "exp_avg", "exp_avg_sq"}
    for plain in (copy.copy(opt.state), opt.state.copy(), pickle.loads(pickle.dumps(opt.state))):
        assert type(plain) is defaultdict
    opt.load_state_dict(opt.state_dict())
    opt.state.clear()
    for each in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt)), opt):
        assert len(each.state) == 0
        _init_optim_state(each)
        assert len(each.state) == 5
    assert not sparsestep.SGD(model.parameters()).state


# from_torch: training goes on as if torch's optimizer had stayed


# Options that torch's class has as well.
CASES = [
    (ours, theirs, options)
    for ours, theirs in [*COUNTERPARTS, (sparsestep.SparseAdam, torch.optim.SparseAdam)]
    for options in [{}, *OPTIONS.get(ours, [])]
    if options.keys() <= theirs([torch.zeros(1)]).defaults.keys()
]


def groups(params: list[torch.nn.Parameter]) -> list[dict[str, Any]]:
    table, bias = params
    return [
        {"params": [("table", table)], "lr": torch.tensor(0.02), "initial_lr": 0.5, "mine": "kept"},
        {"params": [("bias", bias)]},
    ]


@pytest.mark.parametrize("before", [0, 3])
@pytest.mark.parametrize(
    ("ours", "theirs", "options"), CASES, ids=[f"{c[0].__name__}-{c[2]}" for c in CASES]
)
def test_training_goes_on_with_the_same_numbers(
    ours: type, theirs: type, options: dict[str, Any], before: int
):
    """By ``from_torch``, and by checkpoints in both directions, of which loading makes copies."""
    sparse = theirs is torch.optim.SparseAdam
    params, expected = two_params(), two_params()
    if not sparse:
        options = {**options, "foreach": False}  # torch's own kernel, with its bits
    old, whole = theirs(groups(params), **options), theirs(groups(expected), **options)
    train_all(old, params, range(before), sparse=sparse)
    if before == 3:
        old.load_state_dict(old.state_dict())
    loaded, returned = copies_of(params), two_params()
    into = ours(groups(loaded), **{**options, "lr": 0.75})
    into.load_state_dict(old.state_dict())
    memory = {value.data_ptr() for value in state_tensors(old) if value.numel() > 1}
    optimizer = sparsestep.from_torch(old)
    assert type(optimizer) is ours
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert optimizer.param_groups[0]["mine"] == "kept"
    assert optimizer.param_groups[1]["param_names"] == ["bias"]
    type(optimizer)(params, **optimizer.defaults)
    assert memory <= {value.data_ptr() for value in state_tensors(optimizer)}  # not copied
    for opt, its in ((into, loaded), (optimizer, params)):
        train_all(opt, its, range(before, 6), sparse=sparse)
    back = theirs(groups(returned), **options)
    back.load_state_dict(through_a_file(optimizer.state_dict()))
    for param, value in zip(returned, params, strict=True):
        param.data.copy_(value.data)
    for opt, its in ((into, loaded), (optimizer, params), (back, returned)):
        train_all(opt, its, range(6, 8), sparse=sparse)
    train_all(whole, expected, range(8), sparse=sparse)
    for others in zip(params, loaded, returned, expected, strict=True):
        for one in others[:-1]:
            if sparse:  # torch's square root
                torch.testing.assert_close(one, others[-1])
            else:
                assert same_bits(one, others[-1])


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
    params = two_params()
    old = torch.optim.AdamW(params, lr=0.1)
    train_all(old, params, range(before))
    expected = copies_of(params)
    other = sparsestep.AdamW(expected, lr=0.1, **options)
    other.load_state_dict(old.state_dict())
    optimizer = sparsestep.from_torch(old, **options)
    for each, trained in ((optimizer, params), (other, expected)):
        train_all(each, trained, range(9), sparse=True)
        each.catch_up()
    assert (optimizer.semantics, optimizer.engine) == (other.semantics, other.engine)
    assert optimizer.state_dict()["param_groups"] == other.state_dict()["param_groups"]
    assert Subject(optimizer).same_as(Subject(other))


@pytest.mark.parametrize("before", [0, 1])
def test_a_scheduler_that_was_created_before_goes_on(before: int):
    """Where torch's optimizer has never stepped, torch warns of the order of calls."""
    params = two_params()
    old = torch.optim.SGD(params, lr=1.0)
    scheduler = lr_scheduler.StepLR(old, step_size=1, gamma=0.5)
    train_all(old, params, range(before))
    optimizer = sparsestep.from_torch(old)
    train_all(optimizer, params, range(1))
    if before:
        scheduler.step()
    else:
        with pytest.warns(UserWarning, match=r"before `optimizer\.step"):
            scheduler.step()
    expected = [param.detach().clone() for param in params]
    train_all(optimizer, params, range(1))
    for param, value in zip(params, expected, strict=True):
        assert torch.equal(param, value - 0.5 * param.grad)


def test_hooks_get_the_new_optimizer_and_their_handles_remove_them():
    params = two_params()
    old = torch.optim.Adagrad(params)
    called: list[Any] = []
    handles = [
        old.register_step_pre_hook(lambda optimizer, *_: called.append(optimizer)),
        old.register_step_post_hook(lambda optimizer, *_: called.append(optimizer)),
        old.register_state_dict_pre_hook(lambda optimizer: called.append(optimizer)),
    ]
    optimizer = sparsestep.from_torch(old)
    assert called == []
    train_all(optimizer, params, range(1))
    optimizer.state_dict()
    assert called == [optimizer] * 3
    for handle in handles:
        handle.remove()
    train_all(optimizer, params, range(1))
    assert len(called) == 3


def test_a_refusal_leaves_the_old_optimizer_as_it_was():
    params = two_params()
    old = torch.optim.Adam(params)
    train_all(old, params, range(1))
    before = [dict(group) for group in old.param_groups]
    with pytest.raises(InputError):
        sparsestep.from_torch(old, bias_correction="per_row")
    assert old.param_groups == before
