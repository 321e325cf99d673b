"""``semantics="dense"``: sparse gradients must come to what dense ones come to, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

import sparsestep
from tests.deferred import own_rules, runs
from tests.fuzz import operations
from tests.fuzz.world import Say, World
from tests.generate.grads import Drawn
from tests.generate.params import any_mask, two_groups, written
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.subject import by_hand_class
from tests.table import Variant


def is_stable(variant: Variant) -> bool:
    """Whether a few steps in float32 stay close to float64, also when betas change.

    Signs of sums that cancel differ, and a first moment cannot begin after the first step.
    """
    is_signed = variant.cls is sparsestep.Lion and "betas" in variant.options
    lacks_moment = variant.cls is sparsestep.RowwiseAdam and "betas" in variant.options
    return not variant.options.get("centered") and not is_signed and not lacks_moment


VARIANTS: list[Variant] = [
    *filter(is_stable, runs.VARIANTS),
    Variant(sparsestep.RMSprop, {"centered": True, "momentum": 0.9, "eps": 0.5}),
    Variant(own_rules.adam, {"eps": 1e-3, **runs.DECAY}),
    *(Variant(rule, {}) for rule in (own_rules.momentum, own_rules.lion, own_rules.rmsprop)),
    Variant(own_rules.adam_by_rows, {}),
]
_ROOM = {torch.float64: 1e-9, torch.float32: 2e-4}
_SHAPES = {(7, 3): 6, (5,): 2, (6, 33): 1, (2, 3, 4): 2, (1, 4): 1, (4, 1): 1, (0, 4): 1, (): 1}
_CHANGES: dict[str, list[Any]] = {
    "lr": [0.0, 0.05, 0.1],
    "weight_decay": [0.05, 0.2],
    "betas": [(0.8, 0.9), (0.9, 0.999)],
    "maximize": [True, False],
}


class DenseWorld(World):
    """An optimizer with dense semantics, and its shadow: the same class with dense gradients."""

    def __init__(self, chance: Source, say: Say, *, by_hand: bool) -> None:
        super().__init__(chance, say, by_hand=by_hand)
        variant = chance.pick(VARIANTS)
        self.cls, self.options = variant.cls, {**variant.options, "lr": chance.pick([0.1, 0.01, 0])}
        self.dtype, self.threads = chance.pick([torch.float32, torch.float64]), 1
        self.table: Any = None

    def build(self) -> None:
        chance = self.chance
        for _ in range(chance.pick([1, 1, 2])):
            shape = chance.weighted(_SHAPES)
            values = chance.numbers(shape, self.dtype)
            if len(shape) > 1 and chance.one_in(6):
                values = values.transpose(0, -1).contiguous().transpose(0, -1)
            self.params.append(torch.nn.Parameter(values))
            self.say(f"param {shape} {self.dtype} strides {values.stride()}")
        engine = chance.pick(["auto", "auto", "reference"])
        options = {"semantics": "dense", "engine": engine, **self.options}
        self.shadows = [
            torch.nn.Parameter(p.detach().to(torch.float64, copy=True)) for p in self.params
        ]
        self.shadow = self.cls(two_groups(self.shadows), engine="reference", **self.options)
        if self.by_hand:
            self.front = by_hand_class(self.cls)(self.params, **options)
            for group in self.shadow.param_groups:
                group["lr"] = self.options["lr"]
        else:
            self.front = self.cls(two_groups(self.params), **options)
        self.say(f"{type(self.front).__name__}({written(options)})")
        if chance.one_in(5) and all(param.dim() for param in self.params):
            masks = [any_mask(chance, param, by_row=True) for param in self.params]
            self.say(f"mask {[mask.int().tolist() for mask in masks]}")
            for groups in (self.groups, self.shadow.param_groups):
                left = list(masks)
                for group in groups:
                    group["mask"] = [left.pop(0) for _ in group["params"]]
        self._make_table()

    def _make_table(self) -> None:
        """A model that reads the first parameter, and is tracked."""
        first = self.params[0]
        if self.by_hand or first.dim() != 2 or not first.numel() or self.chance.one_in(2):
            return
        kind = self.chance.pick([torch.nn.Embedding, sparsestep.nn.Embedding])
        self.table = kind(*first.shape, sparse=True, dtype=self.dtype)
        self.table.weight = first
        self.front.track(self.table)
        self.say(f"track({kind.__module__}.Embedding)")

    def valid_step(self, around: AbstractContextManager[Any] | None = None) -> None:
        """A step of both."""
        drawn = self.draw()
        if self.chance.one_in(2):
            for param, each in zip(self.params, drawn, strict=True):
                if each is not None and param.dim() and param.numel():
                    rows = each.held.reshape(len(param), -1).any(1).nonzero().flatten()
                    self.front.catch_up(param, rows)
        self.give(drawn)
        with around or nullcontext():
            self.step()
        self._step_shadow(drawn)

    def _step_shadow(self, drawn: Sequence[Drawn | None]) -> None:
        for shadow, each in zip(self.shadows, drawn, strict=True):
            shadow.grad = None if each is None else each.dense.clone()
        self.shadow.step()

    def check(self, drawn: Sequence[Drawn | None] | None = None, *_: Any) -> None:
        """Everything brought up to date is where the shadow is, which follows a step of these."""
        if drawn is not None:
            self._step_shadow(drawn)
        self.front.catch_up()
        for place, (ours, theirs) in enumerate(zip(self.params, self.shadows, strict=True)):
            self.close(ours, theirs, f"param {place}")
            mine = self.record(ours)
            for name, value in self.shadow.state.get(theirs, {}).items():
                if isinstance(value, Tensor):
                    self.close(mine[name], value, f"{name} of {place}")
                elif name == "step" and int(mine[name]) != int(value):
                    raise FindingError("wrong step count", f"{mine[name]}, right is {value}")

    def end(self) -> None:
        self.check()

    def close(self, ours: Tensor, exact: Tensor, what: str) -> None:
        room = _ROOM[self.dtype] * (20 if self.cls is sparsestep.Ftrl else 1)
        room *= max(float(exact.abs().max()), 0.1) if exact.numel() else 1.0
        try:
            torch.testing.assert_close(
                ours.double(), exact.double(), rtol=0, atol=room, equal_nan=True
            )
        except AssertionError as error:
            detail = f"{what}: {' '.join(str(error).split())}"
            raise FindingError("dense semantics is not the dense run", detail) from None


def read(world: DenseWorld) -> None:
    """What a tracked model reads is current."""
    if world.table is not None:
        ids = torch.tensor(world.chance.integers(3, world.params[0].shape[0]))
        world.say(f"read rows {ids.tolist()}")
        with torch.no_grad():
            world.close(world.table(ids), world.shadows[0][ids], "a tracked row")


def change(world: DenseWorld) -> None:
    name = world.chance.pick(["lr", *_CHANGES])
    group = world.groups[0]
    if name not in group or (name == "weight_decay" and not group.get("weight_decay")):
        return
    value = world.chance.pick(_CHANGES[name])
    world.say(f"{name} = {value}")
    for each in (*world.groups, *world.shadow.param_groups):
        each[name] = value


def load_older(world: DenseWorld) -> None:
    """The state of some steps ago: parameters stay, and what they have missed is made up."""
    if any(param.numel() == 0 for param in world.params):
        return
    world.say("two steps, then load_state_dict of before")
    pairs = (world.front, world.groups), (world.shadow, world.shadow.param_groups)
    saved = [copy.deepcopy(front.state_dict()) for front, _ in pairs]
    masks = [[group.get("mask") for group in groups] for _, groups in pairs]
    world.valid_step()
    world.valid_step()
    for (front, _), state in zip(pairs, saved, strict=True):
        front.load_state_dict(state)
    for groups, each in zip((world.groups, world.shadow.param_groups), masks, strict=True):
        for group, mask in zip(groups, each, strict=True):
            if mask is not None:
                group["mask"] = mask


def copy_all(world: DenseWorld) -> None:
    if world.table is None:  # which a copy would not track
        operations.copy_all(world)


OPERATIONS: dict[Callable[[Any], None], int] = {
    operations.step: 20,
    read: 4,
    change: 4,
    operations.round_trip: 2,
    load_older: 1,
    copy_all: 1,
    operations.switch: 2,
    DenseWorld.check: 2,
}
