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
from tests.fuzz.world import World, any_surroundings
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
    """The gradients come from the closure."""
    if world.by_hand:
        return step(world)
    drawn = world.draw()
    world.give([None] * len(drawn))
    wanted, before = world.wanted(drawn), Snapshot(world)

    def closure() -> float:
        assert torch.is_grad_enabled()
        world.give(drawn)
        return 1.5

    world.say("step with a closure")
    losses: list[float] = []
    if is_taken(lambda: losses.append(world.front.step(closure)), before.check):
        assert losses == [1.5]
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
    threads = [Thread(target=one, args=call) for call in calls]
    for thread in threads:
        thread.start()
        if not threaded:
            thread.join()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, InputError) or NOT_NATIVE not in str(error):
            raise FindingError(f"{type(error).__name__} in step_param", str(error)[:300]) from error
    if not errors:
        world.check(drawn, wanted, before)


# Options whose change would need other state, or another formula.
_KEPT = {"state_dtype", "stochastic_rounding", "bias_correction", "amsgrad", "centered", "momentum"}
_KEPT |= {"nesterov", "dampening", "foreach", "fused", "initial_accumulator_value"}


def change_options(world: World) -> None:
    """As a scheduler or a person would, also in place."""
    group = world.chance.pick(world.groups)
    fresh = any_options(world.chance, world.cls)
    names = [name for name in fresh if name in group and name not in _KEPT]
    if not names:
        return
    name = world.chance.pick(names)
    old, new = group[name], fresh[name]
    is_tensor, was_tensor = _has_tensor(new), _has_tensor(old)
    if name in ("lr", "betas") and (is_tensor or was_tensor) and group.get("foreach"):
        return
    if name == "eps" and group.get("centered"):
        return
    if name == "betas" and world.cls.__name__.endswith("RowwiseAdam") and new[0] and not old[0]:
        return  # there is no first moment
    if was_tensor and not is_tensor and (name == "betas" or world.chance.one_in(2)):
        world.say(f"{name} written in place: {new}")
        pairs = zip(old, new, strict=True) if name == "betas" else [(old, new)]
        for tensor, value in pairs:
            tensor.fill_(value)
    elif not (is_tensor and group.get("fused") and name == "betas"):
        world.say(f"{name} = {new}")
        group[name] = new


def _has_tensor(value: Any) -> bool:
    values = value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, Tensor) for each in values)


def change_mask(world: World) -> None:
    group = world.chance.pick(world.groups)
    given = group.get("mask")
    masks = given if isinstance(given, list) else [given]
    chosen = [index for index, mask in enumerate(masks) if isinstance(mask, Tensor)]
    if not chosen:
        return
    index = world.chance.pick(chosen)
    fresh = world.chance.flags(masks[index].shape)
    how = world.chance.pick(["written in place", "another", "another", "none any more"])
    world.say(f"mask, {how}: {fresh.int().tolist()}")
    if how == "written in place" and not masks[index].is_inference():
        masks[index].copy_(fresh)
    elif isinstance(given, list):
        given[index] = fresh
    else:
        group["mask"] = None if how == "none any more" else fresh


def round_trip(world: World) -> None:
    """A checkpoint, loaded into itself."""
    saved = world.front.state_dict()
    before = kept(world)
    how = world.chance.pick(["itself", "torch.save", "copied"])
    if how == "torch.save":
        saved = through_a_file(saved, weights_only=False)
    elif how == "copied":
        saved = copy.deepcopy(saved)
    world.say(f"load_state_dict of its own state_dict, {how}")
    masks = [group.get("mask") for group in world.groups]
    world.front.load_state_dict(saved)
    check_kept(world, before)
    for group, mask in zip(world.groups, masks, strict=True):
        if mask is not None:
            group["mask"] = mask


def copy_all(world: World) -> None:
    """Go on with a deep copy or what a pickle gives."""
    for _, _, param in world.each():
        param.grad = None  # not every gradient can be copied
    how = world.chance.pick(["deepcopy", "pickle"])
    if world.cls not in OPTIMIZERS:
        how = "deepcopy"  # what is made here has no name that a pickle could find it by
    world.say(how)
    old, before = world.front, kept(world)
    world.front = copy.deepcopy(old) if how == "deepcopy" else pickle.loads(pickle.dumps(old))
    world.params = [param for _, _, param in world.each()]
    check_kept(world, before)


def kept(world: World) -> list[dict[str, Any]]:
    """Copies of parameters and state."""
    found = ({"param": p.detach(), **world.record(p)} for _, _, p in world.each())
    return [copy.deepcopy({k: v for k, v in each.items() if v is not None}) for each in found]


def check_kept(world: World, before: list[dict[str, Any]]) -> None:
    """Not under dense semantics, where rows catch up."""
    if world.optimizer.semantics == "dense":
        return
    for (_, _, param), now, was in zip(world.each(), kept(world), before, strict=True):
        packed = world.optimizer.store.layouts.get(param)
        same = now.keys() == was.keys()
        for name in now if same else ():
            new, old = now[name], was[name]
            if packed is not None and name not in ("param", "step") and new.shape == packed.shape:
                inside = packed.indices()  # what the mask excludes is not loaded
                new, old = new.reshape(-1)[inside], old.reshape(-1)[inside]
            # The dtype of a count follows torch's default.
            same &= int(new) == int(old) if name == "step" else same_bits(new, old)
        if not same:
            raise FindingError("a copy or a checkpoint is another", f"{list(was)}, {list(now)}")


def replace_data(world: World) -> None:
    """Other memory for the same parameter, perhaps with other strides."""
    _, _, param = world.chance.pick(world.each())
    values = world.chance.numbers(param.shape, param.dtype)
    if param.dim() > 1 and world.chance.one_in(2):
        values = values.transpose(0, -1).contiguous().transpose(0, -1)
    world.say(f"param.data = others, strides {values.stride()}")
    param.grad = None
    param.data = values


def add_param(world: World) -> None:
    """A new group; by hand, a new parameter with its first step."""
    if len(world.params) > 4 or (world.by_hand and world.groups[0].get("mask") is not None):
        return
    param, text = any_param(world.chance, world.dtype)
    if not world.by_hand:
        world.say(f"add_param_group: {text}")
        world.front.add_param_group({"params": [param]})
        world.params.append(param)
        return
    drawn, group = any_grad(world.chance, param, by_hand=True), world.groups[0]
    wanted = oracle.expected(world.cls, group, {}, param, drawn, None) if param.numel() else None
    world.say(f"step_param of a new {text}: {drawn.text}")
    before = Snapshot(world)
    if is_taken(lambda: world.front.step_param(param, drawn.grad), before.check):
        world.params.append(param)
        world.compare(wanted, param, group)


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
    add_param: 3,
    zero_grad: 1,
    switch: 3,
    read_all: 1,
}
