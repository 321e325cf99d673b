"""Tracing: a formula called on tracers gives a straight-line program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from sys import getrefcount
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from sparsestep.rules.rule import Rule

Value = TypeVar("Value")


class TraceError(Exception):
    """A formula does something that is no operation on single elements or rows."""


class ConstantRef(NamedTuple):
    """One of a program's numbers, by its place among them."""

    place: int


# A value, by the place of the operation that makes it, or a number.
Argument: TypeAlias = int | ConstantRef


class Operation(NamedTuple):
    """An operation of a program, which computes a value."""

    name: str  # ``"input"``, or one of ``OPERATIONS``
    arguments: tuple[Argument, ...]  # of an input none
    per_row: bool  # one number for each row, not one for each element


def values_in(arguments: Iterable[Argument]) -> list[int]:
    """The values among some arguments, without the numbers."""
    return [argument for argument in arguments if isinstance(argument, int)]


@dataclass
class Program:
    """A formula as a straight-line program.

    Example:
        >>> def update(param, grad, sum, *, lr):
        ...     sum = sum + grad * grad
        ...     return param - lr * grad / sum.sqrt(), sum
        >>> from sparsestep.rules.rule import Rule, StateSpec
        >>> trace(Rule("mine", update, (StateSpec("sum"),)), 1, {"lr": 0.5})
        param, grad, sum
        v3 = mul(grad, grad)
        v4 = add(sum, v3)
        v5 = mul(0.5, grad)
        v6 = sqrt(v4)
        v7 = div(v5, v6)
        v8 = sub(param, v7)
        return v8, v4
    """

    inputs: tuple[str, ...]  # names of the first values: parameter, gradient, state
    operations: list[Operation] = field(default_factory=list)  # one for each value, inputs first
    constants: list[float] = field(default_factory=list)  # in the order of their use
    results: tuple[int, ...] = ()  # the new parameter and state
    allow_float64: bool = False  # whether some values may be float64
    casts_to_float32: bool = False  # which rules out float64 tensors
    # Of its values, while it is traced; the first one is never passed to the formula.
    tracers: list[Tracer] = field(default_factory=list)

    @property
    def structure(self) -> tuple[Any, ...]:
        """Everything but the numbers: programs with equal structure share lowered code."""
        return self.inputs, tuple(self.operations), self.results

    def add(self, name: str, arguments: Sequence[int | float], *, per_row: bool) -> int:
        """Append an operation on values, given by place, and numbers; return its place."""
        found: list[Argument] = []
        for argument in arguments:
            if type(argument) is int:
                found.append(argument)
            else:
                found.append(ConstantRef(len(self.constants)))
                self.constants.append(argument)
        self.operations.append(Operation(name, tuple(found), per_row))
        return len(self.operations) - 1

    def __repr__(self) -> str:
        lines = [", ".join(self.inputs)]
        for place, operation in enumerate(self.operations):
            if operation.name != "input":
                arguments = ", ".join(map(self._shown, operation.arguments))
                lines.append(f"v{place} = {operation.name}({arguments})")
        results = ", ".join(map(self._shown, self.results))
        return "\n".join([*lines, f"return {results}"])

    def _shown(self, argument: Argument) -> str:
        if isinstance(argument, ConstantRef):
            return repr(self.constants[argument.place])
        return self.inputs[argument] if argument < len(self.inputs) else f"v{argument}"

    def evaluate(
        self,
        inputs: Sequence[Value],
        constant: Callable[[float], Value],
        apply: Callable[[str, list[Value]], Value],
    ) -> list[Value]:
        """Evaluate the program in any arithmetic."""
        found = list(inputs)
        for name, arguments, _ in self.operations[len(inputs) :]:
            given = [
                constant(self.constants[argument.place])
                if isinstance(argument, ConstantRef)
                else found[argument]
                for argument in arguments
            ]
            found.append(apply(name, given))
        return [found[place] for place in self.results]


def _as_float(condition: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Tensor]:
    return lambda a, b: condition(a, b).to(a.dtype)


# Comparisons are 1 or 0, and ``where`` tests for zero. There are also ``wide``, to float64, and
# ``narrow``, back to the dtype of all other values.
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
    "lt": _as_float(torch.lt),
    "le": _as_float(torch.le),
    "gt": _as_float(torch.gt),
    "ge": _as_float(torch.ge),
    "eq": _as_float(torch.eq),
    "ne": _as_float(torch.ne),
    "where": lambda condition, a, b: torch.where(condition != 0, a, b),
    "mean": lambda a: a.mean(1, keepdim=True),
    "sum": lambda a: a.sum(1, keepdim=True),
    "amax": lambda a: a.amax(1, keepdim=True),
}

# Operations on a whole row, whose value is one number for it.
ROW_REDUCTIONS = ("mean", "sum", "amax")


def trace(
    rule: Rule, step: int, hyperparams: Mapping[str, Any], *, allow_float64: bool = False
) -> Program:
    """Trace a rule's formula for one step; raises TraceError if it does anything else."""
    program = Program(("param", "grad", *rule.state_names), allow_float64=allow_float64)
    Tracer(program, 0)
    try:
        program.results = _call_formula(rule, program, step, hyperparams)
        counts = list(map(getrefcount, program.tracers))
        if max(counts) > counts[0]:
            raise TraceError("it keeps a value after it returns")
    finally:
        program.tracers.clear()
    return program


def _call_formula(
    rule: Rule, program: Program, step: int, hyperparams: Mapping[str, Any]
) -> tuple[int, ...]:
    kinds = [False, *(spec.per_row for spec in rule.state)]
    tracers = [
        Tracer(program, program.add("input", (), per_row=per_row)) for per_row in (False, *kinds)
    ]
    counted = {"step": step} if rule.takes_step else {}
    with torch.no_grad():
        new = (rule.traceable_update or rule.update)(*tracers, **counted, **hyperparams)
    results = list(new) if isinstance(new, tuple | list) else [new]
    if len(results) != len(kinds):
        raise TraceError(f"it returns {len(results)} values, not {len(kinds)}")
    for result, per_row in zip(results, kinds, strict=True):
        if not isinstance(result, Tracer) or (per_row and not result.is_per_row):
            raise TraceError("it returns something that is not computed from its arguments")
    return tuple(result.place for result in results)


class Tracer:
    """Symbolic tensor of any number of rows; operations on it are traced."""

    __slots__ = ("place", "program")

    def __init__(self, program: Program, place: int) -> None:
        self.program: Program = program
        self.place: int = place
        program.tracers.append(self)

    @property
    def is_per_row(self) -> bool:
        """Whether it has one value per row."""
        return self.program.operations[self.place].per_row

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return trace_call(getattr(func, "__name__", repr(func)), args, kwargs or {})

    def where(self, condition: Any, other: Any) -> Tracer:
        """``torch.where`` as a method, which has another order of arguments."""
        return emit("where", condition, self, other)

    def __getattr__(self, name: str) -> Any:
        raise TraceError(f"it uses .{name}")

    def __bool__(self) -> bool:
        raise TraceError("it branches on values")

    def __repr__(self) -> str:
        raise TraceError("it prints or formats values")

    def __hash__(self) -> int:
        return id(self)


# Functions that formulas call, in terms of ``OPERATIONS``

_ALIASES = {
    **{"subtract": "sub", "multiply": "mul", "divide": "div", "true_divide": "div"},
    **{"negative": "neg", "absolute": "abs", "sgn": "sign", "float_power": "pow"},
    **{"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"},
    **{"not_equal": "ne", "clip": "clamp"},
}


def trace_call(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
    """Trace a call of a function of torch."""
    is_in_place = name.endswith("_") and not name.endswith("__")
    name = name.rstrip("_") if is_in_place else name
    name = _ALIASES.get(name, name)
    made = (
        _DECOMPOSITIONS[name](*args, **kwargs)
        if name in _DECOMPOSITIONS
        else _trace_primitive(name, args, kwargs)
    )
    if is_in_place:
        if args[0].is_per_row and not made.is_per_row:
            raise TraceError("it broadcasts a column in place")
        args[0].place = made.place
        return args[0]  # type: ignore[no-any-return]
    return made


def _trace_primitive(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tracer:
    if name in ROW_REDUCTIONS:
        return _row_reduction(name, *args, **kwargs)
    if name not in OPERATIONS:
        raise TraceError(f"it calls {name}")
    if kwargs.keys() == {"alpha"} and name in ("add", "sub"):
        args, kwargs = (args[0], emit("mul", kwargs["alpha"], args[1])), {}
    if kwargs:
        raise TraceError(f"it calls {name} with {', '.join(kwargs)}")
    return emit(name, *args)


def emit(name: str, *args: Any) -> Tracer:
    """Append an operation to the program of its arguments."""
    program: Program | None = None
    given: list[int | float] = []
    per_row = True
    for arg in args:
        if type(arg) is Tracer:
            program = arg.program
            per_row = per_row and program.operations[arg.place].per_row
            given.append(arg.place)
        else:
            given.append(arg if type(arg) is float else _as_constant(arg))
    if program is None:
        raise TraceError(f"it calls {name} on numbers alone")
    return Tracer(program, program.add(name, given, per_row=per_row))


def _as_constant(arg: Any) -> float:
    if isinstance(arg, Tensor) and arg.dim() == 0 and not arg.is_complex():
        return float(arg)
    if isinstance(arg, bool | int | float):
        return float(arg)
    raise TraceError(f"it uses a {type(arg).__name__} that is not an argument")


def _row_reduction(name: str, row: Tracer, dim: Any = None, keepdim: bool = False) -> Tracer:
    if isinstance(dim, tuple | list) and len(dim) == 1:
        (dim,) = dim
    if dim not in (1, -1) or not keepdim or row.is_per_row:
        raise TraceError(f"it takes a {name} other than over rows, with dim=1 and keepdim=True")
    return Tracer(row.program, row.program.add(name, (row.place,), per_row=True))


def _norm(
    row: Tracer, ord: Any = 2, dim: Any = None, keepdim: bool = False, *, p: Any = 2, **more: Any
) -> Tracer:
    if any(value is not None for value in more.values()):
        raise TraceError(f"it takes a norm with {', '.join(more)}")
    ord = p if ord == 2 else ord
    if ord not in (2, 2.0, "fro", None):
        raise TraceError(f"it takes a norm of order {ord}")
    return emit("sqrt", _row_reduction("sum", emit("mul", row, row), dim, keepdim))


def _clamp(value: Any, min: Any = None, max: Any = None) -> Tracer:
    if min is not None:
        value = emit("maximum", value, min)
    return value if max is None else emit("minimum", value, max)


def _pow(base: Any, exponent: Any) -> Tracer:
    if isinstance(exponent, Tracer):
        return emit("pow", base, exponent)
    # As torch computes them.
    if exponent == 2:
        return emit("mul", base, base)
    if exponent == 3:
        return emit("mul", emit("mul", base, base), base)
    if exponent == 0.5:
        return emit("sqrt", base)
    return emit("rsqrt", base) if exponent == -0.5 else emit("pow", base, exponent)


def _lerp(start: Any, end: Any, weight: Any) -> Tracer:
    """From whichever end is nearer, as torch does."""
    if isinstance(weight, Tracer):
        raise TraceError("it calls lerp with a weight that depends on values")
    apart = emit("sub", end, start)
    if abs(float(weight)) < 0.5:
        return emit("add", start, emit("mul", weight, apart))
    return emit("sub", end, emit("mul", apart, 1 - float(weight)))


def _fused_add(name: str) -> Callable[..., Tracer]:
    def add(start: Any, first: Any, second: Any, *, value: Any = 1) -> Tracer:
        scaled = first if value == 1 else emit("mul", value, first)
        return emit("add", start, emit(name, scaled, second))

    return add


def _to_float64(value: Tracer) -> Tracer:
    if not value.program.allow_float64:
        raise TraceError("it calls double")
    return emit("wide", value)


def _to_dtype(value: Tracer, dtype: Any = None) -> Tracer:
    if isinstance(dtype, Tracer):  # all tracers have the same dtype
        return emit("narrow", value) if value.program.allow_float64 else value
    if dtype is not torch.float32:
        raise TraceError(f"it converts values to {dtype}")
    return _float(value)


def _float(value: Tracer) -> Tracer:
    value.program.casts_to_float32 = True
    return value


def _full_like(value: Tracer, number: Any) -> Tracer:
    """The same number everywhere: no value is less than itself."""
    return emit("add", emit("lt", value, value), number)


def _copy_from(value: Tracer, other: Any) -> Tracer:
    return emit("where", emit("lt", value, value), value, other)


_DECOMPOSITIONS: dict[str, Callable[..., Tracer]] = {
    "clone": lambda value, **_: Tracer(value.program, value.place),
    "copy": _copy_from,
    "fill": _full_like,
    "full_like": _full_like,
    "zero": lambda value: emit("lt", value, value),
    # They share memory: an in-place operation on one changes the other.
    "contiguous": lambda value: value,
    "detach": lambda value: value,
    "square": lambda value: emit("mul", value, value),
    "pow": _pow,
    "clamp": _clamp,
    "clamp_min": lambda value, min: _clamp(value, min=min),
    "clamp_max": lambda value, max: _clamp(value, max=max),
    "lerp": _lerp,
    "addcmul": _fused_add("mul"),
    "addcdiv": _fused_add("div"),
    "norm": _norm,
    "vector_norm": _norm,
    "linalg_vector_norm": _norm,
    "where": lambda condition, a, b: emit("where", condition, a, b),
    "zeros_like": lambda value: emit("lt", value, value),
    "ones_like": lambda value: emit("eq", emit("lt", value, value), 0.0),
    "to": _to_dtype,
    "double": _to_float64,
    "float": _float,
    # Of a condition, which is 1 or 0.
    "logical_not": lambda value: emit("eq", value, 0.0),
    "logical_and": lambda a, b: emit("mul", emit("ne", a, 0.0), emit("ne", b, 0.0)),
    "logical_or": lambda a, b: emit("maximum", emit("ne", a, 0.0), emit("ne", b, 0.0)),
}


def _define_methods() -> None:
    for name in (*OPERATIONS, *_DECOMPOSITIONS, *_ALIASES):
        for each in (name, f"{name}_") if name != "where" else ():
            setattr(
                Tracer,
                each,
                lambda self, *args, each=each, **kwargs: trace_call(each, (self, *args), kwargs),
            )


def _define_operators() -> None:
    named = {"add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "pow": "pow"}
    for sign, name in named.items():
        made = _DECOMPOSITIONS.get(name, partial(emit, name))
        setattr(Tracer, f"__{sign}__", lambda a, b, made=made: made(a, b))
        setattr(Tracer, f"__i{sign}__", lambda a, b, name=name: trace_call(f"{name}_", (a, b), {}))
        setattr(Tracer, f"__r{sign}__", lambda a, b, name=name: emit(name, b, a))
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(Tracer, f"__{name}__", lambda a, b, name=name: emit(name, a, b))
    for sign, name in {"neg": "neg", "abs": "abs", "invert": "logical_not"}.items():
        setattr(Tracer, f"__{sign}__", lambda a, name=name: trace_call(name, (a,), {}))
    for sign, name in {"and": "logical_and", "or": "logical_or"}.items():
        setattr(Tracer, f"__{sign}__", lambda a, b, name=name: trace_call(name, (a, b), {}))


_define_methods()
_define_operators()
