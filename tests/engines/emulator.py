"""What the core must compute for a traced formula, to the bit: each operation on its own.

Numpy rounds every operation as IEEE 754 says, torch's vector library does not: so it is numpy that
tells. Exponentials, logarithms and powers come from the system's library, in double.
"""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from torch import Tensor

from sparsestep.rules.trace import Program

_LANES = 16  # a row is summed in so many
_library = ctypes.CDLL(ctypes.util.find_library("m"))


def _from_library(name: str, count: int) -> Callable[..., Any]:
    function = getattr(_library, name)
    function.restype = ctypes.c_double
    function.argtypes = [ctypes.c_double] * count
    return numpy.vectorize(function, otypes=[numpy.float64])


def _in_double(name: str, count: int = 1) -> Callable[..., Any]:
    function = _from_library(name, count)

    def compute(*values: Any) -> Any:
        if min(value.size for value in values) == 0:
            return values[0]
        return function(*(value.astype(numpy.float64) for value in values)).astype(values[0].dtype)

    return compute


def _larger(a: Any, b: Any) -> Any:
    return numpy.where((a > b) | (a != a), a, b)


def _smaller(a: Any, b: Any) -> Any:
    return numpy.where((a < b) | (a != a), a, b)


def _of_row(row: Any, first: float, take: Callable[[Any, Any], Any]) -> Any:
    lanes = numpy.full((len(row), _LANES), first, dtype=row.dtype)
    for column in range(row.shape[1]):
        lane = lanes[:, column % _LANES]
        lane[:] = take(row[:, column], lane)
    while lanes.shape[1] > 1:
        half = lanes.shape[1] // 2
        lanes = take(lanes[:, :half], lanes[:, half:])
    return lanes


def _sum(row: Any) -> Any:
    return _of_row(row, 0.0, numpy.add)


def _as_number(condition: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: condition(a, b).astype(a.dtype)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": numpy.add,
    "sub": numpy.subtract,
    "mul": numpy.multiply,
    "div": numpy.divide,
    "maximum": _larger,
    "minimum": _smaller,
    "pow": _in_double("pow", 2),
    "neg": numpy.negative,
    "abs": numpy.abs,
    "sign": lambda a: (a > 0).astype(a.dtype) - (a < 0).astype(a.dtype),
    "sqrt": numpy.sqrt,
    "rsqrt": lambda a: a.dtype.type(1) / numpy.sqrt(a),
    "reciprocal": lambda a: a.dtype.type(1) / a,
    "exp": _in_double("exp"),
    "log": _in_double("log"),
    "lt": _as_number(numpy.less),
    "le": _as_number(numpy.less_equal),
    "gt": _as_number(numpy.greater),
    "ge": _as_number(numpy.greater_equal),
    "eq": _as_number(numpy.equal),
    "ne": _as_number(numpy.not_equal),
    "where": lambda condition, a, b: numpy.where(condition != 0, a, b),
    "mean": lambda row: _sum(row) / row.dtype.type(row.shape[1]),
    "sum": _sum,
    "amax": lambda row: _of_row(row, -numpy.inf, _larger),
}


def run(program: Program, values: Sequence[Tensor]) -> list[Any]:
    """The new parameter and state."""
    given = [value.numpy() for value in values]

    def constant(number: float) -> Any:
        return numpy.full((1, 1), number, dtype=given[0].dtype)

    def apply(name: str, operands: list[Any]) -> Any:
        return _OPERATIONS[name](*numpy.broadcast_arrays(*operands))

    with numpy.errstate(all="ignore"):
        found = program.evaluate(given, constant, apply)
    param, _, *state = given
    return [
        numpy.broadcast_to(new, old.shape) for new, old in zip(found, [param, *state], strict=True)
    ]
