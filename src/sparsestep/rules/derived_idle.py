"""The idle update of a rule that does not declare one, derived from its traced formula.

A formula is evaluated symbolically for a gradient of zero. If every state becomes a multiple of
itself, and the parameter a multiple of itself plus a move along one state, that is one of the
classes of ``idle.py``. The size of a step may depend on the step and on all options, so every step
is analyzed again before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import torch

from sparsestep.errors import InputError, message
from sparsestep.rules.idle import (
    AdamDrift,
    GeometricDrift,
    Hyperparams,
    IdleUpdate,
    NoDrift,
    SignDrift,
)
from sparsestep.rules.rule import Rule
from sparsestep.rules.trace import OPERATIONS, ROW_REDUCTIONS, Program, TraceError, trace


class Denominator(NamedTuple):
    """``factor * root of an input + number``, both of which are positive."""

    square: int
    factor: float
    number: float


class Term(NamedTuple):
    """A quantity that a symbolic value is a multiple of."""

    kind: str  # ``"one"``, ``"input"``, or ``"sign"`` or ``"root"`` of an input
    place: int  # of the input
    denominator: Denominator | None = None


ONE = Term("one", -1)


class SymbolicValue(NamedTuple):
    """A value in closed form, if it has one, with bounds."""

    terms: Mapping[Term, float] | None  # factors of the terms of a sum; None: no closed form
    low: float = -math.inf  # a lower bound
    is_finite: bool = True  # for finite inputs

    @property
    def number(self) -> float | None:
        """The value, if it is the same for all elements."""
        if self.terms is None or self.terms.keys() - {ONE}:
            return None
        return self.terms.get(ONE, 0.0)

    @property
    def plain_terms(self) -> Mapping[Term, float] | None:
        """The terms, if none is divided."""
        if self.terms is None or any(term.denominator for term in self.terms):
            return None
        return self.terms


def _number(value: float) -> SymbolicValue:
    return SymbolicValue({ONE: value} if value else {}, value)


def _unknown(low: float, *operands: SymbolicValue) -> SymbolicValue:
    """A value without a closed form, finite if all operands are."""
    return SymbolicValue(None, low, all(each.is_finite for each in operands))


_ANYTHING = SymbolicValue(None, is_finite=False)


def _evaluate(
    rule: Rule, step: int, hyperparams: Hyperparams, start: Mapping[int, float] | None = None
) -> list[SymbolicValue]:
    """Evaluate a rule for a gradient of zero; ``start`` has values of inputs, by place."""
    if rule.traceable_update is None:
        raise NoClosedFormError("compile leaves nothing to trace")
    known = {1: 0.0, **(start or {})}
    try:
        program = trace(rule, step, hyperparams)
        inputs = [
            _number(known[place]) if place in known else SymbolicValue({Term("input", place): 1.0})
            for place in range(len(program.inputs))
        ]
        return program.evaluate(inputs, _number, partial(_apply, program))
    except TraceError as error:
        raise NoClosedFormError(str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # a formula may do anything with symbolic arguments
        raise NoClosedFormError(f"{type(error).__name__}: {error}") from None


def _apply(program: Program, name: str, given: list[SymbolicValue]) -> SymbolicValue:
    constants = [each.number for each in given if each.number is not None]
    if len(constants) == len(given):
        folded = _fold_constants(name, constants)
        return _number(folded) if math.isfinite(folded) else _ANYTHING
    if name in ROW_REDUCTIONS:
        (value,) = given
        terms = value.plain_terms
        if name != "sum" and terms is not None:
            inputs = program.operations
            if all(term == ONE or inputs[term.place].per_row for term in terms):
                return value
        return _unknown(0.0 if value.low >= 0 else -math.inf, value)
    if len(given) == 2 and given[0] is given[1]:
        if name in _SAME_OPERAND:
            return _number(_SAME_OPERAND[name])
        if name == "mul":
            return _unknown(0.0, given[0])
    return _EVALUATORS[name](*given) if name in _EVALUATORS else _ANYTHING


def _fold_constants(name: str, numbers: Sequence[float]) -> float:
    if name in ROW_REDUCTIONS:  # a sum depends on the length of the row
        return numbers[0] if name != "sum" or numbers[0] == 0 else math.nan
    given = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in numbers)
    return float(OPERATIONS[name](*given))


# Operations with equal operands; tracing emits these for ``zeros_like`` and ``ones_like``.
_SAME_OPERAND = {"lt": 0.0, "gt": 0.0, "ne": 0.0, "sub": 0.0, "le": 1.0, "ge": 1.0, "eq": 1.0}


def _scale(value: SymbolicValue, factor: float) -> SymbolicValue:
    if factor == 0:
        return _number(0.0) if value.is_finite else _ANYTHING
    low = value.low * factor if factor > 0 else -math.inf
    if value.terms is None:
        return _unknown(low, value)
    return SymbolicValue({term: each * factor for term, each in value.terms.items()}, low)


def _add(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    low = a.low + b.low
    if a.terms is None or b.terms is None:
        return _unknown(low, a, b)
    terms = dict(a.terms)
    for term, factor in b.terms.items():
        terms[term] = terms.get(term, 0.0) + factor
    return SymbolicValue({term: factor for term, factor in terms.items() if factor}, low)


def _mul(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    for value, other in ((a, b), (b, a)):
        if value.number is not None:
            return _scale(other, value.number)
    for value, other in ((a, b), (b, a)):
        terms = value.plain_terms
        if terms is not None and other.terms is not None and len(other.terms) == 1:
            ((term, factor),) = other.terms.items()
            if term.kind == "one" and term.denominator:
                scaled = {each: its * factor for each, its in terms.items()}
                return _divided(scaled, term.denominator)
    return _unknown(0.0 if a.low >= 0 and b.low >= 0 else -math.inf, a, b)


def _divided(terms: Mapping[Term, float], by: Denominator, low: float = -math.inf) -> SymbolicValue:
    return SymbolicValue({term._replace(denominator=by): f for term, f in terms.items()}, low)


def _div(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    by = b.number
    if by is not None:
        return _scale(a, 1 / by) if by else _ANYTHING
    if not b.low > 0:
        return _ANYTHING
    if a.number == 0:
        return _number(0.0)
    low = 0.0 if a.low >= 0 else -math.inf
    above, below = a.plain_terms, b.plain_terms
    if above is not None and below is not None:
        roots = [term for term in below if term.kind == "root"]
        if len(roots) == 1 and below.keys() == {roots[0], ONE} and math.isfinite(below[ONE]):
            return _divided(above, Denominator(roots[0].place, below[roots[0]], below[ONE]), low)
    return _unknown(low, a)


def _as_input(value: SymbolicValue) -> tuple[int, float] | None:
    """An input and its factor, if that is all."""
    terms = value.plain_terms or {}
    found = [(term.place, factor) for term, factor in terms.items() if term.kind == "input"]
    return found[0] if len(terms) == len(found) == 1 else None


def _sqrt(value: SymbolicValue) -> SymbolicValue:
    """Assumed to be finite: a formula takes no root of negative values."""
    found = _as_input(value)
    if found is not None and found[1] > 0:
        return SymbolicValue({Term("root", found[0]): math.sqrt(found[1])}, 0.0)
    return _unknown(math.sqrt(max(value.low, 0.0)), value)


def _sign(value: SymbolicValue) -> SymbolicValue:
    found = _as_input(value)
    if found is not None:
        return SymbolicValue({Term("sign", found[0]): math.copysign(1.0, found[1])}, -1.0)
    return _unknown(-1.0, value)


def _maximum(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    for value, other in ((a, b), (b, a)):
        if value.number is not None and other.low >= value.number:
            return other
    return _unknown(max(a.low, b.low), a, b)


def _minimum(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    return _unknown(min(a.low, b.low), a, b)


def _where(condition: SymbolicValue, a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    if condition.number is not None:
        return a if condition.number else b
    return _minimum(a, b)


def _finite_if_positive(low: float) -> Callable[..., SymbolicValue]:
    """A function that is finite, and at least ``low``, if its argument is greater than zero."""

    def made(value: SymbolicValue, *further: SymbolicValue) -> SymbolicValue:
        numbers = [each.number for each in further]
        return SymbolicValue(None, low, value.low > 0 and value.is_finite and None not in numbers)

    return made


_EVALUATORS: dict[str, Callable[..., SymbolicValue]] = {
    "add": _add,
    "sub": lambda a, b: _add(a, _scale(b, -1.0)),
    "mul": _mul,
    "div": _div,
    "neg": lambda value: _scale(value, -1.0),
    "reciprocal": lambda value: _div(_number(1.0), value),
    "sqrt": _sqrt,
    "rsqrt": _finite_if_positive(0.0),
    "pow": _finite_if_positive(0.0),
    "log": _finite_if_positive(-math.inf),
    "sign": _sign,
    "abs": lambda value: value if value.low >= 0 else _unknown(0.0, value),
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _where,
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), lambda a, b: _unknown(0.0)),
}


class NoClosedFormError(Exception):
    """A formula has no closed form without a gradient; the message says why."""


class IdleForm(NamedTuple):
    """The effect of a step on an entry whose gradient is zero."""

    kind: type[IdleUpdate]
    decays: Mapping[str, float]  # factors of the states that decay
    shrink: float  # the factor of the parameter
    buffer: str = ""  # the state along which the parameter moves, if it does
    size: float = 0.0  # of that move, relative to the buffer after the step
    square: str = ""  # the state whose root divides the move, if one does
    factor: float = 1.0  # of the root of the square after the step
    number: float = 0.0  # added to that root


def _analyze(rule: Rule, step: int, hyperparams: Hyperparams) -> IdleForm:
    """Derive the form of a rule's step without a gradient, or raise NoClosedFormError."""
    param, *state = _evaluate(rule, step, hyperparams)
    decays: dict[str, float] = {}
    for place, (value, spec) in enumerate(zip(state, rule.state, strict=True), start=2):
        factor = _as_multiple(value, place)
        if factor is None or not 0 <= factor <= 1:
            raise NoClosedFormError(_describe_change(rule, spec.name, value))
        if factor != 1:
            decays[spec.name] = factor
    found = _match_form(rule, param, decays)
    if found is None:
        raise NoClosedFormError(_describe_change(rule, "param", param))
    return found


def _describe_change(rule: Rule, name: str, value: SymbolicValue) -> str:
    if value.terms is None:
        return f"{name} has no closed-form {'update' if name == 'param' else 'decay'}"
    names = ("param", "grad", *rule.state_names)
    return f"{name} becomes {_format_terms(value.terms, names)}"


def _format_terms(terms: Mapping[Term, float], names: Sequence[str]) -> str:
    parts = [_format_term(term, factor, names) for term, factor in terms.items()]
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _format_term(term: Term, factor: float, names: Sequence[str]) -> str:
    if term.denominator is not None:
        square, root_factor, number = term.denominator
        above = _format_term(term._replace(denominator=None), factor, names)
        below = _format_terms({Term("root", square): root_factor, ONE: number}, names)
        return f"({above}) / ({below})"
    if term == ONE:
        return f"{factor:g}"
    name = names[term.place]
    name = {"sign": f"sign({name})", "root": f"sqrt({name})"}.get(term.kind, name)
    return {1.0: name, -1.0: f"-{name}"}.get(factor, f"{factor:g} * {name}")


def _as_multiple(value: SymbolicValue, place: int) -> float | None:
    """The factor of an input, if the value is a multiple of it."""
    term = Term("input", place)
    if value.terms is None or value.terms.keys() - {term}:
        return None
    return value.terms.get(term, 0.0)


def _match_form(rule: Rule, param: SymbolicValue, decays: Mapping[str, float]) -> IdleForm | None:
    own = Term("input", 0)
    terms = dict(param.terms or {})
    shrink = terms.pop(own, 0.0)
    if not shrink > 0 or len(terms) > 1:
        return None
    if not terms:
        return IdleForm(NoDrift, decays, shrink)
    ((term, factor),) = terms.items()
    buffer = _buffer_name(rule, term)
    if not buffer:
        return None
    if term.kind == "sign" and term.denominator is None:
        return IdleForm(SignDrift, decays, shrink, buffer, -factor)
    left = decays.get(buffer, 1.0)
    if term.kind != "input" or not left:
        return None
    size = -factor / left
    if term.denominator is None:
        return IdleForm(GeometricDrift, decays, shrink, buffer, size)
    place, of_root, number = term.denominator
    square = rule.state[place - 2].name if place else ""
    root = math.sqrt(decays.get(square, 1.0))
    if not square or not root:
        return None
    return IdleForm(AdamDrift, decays, shrink, buffer, size, square, of_root / root, number)


def _buffer_name(rule: Rule, term: Term) -> str:
    """The state that a move is along; none if it is no state, or would move rows from the start."""
    if term.place < 2:
        return ""
    spec = rule.state[term.place - 2]
    return "" if spec.per_row or spec.initial != 0 else spec.name


class _StepSizes:
    """Step sizes of a derived idle update; the latest step is cached."""

    def __init__(self, rule: Rule, like: IdleForm) -> None:
        self._rule = rule
        self._like = like
        self._latest: tuple[int, Hyperparams, tuple[float, float, float] | None] = (0, {}, None)

    def fits(self, step: int, hyperparams: Hyperparams) -> bool:
        """Whether a step has this form; raises if it has none."""
        return self._of(step, hyperparams) is not None

    def size(self, step: int, hyperparams: Hyperparams) -> tuple[float, float]:
        return (self._of(step, hyperparams) or (0.0, 1.0, 1.0))[:2]

    def shrink(self, step: int, hyperparams: Hyperparams) -> float:
        return (self._of(step, hyperparams) or (0.0, 1.0, 1.0))[2]

    def _of(self, step: int, hyperparams: Hyperparams) -> tuple[float, float, float] | None:
        """Size, root and shrink of a step."""
        known_step, known, found = self._latest
        if known_step != step or known is not hyperparams:
            found = self._derive(step, hyperparams)
            self._latest = step, hyperparams, found
        return found

    def _derive(self, step: int, hyperparams: Hyperparams) -> tuple[float, float, float] | None:
        like = self._like
        try:
            found = _analyze(self._rule, step, hyperparams)
        except NoClosedFormError as error:
            first = self._first(hyperparams) if step == 1 else None
            if first is None:
                raise InputError(unsupported_message(self._rule.name, str(error))) from None
            return first
        same = (like.kind, like.buffer, like.square) == (found.kind, found.buffer, found.square)
        if found.decays != like.decays or not (same or found.kind is NoDrift):
            return self._first(hyperparams) if step == 1 else None
        if found.kind is not AdamDrift:
            return found.size, 1.0, found.shrink
        scale = like.number / found.number
        root = found.factor * scale
        return (found.size * scale, 1 / root, found.shrink) if 0 < root < math.inf else None

    def _first(self, hyperparams: Hyperparams) -> tuple[float, float, float] | None:
        """A first step that is special: every entry without a gradient is as it began."""
        specs = self._rule.state
        start = {place: float(spec.initial) for place, spec in enumerate(specs, start=2)}
        param, *state = _evaluate(self._rule, 1, hyperparams, start)
        for value, spec in zip(state, specs, strict=True):
            if value.number != self._like.decays.get(spec.name, 1.0) * float(spec.initial):
                return None
        shrink = _as_multiple(param, 0)
        return (0.0, 1.0, shrink) if shrink else None


def derive_idle_update(rule: Rule, step: int, hyperparams: Hyperparams) -> IdleUpdate:
    """Derive the idle update of a rule from a step on.

    Raises:
        InputError: it has none.

    Example:
        >>> from sparsestep.rules.rule import StateSpec
        >>> def update(param, grad, mean, *, lr):
        ...     mean = 0.75 * mean + 0.25 * grad
        ...     return param - lr * mean, mean
        >>> rule = Rule("mine", update, (StateSpec("mean"),), traceable_update=update)
        >>> idle = derive_idle_update(rule, 1, {"lr": 2.0})
        >>> type(idle).__name__, idle.buffer, idle.decays({}), idle.size(1, {"lr": 2.0})
        ('GeometricDrift', 'mean', {'mean': 0.75}, (2.0, 1.0))
    """
    # With lr=0 nothing moves, so analyze lr=1. The first step may differ, so analyze a later one.
    stands_still = isinstance(hyperparams.get("lr"), int | float) and not hyperparams["lr"]
    typical = {**hyperparams, "lr": 1.0} if stands_still else hyperparams
    later = max(step, 2)
    try:
        like = _analyze(rule, later, typical)
        after = _analyze(rule, later + 1, typical)
        if like.decays != after.decays:
            raise NoClosedFormError("its state decays differently from step to step")
    except NoClosedFormError as error:
        raise InputError(unsupported_message(rule.name, str(error))) from None
    steps = _StepSizes(rule, like)
    if not steps.fits(step, hyperparams):
        raise InputError(
            unsupported_message(rule.name, f"step {step} has a different update from the next one")
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


def unsupported_message(name: str, why: str = "") -> str:
    """Phrase that a rule has no idle update."""
    if not why:
        requirement = (
            "semantics='dense' needs a rule that defines its update for rows without a gradient"
        )
        return message(requirement, f"rule {name!r}", "Use semantics='masked'")
    return (
        f"semantics='dense' cannot defer updates of rule {name!r}: {why}. Without a gradient, "
        "each state must decay, and the parameter must decay or move along one state. "
        "Use semantics='masked'."
    )
