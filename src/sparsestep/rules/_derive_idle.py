"""The motion of a rule that does not declare one: derived from its recorded formula.

``zero_gradient`` says what becomes of parameter and state in a step without a gradient. Where every
state is a multiple of itself, and the parameter a multiple of itself plus a move along one state,
that is one of the motions of ``motion.py``. How far a step goes may depend on the step and on all
options; what is derived is looked at again for each step, before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sparsestep.errors import InputError, sentence
from sparsestep.rules.idle import Geometric, Motion, Quotient, SignDrift, Still
from sparsestep.rules.program import RecordError
from sparsestep.rules.rule import Rule
from sparsestep.rules.trace import record
from sparsestep.rules.zero_gradient import (
    ONE,
    Atom,
    Found,
    Known,
    Ratio,
    Unknown,
    followed,
    shown,
)

Hyper = Mapping[str, Any]


class NoMotionError(Exception):
    """A formula does something else without a gradient; says what."""


class Idle(NamedTuple):
    """What a step does to an entry whose gradient is zero.

    Attributes:
        kind: the motion.
        buffer: the state along which the parameter moves, if it does.
        square: the state by whose root that is divided, if it is.
        decays: factors of the states, but for those that stay.
        shrink: the factor of the parameter.
        size: by how much it moves, of what its buffer is after the step.
        factor: of the root that it is divided by, of what the square is after the step.
        number: what is added to that root.
    """

    kind: type[Motion]
    buffer: str
    square: str
    decays: Mapping[str, float]
    shrink: float
    size: float
    factor: float = 1.0
    number: float = 0.0


def idle(rule: Rule, step: int, hyper: Hyper) -> Idle:
    """What a rule does in a step without a gradient.

    Raises:
        NoMotionError: none of the motions does that.
    """
    names = ["param", "grad", *(spec.name for spec in rule.state)]
    param, *state = _followed(rule, step, hyper)
    decays: dict[str, float] = {}
    for place, (value, spec) in enumerate(zip(state, rule.state, strict=True), start=2):
        factor = _multiple(value, place)
        if factor is None or not 0 <= factor <= 1:
            raise NoMotionError(_change(spec.name, value, names))
        if factor != 1:
            decays[spec.name] = factor
    found = _moved(rule, param, decays)
    if found is None:
        raise NoMotionError(_change("param", param, names))
    return found


def _change(name: str, value: Found, names: list[str]) -> str:
    """Describe what a step without a gradient does to a value that has no motion."""
    if isinstance(value, Unknown):
        return f"{name} has no closed-form {'update' if name == 'param' else 'decay'}"
    return f"{name} becomes {shown(value, names)}"


def _followed(
    rule: Rule, step: int, hyper: Hyper, start: Mapping[int, float] | None = None
) -> list[Found]:
    if rule.recorded is None:
        raise NoMotionError("compile leaves nothing to record")
    try:
        return followed(record(rule, step, hyper), start)
    except RecordError as error:
        raise NoMotionError(str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # whatever a formula does with what is no tensor
        raise NoMotionError(f"{type(error).__name__}: {error}") from None


def _multiple(value: Found, place: int) -> float | None:
    """By what an input is multiplied, where that is all."""
    atom = Atom("input", place)
    if not isinstance(value, Known) or value.ratio is not None or value.terms.keys() - {atom}:
        return None
    return value.terms.get(atom, 0.0)


def _moved(rule: Rule, param: Found, decays: Mapping[str, float]) -> Idle | None:
    if not isinstance(param, Known):
        return None
    own = Atom("input", 0)
    shrink = param.terms.get(own, 0.0)
    moves = [(atom, factor) for atom, factor in param.terms.items() if atom != own]
    if not shrink > 0 or len(moves) + (param.ratio is not None) > 1:
        return None
    if param.ratio is not None:
        return _quotient(rule, param.ratio, decays, shrink)
    if not moves:
        return Idle(Still, "", "", decays, shrink, 0.0)
    ((atom, factor),) = moves
    buffer = _buffer(rule, atom)
    left = decays.get(buffer, 1.0)
    if atom.kind == "sign" and buffer:
        return Idle(SignDrift, buffer, "", decays, shrink, -factor)
    if atom.kind == "input" and buffer and left:
        return Idle(Geometric, buffer, "", decays, shrink, -factor / left)
    return None


def _quotient(rule: Rule, ratio: Ratio, decays: Mapping[str, float], shrink: float) -> Idle | None:
    if len(ratio.terms) != 1 or ratio.square == 0:
        return None
    ((atom, factor),) = ratio.terms.items()
    buffer, square = _buffer(rule, atom), rule.state[ratio.square - 2].name
    left, root = decays.get(buffer, 1.0), math.sqrt(decays.get(square, 1.0))
    if atom.kind != "input" or not buffer or not left or not root:
        return None
    size = -factor / left
    return Idle(Quotient, buffer, square, decays, shrink, size, ratio.factor / root, ratio.number)


def _buffer(rule: Rule, atom: Atom) -> str:
    """The state that a move is along; none if it is no state, or would move rows from the start."""
    if atom == ONE or atom.place < 2:
        return ""
    spec = rule.state[atom.place - 2]
    return "" if spec.per_row or spec.initial != 0 else spec.name


class _Steps:
    """What steps do, as a motion asks for it; the latest is remembered."""

    def __init__(self, rule: Rule, like: Idle) -> None:
        self._rule = rule
        self._like = like
        self._latest: tuple[int, Hyper, tuple[float, float, float] | None] = (0, {}, None)

    def fits(self, step: int, hyper: Hyper) -> bool:
        """Whether a step is of this motion; raises where it is of none."""
        return self._of(step, hyper) is not None

    def size(self, step: int, hyper: Hyper) -> tuple[float, float]:
        """How far it goes, and the root."""
        size, root, _ = self._of(step, hyper) or (0.0, 1.0, 1.0)
        return size, root

    def shrink(self, step: int, hyper: Hyper) -> float:
        """What it leaves of the parameter."""
        return (self._of(step, hyper) or (0.0, 1.0, 1.0))[2]

    def _of(self, step: int, hyper: Hyper) -> tuple[float, float, float] | None:
        known_step, known, found = self._latest
        if known_step != step or known is not hyper:
            found = self._derived(step, hyper)
            self._latest = step, hyper, found
        return found

    def _derived(self, step: int, hyper: Hyper) -> tuple[float, float, float] | None:
        like = self._like
        try:
            found = idle(self._rule, step, hyper)
        except NoMotionError as error:
            first = self._first(hyper) if step == 1 else None
            if first is None:
                raise InputError(refusal(self._rule.name, str(error))) from None
            return first
        same = (like.kind, like.buffer, like.square) == (found.kind, found.buffer, found.square)
        if found.decays != like.decays or not (same or found.kind is Still):
            return self._first(hyper) if step == 1 else None
        if found.kind is not Quotient:
            return found.size, 1.0, found.shrink
        scale = like.number / found.number
        return found.size * scale, 1 / (found.factor * scale), found.shrink

    def _first(self, hyper: Hyper) -> tuple[float, float, float] | None:
        """A first step that is special: every entry without a gradient is as it began."""
        start = {place: spec.initial for place, spec in enumerate(self._rule.state, start=2)}
        numbers = {place: float(initial) for place, initial in start.items()}
        param, *state = _followed(self._rule, 1, hyper, numbers)
        for value, spec in zip(state, self._rule.state, strict=True):
            wanted = self._like.decays.get(spec.name, 1.0) * float(spec.initial)
            if not isinstance(value, Known) or value.number != wanted:
                return None
        shrink = _multiple(param, 0)
        return (0.0, 1.0, shrink) if shrink else None


def motion_of(rule: Rule, step: int, hyper: Hyper) -> Motion:
    """The motion of a rule, as it is from a step on.

    Raises:
        InputError: it has none.

    Example:
        >>> from sparsestep.rules.rule import State
        >>> def update(param, grad, mean, *, lr):
        ...     mean = 0.75 * mean + 0.25 * grad
        ...     return param - lr * mean, mean
        >>> rule = Rule("mine", update, (State("mean"),), recorded=update)
        >>> motion = motion_of(rule, 1, {"lr": 2.0})
        >>> type(motion).__name__, motion.buffer, motion.decays({}), motion.size(1, {"lr": 2.0})
        ('Geometric', 'mean', {'mean': 0.75}, (2.0, 1.0))
    """
    # A rate of zero would hide where to; a first step may be special.
    typical = {**hyper, "lr": 1.0} if hyper.get("lr") == 0 else hyper
    later = max(step, 2)
    try:
        like, after = idle(rule, later, typical), idle(rule, later + 1, typical)
        if like.decays != after.decays:
            raise NoMotionError("its state decays differently from step to step")
    except NoMotionError as error:
        raise InputError(refusal(rule.name, str(error))) from None
    steps = _Steps(rule, like)
    if not steps.fits(step, hyper):
        raise InputError(
            refusal(rule.name, f"step {step} has a different update from the next one")
        )
    decays = dict(like.decays)
    if like.buffer:
        decays.setdefault(like.buffer, 1.0)
    return like.kind(
        decays=lambda _: decays,
        size=steps.size,
        shrink=steps.shrink,
        eps=lambda _: like.number,
        fits=steps.fits,
        buffer=like.buffer,
        square=like.square,
    )


def refusal(name: str, why: str = "") -> str:
    """Phrase that a rule has no motion."""
    if not why:
        contract = (
            "semantics='dense' needs a rule that defines its update for rows without a gradient"
        )
        return sentence(contract, f"rule {name!r}", "Use semantics='masked'")
    return (
        f"semantics='dense' cannot defer updates of rule {name!r}: {why}. Without a gradient, "
        "each state must decay, and the parameter must decay or move along one state. "
        "Use semantics='masked'."
    )
