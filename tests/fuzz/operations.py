"""What may be done with an optimizer between two steps."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from sparsestep import InputError, _native
from sparsestep.optim import OPTIMIZERS
from tests import oracle
from tests.fuzz.findings import is_taken
from tests.fuzz.world import World, any_surroundings, same_value
from tests.generate.grads import any_grad
from tests.generate.params import any_options, any_param
from tests.oracle import FindingError
from tests.subject import NOT_NATIVE, Snapshot
from tests.table import INSTRUCTION_SETS, same_bits, through_a_file

Operation = Callable[[World], None]


def step(world: World) -> None:
    around, name = any_surroundings(world.chance)
    world.say(f"step{' in ' + name if name else ''}")
    world.valid_step(around)


def step_with_closure(world: World) -> None:
    """The gradients come from the closure; hooks see the step."""
    if world.by_hand:
        return step(world)
    seen: list[str] = []
    handles = [
        world.front.register_step_pre_hook(lambda *_: seen.append("pre")),
        world.front.register_step_post_hook(lambda *_: seen.append("post")),
    ]
    drawn = world.draw()
    world.give([None] * len(drawn))
    wanted, before = world.wanted(drawn), Snapshot(world)

    def closure() -> float:
        if not torch.is_grad_enabled():
            raise FindingError("a closure without gradients", "grad mode is off")
        world.give(drawn)
        return 1.5

    world.say("step with a closure and hooks")
    losses: list[float] = []
    taken = is_taken(lambda: losses.append(world.front.step(closure)), before.check)
    for handle in handles:
        handle.remove()
    if not taken:
        return
    if losses != [1.5] or seen != ["pre", "post"]:
        raise FindingError("closure or hooks", f"loss {losses}, hooks {seen}")
    world.check(drawn, wanted, before)


def step_one_by_one(world: World) -> None:
    """By hand, one parameter at a time, perhaps each in a thread of its own."""
    if not world.by_hand:
        return step(world)
    drawn = world.draw()
    wanted, before = world.wanted(drawn), Snapshot(world)
    errors: list[Exception] = []

    def one(param: Tensor, grad: Any) -> None:
        try:
            world.front.step_param(param, grad)
        except Exception as error:
            errors.append(error)

    calls = [(p, d and d.grad) for (_, _, p), d in zip(world.each(), drawn, strict=True)]
    threaded = world.chance.one_in(3)
    world.say(f"step_param for each{' in threads' if threaded else ''}")
    if threaded:
        threads = [Thread(target=one, args=call) for call in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    else:
        for call in calls:
            one(*call)
    for error in errors:
        if not isinstance(error, InputError) or NOT_NATIVE not in str(error):
            raise FindingError(f"{type(error).__name__} in step_param", str(error)[:300]) from error
    if not errors:
        world.check(drawn, wanted, before)


def change_options(world: World) -> None:
    """As a scheduler or a person would, also in place."""
    group = world.chance.pick(world.groups)
    fresh = any_options(world.chance, world.cls)
    keep = {"state_dtype", "stochastic_rounding", "bias_correction", "amsgrad", "centered"}
    keep |= {"momentum", "nesterov", "dampening", "foreach", "fused", "initial_accumulator_value"}
    names = [name for name in fresh if name in group and name not in keep]
    if not names:
        return
    name = world.chance.pick(names)
    old, new = group[name], fresh[name]
    if name in ("lr", "betas") and (_has_tensor(new) or _has_tensor(old)) and group.get("foreach"):
        return
    if name == "eps" and group.get("centered"):
        return
    if name == "betas" and world.cls.__name__.endswith("RowwiseAdam") and new[0] and not old[0]:
        return  # there is no first moment
    if name == "betas" and _has_tensor(old) and not _has_tensor(new):
        world.say(f"betas written in place: {new}")
        for tensor, value in zip(old, new, strict=True):
            tensor.fill_(value)
    elif isinstance(old, Tensor) and not isinstance(new, Tensor) and world.chance.one_in(2):
        world.say(f"{name} written in place: {new}")
        old.fill_(new)
    elif not (_has_tensor(new) and group.get("fused") and name == "betas"):
        world.say(f"{name} = {new}")
        group[name] = new


def _has_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or (
        isinstance(value, tuple) and any(isinstance(v, Tensor) for v in value)
    )


def change_mask(world: World) -> None:
    group = world.chance.pick(world.groups)
    given = group.get("mask")
    masks = given if isinstance(given, list) else [given]
    chosen = [mask for mask in masks if isinstance(mask, Tensor)]
    if not chosen:
        return
    mask = world.chance.pick(chosen)
    fresh = world.chance.flags(mask.shape)
    if world.chance.one_in(2) and not mask.is_inference():
        world.say(f"mask written in place: {fresh.int().tolist()}")
        mask.copy_(fresh)
    elif isinstance(given, list):
        world.say(f"another mask in the list: {fresh.int().tolist()}")
        given[next(i for i, each in enumerate(given) if each is mask)] = fresh
    elif world.chance.one_in(3):
        world.say("no mask any more")
        group["mask"] = None
    else:
        world.say(f"another mask: {fresh.int().tolist()}")
        group["mask"] = fresh


def round_trip(world: World) -> None:
    """A checkpoint, loaded into itself or into a new optimizer of the same kind."""
    before = Snapshot(world)
    saved = world.front.state_dict()
    how = world.chance.pick(["itself", "torch.save", "copied"])
    if how == "torch.save":
        saved = through_a_file(saved, weights_only=False)
    elif how == "copied":
        saved = copy.deepcopy(saved)
    world.say(f"load_state_dict of its own state_dict, {how}")
    masks = [group.get("mask") for group in world.groups]
    world.front.load_state_dict(saved)
    _check_kept(world, before)
    for group, mask in zip(world.groups, masks, strict=True):
        if mask is not None:
            group["mask"] = mask


def _check_kept(world: World, before: Snapshot) -> None:
    for place, (_, _, param) in enumerate(world.each()):
        if not same_bits(param, before.params[place]):
            raise FindingError("a checkpoint changed a parameter", f"param {place}")
        was = before.state[place]
        record = world.record(param)
        if {k for k, v in was.items() if v is not None} != {
            k for k, v in record.items() if v is not None
        }:
            raise FindingError("a checkpoint changed the state", f"{list(was)} to {list(record)}")
        packed = world.optimizer.store.layouts.get(param)
        for name, value in record.items():
            old = was[name]
            if packed is not None and isinstance(value, Tensor) and value.shape == packed.shape:
                kept = packed.indices()  # what the mask excludes is not loaded
                value, old = value.reshape(-1)[kept], old.reshape(-1)[kept]
            if not same_value(name, value, old):
                raise FindingError("a checkpoint changed the state", name)


def copy_all(world: World) -> None:
    """Go on with a deep copy or what a pickle gives."""
    before = Snapshot(world)
    for _, _, param in world.each():
        param.grad = None  # not every gradient can be copied
    how = world.chance.pick(["deepcopy", "pickle"])
    if world.cls not in OPTIMIZERS:
        how = "deepcopy"  # what is made here has no name that a pickle could find it by
    world.say(how)
    if how == "deepcopy":
        world.front = copy.deepcopy(world.front)
    else:
        world.front = pickle.loads(pickle.dumps(world.front))
    world.params = [param for _, _, param in world.each()]
    _check_kept(world, before)


def replace_data(world: World) -> None:
    """Other memory for the same parameter, perhaps with other strides."""
    _, _, param = world.chance.pick(world.each())
    values = world.chance.numbers(param.shape, param.dtype)
    if param.dim() > 1 and world.chance.one_in(2):
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    world.say(f"param.data = others, strides {values.stride()}")
    param.grad = None
    param.data = values


def add_group(world: World) -> None:
    if world.by_hand or len(world.groups) > 3:
        return
    param, text = any_param(world.chance, world.dtype)
    world.say(f"add_param_group: {text}")
    world.front.add_param_group({"params": [param]})
    world.params.append(param)


def take_on(world: World) -> None:
    """By hand, a new parameter."""
    if not world.by_hand or world.groups[0].get("mask") is not None or len(world.params) > 4:
        return
    param, text = any_param(world.chance, world.dtype)
    drawn = any_grad(world.chance, param, by_hand=True)
    wanted = None
    if param.numel():
        wanted = oracle.expected(world.cls, world.groups[0], {}, param, drawn, None)
    world.say(f"step_param of a new {text}: {drawn.text}")
    before = Snapshot(world)
    if not is_taken(lambda: world.front.step_param(param, drawn.grad), before.check):
        return
    world.params.append(param)
    if wanted is not None:
        record = world.record(param)
        found = [param.detach(), *(record.get(name) for name in wanted.names[1:])]
        in_half = world.is_in_half(world.groups[0], param)
        oracle.compare(wanted, found, world.groups[0], exactly=not in_half)


def materialize(world: World) -> None:
    world.say("materialize_state")
    world.optimizer.materialize_state()


def zero_grad(world: World) -> None:
    if not world.by_hand:
        world.say("zero_grad")
        world.front.zero_grad()


def switch(world: World) -> None:
    """Other threads, other instructions, another engine."""
    isa = world.chance.pick(INSTRUCTION_SETS or ["none"])
    world.threads = world.chance.integer(1, 3)
    if INSTRUCTION_SETS:
        _native.use_instruction_set(isa)
    world.optimizer.engine = world.chance.pick(["auto", "auto", "reference"])
    world.say(f"{world.threads} threads, {isa}, engine {world.optimizer.engine}")


def read_all(world: World) -> None:
    """What only looks must change nothing."""
    before = Snapshot(world)
    repr(world.front)
    world.front.state_dict()
    if world.optimizer.semantics == "masked":
        world.front.catch_up()
    before.check()


OPERATIONS: dict[Operation, int] = {
    step: 30,
    step_with_closure: 4,
    step_one_by_one: 6,
    change_options: 6,
    change_mask: 4,
    round_trip: 3,
    copy_all: 2,
    replace_data: 2,
    add_group: 2,
    take_on: 2,
    materialize: 1,
    zero_grad: 1,
    switch: 3,
    read_all: 1,
}
