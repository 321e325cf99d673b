"""The idle update of a rule that does not declare one, derived from its traced formula.

A formula is evaluated symbolically for a gradient of zero. If every state becomes a multiple of
itself, and the parameter a multiple of itself plus a move along one state, that is one of the
classes of ``idle.py``. The size of a step may depend on the step and on all options, so every step
is analyzed again before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

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
from sparsestep.rules.trace import (
    OPERATIONS,
    ROW_REDUCTIONS,
    ConstantRef,
    Program,
    TraceError,
    ValueRef,
    trace,
)


class Term(NamedTuple):
    """What a factor is of.

    Attributes:
        kind: ``"one"``, ``"input"``, or ``"sign"`` or ``"root"`` of an input.
        place: of the input.
    """

    kind: str
    place: int


ONE = Term("one", -1)
LinearTerms: TypeAlias = Mapping[Term, float]


class RootQuotient(NamedTuple):
    """Something divided by ``factor * root of an input + number``, both of which are positive."""

    terms: LinearTerms
    square: int
    factor: float
    number: float


class ClosedForm(NamedTuple):
    """A value in closed form: the sum of ``terms`` and of ``ratio``; at least ``low``."""

    terms: LinearTerms
    ratio: RootQuotient | None = None
    low: float = -math.inf

    @property
    def number(self) -> float | None:
        """The value, where it is one and the same for all elements."""
        if self.ratio is None and self.terms.keys() <= {ONE}:
            return self.terms.get(ONE, 0.0)
        return None


class NoClosedForm(NamedTuple):
    """A value without such a form."""

    low: float = -math.inf
    is_finite: bool = False


SymbolicValue: TypeAlias = ClosedForm | NoClosedForm


def number(value: float) -> ClosedForm:
    """The form of a number."""
    return ClosedForm({ONE: value} if value else {}, low=value)


def evaluate_at_zero_grad(
    program: Program, start: Mapping[int, float] | None = None
) -> list[SymbolicValue]:
    """What the results of a program are where the gradient is zero.

    Args:
        program: that of a rule: its inputs are the parameter, the gradient, the state.
        start: the values of state, by place among the inputs, where they are known.

    Example:
        >>> from sparsestep.rules.rule import Rule, StateSpec
        >>> from sparsestep.rules.trace import trace
        >>> def update(param, grad, mean, *, lr):
        ...     mean = 0.75 * mean + 0.25 * grad
        ...     return param - lr * mean, mean
        >>> program = trace(Rule("mine", update, (StateSpec("mean"),)), 1, {"lr": 2.0})
        >>> [format_value(value, program.inputs) for value in evaluate_at_zero_grad(program)]
        ['param - 1.5 * mean', '0.75 * mean']
    """
    known = {1: 0.0, **(start or {})}  # the gradient, and state
    found: list[SymbolicValue] = []
    for place, (name, arguments, _) in enumerate(program.operations):
        if name == "input":
            found.append(number(known[place]) if place in known else _input_form(place))
            continue
        given: list[SymbolicValue] = [
            number(program.constants[argument.place])
            if isinstance(argument, ConstantRef)
            else found[argument.place]
            for argument in arguments
        ]
        is_twice = len(arguments) == 2 and len(set(arguments)) == 1
        is_same = is_twice and all(isinstance(each, ValueRef) for each in arguments)
        found.append(_apply(program, name, given, is_same=is_same))
    return [found[place] for place in program.results]


def _apply(
    program: Program, name: str, given: list[SymbolicValue], *, is_same: bool
) -> SymbolicValue:
    """Apply an operation; ``is_same`` if both of its operands are the same value."""
    constants = [each for each in map(_as_constant, given) if each is not None]
    if len(constants) == len(given):
        folded = _fold_constants(name, constants)
        return number(folded) if math.isfinite(folded) else NoClosedForm()
    if name in ROW_REDUCTIONS:
        (value,) = given
        if name != "sum" and isinstance(value, ClosedForm) and value.ratio is None:
            inputs = program.operations
            if all(term == ONE or inputs[term.place].per_row for term in value.terms):
                return value
        return NoClosedForm(0.0 if value.low >= 0 else -math.inf, _is_finite(value))
    if is_same and name in _SAME_OPERAND:
        return number(_SAME_OPERAND[name])
    if is_same and name == "mul":
        return NoClosedForm(0.0, _is_finite(given[0]))
    return _EVALUATORS[name](*given) if name in _EVALUATORS else NoClosedForm()


def format_value(value: SymbolicValue, names: Sequence[str]) -> str:
    """A value as people write it."""
    if isinstance(value, NoClosedForm):
        return "unknown"
    parts = [_format_term(term, factor, names) for term, factor in value.terms.items()]
    if value.ratio is not None:
        terms, square, factor, eps = value.ratio
        above = format_value(ClosedForm(terms), names)
        below = format_value(ClosedForm({Term("root", square): factor, ONE: eps}), names)
        parts.append(f"({above}) / ({below})")
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _format_term(term: Term, factor: float, names: Sequence[str]) -> str:
    if term == ONE:
        return f"{factor:g}"
    name = names[term.place]
    name = {"sign": f"sign({name})", "root": f"sqrt({name})"}.get(term.kind, name)
    return {1.0: name, -1.0: f"-{name}"}.get(factor, f"{factor:g} * {name}")


def _input_form(place: int) -> ClosedForm:
    return ClosedForm({Term("input", place): 1.0})


def _fold_constants(name: str, numbers: Sequence[float]) -> float:
    """An operation on numbers, of which a row has as many as it likes."""
    if name in ROW_REDUCTIONS:
        return numbers[0] if name != "sum" or numbers[0] == 0 else math.nan
    given = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in numbers)
    return float(OPERATIONS[name](*given))


# Operations with equal operands; tracing emits these for ``zeros_like`` and ``ones_like``.
_SAME_OPERAND = {"lt": 0.0, "gt": 0.0, "ne": 0.0, "sub": 0.0, "le": 1.0, "ge": 1.0, "eq": 1.0}


def _is_finite(value: SymbolicValue) -> bool:
    return value.is_finite if isinstance(value, NoClosedForm) else True


def _as_constant(value: SymbolicValue) -> float | None:
    return value.number if isinstance(value, ClosedForm) else None


def _scale(value: SymbolicValue, factor: float) -> SymbolicValue:
    if factor == 0:
        return number(0.0) if _is_finite(value) else NoClosedForm()
    low = value.low * factor if factor > 0 else -math.inf
    if isinstance(value, NoClosedForm):
        return NoClosedForm(low, value.is_finite)
    ratio = value.ratio
    if ratio is not None:
        ratio = ratio._replace(terms=_scale_terms(ratio.terms, factor))
    return ClosedForm(_scale_terms(value.terms, factor), ratio, low)


def _scale_terms(terms: LinearTerms, factor: float) -> LinearTerms:
    return {term: each * factor for term, each in terms.items()}


def _add(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    low = a.low + b.low
    if isinstance(a, NoClosedForm) or isinstance(b, NoClosedForm) or (a.ratio and b.ratio):
        return NoClosedForm(low, _is_finite(a) and _is_finite(b))
    terms = dict(a.terms)
    for term, factor in b.terms.items():
        terms[term] = terms.get(term, 0.0) + factor
    left = {term: factor for term, factor in terms.items() if factor}
    return ClosedForm(left, a.ratio or b.ratio, low)


def _sub(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    return _add(a, _scale(b, -1.0))


def _mul(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    for value, other in ((a, b), (b, a)):
        factor = _as_constant(value)
        if factor is not None:
            return _scale(other, factor)
    for value, other in ((a, b), (b, a)):
        ratio = _as_reciprocal(other)
        if isinstance(value, ClosedForm) and value.ratio is None and ratio is not None:
            scaled = _scale_terms(value.terms, ratio.terms[ONE])
            return ClosedForm({}, ratio._replace(terms=scaled))
    low = 0.0 if a.low >= 0 and b.low >= 0 else -math.inf
    return NoClosedForm(low, _is_finite(a) and _is_finite(b))


def _as_reciprocal(value: SymbolicValue) -> RootQuotient | None:
    """The quotient, if the value is a number divided by something, and nothing else."""
    if isinstance(value, NoClosedForm) or value.terms or value.ratio is None:
        return None
    return value.ratio if value.ratio.terms.keys() == {ONE} else None


def _div(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    by = _as_constant(b)
    if by is not None:
        return _scale(a, 1 / by) if by else NoClosedForm()
    if not b.low > 0:
        return NoClosedForm()
    if _as_constant(a) == 0:
        return number(0.0)
    low = 0.0 if a.low >= 0 else -math.inf
    above, below = _as_terms(a), _as_terms(b)
    if above is not None and below is not None:
        roots = [term for term in below if term.kind == "root"]
        if len(roots) == 1 and below.keys() == {roots[0], ONE}:
            divided = RootQuotient(above, roots[0].place, below[roots[0]], below[ONE])
            return ClosedForm({}, divided, low)
    return NoClosedForm(low, _is_finite(a))


def _as_terms(value: SymbolicValue) -> LinearTerms | None:
    """The terms of a value that has nothing else."""
    return value.terms if isinstance(value, ClosedForm) and value.ratio is None else None


def _as_input(value: SymbolicValue) -> tuple[int, float] | None:
    """An input and its factor, if that is all."""
    terms = _as_terms(value) or {}
    found = [(term.place, factor) for term, factor in terms.items() if term.kind == "input"]
    return found[0] if len(terms) == len(found) == 1 else None


def _sqrt(value: SymbolicValue) -> SymbolicValue:
    """Taken for a number: a formula has no root of what may be negative."""
    found = _as_input(value)
    if found is not None and found[1] > 0:
        return ClosedForm({Term("root", found[0]): math.sqrt(found[1])}, low=0.0)
    return NoClosedForm(math.sqrt(max(value.low, 0.0)), _is_finite(value))


def _sign(value: SymbolicValue) -> SymbolicValue:
    found = _as_input(value)
    if found is not None:
        return ClosedForm({Term("sign", found[0]): math.copysign(1.0, found[1])}, low=-1.0)
    return NoClosedForm(-1.0, _is_finite(value))


def _abs(value: SymbolicValue) -> SymbolicValue:
    return value if value.low >= 0 else NoClosedForm(0.0, _is_finite(value))


def _maximum(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    for value, other in ((a, b), (b, a)):
        least = _as_constant(value)
        if least is not None and other.low >= least:
            return other
    return NoClosedForm(max(a.low, b.low), _is_finite(a) and _is_finite(b))


def _minimum(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    return NoClosedForm(min(a.low, b.low), _is_finite(a) and _is_finite(b))


def _where(condition: SymbolicValue, a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    chosen = _as_constant(condition)
    if chosen is not None:
        return a if chosen else b
    return NoClosedForm(min(a.low, b.low), _is_finite(a) and _is_finite(b))


def _finite_if_positive(low: float) -> Callable[..., SymbolicValue]:
    """What is finite where its argument is more than zero, and then at least ``low``."""

    def made(value: SymbolicValue, *further: SymbolicValue) -> SymbolicValue:
        numbers = [_as_constant(each) for each in further]
        return NoClosedForm(low, value.low > 0 and _is_finite(value) and None not in numbers)

    return made


def _comparison(a: SymbolicValue, b: SymbolicValue) -> SymbolicValue:
    return NoClosedForm(0.0, is_finite=True)


_EVALUATORS: dict[str, Callable[..., SymbolicValue]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda value: _scale(value, -1.0),
    "reciprocal": lambda value: _div(number(1.0), value),
    "sqrt": _sqrt,
    "rsqrt": _finite_if_positive(0.0),
    "pow": _finite_if_positive(0.0),
    "log": _finite_if_positive(-math.inf),
    "sign": _sign,
    "abs": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _where,
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _comparison),
}


class NoClosedFormError(Exception):
    """A formula does something else without a gradient; says what."""


class IdleForm(NamedTuple):
    """What a step does to an entry whose gradient is zero.

    Attributes:
        kind: the class of the idle update.
        buffer: the state along which the parameter moves, if it does.
        square: the state by whose root that is divided, if it is.
        decays: factors of the states, but for those that stay.
        shrink: the factor of the parameter.
        size: by how much it moves, of what its buffer is after the step.
        factor: of the root that it is divided by, of what the square is after the step.
        number: what is added to that root.
    """

    kind: type[IdleUpdate]
    buffer: str
    square: str
    decays: Mapping[str, float]
    shrink: float
    size: float
    factor: float = 1.0
    number: float = 0.0


def analyze_idle_step(rule: Rule, step: int, hyperparams: Hyperparams) -> IdleForm:
    """What a rule does in a step without a gradient.

    Raises:
        NoClosedFormError: no class of idle updates matches.
    """
    names = ["param", "grad", *(spec.name for spec in rule.state)]
    param, *state = _evaluate(rule, step, hyperparams)
    decays: dict[str, float] = {}
    for place, (value, spec) in enumerate(zip(state, rule.state, strict=True), start=2):
        factor = _as_multiple(value, place)
        if factor is None or not 0 <= factor <= 1:
            raise NoClosedFormError(_change(spec.name, value, names))
        if factor != 1:
            decays[spec.name] = factor
    found = _match_form(rule, param, decays)
    if found is None:
        raise NoClosedFormError(_change("param", param, names))
    return found


def _change(name: str, value: SymbolicValue, names: list[str]) -> str:
    """Describe what a step without a gradient does to a value without a closed form."""
    if isinstance(value, NoClosedForm):
        return f"{name} has no closed-form {'update' if name == 'param' else 'decay'}"
    return f"{name} becomes {format_value(value, names)}"


def _evaluate(
    rule: Rule, step: int, hyperparams: Hyperparams, start: Mapping[int, float] | None = None
) -> list[SymbolicValue]:
    if rule.traceable_update is None:
        raise NoClosedFormError("compile leaves nothing to record")
    try:
        return evaluate_at_zero_grad(trace(rule, step, hyperparams), start)
    except TraceError as error:
        raise NoClosedFormError(str(error)) from None
    except MemoryError:
        raise
    except Exception as error:  # whatever a formula does with what is no tensor
        raise NoClosedFormError(f"{type(error).__name__}: {error}") from None


def _as_multiple(value: SymbolicValue, place: int) -> float | None:
    """By what an input is multiplied, where that is all."""
    terms, term = _as_terms(value), Term("input", place)
    return None if terms is None or terms.keys() - {term} else terms.get(term, 0.0)


def _match_form(rule: Rule, param: SymbolicValue, decays: Mapping[str, float]) -> IdleForm | None:
    if not isinstance(param, ClosedForm):
        return None
    own = Term("input", 0)
    shrink = param.terms.get(own, 0.0)
    moves = [(term, factor) for term, factor in param.terms.items() if term != own]
    if not shrink > 0 or len(moves) + (param.ratio is not None) > 1:
        return None
    if param.ratio is not None:
        return _match_adam(rule, param.ratio, decays, shrink)
    if not moves:
        return IdleForm(NoDrift, "", "", decays, shrink, 0.0)
    ((term, factor),) = moves
    buffer = _state_name(rule, term)
    left = decays.get(buffer, 1.0)
    if term.kind == "sign" and buffer:
        return IdleForm(SignDrift, buffer, "", decays, shrink, -factor)
    if term.kind == "input" and buffer and left:
        return IdleForm(GeometricDrift, buffer, "", decays, shrink, -factor / left)
    return None


def _match_adam(
    rule: Rule, ratio: RootQuotient, decays: Mapping[str, float], shrink: float
) -> IdleForm | None:
    if len(ratio.terms) != 1 or ratio.square == 0:
        return None
    ((term, factor),) = ratio.terms.items()
    buffer, square = _state_name(rule, term), rule.state[ratio.square - 2].name
    left, root = decays.get(buffer, 1.0), math.sqrt(decays.get(square, 1.0))
    if term.kind != "input" or not buffer or not left or not root:
        return None
    size = -factor / left
    return IdleForm(
        AdamDrift, buffer, square, decays, shrink, size, ratio.factor / root, ratio.number
    )


def _state_name(rule: Rule, term: Term) -> str:
    """The state that a move is along; none if it is no state, or would move rows from the start."""
    if term == ONE or term.place < 2:
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
        """How far it goes, and the root."""
        return (self._of(step, hyperparams) or (0.0, 1.0, 1.0))[:2]

    def shrink(self, step: int, hyperparams: Hyperparams) -> float:
        """What it leaves of the parameter."""
        return (self._of(step, hyperparams) or (0.0, 1.0, 1.0))[2]

    def _of(self, step: int, hyperparams: Hyperparams) -> tuple[float, float, float] | None:
        known_step, known, found = self._latest
        if known_step != step or known is not hyperparams:
            found = self._derived(step, hyperparams)
            self._latest = step, hyperparams, found
        return found

    def _derived(self, step: int, hyperparams: Hyperparams) -> tuple[float, float, float] | None:
        like = self._like
        try:
            found = analyze_idle_step(self._rule, step, hyperparams)
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
        return found.size * scale, 1 / (found.factor * scale), found.shrink

    def _first(self, hyperparams: Hyperparams) -> tuple[float, float, float] | None:
        """A first step that is special: every entry without a gradient is as it began."""
        start = {place: spec.initial for place, spec in enumerate(self._rule.state, start=2)}
        numbers = {place: float(initial) for place, initial in start.items()}
        param, *state = _evaluate(self._rule, 1, hyperparams, numbers)
        for value, spec in zip(state, self._rule.state, strict=True):
            wanted = self._like.decays.get(spec.name, 1.0) * float(spec.initial)
            if not isinstance(value, ClosedForm) or value.number != wanted:
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
    typical = {**hyperparams, "lr": 1.0} if hyperparams.get("lr") == 0 else hyperparams
    later = max(step, 2)
    try:
        like = analyze_idle_step(rule, later, typical)
        after = analyze_idle_step(rule, later + 1, typical)
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
