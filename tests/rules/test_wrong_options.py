"""Options of the wrong kind or out of range: refused by name, wherever they are set."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.optim import FUNCTIONAL, OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules import options as checks
from sparsestep.rules.options import OPTIMIZER_OPTIONS
from tests.generate.garbage import Wrapper
from tests.rules.tables import rows, table, train
from tests.table import FUNCTIONS, each_optimizer, same_bits, snapshot, unchanged


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


NAN, INF = float("nan"), float("inf")
TWO = torch.tensor([0.1, 0.2])

NO_NUMBERS: list[Any] = [
    *(Unprintable(), Wrapper(torch.zeros(2))),
    *("1e-3", "fast", None, [], [0.1], (0.1,), {}, {"lr": 0.1}, 1j, object(), torch.float32),
    *(NAN, INF, -INF, 10**400, TWO, torch.tensor(1j), torch.tensor(NAN)),
    *(torch.tensor(0.1, device="meta"), np.ones(2), b"1"),
]
# For each kind of option, values that are none of it.
WRONG: dict[str, list[Any]] = {
    "number": NO_NUMBERS,
    "number from 0": [*NO_NUMBERS, -1, -0.5, torch.tensor(-1.0)],
    "pair": [
        *(0.9, "0.9", "ab", None, (), (0.9,), (0.9, 0.99, 0.999), {}, {"a": 1, "b": 2}, 1j),
        *((0.9, 1.0), (-0.1, 0.9), (NAN, 0.9), (0.9, INF), ("0.9", "0.99"), (None, None)),
        *(torch.tensor(0.9), (TWO, TWO), object()),
    ],
    "switch": [
        Unprintable(),
        Wrapper(torch.zeros(2)),
        "yes",
        "True",
        None,
        [],
        {},
        0.5,
        2,
        NAN,
        1j,
        TWO,
        object(),
        (True,),
    ],
    "switch or None": ["yes", [], {}, 0.5, 2, NAN, TWO, object()],
    "correction": ["row", None, True, 1, [], {}, TWO],
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
    "bias_correction": "correction",
    "mask": "mask",
    "rounding_seed": "seed",
    "state_dtype": "dtype",
}
# What torch says instead of the option's name.
IN_TORCHS_WORDS = {"lr": "learning rate", "eps": "epsilon", "betas": "beta parameter"}


def options_of(optimizer: type[RuleOptimizer]) -> list[str]:
    return [name for name in inspect.signature(optimizer).parameters if name != "params"]


def check_message(error: pytest.ExceptionInfo[Exception], who: str, name: str) -> None:
    message = str(error.value)
    assert isinstance(error.value, InputError)
    assert message.startswith(f"{who}: "), message
    assert name in message, (name, message)
    assert "\n" not in message


@each_optimizer
def test_every_option_of_every_class_has_a_kind(optimizer: type[RuleOptimizer]):
    assert set(options_of(optimizer)) <= KINDS.keys()


@each_optimizer
def test_the_constructor_names_the_option(optimizer: type[RuleOptimizer]):
    who = optimizer.__name__
    for name in options_of(optimizer):
        for value in WRONG[KINDS[name]]:
            with pytest.raises((InputError, TypeError)) as error:
                optimizer([table()], **{name: value})
            check_message(error, who, name)
            if name in OPTIMIZER_OPTIONS or (name == "decoupled_weight_decay" and who == "AdamW"):
                continue
            with pytest.raises((InputError, TypeError)) as error:
                optimizer([{"params": [table()]}, {"params": [table()], name: value}])
            check_message(error, f"{who}: param group 1", name)


Stepping = Callable[[Any, dict[str, Any], Tensor, Tensor], None]


def by_step(opt: Any, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
    param.grad = grad
    opt.step()


def by_hand(opt: Any, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
    opt.step([grad])


def by_backward(opt: Any, group: dict[str, Any], param: Tensor, grad: Tensor) -> None:
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
        step(front, opt.param_groups[-1], param, rows(index, 5))
    return front, opt, param


@pytest.mark.parametrize("step", [by_step, by_hand, by_backward])
@each_optimizer
def test_a_value_set_later_is_refused_by_the_next_step(
    optimizer: type[RuleOptimizer], step: Stepping
):
    front, opt, param = prepared(optimizer, step)
    group, before = opt.param_groups[-1], snapshot(opt)
    who = f"{optimizer.__name__}: param group {len(opt.param_groups) - 1}"
    for name in options_of(optimizer):
        if name in OPTIMIZER_OPTIONS or name == "mask":
            continue
        there, was = name in group, group.get(name)
        for value in WRONG[KINDS[name]]:
            group[name] = value
            for _ in range(2):  # NaN is NaN: the second step must not take it for known
                with pytest.raises((InputError, TypeError)) as error:
                    step(front, group, param, rows(1, 5))
                check_message(error, who, name)
            assert unchanged(opt, before), (name, value)
            if there:
                group[name] = was
            else:
                del group[name]
    step(front, group, param, rows(1, 5))
    assert not unchanged(opt, before)


@pytest.mark.parametrize("step", [by_step, by_hand, by_backward])
@each_optimizer
def test_a_misspelled_key_put_in_later_is_refused_by_the_next_step(
    optimizer: type[RuleOptimizer], step: Stepping
):
    front, opt, param = prepared(optimizer, step)
    group, before = opt.param_groups[-1], snapshot(opt)
    for key, name in (("weight_deacy", "weight_decay"), ("bettas", "betas"), ("masks", "mask")):
        group[key] = 0.1
        with pytest.raises(InputError, match=f"unknown key '{key}'; did you mean '{name}'"):
            step(front, group, param, rows(1, 5))
        del group[key]
    assert unchanged(opt, before)
    group["layer"] = "a key of one's own"
    step(front, group, param, rows(1, 5))
    assert not unchanged(opt, before)


@each_optimizer
def test_an_option_of_another_class_put_in_later_is_refused(optimizer: type[RuleOptimizer]):
    front, opt, param = prepared(optimizer, by_step)
    known = {*opt.option_names, *opt.group_options}
    foreign = [name for name in ("momentum", "weight_decay", "l1", "amsgrad") if name not in known]
    for name in foreign:
        opt.param_groups[1][name] = 0.0
        by_step(front, opt.param_groups[1], param, rows(1, 5))
        opt.param_groups[1][name] = 0.5
        with pytest.raises(InputError, match=f"param group 1: it may only set .*Got {name}"):
            by_step(front, opt.param_groups[1], param, rows(1, 5))
        del opt.param_groups[1][name]


def test_values_changed_in_place_are_seen():
    param, lr, betas = table(), torch.tensor(0.1), [0.9, 0.999]
    opt = sparsestep.SparseAdam([param], lr=lr, betas=betas)  # type: ignore[arg-type]
    by_step(opt, {}, param, rows(1, 5))
    before = snapshot(opt)
    lr.fill_(NAN)
    with pytest.raises(InputError, match="Invalid learning rate"):
        by_step(opt, {}, param, rows(1, 5))
    lr.fill_(0.1)
    betas[1] = 1.0
    with pytest.raises(InputError, match="Invalid beta parameter at index 1"):
        by_step(opt, {}, param, rows(1, 5))
    assert unchanged(opt, before)


@each_optimizer
def test_a_checkpoint_with_such_a_value_is_refused(optimizer: type[RuleOptimizer]):
    _, opt, _ = prepared(optimizer, by_step)
    saved, before = copy.deepcopy(opt.state_dict()), snapshot(opt)
    who = f"{optimizer.__name__}: group 1 of the checkpoint"
    for name in options_of(optimizer):
        if name in OPTIMIZER_OPTIONS:
            continue
        for value in WRONG[KINDS[name]]:
            bad = copy.deepcopy(saved)
            bad["param_groups"][1][name] = value
            with pytest.raises((InputError, TypeError)) as error:
                opt.load_state_dict(bad)
            check_message(error, who, name)
            assert unchanged(opt, before), (name, value)
    bad["param_groups"][1] = {**saved["param_groups"][1], "weight_deacy": 0.1}
    with pytest.raises(InputError, match="unknown key 'weight_deacy'; did you mean"):
        opt.load_state_dict(bad)
    opt.load_state_dict(saved)


@each_optimizer
def test_a_function_names_the_option(optimizer: type[RuleOptimizer]):
    function = FUNCTIONS[optimizer]
    arguments = inspect.signature(function).parameters
    state = [name for name, each in arguments.items() if each.kind is not each.KEYWORD_ONLY][2:]
    for name in set(arguments) & KINDS.keys() - {"mask"}:
        for value in WRONG[KINDS[name]]:
            param = table().detach()
            like = param[:, :1] if "Rowwise" in optimizer.__name__ else param
            tensors = {each: torch.zeros_like(like).squeeze() for each in state}
            if optimizer is sparsestep.RowwiseAdam:
                tensors["exp_avg"] = torch.zeros_like(param)
            if optimizer is sparsestep.Ftrl:
                tensors = {each: torch.zeros_like(param) for each in state}
            with pytest.raises((InputError, TypeError)) as error:
                function(param, rows(1, 5), **{"step": 1, **tensors, name: value})
            check_message(error, function.__name__, name)
            assert same_bits(param, table().detach())


# Values that mean a number or a switch

NUMBERS_ALIKE = [
    *(np.float64(0.5), np.float32(0.5), np.float16(0.5), Fraction(1, 2), torch.tensor(0.5)),
    *(torch.tensor([0.5]), torch.tensor(0.5, dtype=torch.float64), torch.nn.Parameter(TWO[:1] * 5)),
]


@pytest.mark.parametrize("kind", ["sparse", "dense"])
@pytest.mark.parametrize("value", NUMBERS_ALIKE, ids=lambda v: f"{type(v).__name__}-{v}")
@each_optimizer
def test_numbers_may_be_of_many_types(optimizer: type[RuleOptimizer], value: Any, kind: str):
    names = [n for n in options_of(optimizer) if n in checks.NUMBERS]
    results = []
    for each in (value, 0.5):
        param = table()
        opt = optimizer([param], **dict.fromkeys(names, each))
        if "betas" in opt.defaults:
            opt.param_groups[0]["betas"] = [each, each]
        for index in range(3):
            grad = rows(index, 5)
            param.grad = grad if kind == "sparse" else grad.to_dense()
            opt.step()
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-6), "torch's kernel rounds tensors otherwise"


@pytest.mark.parametrize("value", [True, 1, np.bool_(True), torch.tensor(True)], ids=repr)
@each_optimizer
def test_switches_may_be_of_many_types(optimizer: type[RuleOptimizer], value: Any):
    param, other = table(), table()
    opt, plain = optimizer([param]), optimizer([other])
    opt.param_groups[0]["maximize"], plain.param_groups[0]["maximize"] = value, True
    assert same_bits(train(opt, param), train(plain, other))


@pytest.mark.parametrize("betas", [[0.5, 0.75], np.array([0.5, 0.75]), torch.tensor([0.5, 0.75])])
@pytest.mark.parametrize("kind", ["sparse", "dense"])
def test_a_pair_may_be_any_sequence_of_two(betas: Any, kind: str):
    results = []
    for each in (betas, (0.5, 0.75)):
        param = table()
        opt = sparsestep.Adam([param], betas=each)
        param.grad = rows(1, 5) if kind == "sparse" else rows(1, 5).to_dense()
        opt.step()
        results.append(param.detach())
    assert torch.allclose(*results, rtol=1e-6)


# The remedies

REMEDIES = [
    ({"lr": "1e-3"}, "AdamW: lr must be a number. Got '1e-3'. YAML reads 1e-3 as a string: "),
    ({"lr": "1e-3"}, ": write 1.0e-3."),
    ({"eps": "2.5E8"}, ": write 2.5e+8."),
    ({"lr": "0.1"}, "Got '0.1'. Pass float('0.1')."),
    ({"lr": "fast"}, "AdamW: lr must be a number. Got 'fast'."),
    ({"betas": 0.9}, "AdamW: betas must be a pair of numbers. Got 0.9."),
    ({"betas": ("0.9", 0.99)}, "betas[0] must be a number. Got '0.9'. Pass float('0.9')."),
    ({"state_dtype": "int8"}, "torch.int8 or None. Got 'int8'. Pass torch.int8."),
    ({"state_dtype": "bfloat16"}, "Got 'bfloat16'. Pass torch.bfloat16."),
    ({"lr": -1}, "AdamW: Invalid learning rate: -1. lr must be at least 0."),
    ({"lr": INF}, "AdamW: Invalid learning rate: inf. lr must be finite."),
]


@pytest.mark.parametrize(("options", "text"), REMEDIES)
def test_the_remedy(options: dict[str, Any], text: str):
    with pytest.raises(InputError) as error:
        sparsestep.AdamW([table()], **options)
    assert text in str(error.value)
