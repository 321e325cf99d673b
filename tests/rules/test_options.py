"""Options: signatures, keys of a param group, values of any kind, re-creation from defaults."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL, OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules import options as checks
from sparsestep.rules.options import GROUP_DEFAULTS, OPTIMIZER_OPTIONS
from tests.generate.garbage import Unusable, Wrapper
from tests.oracle import FindingError
from tests.properties.test_refusals import fresh_state
from tests.subject import Snapshot, Subject, refused
from tests.table import (
    EVERY,
    FUNCTIONS,
    Variant,
    all_same_bits,
    each_engine,
    each_optimizer,
    running_on,
    same_bits,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def table(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.linspace(-1, 1, 24).reshape(6, 4).to(dtype).requires_grad_()


def rows(*numbers: int, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.linspace(0.5, 1, 4 * len(numbers)).reshape(-1, 4).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([numbers]), values, (6, 4), check_invariants=True)


def train(opt: RuleOptimizer, param: Tensor, *, dense: bool = False) -> Tensor:
    for step in range(4):
        grad = rows(step, 5, dtype=param.dtype)
        param.grad = grad.to_dense() if dense else grad
        opt.step()
    opt.catch_up()
    return param.detach()


def options_of(optimizer: type[RuleOptimizer]) -> list[str]:
    return [name for name in inspect.signature(optimizer).parameters if name != "params"]


# Signatures


@each_optimizer
def test_every_keyword_is_written_out(optimizer: type[RuleOptimizer]):
    arguments = inspect.signature(optimizer).parameters
    assert {each.kind for each in arguments.values()} <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }
    given = {}
    for name in (*OPTIMIZER_OPTIONS, *optimizer.group_options):
        assert arguments[name].kind is inspect.Parameter.KEYWORD_ONLY
        given[name] = arguments[name].default
        assert given[name] == {**OPTIMIZER_OPTIONS, **GROUP_DEFAULTS}[name]
    kinds = {name: get_args(argument.annotation) for name, argument in arguments.items()}
    assert kinds["engine"] == ("auto", "native", "reference", "triton")
    assert kinds["semantics"] == ("masked", "dense")
    assert optimizer([table()], **given).defaults == optimizer([table()]).defaults
    with pytest.raises(TypeError, match="laerning_rate"):
        optimizer([table()], laerning_rate=0.1)


# Keys of a param group


MISSPELT = ["masks", "bias_corection", "weight-decay", "esp", "LR", "semantic"]
# Of torch's schedulers, of well-known libraries, and others.
NOTES = [
    *("initial_lr", "max_lr", "min_lr", "base_lr", "swa_lr", "max_momentum", "base_momentum"),
    *("lr_scale", "layer_decay", "wd_mult", "name", "layer_id", "tag", "step", "dtype", "no_decay"),
]


@each_optimizer
def test_keys_of_a_group(optimizer: type[RuleOptimizer]):
    """Misspelt options are refused, as are those of the whole optimizer; notes are kept."""
    opt, who = optimizer([table()]), optimizer.__name__
    for key in (*MISSPELT, *OPTIMIZER_OPTIONS):
        group = {"params": [table()], key: OPTIMIZER_OPTIONS.get(key)}
        assert_refused(partial(optimizer, [group]), f"{who}: param group 0", key)
        assert_refused(partial(opt.add_param_group, group), f"{who}: param group 1", key)
    assert len(opt.param_groups) == 1
    own: dict[Any, Any] = {**dict.fromkeys(NOTES, "mine"), 7: "not even a string"}
    opt = optimizer([{"params": [table()], **own}])
    assert own.items() <= opt.param_groups[0].items()


@each_optimizer
def test_values_that_ask_for_nothing_are_accepted(optimizer: type[RuleOptimizer]):
    known = {*optimizer([table()]).defaults, *optimizer.group_options}
    plain = train(optimizer([param := table()]), param)
    for name in optimizer.no_op_values.keys() - known:
        nothing = tuple(optimizer.no_op_values[name])
        for value in nothing:
            param = table()
            assert same_bits(train(optimizer([{"params": [param], name: value}]), param), plain)
        asking = {"bias_correction": "per_row", "decoupled_weight_decay": True not in nothing}
        for value in (asking.get(name, 0.5), torch.tensor(0.0), [0]):
            group = {"params": [table()], name: value}
            assert_refused(partial(optimizer, [group]), optimizer.__name__, name)


# Re-creation from defaults


SETTINGS: list[dict[str, Any]] = [
    {"semantics": "dense"},
    {"mask": torch.arange(6) < 5, "state_dtype": torch.float64},
    {"maximize": True, "stochastic_rounding": True},
    {"stochastic_rounding": True, "rounding_seed": 7, "engine": "reference"},
]


def may_be_dense(variant: Variant) -> bool:
    coupled = "weight_decay" in variant.options and not variant.options.get(
        "decoupled_weight_decay", variant.cls.always_decoupled
    )
    return variant.rule.idle_update is not None and not coupled


@pytest.mark.filterwarnings("ignore::sparsestep.StaleWarning")
@pytest.mark.parametrize("more", SETTINGS, ids="-".join)
def test_an_optimizer_is_re_created_from_its_defaults(more: dict[str, Any]):
    for variant in EVERY:
        if more.get("semantics") == "dense" and not may_be_dense(variant):
            continue
        torch.manual_seed(1)
        dtype = torch.bfloat16 if "stochastic_rounding" in more else torch.float32
        param, other = table(dtype), table(dtype)
        opt = variant([param], lr=0.5, **more)
        torch.manual_seed(2)  # the seed of rounding is part of it
        again = type(opt)([other], **opt.defaults)
        assert repr(again) == repr(opt)
        assert (again.engine, again.semantics) == (opt.engine, opt.semantics)
        assert all(f"{name}: " in repr(opt) for name in more)
        assert same_bits(train(again, other), train(opt, param)), variant


def test_no_seed_is_torchs():
    torch.manual_seed(7)
    for given in ({}, {"rounding_seed": None}):
        opt = sparsestep.SGD([table(torch.bfloat16)], stochastic_rounding=True, **given)
        opt.add_param_group({"params": [table()], "stochastic_rounding": True, **given})
        opt.add_param_group({"params": [table()]})
        opt.param_groups[2].update(stochastic_rounding=True, **given)
        for group in opt.param_groups:
            group["params"][0].grad = torch.zeros_like(group["params"][0])
        opt.step()
        assert [group["rounding_seed"] for group in opt.param_groups] == [7, 7, 7]


# Values of the wrong kind or out of range: refused by name, wherever they are set


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


NAN, INF = float("nan"), float("inf")
TWO = torch.tensor([0.1, 0.2])

NO_NUMBERS: list[Any] = [
    *(Unprintable(), Wrapper(torch.zeros(2))),
    *("1e-3", "fast", None, [], [0.1], (0.1,), {}, {"lr": 0.1}, 1j, object(), torch.float32),
    *(NAN, INF, -INF, 10**400, TWO, torch.tensor(1j), torch.tensor(NAN)),
    *(torch.tensor(0.1, device="meta"), torch.ones(1).to_sparse(), np.ones(2), b"1"),
]
# For each kind of option, values that are none of it.
WRONG: dict[str, list[Any]] = {
    "number": NO_NUMBERS,
    "number from 0": [*NO_NUMBERS, -1, -0.5, torch.tensor(-1.0)],
    "norm or None": [*(each for each in NO_NUMBERS if each is not None), 0, 0.0, -1],
    "pair": [
        *(0.9, "0.9", "ab", None, (), (0.9,), (0.9, 0.99, 0.999), {}, {"a": 1, "b": 2}, 1j),
        *((0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (0.9, INF), ("0.9", "0.99"), (None, None)),
        *(torch.tensor(0.9), (TWO, TWO), object(), Unusable(TWO)),
    ],
    "switch": [
        *(Unprintable(), Wrapper(torch.zeros(2)), "yes", "True", None, [], {}, 0.5, 2, NAN, 1j),
        *(TWO, object(), (True,)),
    ],
    "switch or None": ["yes", [], {}, 0.5, 2, NAN, TWO, object()],
    "mode": ["row", None, True, 1, [], {}, TWO],
    "dtype": ["int8", "torch.int8", "half", int, float, 8, [], {}, TWO, torch.int32, torch.cfloat],
    "seed": ["7", 0.5, True, [], {}, NAN, TWO],
    "mask": ["all", 1, True, {}, 0.5, TWO, [None, None]],
    "word": ["", "adam", 1, True, [], {}, TWO],
}
KINDS: dict[str, str] = {
    **dict.fromkeys(checks.NUMBERS, "number from 0"),
    "dampening": "number",
    **dict.fromkeys(checks.SWITCHES, "switch"),
    **dict.fromkeys(("foreach", "fused"), "switch or None"),
    **dict.fromkeys(OPTIMIZER_OPTIONS, "word"),
    "betas": "pair",
    **dict.fromkeys(("bias_correction", "dense"), "mode"),
    "mask": "mask",
    "max_norm": "norm or None",
    "rounding_seed": "seed",
    "state_dtype": "dtype",
}


def assert_refused(call: Callable[[], Any], who: str, name: str) -> None:
    with pytest.raises((InputError, TypeError)) as error:
        call()
    message = str(error.value)
    assert isinstance(error.value, InputError)
    assert message.startswith(f"{who}: "), message
    assert name in message, (name, message)
    assert "\n" not in message


def wrong_options(names: Iterable[str], *others: str) -> Iterator[tuple[str, Any]]:
    """Each option with each wrong value, but for some others."""
    return ((name, value) for name in names if name not in others for value in WRONG[KINDS[name]])


@each_optimizer
def test_the_constructor_names_the_option(optimizer: type[RuleOptimizer]):
    who = optimizer.__name__
    for name, value in wrong_options(options_of(optimizer)):
        assert_refused(partial(optimizer, [table()], **{name: value}), who, name)
        if name in OPTIMIZER_OPTIONS or (name == "decoupled_weight_decay" and who == "AdamW"):
            continue
        groups = [{"params": [table()]}, {"params": [table()], name: value}]
        assert_refused(partial(optimizer, groups), f"{who}: param group 1", name)


Stepping = Callable[[Any, Tensor, Tensor], None]


def by_step(opt: Any, param: Tensor, grad: Tensor) -> None:
    param.grad = grad
    opt.step()


def by_hand(opt: Any, param: Tensor, grad: Tensor) -> None:
    opt.step([grad])


def by_backward(opt: Any, param: Tensor, grad: Tensor) -> None:
    (param * 1.0).backward(grad.to_dense())


def prepared(optimizer: type[RuleOptimizer], step: Stepping) -> tuple[Any, RuleOptimizer, Tensor]:
    """An optimizer after three steps, so that the group's settings are cached."""
    param = table()
    if step is by_hand:
        front: Any = FUNCTIONAL[OPTIMIZERS.index(optimizer)]([param], lr=0.1)
        opt = front.optimizer
    else:
        front = opt = optimizer([{"params": [table()]}, {"params": [param]}], lr=0.1)
        if step is by_backward:
            opt.step_in_backward()
    for index in range(3):
        step(front, param, rows(index, 5))
    return front, opt, param


@pytest.mark.parametrize(
    ("optimizer", "step"),
    [
        *((cls, by_step) for cls in OPTIMIZERS),
        *(
            (cls, way)
            for cls in (sparsestep.Adam, sparsestep.Ftrl)
            for way in (by_hand, by_backward)
        ),
    ],
)
def test_a_value_or_key_set_later_is_refused_by_the_next_step(
    optimizer: type[RuleOptimizer], step: Stepping
):
    front, opt, param = prepared(optimizer, step)
    group, before = opt.param_groups[-1], Snapshot(Subject(opt))
    who = f"{optimizer.__name__}: param group {len(opt.param_groups) - 1}"

    def take_step() -> None:
        step(front, param, rows(1, 5))

    kept = dict(group)
    for name, value in wrong_options(options_of(optimizer), *OPTIMIZER_OPTIONS, "mask"):
        group[name] = value
        for _ in range(2):  # NaN is NaN: the second step must not take it for known
            assert_refused(take_step, who, name)
        group.clear()
        group.update(kept)
        before.check(name)
    known = {*opt.option_names, *opt.group_options}
    for name in {"weight_deacy", "masks", "momentum", "weight_decay", "l1", "amsgrad"} - known:
        group[name] = 0.5
        assert_refused(take_step, who, name)
        del group[name]
    before.check()
    group["layer"] = "a key of one's own"
    take_step()
    with pytest.raises(FindingError):
        before.check()


def test_values_changed_in_place_are_seen():
    param, other, lr, betas = table(), table(), torch.tensor(0.1), [0.9, 0.999]
    opt = sparsestep.SparseAdam([param], lr=lr, betas=betas)  # type: ignore[arg-type]
    plain = sparsestep.SparseAdam([other], lr=0.1)
    by_step(opt, param, rows(1, 5))
    by_step(plain, other, rows(1, 5))
    lr.fill_(NAN)
    with refused(opt):
        opt.step()
    lr.fill_(0.25)
    betas[1] = 1.0
    with refused(opt):
        opt.step()
    betas[1] = 0.5
    opt.step()
    plain.param_groups[0].update(lr=0.25, betas=(0.9, 0.5))
    plain.step()
    assert torch.allclose(param, other)


@pytest.mark.parametrize("optimizer", [sparsestep.Adam, sparsestep.Ftrl])
def test_a_checkpoint_with_such_a_value_is_refused(optimizer: type[RuleOptimizer]):
    _, opt, _ = prepared(optimizer, by_step)
    saved, before = copy.deepcopy(opt.state_dict()), Snapshot(Subject(opt))
    who = f"{optimizer.__name__}: group 1 of the checkpoint"
    wrong = wrong_options(options_of(optimizer), *OPTIMIZER_OPTIONS)
    for name, value in (*wrong, ("weight_deacy", 0.1)):
        bad = copy.deepcopy(saved)
        bad["param_groups"][1][name] = value
        assert_refused(partial(opt.load_state_dict, bad), who, name)
    before.check()
    opt.load_state_dict(saved)


@each_optimizer
def test_a_function_names_the_option(optimizer: type[RuleOptimizer]):
    """Also in a call like two before, which the core runs by itself."""
    function, param = FUNCTIONS[optimizer], table().detach()
    given = {"step": 1, **fresh_state(Variant(optimizer, {}), param)}
    names = inspect.signature(function).parameters.keys() & KINDS.keys()
    for name, value in wrong_options(names, "mask"):
        for _ in range(2):
            function(param, rows(1, 5), **given)
        before = param.clone()
        call = partial(function, param, rows(1, 5), **{**given, name: value})
        assert_refused(call, function.__name__, name)
        assert same_bits(param, before)


@each_engine
def test_options_are_checked_only_in_groups_with_a_gradient(engine: str):
    """Torch's suite cycles beta1 up to 22 in an optimizer that has no gradient."""
    params = [torch.nn.Parameter(torch.ones(4)) for _ in range(2)]
    with running_on(engine) as name:
        opt = sparsestep.Adam([{"params": [param]} for param in params], engine=name)
        opt.param_groups[0]["betas"] = (22.0, 0.999)
        opt.step()
        params[1].grad = torch.ones(4)
        opt.step()
        assert torch.equal(params[0], torch.ones(4))
        assert (params[1] < 1).all()
        params[0].grad = torch.ones(4)
        with pytest.raises(ValueError, match=r"param group 0: .*beta"):
            opt.step()


# Values that mean a number, a switch or a pair


NUMBERS_ALIKE = [
    *(np.float64(0.5), np.float32(0.5), np.float16(0.5), Fraction(1, 2), torch.tensor(0.5)),
    *(torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64), torch.nn.Parameter(TWO[:1] * 5)),
]


@each_optimizer
def test_numbers_and_switches_may_be_of_many_types(optimizer: type[RuleOptimizer]):
    names = [n for n in options_of(optimizer) if n in checks.NUMBERS]

    def trained(value: Any, switch: Any, dense: bool) -> Tensor:
        param = table()
        opt = optimizer([param], **dict.fromkeys(names, value))
        if "betas" in opt.defaults:
            opt.param_groups[0]["betas"] = [value, value]
        opt.param_groups[0]["maximize"] = switch
        return train(opt, param, dense=dense)

    for dense in (False, True):
        plain, turned = trained(0.5, False, dense), trained(0.5, True, dense)
        for value in NUMBERS_ALIKE:  # torch's kernel rounds tensors otherwise
            assert torch.allclose(trained(value, False, dense), plain, rtol=1e-6)
        for switch in (1, np.bool_(True), torch.tensor(True)):
            assert same_bits(trained(0.5, switch, dense), turned)


@pytest.mark.parametrize("dense", [False, True], ids=["sparse", "dense"])
def test_a_pair_may_be_any_sequence_of_two_and_may_be_changed_in_place(dense: bool):
    for variant in (Variant(sparsestep.AdamW, {}), Variant(sparsestep.RowwiseAdam, {})):
        for betas in (
            [0.5, 0.75],
            np.array([0.5, 0.75]),
            torch.tensor([0.5, 0.75]),
            (torch.tensor(0.5), torch.tensor(0.75)),
        ):
            param, other = table(), table()
            opt, plain = variant([param], betas=betas), variant([other], betas=(0.5, 0.75))
            train(opt, param, dense=dense)
            train(plain, other, dense=dense)
            if isinstance(betas, tuple):
                betas[0].fill_(0.25)
                betas[1].fill_(0.5)
                plain.param_groups[0]["betas"] = (0.25, 0.5)
                assert opt.param_groups[0]["betas"] is betas
                train(opt, param, dense=dense)
                train(plain, other, dense=dense)
            assert torch.allclose(param, other, rtol=1e-6), (variant, betas)


def test_switches_and_numbers_may_be_written_as_each_other():
    """Torch's kernels are particular, and are called when others have written."""
    for cls, name, given, same in (
        (sparsestep.Adam, "amsgrad", 1, True),
        (sparsestep.SGD, "nesterov", 0, False),
        (sparsestep.SGD, "momentum", True, 1),
    ):
        runs = []
        for value in (given, same):
            params = [torch.nn.Parameter(torch.ones(4, 2)) for _ in range(2)]
            opt = cls(params, lr=0.1, fused=True)
            opt.param_groups[0][name] = value
            for _ in range(2):
                params[0].grad, params[1].grad = torch.eye(4)[:, :2].to_sparse(1), torch.ones(4, 2)
                opt.step()
            runs.append(params)
        assert all_same_bits(*runs), name


def test_a_schedule_may_end_just_below_zero():
    """LinearLR(end_factor=0) does: 0.1 ends at -5e-18 here."""
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], lr=0.1)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.7, 0.0, total_iters=3)
    lowest = 0.0
    for _ in range(5):
        by_step(opt, param, torch.ones(4, 2).to_sparse(1))
        schedule.step()
        lowest = min(lowest, opt.param_groups[0]["lr"])
    assert lowest < 0.0
