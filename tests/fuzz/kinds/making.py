"""Optimizers made with garbage, and what is loaded into them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch

from tests.fuzz.findings import check_refusal
from tests.fuzz.spoiling import VALUES
from tests.fuzz.world import Say, World, refused
from tests.generate.garbage import Wrapper
from tests.generate.params import any_class, any_options, any_param
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.subject import by_hand_class

# Misspelled options must not go unnoticed.
_NEAR_MISSES = ["masks", "bias_corection", "weight_deacy", "state_dtpye", "stochastic_roundng"]


def making(chance: Source, say: Say) -> None:
    """A class with one argument that makes no sense."""
    cls = any_class(chance)
    options = any_options(chance, cls)
    params: Any = [any_param(chance, torch.float32)[0] for _ in range(2)]
    kind = chance.pick(["option", "option", "group option", "near miss", "params", "keyword"])
    must = False
    if kind == "option":
        names = ["lr", "engine", "semantics", "mask", *options, *cls.group_options]
        name = chance.pick(names)
        options[name] = chance.pick(VALUES)
        text = f"{name} = {options[name]!r}"
    elif kind == "group option":
        name = chance.pick(["lr", *options, *cls.group_options, "params"])
        value = chance.pick(VALUES)
        params = [{"params": params, name: value}]
        text = f"group with {name} = {value!r}"
    elif kind == "near miss":
        name = chance.pick(_NEAR_MISSES)
        near = {"weight_deacy": "weight_decay"}.get(name)
        must = near is None or near in cls([torch.zeros(1)]).param_groups[0]
        must = must and (name != "bias_corection" or "bias_correction" in cls.group_options)
        params = [{"params": params, name: chance.pick([True, 0.5, torch.ones(2) > 0])}]
        text = f"group with {name}"
    elif kind == "params":
        name, params = chance.pick(list(_params().items()))
        text = f"params = {name}"
    else:
        options["unknown_keyword"] = 1
        text, must = "an unknown keyword", True
    make: Any = by_hand_class(cls) if chance.one_in(3) else cls
    say(f"{make.__name__}({text})")
    try:
        made = make(params, **options)
    except Exception as error:
        check_refusal(error, text)
        return
    if must:
        raise FindingError(f"accepted: {text}", "it should have been refused")
    del made


def _params() -> dict[str, Any]:
    leaf = torch.nn.Parameter(torch.ones(2, 2))
    return {
        "None": None,
        "a number": 3,
        "a string": "x",
        "nothing": [],
        "an empty dict": {},
        "[None]": [None],
        "a list in a list": [[leaf]],
        "a tensor": leaf,
        "a dict": {"params": leaf},
        "a set": {leaf},
        "an empty group": [{}],
        "a group without params": [{"lr": 1}],
        "a group of None": [{"params": None}],
        "no leaf": [leaf * 2],
        "a sparse one": [leaf.detach().to_sparse_coo()],
        "integers": [torch.zeros(2, dtype=torch.int64)],
        "bools": [torch.zeros(2, dtype=torch.bool)],
        "meta": [torch.zeros(2, device="meta")],
        "a wrapper": [Wrapper(torch.zeros(2, 2))],
        "expanded": [torch.zeros(()).expand(3)],
        "twice in two groups": [{"params": [leaf]}, {"params": [leaf]}],
        "some with names": [("a", leaf), leaf],
        "one name twice": [("a", leaf), ("a", torch.zeros(2))],
    }


def loading(chance: Source, say: Say) -> None:
    """Checkpoints that are broken: nothing may change, and training goes on."""
    world = World(chance, say, by_hand=chance.one_in(3))
    world.build()
    world.valid_step()
    saved = copy.deepcopy(world.front.state_dict())
    text = _broken(chance, saved)
    say(f"load_state_dict with {text}")
    if refused(world, lambda: world.front.load_state_dict(saved), f"loading {text}", must=False):
        world.valid_step()


def _broken(chance: Source, saved: dict[str, Any]) -> str:
    """Break one thing in a checkpoint."""
    what = chance.pick(["state", "tensor", "count", "group", "option", "whole"])
    state, groups = saved["state"], saved["param_groups"]
    thing = chance.pick([None, 3, "x", [], torch.zeros(2, 9), torch.zeros(()), {}])
    known = [key for key, each in state.items() if isinstance(each, dict) and each]
    if what == "tensor" and known:
        record = state[chance.pick(known)]
        name = chance.pick(list(record))
        if chance.one_in(3):
            del record[name]
            return f"no {name}"
        record[name] = thing
        return f"{name} = {type(thing).__name__}"
    if what == "state" and known:
        state[chance.pick(known)] = thing
        return f"a record that is {type(thing).__name__}"
    if what == "group":
        if chance.one_in(2):
            groups.append(copy.deepcopy(groups[0]))
            return "a group too many"
        groups[0]["params"] = groups[0]["params"][:-1]
        return "a parameter too few"
    if what == "option":
        name = chance.pick(list(groups[0]))
        groups[0][name] = thing
        return f"option {name} = {type(thing).__name__}"
    if what == "whole":
        name = chance.pick(["state", "param_groups"])
        if chance.one_in(2):
            del saved[name]
            return f"no {name!r}"
        saved[name] = thing
        return f"{name!r} that is {type(thing).__name__}"
    saved["own note"] = thing
    return "a note"


KINDS: dict[Callable[[Source, Say], None], int] = {making: 6, loading: 5}
