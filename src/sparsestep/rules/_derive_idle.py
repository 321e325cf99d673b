"""The motion of a rule that does not declare one: derived from its recorded formula.

``zero_gradient`` says what becomes of parameter and state in a step without a gradient. Where every
state is a multiple of itself, and the parameter a multiple of itself plus a move along one state,
that is one of the motions of ``motion.py``. How far a step goes may depend on the step and on all
options; what is derived is looked at again for each step, before anything is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from sparsestep.errors import InputError, message
from sparsestep.rules.idle import Geometric, Motion, Quotient, SignDrift, Still
from sparsestep.rules.rule import Rule
from sparsestep.rules.trace import OPERATIONS, Number, Program, RecordError, Value, record


class Atom(NamedTuple):
    """What a factor is of.

    Attributes:
        kind: ``"one"``, ``"input"``, or ``"sign"`` or ``"root"`` of an input.
        place: of the input.
    """

    kind: str
    place: int


ONE = Atom("one", -1)
Terms: TypeAlias = Mapping[Atom, float]


class Ratio(NamedTuple):
    """Something divided by ``factor * root of an input + number``, both of which are positive."""

    terms: Terms
    square: int
    factor: float
    number: float


class Known(NamedTuple):
    """A value in closed form: the sum of ``terms`` and of ``ratio``; at least ``low``."""

    terms: Terms
    ratio: Ratio | None = None
    low: float = -math.inf

    @property
    def number(self) -> float | None:
        """The value, where it is one and the same for all elements."""
        if self.ratio is None and self.terms.keys() <= {ONE}:
            return self.terms.get(ONE, 0.0)
        return None


class Unknown(NamedTuple):
    """A value without such a form."""

    low: float = -math.inf
    is_finite: bool = False


Found: TypeAlias = Known | Unknown


def number(value: float) -> Known:
    """The form of a number."""
    return Known({ONE: value} if value else {}, low=value)


def followed(program: Program, start: Mapping[int, float] | None = None) -> list[Found]:
    """What the results of a program are where the gradient is zero.

    Args:
        program: that of a rule: its inputs are the parameter, the gradient, the state.
        start: the values of state, by place among the inputs, where they are known.

    Example:
        >>> from sparsestep.rules.rule import Rule, State
        >>> from sparsestep.rules.trace import record
        >>> def update(param, grad, mean, *, lr):
        ...     mean = 0.75 * mean + 0.25 * grad
        ...     return param - lr * mean, mean
        >>> program = record(Rule("mine", update, (State("mean"),)), 1, {"lr": 2.0})
        >>> [shown(value, program.inputs) for value in followed(program)]
        ['param - 1.5 * mean', '0.75 * mean']
    """
    return _Follower(program, start or {}).run()


def shown(value: Found, names: Sequence[str]) -> str:
    """A value as people write it."""
    if isinstance(value, Unknown):
        return "unknown"
    parts = [_shown_term(atom, factor, names) for atom, factor in value.terms.items()]
    if value.ratio is not None:
        terms, square, factor, eps = value.ratio
        above = shown(Known(terms), names)
        below = shown(Known({Atom("root", square): factor, ONE: eps}), names)
        parts.append(f"({above}) / ({below})")
    return " + ".join(parts).replace("+ -", "- ") or "0"


def _shown_term(atom: Atom, factor: float, names: Sequence[str]) -> str:
    if atom == ONE:
        return f"{factor:g}"
    name = names[atom.place]
    name = {"sign": f"sign({name})", "root": f"sqrt({name})"}.get(atom.kind, name)
    return {1.0: name, -1.0: f"-{name}"}.get(factor, f"{factor:g} * {name}")


class _Follower:
    def __init__(self, program: Program, start: Mapping[int, float]) -> None:
        self._program = program
        self._start = start
        self._found: list[Found] = []

    def run(self) -> list[Found]:
        for place, (name, arguments, _) in enumerate(self._program.operations):
            if name == "input":
                self._found.append(self._input(place))
                continue
            given: list[Found] = [
                number(self._program.numbers[argument.place])
                if isinstance(argument, Number)
                else self._found[argument.place]
                for argument in arguments
            ]
            is_twice = len(arguments) == 2 and len(set(arguments)) == 1
            is_same = is_twice and all(isinstance(each, Value) for each in arguments)
            self._found.append(self._made(name, given, is_same))
        return [self._found[place] for place in self._program.results]

    def _input(self, place: int) -> Known:
        if place == 1:
            return number(0.0)
        return number(self._start[place]) if place in self._start else _input(place)

    def _made(self, name: str, given: list[Found], is_same: bool) -> Found:
        numbers = [each.number for each in given if isinstance(each, Known)]
        whole = [each for each in numbers if each is not None]
        if len(whole) == len(given):
            computed = _computed(name, whole)
            return number(computed) if math.isfinite(computed) else Unknown()
        if name in ("mean", "sum", "amax"):
            return self._of_row(name, given[0])
        if is_same and name in _OF_ITSELF:
            return number(_OF_ITSELF[name])
        if is_same and name == "mul":
            return Unknown(0.0, _is_finite(given[0]))
        return _MADE[name](*given) if name in _MADE else Unknown()

    def _of_row(self, name: str, value: Found) -> Found:
        if name != "sum" and isinstance(value, Known) and value.ratio is None:
            inputs = self._program.operations
            if all(atom == ONE or inputs[atom.place].per_row for atom in value.terms):
                return value
        return Unknown(0.0 if value.low >= 0 else -math.inf, _is_finite(value))


def _input(place: int) -> Known:
    return Known({Atom("input", place): 1.0})


def _computed(name: str, numbers: Sequence[float]) -> float:
    """An operation on numbers, of which a row has as many as it likes."""
    if name == "mean" or name == "amax":
        return numbers[0]
    if name == "sum":
        return 0.0 if numbers[0] == 0 else math.nan
    given = (torch.tensor(each, dtype=torch.float64, device="cpu") for each in numbers)
    return float(OPERATIONS[name](*given))


# A value and itself: so stand-ins make zeros and ones.
_OF_ITSELF = {"lt": 0.0, "gt": 0.0, "ne": 0.0, "sub": 0.0, "le": 1.0, "ge": 1.0, "eq": 1.0}


def _is_finite(value: Found) -> bool:
    return value.is_finite if isinstance(value, Unknown) else True


def _number_of(value: Found) -> float | None:
    return value.number if isinstance(value, Known) else None


def _scaled(value: Found, factor: float) -> Found:
    if factor == 0:
        return number(0.0) if _is_finite(value) else Unknown()
    low = value.low * factor if factor > 0 else -math.inf
    if isinstance(value, Unknown):
        return Unknown(low, value.is_finite)
    ratio = value.ratio
    if ratio is not None:
        ratio = ratio._replace(terms=_times(ratio.terms, factor))
    return Known(_times(value.terms, factor), ratio, low)


def _times(terms: Terms, factor: float) -> Terms:
    return {atom: each * factor for atom, each in terms.items()}


def _add(a: Found, b: Found) -> Found:
    low = a.low + b.low
    if isinstance(a, Unknown) or isinstance(b, Unknown) or (a.ratio and b.ratio):
        return Unknown(low, _is_finite(a) and _is_finite(b))
    terms = dict(a.terms)
    for atom, factor in b.terms.items():
        terms[atom] = terms.get(atom, 0.0) + factor
    left = {atom: factor for atom, factor in terms.items() if factor}
    return Known(left, a.ratio or b.ratio, low)


def _sub(a: Found, b: Found) -> Found:
    return _add(a, _scaled(b, -1.0))


def _mul(a: Found, b: Found) -> Found:
    for value, other in ((a, b), (b, a)):
        factor = _number_of(value)
        if factor is not None:
            return _scaled(other, factor)
    for value, other in ((a, b), (b, a)):
        if isinstance(value, Known) and isinstance(other, Known) and _is_inverse(other):
            ratio = other.ratio
            if ratio is not None and value.ratio is None:
                return Known({}, ratio._replace(terms=_times(value.terms, ratio.terms[ONE])))
    low = 0.0 if a.low >= 0 and b.low >= 0 else -math.inf
    return Unknown(low, _is_finite(a) and _is_finite(b))


def _is_inverse(value: Known) -> bool:
    """Whether it is a number divided by something, and nothing else."""
    return not value.terms and value.ratio is not None and value.ratio.terms.keys() == {ONE}


def _div(a: Found, b: Found) -> Found:
    by = _number_of(b)
    if by is not None:
        return _scaled(a, 1 / by) if by else Unknown()
    if not b.low > 0:
        return Unknown()
    if _number_of(a) == 0:
        return number(0.0)
    if isinstance(a, Known) and a.ratio is None and isinstance(b, Known) and b.ratio is None:
        roots = [atom for atom in b.terms if atom.kind == "root"]
        if len(roots) == 1 and b.terms.keys() == {roots[0], ONE}:
            divided = Ratio(a.terms, roots[0].place, b.terms[roots[0]], b.terms[ONE])
            return Known({}, divided, 0.0 if a.low >= 0 else -math.inf)
    return Unknown(0.0 if a.low >= 0 else -math.inf, _is_finite(a))


def _sqrt(value: Found) -> Found:
    """Taken for a number: a formula has no root of what may be negative."""
    if isinstance(value, Known) and value.ratio is None and len(value.terms) == 1:
        ((atom, factor),) = value.terms.items()
        if atom.kind == "input" and factor > 0:
            return Known({Atom("root", atom.place): math.sqrt(factor)}, low=0.0)
    return Unknown(math.sqrt(max(value.low, 0.0)), _is_finite(value))


def _sign(value: Found) -> Found:
    if isinstance(value, Known) and value.ratio is None and len(value.terms) == 1:
        ((atom, factor),) = value.terms.items()
        if atom.kind == "input":
            return Known({Atom("sign", atom.place): math.copysign(1.0, factor)}, low=-1.0)
    return Unknown(-1.0, _is_finite(value))


def _abs(value: Found) -> Found:
    return value if value.low >= 0 else Unknown(0.0, _is_finite(value))


def _maximum(a: Found, b: Found) -> Found:
    for value, other in ((a, b), (b, a)):
        least = _number_of(value)
        if least is not None and other.low >= least:
            return other
    return Unknown(max(a.low, b.low), _is_finite(a) and _is_finite(b))


def _minimum(a: Found, b: Found) -> Found:
    return Unknown(min(a.low, b.low), _is_finite(a) and _is_finite(b))


def _where(condition: Found, a: Found, b: Found) -> Found:
    chosen = _number_of(condition)
    if chosen is not None:
        return a if chosen else b
    return Unknown(min(a.low, b.low), _is_finite(a) and _is_finite(b))


def _of_positive(low: float) -> Callable[..., Found]:
    """What is finite where its argument is more than zero, and then at least ``low``."""

    def made(value: Found, *further: Found) -> Found:
        numbers = [_number_of(each) for each in further]
        return Unknown(low, value.low > 0 and _is_finite(value) and None not in numbers)

    return made


def _compared(a: Found, b: Found) -> Found:
    return Unknown(0.0, is_finite=True)


_MADE: dict[str, Callable[..., Found]] = {
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "div": _div,
    "neg": lambda value: _scaled(value, -1.0),
    "reciprocal": lambda value: _div(number(1.0), value),
    "sqrt": _sqrt,
    "rsqrt": _of_positive(0.0),
    "pow": _of_positive(0.0),
    "log": _of_positive(-math.inf),
    "sign": _sign,
    "abs": _abs,
    "maximum": _maximum,
    "minimum": _minimum,
    "where": _where,
    **dict.fromkeys(("lt", "le", "gt", "ge", "eq", "ne"), _compared),
}


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
        requirement = (
            "semantics='dense' needs a rule that defines its update for rows without a gradient"
        )
        return message(requirement, f"rule {name!r}", "Use semantics='masked'")
    return (
        f"semantics='dense' cannot defer updates of rule {name!r}: {why}. Without a gradient, "
        "each state must decay, and the parameter must decay or move along one state. "
        "Use semantics='masked'."
    )
