"""Stand-ins for tensors: a formula that is called on them writes its program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from sys import getrefcount
from typing import Any

import torch
from torch import Tensor

from sparsestep.rules.program import (
    OF_ROWS,
    OPERATIONS,
    Program,
    RecordError,
    Value,
    value_at,
)
from sparsestep.rules.rule import Rule


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
