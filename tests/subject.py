"""An optimizer under test, or its functional form: steps that are checked, and snapshots."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparsestep import InputError
from sparsestep.optim import FUNCTIONAL
from sparsestep.optim.functional import FunctionalOptimizer
from sparsestep.optim.optimizer import RuleOptimizer
from tests import oracle
from tests.generate.grads import Drawn
from tests.oracle import FindingError
from tests.table import Variant, all_same_bits, same_bits, state_of, state_tensors

_BY_HAND = {each.optimizer_class: each for each in FUNCTIONAL}
# With these words the native engine says that it was asked for by name and does not apply.
NOT_NATIVE = "the native engine needs"


def by_hand_class(cls: type[RuleOptimizer]) -> type[FunctionalOptimizer]:
    """The functional class of an optimizer; one made up for a user's rule."""
    return _BY_HAND.get(cls) or type("Functional", (FunctionalOptimizer,), {"optimizer_class": cls})


def by_hand(variant: Variant, engine: str, start: Tensor, **options: Any) -> Subject:
    """The functional form of an optimizer of one parameter."""
    if not variant.has_twin and engine == "native":
        engine = "auto"
    options = {**variant.options, **options, "engine": engine}
    return Subject(by_hand_class(variant.cls)([start.clone()], **options))


class Subject:
    """An optimizer, or its functional form (``by_hand``), with gradients to be given."""

    def __init__(self, front: Any) -> None:
        self.front, self.by_hand = front, isinstance(front, FunctionalOptimizer)
        self.cls: type[RuleOptimizer] = type(self.optimizer)
        self.given: list[Any] = []

    @property
    def groups(self) -> list[dict[str, Any]]:
        return [self.front.param_group] if self.by_hand else self.front.param_groups

    @property
    def state(self) -> Any:
        return self.front.state

    @property
    def optimizer(self) -> RuleOptimizer:
        return self.front.optimizer if self.by_hand else self.front

    @property
    def tensors(self) -> list[Tensor]:
        """All parameters, then all of their state."""
        return [*(p.detach() for _, _, p in self.each()), *state_tensors(self.optimizer)]

    def each(self) -> list[tuple[dict[str, Any], int, Any]]:
        """Every parameter with its group and its number in it."""
        return [(g, i, p) for g in self.groups for i, p in enumerate(g["params"])]

    def mask_of(self, group: dict[str, Any], index: int) -> Tensor | None:
        mask = group.get("mask")
        return mask[index] if isinstance(mask, list) else mask

    def record(self, param: Tensor) -> dict[str, Any]:
        try:
            return state_of(self.optimizer, param)
        except (RuntimeError, TypeError):  # options that select no rule
            return dict(self.state.get(param, {}))

    def copy(self) -> Subject:
        return Subject(copy.deepcopy(self.front))

    # Steps

    def give(self, drawn: Sequence[Drawn | None]) -> None:
        """Hand gradients over for the next step."""
        self.give_grads([None if each is None else each.grad for each in drawn])

    def give_grads(self, grads: list[Any]) -> None:
        self.given = grads
        if not self.by_hand:
            for (_, _, param), grad in zip(self.each(), grads, strict=True):
                param.grad = grad

    def step(self) -> None:
        self.front.step(*([self.given] if self.by_hand else []))

    def step_on_any_engine(self) -> None:
        """A step; by another engine if the native one does not apply."""
        try:
            self.step()
        except InputError as error:
            if self.optimizer.engine != "native" or NOT_NATIVE not in str(error):
                raise
            self.optimizer.engine = "auto"
            self.step()

    def take(self, grad: Any, mask: Tensor | None = None) -> Subject:
        """A step of a single parameter."""
        if mask is not None:
            self.groups[0]["mask"] = mask
        self.give_grads([grad])
        self.step()
        return self

    def checked_step(self, drawn: Sequence[Drawn | None]) -> None:
        """A step, every number of which is compared with the oracle's."""
        self.give(drawn)
        wanted, before = self.wanted(drawn), Snapshot(self)
        self.step_on_any_engine()
        self.check(drawn, wanted, before)

    def wanted(self, drawn: Sequence[Drawn | None]) -> list[oracle.Expected | None]:
        return [
            oracle.expected(self.cls, group, self.record(param), param, each, mask)
            if each is not None and param.numel()
            else None
            for (group, index, param), each in zip(self.each(), drawn, strict=True)
            for mask in [self.mask_of(group, index)]
        ]

    def check(
        self,
        drawn: Sequence[Drawn | None],
        wanted: list[oracle.Expected | None],
        before: Snapshot,
    ) -> None:
        for place, ((group, _, param), each, want) in enumerate(
            zip(self.each(), drawn, wanted, strict=True)
        ):
            record = self.record(param)
            if each is not None and not each.is_as_given():
                raise FindingError("a gradient was written", each.text)
            count, now = before.counts[place], count_in(record)
            if now is not None and now != (count or 0) + (each is not None):
                raise FindingError("wrong step count", f"{count} to {now} of param {place}")
            if want is None and not same_bits(param, before.params[place]):
                raise FindingError("a parameter without a gradient changed", f"param {place}")
            self.compare(want, param, group)

    def compare(self, want: oracle.Expected | None, param: Tensor, group: dict[str, Any]) -> None:
        """Compare a parameter and its state with what a step must come to."""
        if want is not None:
            record = self.record(param)
            found = [param.detach(), *(record.get(name) for name in want.names[1:])]
            # Torch's kernel computes in half precision if that was asked for.
            is_half = param.dtype in (torch.float16, torch.bfloat16)
            in_half = is_half and group.get("state_dtype") == param.dtype
            oracle.compare(want, found, group, exactly=not in_half)

    def same_as(self, other: Subject) -> bool:
        return all_same_bits(self.tensors, other.tensors)


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
    """Everything that a step may change."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self.params, self.counts, self.state, self._options = [], [], [], []
        self._versions = []
        for _, _, param in subject.each():
            record = subject.record(param)
            self.params.append(param.detach().clone() if _is_readable(param) else None)
            self._versions.append(None if param.is_inference() else param._version)
            try:
                self.counts.append(count_in(record))
            except (TypeError, ValueError, RuntimeError):
                self.counts.append(None)
            self.state.append({k: v.clone() if _is_readable(v) else v for k, v in record.items()})
        for group in subject.groups:
            self._options.append({k: v for k, v in group.items() if k != "rounding_seed"})
        self._deferred = _deferred(subject.optimizer)

    def check(self, note: str = "a refusal") -> None:
        """Raise a finding if something has changed."""
        changed = f"{note or 'a refusal'} changed something"
        each = self._subject.each()
        if len(each) != len(self.params):
            raise FindingError(changed, "the number of parameters")
        for place, (_, _, param) in enumerate(each):
            old, version = self.params[place], self._versions[place]
            if old is not None and not same_bits(param, old):
                raise FindingError(changed, f"param {place}")
            if version is not None and param._version != version:
                raise FindingError(changed, f"version of param {place}")
            record, was = self._subject.record(param), self.state[place]
            if record.keys() != was.keys():
                raise FindingError(
                    changed,
                    f"state of {place}: {list(was)} to {list(record)}",
                )
            for name, value in record.items():
                if not _same(value, was[name]):
                    raise FindingError(changed, f"state {name} of {place}")
        for group, was in zip(self._subject.groups, self._options, strict=True):
            for name, value in was.items():
                if group.get(name) is not value:
                    raise FindingError(changed, f"option {name}")
        now = _deferred(self._subject.optimizer)
        if now.keys() != self._deferred.keys() or not all(
            torch.equal(now[key][0], rows) and now[key][1:] == tuple(rest)
            for key, (rows, *rest) in self._deferred.items()
        ):
            raise FindingError(changed, "deferred rows")


def _deferred(optimizer: RuleOptimizer) -> dict[Any, tuple[Any, ...]]:
    """What dense semantics remembers about deferred rows."""
    return {
        key: (clock.last_step.clone(), clock.history.base, clock.history.steps)
        for key, clock in optimizer.deferred.items()
    }


def _same(now: Any, was: Any) -> bool:
    if _is_readable(now) and _is_readable(was):
        return same_bits(now, was)
    return now is was or (not isinstance(now, Tensor) and bool(now == was))


@contextmanager
def refused(
    front: Any, *, error: type[BaseException] = InputError, match: str = "", note: str = ""
) -> Iterator[None]:
    """The body raises ``error``, and nothing of the optimizer has changed."""
    snapshot = Snapshot(Subject(front))
    try:
        yield
    except error as raised:
        text = str(raised)
        assert text.strip(), note
        assert "\n" not in text, f"{note}: {text}"
        assert re.search(match, text), text
        snapshot.check(note)
    else:
        raise FindingError("accepted", note)
