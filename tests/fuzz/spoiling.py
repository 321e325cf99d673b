"""Steps that must be refused, or at least break nothing; afterwards training goes on.

Interrupted steps are left to tests/faults.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.world import World, refused
from tests.generate import garbage
from tests.generate.source import NotApplicableError, Source

# What was done, whether it has to be refused, and how it is undone.
Spoilt = tuple[str, bool, Callable[[], Any]]


def spoil(world: World) -> None:
    """A step in which one thing is wrong, or a checkpoint that is."""
    how = world.chance.weighted(_WAYS)
    if how is None:
        bad_checkpoint(world)
        return
    drawn = world.draw()
    world.give(drawn)
    place = world.chance.integer(0, len(drawn) - 1)
    try:
        text, must, undo = how(world, place)
    except NotApplicableError:
        return
    world.say(f"param {place}: {text}; step")
    was_refused = refused(world, world.step, text, must=must)
    undo()
    world.over = not was_refused


def bad_gradient(world: World, place: int) -> Spoilt:
    _, _, param = world.each()[place]
    if not world.by_hand:
        before = param.grad
        param.grad, text = garbage.index_outside(world.chance, param)
        return text, True, lambda: setattr(param, "grad", before)
    if world.chance.one_in(12):
        del world.given[place]
        return "one gradient too few", True, lambda: None
    world.given[place], text, must = garbage.any_garbage(world.chance, param)
    return text, must, lambda: None


def bad_memory(world: World, place: int) -> Spoilt:
    """Other memory, which does not fit the gradient, the state, the mask or anything."""
    group, index, param = world.each()[place]
    before = param.data
    kind, memory = world.chance.pick([*garbage.bad_memory(param).items()])
    must = kind not in ("meta", "lazily negated")
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

    return f"{kind} memory {tuple(memory.shape)} {memory.dtype}", must, undo


def another_param(world: World, place: int) -> Spoilt:
    """Some other tensor in the group's list, with a gradient that would fit."""
    group, index, param = world.each()[place]
    values = world.chance.numbers(param.shape, param.dtype)
    with torch.inference_mode():
        inference = values.clone()
    kind, other = world.chance.pick(
        [
            ("a wrapper", garbage.Wrapper(values)),
            ("an inference tensor", inference),
            ("a sparse one", values.to_sparse_coo()),
            ("one more", torch.nn.Parameter(values)),
        ]
    )
    fitting, more = torch.ones_like(values), kind == "one more"
    if not world.by_hand:
        try:
            other.grad = fitting
        except RuntimeError:
            raise NotApplicableError from None
    else:
        world.given[place + more : place + 1] = [fitting]
    params, before = group["params"], list(group["params"])
    params[index + more : index + 1] = [other]
    must = kind == "a sparse one" or (more and group.get("mask") is not None)
    return f"{kind} in the group's list", must, lambda: params.__setitem__(slice(None), before)


def bad_state(world: World, place: int) -> Spoilt:
    _, _, param = world.each()[place]
    record = world.state.get(param)
    if not record:
        raise NotApplicableError
    name, before = world.chance.pick(list(record)), dict(record)

    def undo() -> None:
        record.clear()  # also the order is as before
        record.update(before)

    if world.chance.one_in(6):
        del record[name]
        return f"state without {name}", False, undo
    things = [*garbage.bad_state(torch.zeros(param.shape)).values()]
    if name == "step":
        things = ["x", None, torch.tensor([1.0, 2.0]), float("nan"), -3, [], 1.5]
        things += [torch.tensor(float("nan")), torch.tensor(2), torch.tensor(False)]
    record[name] = thing = world.chance.pick(things)
    return f"state {name} = {type(thing).__name__} {getattr(thing, 'shape', thing)}", False, undo


def bad_option(world: World, place: int) -> Spoilt:
    group, _, _ = world.each()[place]
    chance, before = world.chance, dict(group)
    names = [name for name in group if name not in ("params", "param_names", "rounding_seed")]
    extra = [*world.cls.group_options, "masks", "own_note", "bias_corection", "engine", "semantics"]
    name = chance.pick([*names, *names, *extra])
    if name == "initial_accumulator_value" and world.optimizer.store.layouts:
        raise NotApplicableError  # without it, packed state cannot be shown in the param's shape

    def undo() -> None:
        group.clear()
        group.update(before)

    if name in group and chance.one_in(8):
        del group[name]
        return f"no {name} in the group", False, undo
    tensors = [torch.tensor([0.1, 0.2]), torch.tensor(0.1), torch.zeros(2, 2) > 0]
    group[name] = value = chance.pick([*garbage.VALUES, *tensors])
    if name == "lr" and "foreach" in group and isinstance(value, Tensor):
        group["foreach"] = True  # which torch's own kernel refuses when it has begun
    return f"{name} = {value!r}", False, undo


def bad_checkpoint(world: World) -> None:
    """Nothing may change, and training goes on."""
    saved = copy.deepcopy(world.front.state_dict())
    text = _broken(world.chance, saved)
    world.say(f"load_state_dict with {text}")
    load, during = world.front.load_state_dict, f"loading {text}"
    world.over = not refused(world, lambda: load(saved), during, must=False)


def _broken(chance: Source, saved: dict[str, Any]) -> str:
    """Break one thing in a checkpoint: leave it out, or replace it by anything."""
    state, groups = saved["state"], saved["param_groups"]
    records = [each for each in state.values() if isinstance(each, dict) and each]
    places: list[Any] = [saved, groups[0], *([state, chance.pick(records)] if records else [])]
    place = chance.pick(places)
    name = chance.pick([*place, "own note"])
    if name in place and chance.one_in(3):
        del place[name]
        return f"no {name!r}"
    if name == "params":
        place[name] = place[name][:-1]
        return "a parameter too few"
    if name == "param_groups" and chance.one_in(2):
        groups.append(copy.deepcopy(groups[0]))
        return "a group too many"
    place[name] = thing = chance.pick([None, 3, "x", [], torch.zeros(2, 9), torch.zeros(()), {}])
    return f"{name!r} = {type(thing).__name__}"


_WAYS: dict[Callable[[World, int], Spoilt] | None, int] = {
    bad_gradient: 13,
    bad_memory: 5,
    another_param: 4,
    bad_state: 5,
    bad_option: 9,
    None: 5,
}
