"""An optimizer with its parameters, and a step that is checked from all sides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tests.fuzz.findings import check_refusal, is_taken
from tests.generate.grads import Drawn, Kind, any_grad
from tests.generate.params import (
    any_class,
    any_dtype,
    any_mask,
    any_options,
    any_param,
    two_groups,
    written,
)
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.subject import Snapshot, Subject, by_hand_class
from tests.table import Variant

Say = Callable[[str], None]


# What may be switched on around a step, and must make no difference to it


@contextmanager
def _set(setter: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    setter(value)
    try:
        yield
    finally:
        setter(before)


_AROUND: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "torch.device('meta')": lambda: torch.device("meta"),
    "default dtype float64": lambda: _set(torch.set_default_dtype, torch.float64, torch.float32),
    "default dtype float16": lambda: _set(torch.set_default_dtype, torch.float16, torch.float32),
    "no_grad": torch.no_grad,
    "enable_grad": torch.enable_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic algorithms": lambda: _set(torch.use_deterministic_algorithms, True, False),
    "sparse invariants checked": torch.sparse.check_sparse_tensor_invariants,
    "profiler": torch.autograd.profiler.profile,
}


def any_surroundings(chance: Source) -> tuple[AbstractContextManager[object], str]:
    """Mostly none."""
    if not chance.one_in(5):
        return nullcontext(), ""
    name = chance.pick(list(_AROUND))
    if name == "profiler" and not chance.one_in(5):  # it is slow
        name = "no_grad"
    return _AROUND[name](), name


class World(Subject):
    """An optimizer, or one by hand, whatever it works on, and where its program is told."""

    def __init__(self, chance: Source, say: Say, *, by_hand: bool) -> None:
        self.chance, self.say, self.by_hand = chance, say, by_hand
        self.cls = any_class(chance)
        self.dtype = any_dtype(chance, self.cls)
        self.options = any_options(chance, self.cls)
        if self.dtype.is_complex:
            for name in ("state_dtype", "fused"):
                self.options.pop(name, None)
        self.params: list[Any] = []
        self.front: Any = None
        self.given: list[Any] = []  # gradients by hand, for the next step
        self.threads = chance.pick([1, 1, 1, 2, 3])
        self.over = False  # nothing more can be said about what it does

    def build(self) -> None:
        """Make the optimizer, with one group or two."""
        chance = self.chance
        engine = chance.pick(["auto", "auto", "native", "reference"])
        if engine == "native" and not Variant(self.cls, self.options).has_twin:
            engine = "auto"
        for _ in range(chance.pick([1, 1, 2, 3])):
            make = partial(self.cls, **self.options)
            param, text = any_param(chance, self.dtype, make)
            self.say(f"param {len(self.params)}: {text}")
            self.params.append(param)
        given = {**self.options, "engine": engine}
        if self.by_hand:
            self.front = by_hand_class(self.cls)(self.params, **given)
            self._mask_some(self.front.param_group)
        else:
            self.front = self.cls(two_groups(self.params), **given)
            for group in self.groups:
                self._mask_some(group)
        self.say(f"{type(self.front).__name__}({written(given)})")

    def _mask_some(self, group: dict[str, Any]) -> None:
        if not self.chance.one_in(4):
            return
        masks: list[Tensor | None] = []
        for param in group["params"]:
            allowed = param.dim() > 0 and not self.chance.one_in(3)
            masks.append(any_mask(self.chance, param) if allowed else None)
        self.say(f"mask {[None if m is None else m.int().tolist() for m in masks]}")
        alone = len(masks) == 1 and masks[0] is not None and self.chance.one_in(2)
        group["mask"] = masks[0] if alone else masks

    # Steps

    def draw(self, kinds: tuple[Kind, ...] = ()) -> list[Drawn | None]:
        found: list[Drawn | None] = []
        for number, (_, _, param) in enumerate(self.each()):
            if self.chance.one_in(6):
                found.append(None)
                continue
            drawn = any_grad(self.chance, param, by_hand=self.by_hand, kinds=kinds)
            self.say(f"gradient {number}: {drawn.text}")
            found.append(drawn)
        return found

    def step(self) -> None:
        torch.set_num_threads(self.threads)  # here alone: for the test they would be too many
        try:
            super().step()
        finally:
            torch.set_num_threads(1)

    def valid_step(self, around: AbstractContextManager[Any] | None = None) -> None:
        """A valid step, whose every number is checked."""
        drawn = self.draw()
        self.give(drawn)
        wanted = self.wanted(drawn)
        before = Snapshot(self)
        with around or nullcontext():
            taken = is_taken(self.step, before.check)
        if not taken:
            self.say("refused: not for the native engine")
            return
        self.check(drawn, wanted, before)

    def end(self) -> None:
        """When the program has ended."""


def refused(world: World, call: Callable[[], Any], during: str, *, must: bool) -> bool:
    """Do what should be refused; whether it was. A refusal is a sentence and changes nothing."""
    before = Snapshot(world)
    try:
        call()
    except Exception as error:
        check_refusal(error, during)
        before.check()
        world.say(f"refused: {error}")
        return True
    if must:
        raise FindingError(f"accepted: {during}", "it should have been refused")
    world.say("accepted")
    return False
