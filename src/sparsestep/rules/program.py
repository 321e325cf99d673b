"""A formula, recorded: what it does to any element, as a list of operations.

A rule's ``update`` is called once on stand-ins for tensors (``stand_in``), with plain numbers for
its options. What comes out is a *program*: straight-line operations on values, and the numbers that
they take. Whatever a formula decides from ``step`` or its options is decided by then, so it is
recorded anew for every step; as long as only numbers differ, the program has the same structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor


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
