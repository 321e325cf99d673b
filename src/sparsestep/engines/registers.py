"""The instructions of a program on tiles: which register has which value, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from sparsestep.rules.program import Argument, Number, Operation, Value


class Instruction(NamedTuple):
    """An operation on registers."""

    code: str
    to: int
    operands: tuple[int, ...]


class Given(NamedTuple):
    """What a phase of a program begins with.

    Attributes:
        operations: of the program.
        inputs: how many registers are the parameter, its gradient and the states per element.
        first_temporary: the first register that is free.
        register: where an argument is that no phase computes; ``None`` for the others.
    """

    operations: list[Operation]
    inputs: int
    first_temporary: int
    register: Callable[[Argument], int | None]


# An operation: its name, the place of its value, what it takes.
Step: TypeAlias = tuple[str, int, tuple[Argument, ...]]


class TileCode:
    """The instructions of one phase on tiles.

    Args:
        given: what there is before it.
        needed: values that the phase needs, in order.
        wanted: those of them that are to be there at its end.
        writes: whether these are the new parameter and states, to be written.
    """

    def __init__(
        self, given: Given, needed: Sequence[int], wanted: Sequence[int], *, writes: bool
    ) -> None:
        self._given = given
        self._wanted = wanted
        self._results: Sequence[int] = wanted if writes else ()
        self._homes: list[int] = [0, *range(2, given.inputs)][: len(self._results)]
        self._made = [p for p in needed if not self._is_given(p)]
        self._registers: dict[int, int] = {}
        self._free: list[int] = []
        self._next = given.first_temporary
        self._steps = self._fused()
        # The last step that uses a value.
        self._last: dict[int, int] = {}
        for step, (_, _, arguments) in enumerate(self._steps):
            for argument in arguments:
                if not isinstance(argument, Number):
                    self._last[argument.place] = step

    def run(self) -> list[Instruction]:
        """The instructions."""
        made, moved = self._save_inputs()
        at_home: set[int] = set()
        for step, (name, place, arguments) in enumerate(self._steps):
            operands = tuple(self.register_of(argument) for argument in arguments)
            for argument in arguments:
                if not isinstance(argument, Number):
                    self._release(argument.place, step)
            home = self._home_for(place, step, at_home)
            if home is None:
                self._registers[place] = self._new()
            else:
                self._registers[place] = home
                at_home.add(home)
            made.append(Instruction(name, self._registers[place], operands))
        for place, home in zip(self._results, self._homes, strict=True):
            register = moved[place] if place in moved else self.register_of(Value(place))
            if home not in at_home and register != home:
                made.append(Instruction("copy", home, (register,)))
        return made

    def register_of(self, argument: Argument) -> int:
        """Where an argument is."""
        register = self._given.register(argument)
        return self._registers[argument.place] if register is None else register

    def _is_given(self, place: int) -> bool:
        return place < self._given.inputs or self._given.operations[place].per_row

    def _save_inputs(self) -> tuple[list[Instruction], dict[int, int]]:
        """Copies of inputs that become another's new value, before anything is overwritten."""
        made, moved = [], {}
        for place, home in zip(self._results, self._homes, strict=True):
            if place in self._homes and place != home and place not in moved:
                moved[place] = self._new()
                made.append(Instruction("copy", moved[place], (place,)))
        return made, moved

    def _home_for(self, place: int, step: int, taken: set[int]) -> int | None:
        """Where a value is written at once, if it is a result and what was there is done with."""
        for result, home in zip(self._results, self._homes, strict=True):
            if result == place and home not in taken and self._last.get(home, -1) <= step:
                return home
        return None

    def _new(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def _release(self, place: int, step: int) -> None:
        register = self._registers.get(place)
        if register is None or place in self._wanted or self._last[place] != step:
            return
        if register >= self._given.first_temporary and register not in self._free:
            self._free.append(register)

    def _fused(self) -> list[Step]:
        """The operations, some of them two or three in one."""
        operations = self._given.operations
        uses: dict[int, int] = {}
        for place in self._made:
            for argument in operations[place].arguments:
                if not isinstance(argument, Number):
                    uses[argument.place] = uses.get(argument.place, 0) + 1
        steps: dict[int, Step] = {}

        def used_once(argument: Argument) -> Step | None:
            """What makes a value that nobody else uses."""
            if isinstance(argument, Number) or argument.place in self._wanted:
                return None
            return steps.get(argument.place) if uses[argument.place] == 1 else None

        for place in self._made:
            name, arguments, _ = operations[place]
            made = _in_one(name, arguments, [used_once(argument) for argument in arguments])
            name, arguments, absorbed = made
            for each in absorbed:
                del steps[each]
            steps[place] = (name, place, arguments)
        return list(steps.values())


def _in_one(
    name: str, arguments: tuple[Argument, ...], makers: list[Step | None]
) -> tuple[str, tuple[Argument, ...], list[int]]:
    """An operation together with those that make its arguments, where there is one for them all.

    Args:
        name: of the operation.
        arguments: what it takes.
        makers: what makes each of these, where it is for this alone.

    Returns:
        Name and arguments of the one, and the places of those that it takes in.
    """
    if len(arguments) != 2:
        return name, arguments, []
    (first, second), (left, right) = arguments, makers
    if name == "add" and left and right and left[0] == right[0] == "mul" and left != right:
        return "mul_mul_add", (*left[2], *right[2]), [left[1], right[1]]
    for maker, other, fused in (
        (right, first, _WITH_SECOND.get((name, right[0] if right else ""))),
        (left, second, _WITH_FIRST.get((name, left[0] if left else ""))),
    ):
        if maker and fused:
            return fused, (*maker[2], other), [maker[1]]
    return name, arguments, []


# What an operation and the maker of its second, or first, argument are in one. The arguments of the
# maker come first, then the other one.
_WITH_SECOND = {
    ("add", "mul"): "mul_add",
    ("add", "sqrt"): "sqrt_add",
    ("add", "sqrt_div"): "sqrt_div_add",
    ("sub", "mul"): "sub_mul",
    ("sub", "div"): "sub_div",
    ("sub", "mul_div"): "sub_mul_div",
}
_WITH_FIRST = {
    ("add", "mul"): "mul_add",
    ("add", "sqrt"): "sqrt_add",
    ("add", "sqrt_div"): "sqrt_div_add",
    ("sub", "mul"): "mul_sub",
    ("div", "mul"): "mul_div",
    ("div", "sqrt"): "sqrt_div",
}
