"""Steps that must be refused, or at least break nothing; afterwards training goes on."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import sparsestep
from tests.faults.injectors import Lines
from tests.fuzz.findings import is_taken
from tests.fuzz.world import World, refused
from tests.generate import garbage
from tests.generate.source import NotApplicableError, Source
from tests.oracle import FindingError
from tests.subject import Snapshot

_SOURCES = os.path.dirname(sparsestep.__file__)


@dataclass
class Spoilt:
    """What was done, whether it has to be refused, and how it is undone."""

    text: str
    must: bool
    undo: Callable[[], None]


def spoil(world: World) -> None:
    """A step in which one thing is wrong."""
    how = world.chance.weighted(_WAYS)
    if how in (interrupt, raising_closure, bad_checkpoint):
        how(world)
        return
    drawn = world.draw()
    world.give(drawn)
    place = world.chance.integer(0, len(drawn) - 1)
    try:
        spoilt = how(world, place)
    except NotApplicableError:
        return
    world.say(f"param {place}: {spoilt.text}; step")
    was_refused = refused(world, world.step, spoilt.text, must=spoilt.must)
    spoilt.undo()
    world.over = not was_refused


# Gradients


def bad_gradient(world: World, place: int) -> Spoilt:
    _, _, param = world.each()[place]
    if world.by_hand:
        bad, text, must = garbage.any_garbage(world.chance, param)
        world.given[place] = bad
        return Spoilt(text, must, lambda: None)
    bad, text = garbage.index_outside(world.chance, param)
    before = param.grad
    param.grad = bad
    return Spoilt(text, True, lambda: setattr(param, "grad", before))


def too_few_gradients(world: World, place: int) -> Spoilt:
    if not world.by_hand:
        raise NotApplicableError
    del world.given[place]
    return Spoilt("one gradient too few", True, lambda: None)


# Parameters


def bad_param(world: World, place: int) -> Spoilt:
    """Other memory, which does not fit the gradient, the state, the mask or anything."""
    group, index, param = world.each()[place]
    before = param.data
    kind = world.chance.pick(list(_MEMORY))
    memory, must = _MEMORY[kind](world, param)
    param.grad = None
    try:
        param.data = memory
    except RuntimeError:  # torch does not allow it
        raise NotApplicableError from None
    fitting = torch.ones(memory.shape, dtype=memory.dtype, device=memory.device)
    if world.by_hand:
        world.given[place] = fitting
    else:
        param.grad = fitting
    if kind == "larger":
        has_state = any(isinstance(v, Tensor) and v.dim() for v in world.record(param).values())
        must = has_state or world.mask_of(group, index) is not None

    def undo() -> None:
        param.grad = None
        param.data = before

    return Spoilt(f"{kind} memory {tuple(memory.shape)} {memory.dtype}", must, undo)


def _larger(world: World, param: Tensor) -> tuple[Tensor, bool]:
    if not param.dim():
        raise NotApplicableError
    return torch.zeros((param.shape[0] + 2, *param.shape[1:]), dtype=param.dtype), True


def _expanded(world: World, param: Tensor) -> tuple[Tensor, bool]:
    if not param.dim() or param.shape[0] < 2 or not param.numel():
        raise NotApplicableError
    return torch.zeros((1, *param.shape[1:]), dtype=param.dtype).expand(param.shape), True


def _overlapping(world: World, param: Tensor) -> tuple[Tensor, bool]:
    if param.dim() != 2 or min(param.shape) < 2:
        raise NotApplicableError
    rows, columns = param.shape
    return torch.zeros(rows + columns, dtype=param.dtype).as_strided((rows, columns), (1, 1)), True


def _integers(world: World, param: Tensor) -> tuple[Tensor, bool]:
    return torch.zeros(param.shape, dtype=world.chance.pick([torch.int64, torch.uint8])), True


def _meta(world: World, param: Tensor) -> tuple[Tensor, bool]:
    return torch.zeros(param.shape, dtype=param.dtype, device="meta"), False


def _lazily_negated(world: World, param: Tensor) -> tuple[Tensor, bool]:
    if param.is_complex():
        return torch.zeros(param.shape, dtype=param.dtype).conj(), False
    return torch._neg_view(torch.zeros(param.shape, dtype=param.dtype)), False


_MEMORY: dict[str, Callable[[World, Tensor], tuple[Tensor, bool]]] = {
    "larger": _larger,
    "expanded": _expanded,
    "overlapping": _overlapping,
    "integer": _integers,
    "meta": _meta,
    "lazily negated or conjugated": _lazily_negated,
}


def another_param(world: World, place: int) -> Spoilt:
    """Some other tensor in the group's list, with a gradient that would fit."""
    group, index, param = world.each()[place]
    values = world.chance.numbers(param.shape, param.dtype)
    kind = world.chance.pick(list(_OTHERS))
    other, fitting = _OTHERS[kind](values), torch.ones_like(values)
    params, more = group["params"], kind == "one more"
    if not world.by_hand:
        try:
            other.grad = fitting
        except RuntimeError:
            raise NotApplicableError from None
    elif more:
        world.given.insert(place + 1, fitting)
    else:
        world.given[place] = fitting
    before = list(params)
    params[index + more : index + 1] = [other]

    def undo() -> None:
        params[:] = before

    must = kind == "a sparse one" or (more and group.get("mask") is not None)
    return Spoilt(f"{kind} in the group's list", must, undo)


def _inference(values: Tensor) -> Tensor:
    with torch.inference_mode():
        return values.clone()


_OTHERS: dict[str, Callable[[Tensor], Any]] = {
    "a wrapper": garbage.Wrapper,
    "an inference tensor": _inference,
    "a sparse one": Tensor.to_sparse_coo,
    "one more": torch.nn.Parameter,
}


# State


def bad_state(world: World, place: int) -> Spoilt:
    _, _, param = world.each()[place]
    record = world.state.get(param)
    if not record:
        raise NotApplicableError
    name = world.chance.pick(list(record))
    before = record[name]
    things: list[Any] = ["x", None, torch.tensor([1.0, 2.0]), float("nan"), -3, [], 1.5]
    things += [torch.tensor(float("nan")), torch.tensor(2), torch.tensor(False)]
    if name != "step":
        things = list(garbage.bad_state(torch.zeros(param.shape)).values())
    if world.chance.one_in(6):
        del record[name]
        text = f"state without {name}"
    else:
        thing = world.chance.pick(things)
        record[name] = thing
        text = f"state {name} = {type(thing).__name__} {getattr(thing, 'shape', thing)}"
    order = [*record]

    def undo() -> None:
        record[name] = before
        if name not in order:  # where it was first
            for each in order:
                record[each] = record.pop(each)

    return Spoilt(text, False, undo)


# Options


def bad_option(world: World, place: int) -> Spoilt:
    group, _, _ = world.each()[place]
    chance = world.chance
    names = [name for name in group if name not in ("params", "param_names", "rounding_seed")]
    extra = [*world.cls.group_options, "masks", "own_note", "bias_corection", "engine", "semantics"]
    name = chance.pick([*names, *names, *extra])
    if name == "initial_accumulator_value" and world.optimizer.store.layouts:
        raise NotApplicableError  # without it, packed state cannot be shown in the param's shape
    there, before = name in group, group.get(name)
    if there and chance.one_in(8):
        del group[name]
        text = f"no {name} in the group"
    else:
        tensors = [torch.tensor([0.1, 0.2]), torch.tensor(0.1), torch.zeros(2, 2) > 0]
        value = chance.pick([*garbage.VALUES, *tensors])
        group[name] = value
        text = f"{name} = {value!r}"

    def undo() -> None:
        if there:
            group[name] = before
        else:
            group.pop(name, None)

    return Spoilt(text, False, undo)


def tensor_lr_with_foreach(world: World, place: int) -> Spoilt:
    """What torch's own kernel refuses when it is too late to refuse anything."""
    group, _, _ = world.each()[place]
    if "foreach" not in group:
        raise NotApplicableError
    before = {name: group[name] for name in ("foreach", "lr")}
    group.update(foreach=True, lr=torch.tensor(0.1))
    return Spoilt("foreach=True, lr a tensor", False, lambda: group.update(before))


# Checkpoints


def bad_checkpoint(world: World) -> None:
    """Nothing may change, and training goes on."""
    saved = copy.deepcopy(world.front.state_dict())
    text = _broken(world.chance, saved)
    world.say(f"load_state_dict with {text}")
    was_refused = refused(
        world, lambda: world.front.load_state_dict(saved), f"loading {text}", must=False
    )
    world.over = not was_refused


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


# Steps that are interrupted


def raising_closure(world: World) -> None:
    """A closure or a hook that raises: what it raises comes out, and nothing has changed."""
    if world.by_hand:
        return
    drawn = world.draw()
    world.give(drawn)
    before = Snapshot(world)
    in_hook = world.chance.one_in(2)
    world.say(f"step with a {'hook' if in_hook else 'closure'} that raises")

    def fail(*_: Any) -> float:
        raise ArithmeticError("on purpose")

    handle = world.front.register_step_pre_hook(fail) if in_hook else None
    try:
        world.front.step(None if in_hook else fail)
    except ArithmeticError:
        before.check()
        return
    finally:
        if handle is not None:
            handle.remove()
    raise FindingError("an error was swallowed", "of a closure or a hook")


def interrupt(world: World) -> None:
    """Ctrl-C at some line of the library: the step is done or not, and nothing between."""
    drawn = world.draw()
    world.give(drawn)
    wanted, before = world.wanted(drawn), Snapshot(world)
    nth = world.chance.integer(0, 149)
    world.say(f"step, with Ctrl-C at its line {nth}")
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupted = False
    try:
        is_taken(lambda: Lines(_SOURCES).inject(world.step, nth), lambda: None)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        signal.signal(signal.SIGINT, handler)
    try:
        before.check()
        if not interrupted:
            return
    except FindingError:
        try:
            world.check(drawn, wanted, before)
        except FindingError as half:
            text = "half a step after Ctrl-C" if interrupted else half.kind
            raise FindingError(text, half.detail) from None


_WAYS: dict[Callable[..., Any], int] = {
    bad_gradient: 12,
    too_few_gradients: 1,
    bad_param: 5,
    another_param: 4,
    bad_state: 5,
    bad_option: 8,
    bad_checkpoint: 5,
    tensor_lr_with_foreach: 1,
    raising_closure: 1,
    interrupt: 3,
}
