"""An optimizer with its parameters, and a step that is checked from all sides."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep import InputError, core
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.functional import FunctionalOptimizer
from sparsestep.rules import FUNCTIONAL
from tests import oracle
from tests.fuzz.findings import check_refusal
from tests.generate.grads import Drawn, any_grad, is_as_given
from tests.generate.params import any_class, any_dtype, any_mask, any_options, any_param, written
from tests.generate.source import Source
from tests.oracle import FindingError
from tests.table import same_bits

INSTRUCTION_SETS = [name for name, there in core.instruction_sets().items() if there]
_BY_HAND = {each.optimizer_class: each for each in FUNCTIONAL}
# With these words the native engine says that it was asked for by name and does not apply.
NOT_NATIVE = "the native engine needs"

Say = Callable[[str], None]


def by_hand_class(cls: type[RuleOptimizer]) -> type[FunctionalOptimizer]:
    return _BY_HAND.get(cls) or type("Functional", (FunctionalOptimizer,), {"optimizer_class": cls})


class World:
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
        if self.cls._rule_for is not None and not self._has_twin() and engine == "native":
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
            half = (len(self.params) + 1) // 2
            groups: list[dict[str, Any]] = [{"params": self.params[:half]}]
            if self.params[half:]:
                groups.append({"params": self.params[half:], "lr": 0.05})
            self.front = self.cls(groups, **given)
            for group in self.groups:
                self._mask_some(group)
        self.say(f"{type(self.front).__name__}({written(given)})")

    def _has_twin(self) -> bool:
        made = self.cls([torch.zeros(1)], **self.options)
        return self.cls._rule_for(made.param_groups[0]).is_native

    def _mask_some(self, group: dict[str, Any]) -> None:
        if not self.chance.one_in(4):
            return
        by_row = self.cls._rule_for(group).by_row
        masks: list[Tensor | None] = []
        for param in group["params"]:
            allowed = param.dim() > 0 and not self.chance.one_in(3)
            masks.append(any_mask(self.chance, param, by_row=by_row) if allowed else None)
        self.say(f"mask {[None if m is None else m.int().tolist() for m in masks]}")
        alone = len(masks) == 1 and masks[0] is not None and self.chance.one_in(2)
        group["mask"] = masks[0] if alone else masks

    # What an optimizer and one by hand have in common

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [self.front.param_group] if self.by_hand else self.front.param_groups

    @property
    def state(self) -> Any:
        return self.front.state

    @property
    def optimizer(self) -> RuleOptimizer:
        return self.front._optimizer if self.by_hand else self.front

    def each(self) -> list[tuple[dict[str, Any], int, Any]]:
        """Every parameter with its group and its number in it."""
        return [(g, i, p) for g in self.groups for i, p in enumerate(g["params"])]

    def mask_of(self, group: dict[str, Any], index: int) -> Tensor | None:
        mask = group.get("mask")
        return mask[index] if isinstance(mask, list) else mask

    def record(self, param: Tensor) -> dict[str, Any]:
        return self.state.get(param, {})

    # Steps

    def draw(self) -> list[Drawn | None]:
        found: list[Drawn | None] = []
        for number, (_, _, param) in enumerate(self.each()):
            if self.chance.one_in(6):
                found.append(None)
                continue
            drawn = any_grad(self.chance, param, by_hand=self.by_hand)
            self.say(f"gradient {number}: {drawn.text}")
            found.append(drawn)
        return found

    def give(self, drawn: list[Drawn | None]) -> Callable[[], None]:
        """Hand gradients over; what is returned takes the step."""
        grads = [None if each is None else each.grad for each in drawn]
        self.given = grads
        if not self.by_hand:
            for (_, _, param), grad in zip(self.each(), grads, strict=True):
                param.grad = grad

        def step() -> None:
            torch.set_num_threads(self.threads)  # here alone: for the test they would be too many
            try:
                self.front.step(*([self.given] if self.by_hand else []))
            finally:
                torch.set_num_threads(1)

        return step

    def step(self, around: AbstractContextManager[Any] | None = None) -> None:
        """A valid step, whose every number is checked."""
        drawn = self.draw()
        step = self.give(drawn)
        wanted = self.wanted(drawn)
        before = Snapshot(self)
        # A copy has other strides where there are gaps, and may be for another engine then.
        alike = all(param.is_contiguous() for _, _, param in self.each())
        twin = self._twin(drawn) if alike and self.chance.one_in(6) else None
        try:
            with around or nullcontext():
                step()
        except InputError as error:
            if NOT_NATIVE not in str(error):
                raise FindingError("a valid step is refused", str(error)[:300]) from error
            self.say("refused: not for the native engine")
            before.check()
            return
        except Exception as error:
            raise FindingError(
                f"{type(error).__name__} in a valid step", str(error)[:300]
            ) from error
        self.check(drawn, wanted, before)
        if twin is not None:
            self._compare_with(twin)

    def wanted(self, drawn: list[Drawn | None]) -> list[oracle.Expected | None]:
        return [
            oracle.expected(self.cls, group, self.record(param), param, each, mask)
            if each is not None and param.numel()
            else None
            for (group, index, param), each in zip(self.each(), drawn, strict=True)
            for mask in [self.mask_of(group, index)]
        ]

    def check(
        self,
        drawn: list[Drawn | None],
        wanted: list[oracle.Expected | None],
        before: Snapshot,
    ) -> None:
        for place, ((group, _, param), each, want) in enumerate(
            zip(self.each(), drawn, wanted, strict=True)
        ):
            record = self.record(param)
            if each is not None and not is_as_given(each):
                raise FindingError("a gradient was written", each.text)
            self._check_count(before.counts[place], record, given=each is not None)
            if want is None:
                if not same_bits(param, before.params[place]):
                    raise FindingError("a parameter without a gradient changed", f"param {place}")
                continue
            found = [param.detach(), *(record.get(name) for name in want.names[1:])]
            oracle.compare(want, found, group, exactly=not self.is_in_half(group, param))

    def is_in_half(self, group: dict[str, Any], param: Tensor) -> bool:
        """Whether torch's kernel does it in half precision, because that was asked for."""
        halves = (torch.float16, torch.bfloat16)
        return param.dtype in halves and group.get("state_dtype") == param.dtype

    def _check_count(self, before: int | None, record: dict[str, Any], *, given: bool) -> None:
        now = count_in(record)
        if now is None:
            return
        if now != (before or 0) + int(given):
            raise FindingError("wrong step count", f"{before} to {now}, gradient: {given}")

    # The same with other threads and instructions

    def _twin(self, drawn: list[Drawn | None]) -> World:
        twin = copy.copy(self)
        twin.params, twin.front = copy.deepcopy((self.params, self.front))
        place = {id(p): q for (_, _, p), (_, _, q) in zip(self.each(), twin.each(), strict=True)}
        twin.params = [place[id(p)] for p in self.params if id(p) in place]
        step = twin.give(drawn)
        isa = core.instruction_set()
        twin.threads = self.chance.integer(1, 3)
        if isa is not None:
            core.use_instruction_set(self.chance.pick(INSTRUCTION_SETS))
        try:
            step()
        except InputError:
            pass
        finally:
            if isa is not None:
                core.use_instruction_set(isa)
        return twin

    def _compare_with(self, twin: World) -> None:
        for (_, _, ours), (_, _, theirs) in zip(self.each(), twin.each(), strict=True):
            if not same_bits(ours, theirs):
                raise FindingError("bits depend on threads, instruction set or copying", "param")
            mine, other = self.record(ours), twin.record(theirs)
            for name, value in mine.items():
                if name == "step":  # whose dtype follows torch's default
                    same = int(value) == int(other[name])
                else:
                    same = not isinstance(value, Tensor) or same_bits(value, other[name])
                if not same:
                    raise FindingError("bits depend on threads, instruction set or copying", name)


def count_in(record: dict[str, Any]) -> int | None:
    count = record.get("step")
    return None if count is None else int(count)


def _is_readable(tensor: Any) -> bool:
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and tensor.layout is torch.strided
        and tensor.device.type == "cpu"
        and not tensor.is_quantized
    )


class Snapshot:
    """Everything that a step may change, as it is now."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.params, self.counts, self._state, self._options = [], [], [], []
        for _, _, param in world.each():
            record = world.record(param)
            self.params.append(param.detach().clone() if _is_readable(param) else None)
            try:
                self.counts.append(count_in(record))
            except (TypeError, ValueError, RuntimeError):
                self.counts.append(None)
            self._state.append(
                {k: v.clone() if isinstance(v, Tensor) else v for k, v in record.items()}
            )
        for group in world.groups:
            self._options.append({k: v for k, v in group.items() if k != "rounding_seed"})

    def check(self) -> None:
        """Raise a finding if something has changed."""
        each = self._world.each()
        if len(each) != len(self.params):
            raise FindingError("a refusal changed something", "the number of parameters")
        for place, (_, _, param) in enumerate(each):
            old = self.params[place]
            if old is not None and not same_bits(param, old):
                raise FindingError("a refusal changed something", f"param {place}")
            record, was = self._world.record(param), self._state[place]
            if record.keys() != was.keys():
                raise FindingError(
                    "a refusal changed something",
                    f"state of {place}: {list(was)} to {list(record)}",
                )
            for name, value in record.items():
                if not _same(value, was[name]):
                    raise FindingError("a refusal changed something", f"state {name} of {place}")
        for group, was in zip(self._world.groups, self._options, strict=True):
            for name, value in was.items():
                if group.get(name) is not value:
                    raise FindingError("a refusal changed something", f"option {name}")


def _same(now: Any, was: Any) -> bool:
    if not isinstance(now, Tensor):
        return now is was or bool(now == was)
    if not _is_readable(now):
        return isinstance(was, Tensor)
    return isinstance(was, Tensor) and same_bits(now, was)


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
