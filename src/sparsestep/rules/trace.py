"""Stand-ins for tensors: a formula that is called on them writes its program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import getrefcount
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsestep.rules.rule import Rule


class RecordError(Exception):
    """A formula does something that is no operation on single elements or rows."""


class Value(NamedTuple):
    """A value of a program, by the place of the operation that makes it."""

    place: int


class Number(NamedTuple):
    """One of a program's numbers, by its place among them."""

    place: int


# Made once: a formula is recorded in every step.
_VALUES = tuple(map(Value, range(256)))
_NUMBERS = tuple(map(Number, range(256)))


def value_at(place: int) -> Value:
    """The value of a place."""
    return _VALUES[place] if place < len(_VALUES) else Value(place)


Argument: TypeAlias = Value | Number


class Operation(NamedTuple):
    """What makes a value.

    Attributes:
        name: ``"input"``, or one of ``OPERATIONS``.
        arguments: what it is made of; of an input none.
        per_row: whether there is one number for each row, not one for each element.
    """

    name: str
    arguments: tuple[Argument, ...]
    per_row: bool


@dataclass
class Program:
    """What a formula does.

    Attributes:
        inputs: names of its first values: the parameter, its gradient, and the state.
        operations: one for each value, inputs first.
        numbers: in the order in which operations take them.
        results: the new parameter and state.
        asks_for_float32: whether the formula converts to float32, which is what it has anyway
            unless the arithmetic is in float64.
        may_widen: whether the machine that it is for can compute in float64 what a formula asks
            for in float64.

    Example:
        >>> def update(param, grad, sum, *, lr):
        ...     sum = sum + grad * grad
        ...     return param - lr * grad / sum.sqrt(), sum
        >>> from sparsestep.rules.rule import Rule, State
        >>> from sparsestep.rules.trace import record
        >>> record(Rule("mine", update, (State("sum"),)), 1, {"lr": 0.5})
        param, grad, sum
        v3 = mul(grad, grad)
        v4 = add(sum, v3)
        v5 = mul(0.5, grad)
        v6 = sqrt(v4)
        v7 = div(v5, v6)
        v8 = sub(param, v7)
        return v8, v4
    """

    inputs: tuple[str, ...]
    operations: list[Operation] = field(default_factory=list)
    numbers: list[float] = field(default_factory=list)
    results: tuple[int, ...] = ()
    may_widen: bool = False
    asks_for_float32: bool = False

    @property
    def structure(self) -> tuple[Any, ...]:
        """Everything but the numbers: programs that are alike in it are run by the same code."""
        return self.inputs, tuple(self.operations), self.results

    def add(self, name: str, arguments: Sequence[Any], *, per_row: bool) -> int:
        """Write down an operation; the place of its value.

        Args:
            name: of the operation.
            arguments: places as ``Value``, or numbers.
            per_row: whether its value is one number for each row.
        """
        found: list[Argument] = []
        for argument in arguments:
            if type(argument) is Value:
                found.append(argument)
            else:
                place = len(self.numbers)
                self.numbers.append(float(argument))
                found.append(_NUMBERS[place] if place < len(_NUMBERS) else Number(place))
        self.operations.append(Operation(name, tuple(found), per_row))
        return len(self.operations) - 1

    def __repr__(self) -> str:
        lines = [", ".join(self.inputs)]
        for place, operation in enumerate(self.operations):
            if operation.name != "input":
                arguments = ", ".join(map(self._shown, operation.arguments))
                lines.append(f"v{place} = {operation.name}({arguments})")
        results = ", ".join(self._shown(Value(place)) for place in self.results)
        return "\n".join([*lines, f"return {results}"])

    def _shown(self, argument: Argument) -> str:
        if isinstance(argument, Number):
            return repr(self.numbers[argument.place])
        is_input = argument.place < len(self.inputs)
        return self.inputs[argument.place] if is_input else f"v{argument.place}"

    def run(self, values: Sequence[Tensor]) -> list[Tensor]:
        """The results for tensors, one operation after the other: what every machine must compute.

        Args:
            values: the parameter, its gradient and the state, as the rule takes them.

        Example:
            >>> program = Program(("param", "grad"))
            >>> for _ in program.inputs:
            ...     _ = program.add("input", (), per_row=False)
            >>> program.results = (program.add("sub", (Value(0), Value(1)), per_row=False),)
            >>> program.run([torch.ones(1, 2), torch.full((1, 2), 0.25)])
            [tensor([[0.7500, 0.7500]])]
        """
        found: list[Tensor] = []
        wide = wide_places(self.operations)
        for place, (name, arguments, _) in enumerate(self.operations):
            if name == "input":
                found.append(values[place])
                continue
            dtype = torch.float64 if wide[place] else values[0].dtype
            given = [
                found[argument.place]
                if isinstance(argument, Value)
                else torch.tensor(self.numbers[argument.place], dtype=dtype)
                for argument in arguments
            ]
            found.append(given[0].to(dtype) if name in CASTS else OPERATIONS[name](*given))
        return [found[place].expand_as(like).clone() for place, like in self._results(found)]

    def _results(self, found: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
        """The results, each with the input that it replaces."""
        inputs = [0, *range(2, len(self.inputs))]
        return [(place, found[old]) for place, old in zip(self.results, inputs, strict=True)]


def wide_places(operations: Sequence[Operation]) -> list[bool]:
    """Which values are computed in float64, whatever the others are: from "wide" up to "narrow".

    Example:
        >>> a = Operation("input", (), per_row=True)
        >>> b = Operation("wide", (Value(0),), per_row=True)
        >>> c = Operation("sqrt", (Value(1),), per_row=True)
        >>> wide_places([a, b, c, Operation("narrow", (Value(2),), per_row=True)])
        [False, True, True, False]
    """
    found: list[bool] = []
    for name, arguments, _ in operations:
        among = any(found[a.place] for a in arguments if isinstance(a, Value))
        found.append(name == "wide" or (among and name != "narrow"))
    return found


def _as_number(condition: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: condition(a, b).to(a.dtype)


# Every operation there is: comparisons are 1 or 0, and ``where`` asks whether that is not zero.
OPERATIONS: Mapping[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": torch.div,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": torch.pow,
    "neg": torch.neg,
    "abs": torch.abs,
    "sign": torch.sign,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "exp": torch.exp,
    "log": torch.log,
    "lt": _as_number(torch.lt),
    "le": _as_number(torch.le),
    "gt": _as_number(torch.gt),
    "ge": _as_number(torch.ge),
    "eq": _as_number(torch.eq),
    "ne": _as_number(torch.ne),
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
    "mean": lambda a: a.mean(1, keepdim=True),
    "sum": lambda a: a.sum(1, keepdim=True),
    "amax": lambda a: a.amax(1, keepdim=True),
}

# To float64, and back to what everything else is computed in.
CASTS = ("wide", "narrow")

# Those of a whole row, whose value is one number for it.
OF_ROWS = ("mean", "sum", "amax")


def record(rule: Rule, step: int, hyper: Mapping[str, Any], *, may_widen: bool = False) -> Program:
    """What a rule does in a step with these options.

    Args:
        rule: the rule.
        step: the number of the update.
        hyper: the options of its formula.
        may_widen: whether it may compute some of it in float64.

    Raises:
        RecordError: the formula looks at values, shapes, or uses an operation without a form
            here.
    """
    program = Program(("param", "grad", *(spec.name for spec in rule.state)), may_widen=may_widen)
    recorder = Recorder(program)
    try:
        program.results = _results(rule, recorder, step, hyper)
        if recorder.is_kept():
            raise RecordError("it keeps a value after it returns")
    finally:
        recorder.made.clear()
    return program


def _results(
    rule: Rule, recorder: Recorder, step: int, hyper: Mapping[str, Any]
) -> tuple[int, ...]:
    kinds = [False, *(spec.per_row for spec in rule.state)]
    stand_ins = [
        StandIn(recorder, recorder.program.add("input", (), per_row=per_row))
        for per_row in (False, *kinds)
    ]
    counted = {"step": step} if rule.takes_step else {}
    with torch.no_grad():
        new = (rule.recorded or rule.update)(*stand_ins, **counted, **hyper)
    results = list(new) if isinstance(new, tuple | list) else [new]
    if len(results) != len(kinds):
        raise RecordError(f"it returns {len(results)} values, not {len(kinds)}")
    for result, per_row in zip(results, kinds, strict=True):
        if not isinstance(result, StandIn) or (per_row and not result.is_per_row):
            raise RecordError("it returns something that is not computed from its arguments")
    return tuple(result.place for result in results)


class Recorder:
    """What is written while a formula runs.

    Attributes:
        program: so far.
        made: all stand-ins, the first of which nobody else ever has.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.made: list[StandIn] = []
        StandIn(self, 0)

    def is_kept(self) -> bool:
        """Whether somebody has a stand-in when the formula is done."""
        counts = list(map(getrefcount, self.made))
        return max(counts) > counts[0]


class StandIn:
    """Stands for a tensor of any number of rows.

    Args:
        recorder: of its program.
        place: that of its value there.
    """

    __slots__ = ("place", "recorder")

    def __init__(self, recorder: Recorder, place: int) -> None:
        self.recorder: Recorder = recorder
        self.place: int = place
        recorder.made.append(self)

    @property
    def program(self) -> Program:
        """What is written."""
        return self.recorder.program

    def like(self, place: int) -> StandIn:
        """Another, for another value of the same program."""
        return StandIn(self.recorder, place)

    @property
    def is_per_row(self) -> bool:
        """Whether it is a column with a number for each row."""
        return self.program.operations[self.place].per_row

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return call(getattr(func, "__name__", repr(func)), args, kwargs or {})

    def where(self, condition: Any, other: Any) -> StandIn:
        """The method has another order than the function."""
        return make("where", condition, self, other)

    def __getattr__(self, name: str) -> Any:
        raise RecordError(f"it uses .{name}")

    def __bool__(self) -> bool:
        raise RecordError("it branches on values")

    def __repr__(self) -> str:
        raise RecordError("it prints or formats values")

    def __hash__(self) -> int:
        return id(self)


# What a formula calls, in terms of the operations there are

_SAME_AS = {
    **{"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div"},
    **{"negative": "neg", "absolute": "abs", "sgn": "sign", "float_power": "pow"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    **{"not_equal": "ne", "clip": "clamp"},
}


def call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
    """Write down what a function of torch does."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    name = name.rstrip("_") if is_in_place else name
    name = _SAME_AS.get(name, name)
    made = _COMPOSED[name](*args, **kwargs) if name in _COMPOSED else _plain(name, args, kwargs)
    if is_in_place:
        if args[0].is_per_row and not made.is_per_row:
            raise RecordError("it broadcasts a column in place")
        args[0].place = made.place
        return args[0]  # type: ignore[no-any-return]
    return made


def _plain(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> StandIn:
    if name in OF_ROWS:
        return _of_row(name, *args, **kwargs)
    if name not in OPERATIONS:
        raise RecordError(f"it calls {name}")
    if kwargs.keys() == {"alpha"} and name in ("add", "sub"):
        args, kwargs = (args[0], make("mul", kwargs["alpha"], args[1])), {}
    if kwargs:
        raise RecordError(f"it calls {name} with {', '.join(kwargs)}")
    return make(name, *args)


def make(name: str, *args: Any) -> StandIn:
    """Write down an operation."""
    recorder: Recorder | None = None
    given: list[Value | float] = []
    per_row = True
    for arg in args:
        if type(arg) is StandIn:
            recorder = arg.recorder
            per_row = per_row and recorder.program.operations[arg.place].per_row
            given.append(value_at(arg.place))
        else:
            given.append(arg if type(arg) is float else _number(arg))
    if recorder is None:
        raise RecordError(f"it calls {name} on numbers alone")
    return StandIn(recorder, recorder.program.add(name, given, per_row=per_row))


def _number(arg: Any) -> float:
    if isinstance(arg, Tensor) and arg.dim() == 0 and not arg.is_complex():
        return float(arg)
    if isinstance(arg, bool | int | float):
        return float(arg)
    raise RecordError(f"it uses a {type(arg).__name__} that is not an argument")


def _of_row(name: str, row: StandIn, dim: Any = None, keepdim: bool = False) -> StandIn:
    """A sum over the elements of each row."""
    if isinstance(dim, tuple | list) and len(dim) == 1:
        (dim,) = dim
    if dim not in (1, -1) or not keepdim or row.is_per_row:
        raise RecordError(f"it takes a {name} other than over rows, with dim=1 and keepdim=True")
    return row.like(row.program.add(name, (Value(row.place),), per_row=True))


def _norm(
    row: StandIn, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, p: Any = 2, **more: Any
) -> StandIn:
    if any(value is not None for value in more.values()):
        raise RecordError(f"it takes a norm with {', '.join(more)}")
    ord = p if ord == 2 else ord
    if ord not in (2, 2.0, "fro", None):
        raise RecordError(f"it takes a norm of order {ord}")
    return make("sqrt", _of_row("sum", make("mul", row, row), dim, keepdim))


def _clamp(value: Any, min: Any = None, max: Any = None) -> StandIn:
    if min is not None:
        value = make("maximum", value, min)
    return value if max is None else make("minimum", value, max)


def _pow(base: Any, exponent: Any) -> StandIn:
    if isinstance(exponent, StandIn):
        return make("pow", base, exponent)
    # As torch computes them.
    if exponent == 2:
        return make("mul", base, base)
    if exponent == 3:
        return make("mul", make("mul", base, base), base)
    if exponent == 0.5:
        return make("sqrt", base)
    return make("rsqrt", base) if exponent == -0.5 else make("pow", base, exponent)


def _lerp(start: Any, end: Any, weight: Any) -> StandIn:
    """From whichever end is nearer, as torch does."""
    if isinstance(weight, StandIn):
        raise RecordError("it calls lerp with a weight that depends on values")
    apart = make("sub", end, start)
    if abs(float(weight)) < 0.5:
        return make("add", start, make("mul", weight, apart))
    return make("sub", end, make("mul", apart, 1 - float(weight)))


def _add_to(name: str) -> Callable[..., StandIn]:
    def add(start: Any, first: Any, second: Any, *, value: Any = 1) -> StandIn:
        scaled = first if value == 1 else make("mul", value, first)
        return make("add", start, make(name, scaled, second))

    return add


def _double(value: StandIn) -> StandIn:
    if not value.program.may_widen:
        raise RecordError("it calls double")
    return make("wide", value)


def _to(value: StandIn, dtype: Any = None) -> StandIn:
    if isinstance(dtype, StandIn):  # to what another is, which is what all are
        return make("narrow", value) if value.program.may_widen else value
    if dtype is not torch.float32:
        raise RecordError(f"it converts values to {dtype}")
    return _float(value)


def _float(value: StandIn) -> StandIn:
    value.program.asks_for_float32 = True
    return value


def _full(value: StandIn, number: Any) -> StandIn:
    """A number everywhere, whatever the value is: less than itself it never is."""
    return make("add", make("lt", value, value), number)


def _copy(value: StandIn, other: Any) -> StandIn:
    return make("where", make("lt", value, value), value, other)


_COMPOSED: dict[str, Callable[..., StandIn]] = {
    "clone": lambda value, **_: value.like(value.place),
    "copy": _copy,
    "fill": _full,
    "full_like": _full,
    "zero": lambda value: make("lt", value, value),
    # The same memory: what is done to the one in place is done to the other.
    "contiguous": lambda value: value,
    "detach": lambda value: value,
    "square": lambda value: make("mul", value, value),
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda value, min: _clamp(value, min=min),
    "clamp_max": lambda value, max: _clamp(value, max=max),
    "lerp": _lerp,
    "addcmul": _add_to("mul"),
    "addcdiv": _add_to("div"),
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
    "where": lambda condition, a, b: make("where", condition, a, b),
    "zeros_like": lambda value: make("lt", value, value),
    "ones_like": lambda value: make("eq", make("lt", value, value), 0.0),
    "to": _to,
    "double": _double,
    "float": _float,
    # Of a condition, which is 1 or 0.
    "logical_not": lambda value: make("eq", value, 0.0),
    "logical_and": lambda a, b: make("mul", make("ne", a, 0.0), make("ne", b, 0.0)),
    "logical_or": lambda a, b: make("maximum", make("ne", a, 0.0), make("ne", b, 0.0)),
}


def _reversed(name: str) -> Callable[[StandIn, Any], StandIn]:
    return lambda self, other: make(name, other, self)


def _define_methods() -> None:
    for name in (*OPERATIONS, *_COMPOSED, *_SAME_AS):
        for each in (name, f"{name}_") if name != "where" else ():
            setattr(
                StandIn,
                each,
                lambda self, *args, each=each, **kwargs: call(each, (self, *args), kwargs),
            )


def _define_operators() -> None:
    named = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}
    for sign, name in named.items():
        made = _COMPOSED.get(name, partial(make, name))
        setattr(StandIn, f"__{sign}__", lambda a, b, made=made: made(a, b))
        setattr(StandIn, f"__i{sign}__", lambda a, b, name=name: call(f"{name}_", (a, b), {}))
        setattr(StandIn, f"__r{sign}__", _reversed(name))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(StandIn, f"__{name}__", lambda a, b, name=name: make(name, a, b))
    for sign, name in {"neg": "neg", "abs": "abs", "invert": "logical_not"}.items():
        setattr(StandIn, f"__{sign}__", lambda a, name=name: call(name, (a,), {}))
    for sign, name in {"and": "logical_and", "or": "logical_or"}.items():
        setattr(StandIn, f"__{sign}__", lambda a, b, name=name: call(name, (a, b), {}))


_define_methods()
_define_operators()
