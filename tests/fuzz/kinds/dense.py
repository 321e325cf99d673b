"""``semantics="dense"``: sparse gradients must come to what dense ones come to, in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import sparsestep
from sparsestep import _native
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from tests.deferred import own_rules
from tests.fuzz.findings import check_close
from tests.fuzz.spoiling import spoil
from tests.fuzz.world import INSTRUCTION_SETS, Say, World
from tests.generate.params import any_mask, written
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.subject import by_hand_class

_DECAY = {"weight_decay": 0.1, "decoupled_weight_decay": True}
# Formulas for which a run of a few steps in float32 stays close to one in float64.
VARIANTS: list[tuple[type[RuleOptimizer], dict[str, Any]]] = [
    (sparsestep.SparseAdam, {}),
    (sparsestep.SparseAdam, {"eps": 0.1, "betas": (0.8, 0.9)}),
    (sparsestep.Adam, {}),
    (sparsestep.Adam, _DECAY),
    (sparsestep.Adam, {"amsgrad": True}),
    (sparsestep.AdamW, {"weight_decay": 0.1}),
    (sparsestep.AdamW, {"amsgrad": True, "betas": (0.8, 0.9), "weight_decay": 0.1}),
    (sparsestep.AdamW, {"betas": (0.99, 0.9)}),
    (sparsestep.AdamW, {"betas": (0.9, 0.99), "eps": 1.0}),
    (sparsestep.AdamW, {"betas": (0.0, 0.9)}),
    (sparsestep.Adagrad, {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
    (sparsestep.Adagrad, _DECAY),
    (sparsestep.RowwiseAdagrad, _DECAY),
    (sparsestep.RowwiseAdam, _DECAY),
    (sparsestep.SGD, {}),
    (sparsestep.SGD, _DECAY),
    (sparsestep.SGD, {"momentum": 0.9, "dampening": 0.5, **_DECAY}),
    (sparsestep.SGD, {"momentum": 0.9, "nesterov": True, **_DECAY}),
    (sparsestep.RMSprop, _DECAY),
    (sparsestep.RMSprop, {"centered": True, "momentum": 0.9, "eps": 0.5}),
    (sparsestep.Lion, {"weight_decay": 0.1}),
    (own_rules.adam, {"eps": 1e-3, **_DECAY}),
    (own_rules.momentum, {}),
    (own_rules.lion, {}),
    (own_rules.rmsprop, {}),
    (own_rules.adam_by_rows, {}),
    (sparsestep.Ftrl, {"l1": 0.01, "l2": 0.1, "initial_accumulator_value": 0.1}),
]
_ROOM = {torch.float64: 1e-9, torch.float32: 2e-4}
_SHAPES = {(7, 3): 6, (5,): 2, (6, 33): 1, (2, 3, 4): 2, (1, 4): 1, (4, 1): 1, (0, 4): 1, (): 1}


class DenseWorld(World):
    """An optimizer with dense semantics, and its shadow: the same class with dense gradients."""

    def __init__(self, chance: Source, say: Say, *, by_hand: bool) -> None:
        self.chance, self.say, self.by_hand = chance, say, by_hand
        self.cls, self.options = chance.pick(VARIANTS)
        self.options = {**self.options, "lr": chance.pick([0.1, 0.01, 0.0])}
        self.dtype = chance.pick([torch.float32, torch.float64])
        self.params, self.given, self.over, self.threads = [], [], False, 1
        self.shadows: list[Any] = []
        self.table: Any = None

    def build(self) -> None:
        chance = self.chance
        for _ in range(chance.pick([1, 1, 2])):
            shape = chance.weighted(_SHAPES)
            values = chance.numbers(shape, self.dtype)
            if len(shape) > 1 and chance.one_in(6):
                values = values.transpose(0, -1).contiguous().transpose(0, -1)
            self.params.append(torch.nn.Parameter(values))
            exact = values.detach().to(torch.float64, copy=True)
            self.shadows.append(torch.nn.Parameter(exact))
            self.say(f"param {shape} {self.dtype} strides {values.stride()}")
        options = dict(self.options)
        if chance.one_in(5) and self.params[0].dim():
            mask = [any_mask(chance, p, by_row=True) if p.dim() else None for p in self.params]
            options["mask"] = mask
            self.say(f"mask {[None if m is None else m.int().tolist() for m in mask]}")
        engine = chance.pick(["auto", "auto", "reference"])
        make = by_hand_class(self.cls) if self.by_hand else self.cls
        self.front = make(self.params, semantics="dense", engine=engine, **options)
        self.shadow = self.cls(self.shadows, engine="reference", **options)
        self.say(f"{make.__name__}(semantics='dense', engine={engine}, {written(options)})")
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

    def take(self) -> None:
        """A step of both."""
        drawn = self.draw()
        if self.chance.one_in(2):
            for param, each in zip(self.params, drawn, strict=True):
                if each is not None and param.dim() and param.numel():
                    rows = each.held.reshape(len(param), -1).any(1).nonzero().flatten()
                    self.front.catch_up(param, rows)
        self.give(drawn)
        for shadow, each in zip(self.shadows, drawn, strict=True):
            shadow.grad = None if each is None else each.dense.clone()
        self.say("step")
        self.step()
        self.shadow.step()

    def read(self) -> None:
        """What a tracked model reads is current."""
        if self.table is None:
            return
        ids = torch.tensor(self.chance.integers(3, self.params[0].shape[0]))
        self.say(f"read rows {ids.tolist()}")
        with torch.no_grad():
            self.close(self.table(ids), self.shadows[0][ids], "a tracked row")

    def change(self) -> None:
        name = self.chance.pick(["lr", "lr", "weight_decay", "betas", "maximize"])
        group, other = self.groups[0], self.shadow.param_groups[0]
        if name not in group or (name == "weight_decay" and not group.get("weight_decay")):
            return
        values = {
            "lr": [0.0, 0.05, 0.1],
            "weight_decay": [0.05, 0.2],
            "betas": [(0.8, 0.9), (0.9, 0.999)],
            "maximize": [True, False],
        }
        group[name] = other[name] = value = self.chance.pick(values[name])
        self.say(f"{name} = {value}")

    def round_trip(self) -> None:
        """A checkpoint of its own, in the middle: nothing that rows have missed may be lost."""
        self.say("load_state_dict of its own state_dict")
        masks = self.groups[0].get("mask")
        self.front.load_state_dict(copy.deepcopy(self.front.state_dict()))
        if masks is not None:
            self.groups[0]["mask"] = masks

    def load_older(self) -> None:
        """The state of some steps ago: parameters stay, and what they have missed is made up."""
        if any(p.numel() == 0 for p in self.params):
            return
        self.say("two steps, then load_state_dict of before")
        ours, theirs = self.front.state_dict(), self.shadow.state_dict()
        ours, theirs = copy.deepcopy(ours), copy.deepcopy(theirs)
        masks = self.groups[0].get("mask")
        self.take()
        self.take()
        self.front.load_state_dict(ours)
        self.shadow.load_state_dict(theirs)
        if masks is not None:
            self.groups[0]["mask"] = self.shadow.param_groups[0]["mask"] = masks

    def copy(self) -> None:
        if self.table is not None:
            return
        self.say("pickle or deepcopy")
        for param in self.params:
            param.grad = None
        # The functional class of a user's own rule is made here, where no pickle finds it.
        if self.chance.one_in(2) or (self.by_hand and self.cls not in OPTIMIZERS):
            self.front = copy.deepcopy(self.front)
        else:
            self.front = pickle.loads(pickle.dumps(self.front))
        self.params = [param for _, _, param in self.each()]

    def switch(self) -> None:
        self.threads = self.chance.integer(1, 3)
        if INSTRUCTION_SETS:
            _native.use_instruction_set(self.chance.pick(INSTRUCTION_SETS))
        self.optimizer.engine = self.chance.pick(["auto", "reference"])
        self.say(f"engine {self.optimizer.engine}, {_native.instruction_set()}")

    def spoil(self) -> None:
        self.say("garbage:")
        spoil(self)
        self.say(":garbage")

    def check(self, *_: Any) -> None:
        """Everything brought up to date is where the shadow is."""
        self.front.catch_up()
        for place, (ours, theirs) in enumerate(zip(self.params, self.shadows, strict=True)):
            self.close(ours, theirs, f"param {place}")
            mine, other = self.record(ours), self.shadow.state.get(theirs, {})
            for name, value in other.items():
                if name == "step":
                    if int(mine[name]) != int(value):
                        raise FindingError("wrong step count", f"{mine[name]}, right is {value}")
                elif isinstance(value, Tensor):
                    self.close(mine[name], value, f"{name} of {place}")

    def close(self, ours: Tensor, exact: Tensor, what: str) -> None:
        room = _ROOM[self.dtype] * (20 if self.cls is sparsestep.Ftrl else 1)
        room *= max(float(exact.abs().max()), 0.1) if exact.numel() else 1.0
        check_close("dense semantics is not the dense run", what, ours, exact, room)


def _program(chance: Source, say: Say, *, by_hand: bool, invalid: bool) -> None:
    world = DenseWorld(chance, say, by_hand=by_hand)
    world.build()
    operations: dict[Callable[[], None], int] = {
        world.take: 20,
        world.read: 4,
        world.change: 4,
        world.round_trip: 2,
        world.load_older: 1,
        world.copy: 1,
        world.switch: 2,
        world.check: 2,
    }
    if invalid:
        operations[world.spoil] = 15
    for _ in range(chance.integer(3, 12)):
        chance.weighted(operations)()
        if world.over:
            return
    world.check()


def dense_semantics(chance: Source, say: Say) -> None:
    _program(chance, say, by_hand=chance.one_in(3), invalid=False)


def dense_semantics_and_garbage(chance: Source, say: Say) -> None:
    _program(chance, say, by_hand=chance.one_in(2), invalid=True)


KINDS: dict[Callable[[Source, Say], None], int] = {
    dense_semantics: 8,
    dense_semantics_and_garbage: 5,
}
