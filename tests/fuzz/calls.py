"""Public functions and classes with one argument that makes no sense: it is refused, or used."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep import IndexedGrad
from tests.fuzz.findings import check_refusal
from tests.fuzz.world import Say
from tests.generate.garbage import VALUES, Wrapper, any_garbage, bad_state, ids, index_outside
from tests.generate.grads import any_grad
from tests.generate.params import REAL, any_class, any_dtype, any_options, any_param
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.subject import by_hand_class
from tests.table import FUNCTIONS, same_bits


@dataclass
class Call:
    """A valid call.

    Attributes:
        function: what is called.
        arguments: by name.
        written: what it may write to, and must not where it refuses.
        bad: an argument, what is to be passed for it, and whether it must be refused.
    """

    function: Callable[..., Any]
    arguments: dict[str, Any]
    written: list[Tensor]
    bad: tuple[str, Any, bool]


def function(chance: Source) -> Call:
    """One of ``sparsestep.functional``."""
    cls = chance.pick(list(FUNCTIONS))
    function: Any = FUNCTIONS[cls]
    param = any_param(chance, any_dtype(chance, cls))[0].detach()
    optimizer = cls([param], **({"momentum": 0.9} if cls is sparsestep.SGD else {}))
    optimizer.materialize_state()
    rule = cls.rule_for(optimizer.param_groups[0])
    wide = torch.promote_types(param.dtype, torch.float32)
    state = {
        spec.name: optimizer.state.get(param, {}).get(
            spec.name, torch.zeros_like(param, dtype=wide)
        )
        for spec in rule.state
    }
    grad = any_grad(chance, param, by_hand=True).grad
    arguments = {**function.__kwdefaults__, "param": param, "grad": grad, **state, "step": 1}
    if chance.one_in(2):
        grad, _, must = any_garbage(chance, param)
        return Call(function, arguments, [param, *state.values()], ("grad", grad, must))
    name = chance.pick([name for name in arguments if name not in ("param", "grad")])
    values = [*VALUES, param, *bad_state(param.real if param.is_complex() else param).values()]
    return Call(function, arguments, [param, *state.values()], (name, chance.pick(values), False))


def lookup(chance: Source) -> Call:
    """In a table of ``sparsestep.nn``."""
    rows, columns = chance.pick([(7, 3), (1, 1), (20, 5), (6, 16)])
    dtype = chance.weighted(REAL)
    arguments: dict[str, Any] = {"input": torch.tensor(chance.integers(6, rows))}
    table: Any = sparsestep.nn.Embedding(rows, columns, dtype=dtype)
    if chance.one_in(2):
        last = chance.one_in(3)
        table = sparsestep.nn.EmbeddingBag(
            rows, columns, mode="sum", include_last_offset=last, dtype=dtype
        )
        arguments["offsets"] = ids(0, 3, 3, 6) if last else ids(0, 3, 3)
        arguments["per_sample_weights"] = torch.ones(6, dtype=dtype)
    written = [table.weight.detach()]
    if chance.one_in(2):
        outside = arguments["input"].clone()
        outside[chance.integer(0, 5)] = chance.pick([-1, rows, 2**31 - 1, 2**62])
        return Call(table, arguments, written, ("input", outside, True))
    things = [
        *(None, "x", 3, [1, 2], {}, torch.zeros(2), torch.zeros(2, 2, 2, dtype=torch.int64)),
        *(torch.zeros(2, dtype=torch.int64, device="meta"), ids(5, 0, 2), ids(-1), ids(2**40)),
        *(torch.eye(2, dtype=torch.int64).to_sparse_coo(), torch.tensor(2.5), ids()),
        torch.zeros(2, dtype=torch.bool),
    ]
    return Call(
        table, arguments, written, (chance.pick(list(arguments)), chance.pick(things), False)
    )


def clip(chance: Source) -> Call:
    """``clip_grad_norm_`` or ``clip_grad_value_``."""
    params = [any_param(chance, chance.weighted(REAL))[0] for _ in range(chance.integer(1, 3))]
    for param in params:
        param.grad = chance.numbers(param.shape, param.dtype).to_sparse_coo()
    written = [param.grad._values() for param in params]
    arguments: dict[str, Any] = {"parameters": params, "max_norm": 0.5, "norm_type": 2.0}
    clip: Any = sparsestep.clip_grad_norm_
    if chance.one_in(2):
        clip, arguments = sparsestep.clip_grad_value_, {"parameters": params, "clip_value": 0.5}
    name = chance.pick(list(arguments))
    if name != "parameters":
        value = chance.pick([*VALUES, torch.tensor(1.0)])
    elif chance.one_in(2):
        value = chance.pick([None, 3, "x", {}, [None], [3], iter(())])
    else:
        bad, _ = any_param(chance, torch.float32)
        bad.grad, _ = index_outside(chance, bad)
        value = [*params, bad]
    return Call(clip, arguments, written, (name, value, False))


def calls(chance: Source, say: Say) -> None:
    call = chance.pick([function, lookup, clip])(chance)
    name, bad, must = call.bad
    shown: Any = "" if isinstance(bad, IndexedGrad) else bad
    if isinstance(bad, Tensor):
        shown = "nested" if bad.is_nested else tuple(bad.shape)
    text = f"{getattr(call.function, '__name__', type(call.function).__name__)}: {name} = "
    text += f"{type(bad).__name__} {shown}"
    say(text)
    before = [tensor.clone() for tensor in call.written]
    arguments = {**call.arguments, name: bad}
    try:
        call.function(**arguments)
    except Exception as error:
        if not _is_torchs(call.function, arguments, error):
            check_refusal(error, text)
        if not all(map(same_bits, call.written, before)):
            raise FindingError("a refusal changed something", text) from error
        return
    if must:
        raise FindingError(f"accepted: {text}", "it should have been refused")


def _is_torchs(function: Any, arguments: dict[str, Any], error: Exception) -> bool:
    """Whether torch's own function says the same of dense gradients: then it is their word."""
    theirs: Any = getattr(nn.utils, getattr(function, "__name__", ""), None)
    if theirs is None:
        return False
    given = arguments["parameters"]
    if isinstance(given, list) and all(isinstance(param, Tensor) for param in given):
        given = [nn.Parameter(torch.ones(param.shape)) for param in given]
        for param in given:
            param.grad = torch.ones(param.shape)
    try:
        theirs(**{**arguments, "parameters": given})
    except Exception as their_error:
        return type(their_error) is type(error)
    return False


# Misspelled options must not go unnoticed.
_NEAR_MISSES = ["masks", "bias_corection", "weight_deacy", "state_dtpye", "stochastic_roundng"]


def making(chance: Source, say: Say) -> None:
    """An optimizer with one argument that makes no sense."""
    cls = any_class(chance)
    options = any_options(chance, cls)
    params: Any = [any_param(chance, torch.float32)[0] for _ in range(2)]
    kind = chance.pick(["option", "option", "group option", "near miss", "params", "keyword"])
    must = False
    if kind == "option":
        name = chance.pick(["lr", "engine", "semantics", "mask", *options, *cls.group_options])
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
        make(params, **options)
    except Exception as error:
        check_refusal(error, text)
        return
    if must:
        raise FindingError(f"accepted: {text}", "it should have been refused")


def _params() -> dict[str, Any]:
    leaf = nn.Parameter(torch.ones(2, 2))
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
