"""``semantics="dense"``: sparse gradients must come to what dense ones come to, in float64."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import sparsestep
from sparsestep.optim import OPTIMIZERS
from tests.deferred import own_rules, runs
from tests.fuzz.findings import check_close
from tests.fuzz.operations import switch
from tests.fuzz.spoiling import spoil
from tests.fuzz.world import Say, World
from tests.generate.grads import Drawn
from tests.generate.params import any_mask, written
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


class DenseWorld(World):
    """An optimizer with dense semantics, and its shadow: the same class with dense gradients."""

    def __init__(self, chance: Source, say: Say, *, by_hand: bool) -> None:
        self.chance, self.say, self.by_hand = chance, say, by_hand
        variant = chance.pick(VARIANTS)
        self.cls, self.options = (
            variant.cls,
            {**variant.options, "lr": chance.pick([0.1, 0.01, 0.0])},
        )
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

    @property
    def operations(self) -> dict[Callable[[], None], int]:
        return {
            self.take: 20,
            self.read: 4,
            self.change: 4,
            self.round_trip: 2,
            self.load_older: 1,
            self.copy: 1,
            self.switch: 2,
            self.check: 2,
        }

    def take(self) -> None:
        """A step of both."""
        drawn = self.draw()
        if self.chance.one_in(2):
            for param, each in zip(self.params, drawn, strict=True):
                if each is not None and param.dim() and param.numel():
                    rows = each.held.reshape(len(param), -1).any(1).nonzero().flatten()
                    self.front.catch_up(param, rows)
        self.give(drawn)
        self.say("step")
        self.step()
        self._step_shadow(drawn)

    def _step_shadow(self, drawn: Sequence[Drawn | None]) -> None:
        for shadow, each in zip(self.shadows, drawn, strict=True):
            shadow.grad = None if each is None else each.dense.clone()
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
        switch(self)

    def spoil(self) -> None:
        spoil(self)

    def check(self, drawn: Sequence[Drawn | None] | None = None, *_: Any) -> None:
        """Everything brought up to date is where the shadow is, which follows a step of these."""
        if drawn is not None:
            self._step_shadow(drawn)
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
