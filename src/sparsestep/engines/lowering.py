"""Lowers a traced formula to the program that the core runs over the tiles of a row.

The core passes over a row once per *phase*. All phases but the last end in reductions of the row
(mean, sum or maximum) and write nothing; the next phase recomputes the elements it needs, so that a
row may have any length. A phase first computes values per row, then elements, tile by tile, in
registers.

The native side is ``native/core/program.h`` (format) and ``native/kernels/programs.cpp``
(operations).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from sparsestep.rules.trace import (
    ROW_REDUCTIONS,
    Argument,
    ConstantRef,
    Program,
    TraceError,
    values_in,
)


class Instruction(NamedTuple):
    """An operation on registers."""

    code: str
    to: int
    operands: tuple[int, ...]


# An operation: its name, the place of its value, its arguments.
FusedOp: TypeAlias = tuple[str, int, tuple[Argument, ...]]


class _PhaseLowering:
    """Lowers the tile operations of one phase.

    It needs the values ``needed``, in order. Those in ``wanted`` must be in registers at the end;
    if it ``writes``, they are the new parameter and states.
    """

    def __init__(
        self, lowering: _Lowering, needed: Sequence[int], wanted: Sequence[int], *, writes: bool
    ) -> None:
        operations, inputs = lowering.operations, lowering.inputs
        self._operations = operations
        self._given = lowering.given
        self._wanted = wanted
        self._results: Sequence[int] = wanted if writes else ()
        self._homes: list[int] = [0, *range(2, inputs)][: len(self._results)]
        self._made = [p for p in needed if p >= inputs and not operations[p].per_row]
        self._registers: dict[int, int] = {}
        self._free: list[int] = []
        self._first_temporary = self._next = lowering.next_register
        self._steps = self._fuse_operations()
        # The last step that uses a value.
        self._last: dict[int, int] = {}
        for step, (_, _, arguments) in enumerate(self._steps):
            self._last.update(dict.fromkeys(values_in(arguments), step))

    def run(self) -> list[Instruction]:
        """Return the instructions."""
        made, moved = self._save_inputs()
        at_home: set[int] = set()
        for step, (name, place, arguments) in enumerate(self._steps):
            operands = tuple(self.register_of(argument) for argument in arguments)
            for value in values_in(arguments):
                self._release(value, step)
            home = self._find_home(place, step, at_home)
            if home is None:
                self._registers[place] = self._new_register()
            else:
                self._registers[place] = home
                at_home.add(home)
            made.append(Instruction(name, self._registers[place], operands))
        for place, home in zip(self._results, self._homes, strict=True):
            register = moved[place] if place in moved else self.register_of(place)
            if home not in at_home and register != home:
                made.append(Instruction("copy", home, (register,)))
        return made

    def register_of(self, argument: Argument) -> int:
        """Return the register of an argument."""
        register = self._given(argument)
        if register is None:
            assert isinstance(argument, int)
            return self._registers[argument]
        return register

    def _save_inputs(self) -> tuple[list[Instruction], dict[int, int]]:
        """Copy inputs that become the new value of another, before they are overwritten."""
        made, moved = [], {}
        for place, home in zip(self._results, self._homes, strict=True):
            if place in self._homes and place != home and place not in moved:
                moved[place] = self._new_register()
                made.append(Instruction("copy", moved[place], (place,)))
        return made, moved

    def _find_home(self, place: int, step: int, taken: set[int]) -> int | None:
        """The final register of a result, if its old value is no longer needed."""
        for result, home in zip(self._results, self._homes, strict=True):
            if result == place and home not in taken and self._last.get(home, -1) <= step:
                return home
        return None

    def _new_register(self) -> int:
        if self._free:
            return self._free.pop()
        self._next += 1
        return self._next - 1

    def _release(self, place: int, step: int) -> None:
        register = self._registers.get(place)
        if register is None or place in self._wanted or self._last[place] != step:
            return
        if register >= self._first_temporary and register not in self._free:
            self._free.append(register)

    def _fuse_operations(self) -> list[FusedOp]:
        """Return the operations, with frequent sequences fused."""
        operations = self._operations
        uses = Counter(
            value for place in self._made for value in values_in(operations[place].arguments)
        )
        steps: dict[int, FusedOp] = {}

        def used_once(argument: Argument) -> FusedOp | None:
            """Return the operation of a value with no other use."""
            if isinstance(argument, ConstantRef) or argument in self._wanted:
                return None
            return steps.get(argument) if uses[argument] == 1 else None

        for place in self._made:
            name, arguments, _ = operations[place]
            makers = [used_once(argument) for argument in arguments]
            name, arguments, absorbed = _fuse(name, arguments, makers)
            for each in absorbed:
                del steps[each]
            steps[place] = (name, place, arguments)
        return list(steps.values())


def _fuse(
    name: str, arguments: tuple[Argument, ...], makers: list[FusedOp | None]
) -> tuple[str, tuple[Argument, ...], list[int]]:
    """Fuse an operation with those that compute its arguments, if there is an instruction for it.

    ``makers`` has the operation that computes each argument, if that has no other use. Returns name
    and arguments of the fused operation, and the places of the operations it replaces.
    """
    if len(arguments) != 2:
        return name, arguments, []
    (first, second), (left, right) = arguments, makers
    if name == "add" and left and right and left[0] == right[0] == "mul" and left != right:
        return "mul_mul_add", (*left[2], *right[2]), [left[1], right[1]]
    for maker, other, fused in (
        (right, first, _FUSE_RIGHT.get((name, right[0] if right else ""))),
        (left, second, _FUSE_LEFT.get((name, left[0] if left else ""))),
    ):
        if maker and fused:
            return fused, (*maker[2], other), [maker[1]]
    return name, arguments, []


# Fused instruction of an operation and the maker of its second, or first, argument. The maker's
# arguments come first.
_FUSE_EITHER = {
    ("add", "mul"): "mul_add",
    ("add", "sqrt"): "sqrt_add",
    ("add", "sqrt_div"): "sqrt_div_add",
}
_FUSE_RIGHT = {
    **_FUSE_EITHER,
    ("sub", "mul"): "sub_mul",
    ("sub", "div"): "sub_div",
    ("sub", "mul_div"): "sub_mul_div",
}
_FUSE_LEFT = {
    **_FUSE_EITHER,
    ("sub", "mul"): "mul_sub",
    ("div", "mul"): "mul_div",
    ("div", "sqrt"): "sqrt_div",
}


# The order is that of Code in native/core/program.h.
_OF_TWO = ("add", "sub", "mul", "div", "maximum", "minimum", "pow")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")
_OF_ONE = ("neg", "abs", "sign", "sqrt", "rsqrt", "reciprocal", "exp", "log", "copy", "spread")
_FUSED = ("mul_add", "mul_sub", "sub_mul", "mul_mul_add", "mul_div", "sub_div", "sub_mul_div")
_ROOTS = ("sqrt_add", "sqrt_div", "sqrt_div_add")
OPCODES = {
    name: code
    for code, name in enumerate(
        (*_OF_TWO, *_COMPARISONS, *_OF_ONE, "where", *_FUSED, *_ROOTS, *ROW_REDUCTIONS)
    )
}

# Limits of the core, as in native/core/types.h and program.h.
MAX_STATES, MAX_ROW_STATES = 8, 4
MAX_TILE_REGISTERS, MAX_ROW_REGISTERS = 64, 128
MAX_REDUCTIONS = 8


class Phase(NamedTuple):
    """Instructions that run once per row, then those that run for each tile of it."""

    row: list[Instruction]
    tile: list[Instruction]


class LoweredProgram(NamedTuple):
    """A program for the core: counts of its inputs, and phases, in order."""

    states: int  # per element
    row_states: int
    constants: int
    phases: list[Phase]
    row_results: list[int]  # registers of the new states per row

    @property
    def encoded(self) -> tuple[int, int, int, tuple[tuple[bytes, bytes], ...], bytes]:
        """The arguments of ``_C.Program``."""
        phases = tuple((_encode(phase.row), _encode(phase.tile)) for phase in self.phases)
        results = array("H", self.row_results).tobytes()
        return self.states, self.row_states, self.constants, phases, results


def _encode(instructions: Iterable[Instruction]) -> bytes:
    constants = array("H")
    for code, to, operands in instructions:
        given = (*operands, *operands[:1] * (4 - len(operands)))
        constants.extend((OPCODES[code], to, *given))
    return constants.tobytes()


def lower(program: Program) -> LoweredProgram:
    """Lower a traced program for the core.

    Raises:
        TraceError: it exceeds the limits of the core.

    Example:
        >>> from sparsestep.rules.rule import Rule
        >>> from sparsestep.rules.trace import trace
        >>> mine = Rule("mine", lambda param, grad, *, lr: param - lr * grad / (grad.abs() + 1))
        >>> for instruction in lower(trace(mine, 1, {"lr": 0.5})).phases[0].tile:
        ...     print(instruction.code, instruction.operands, "to", instruction.to)
        abs (1,) to 4
        add (4, 3) to 4
        sub_mul_div (2, 1, 4, 0) to 0
    """
    return _Lowering(program).run()


class _Lowering:
    def __init__(self, program: Program) -> None:
        self._program = program
        self.operations = program.operations
        inputs = self.operations[: len(program.inputs)]
        self._row_states = sum(operation.per_row for operation in inputs)
        self.inputs = len(inputs) - self._row_states  # those of tiles
        self._results = program.results[: self.inputs - 1]
        self._row_results = program.results[self.inputs - 1 :]
        self._levels = self._find_levels()
        self._live = self._needed(program.results, through_rows=True)
        first = self._row_states + len(program.constants)
        self._row_registers = {self.inputs + s: s for s in range(self._row_states)}
        self._next_row_register = first
        self._spread: dict[int, int] = {}  # registers of tiles, for values of the row
        self.next_register = self.inputs + len(program.constants)

    def run(self) -> LoweredProgram:
        levels = [self._levels[place] for place in self._live]
        phases = [self._phase(level) for level in range(max(levels, default=0) + 1)]
        results = [self._row_registers[place] for place in self._row_results]
        constants = len(self._program.constants)
        made = LoweredProgram(self.inputs - 2, self._row_states, constants, phases, results)
        self._check_size(made)
        return made

    def _check_size(self, made: LoweredProgram) -> None:
        most = max(
            (i.to for phase in made.phases for i in phase.tile if i.code not in ROW_REDUCTIONS),
            default=0,
        )
        reductions = (sum(i.code in ROW_REDUCTIONS for i in phase.tile) for phase in made.phases)
        if (
            made.states > MAX_STATES
            or made.row_states > MAX_ROW_STATES
            or max(most, self.next_register) >= MAX_TILE_REGISTERS
            or self._next_row_register > MAX_ROW_REGISTERS
            or max(reductions) > MAX_REDUCTIONS
        ):
            raise TraceError("it is too long, or has too much state, for the core")

    # Dependencies

    def _find_levels(self) -> list[int]:
        """For each value, the number of row reductions it depends on: its phase."""
        levels: list[int] = []
        for name, arguments, _ in self.operations:
            known = [levels[value] for value in values_in(arguments)]
            levels.append(max(known, default=0) + (name in ROW_REDUCTIONS))
        return levels

    def _needed(self, places: Iterable[int], *, through_rows: bool) -> list[int]:
        """Values that others depend on, in order; values per row only if ``through_rows``."""
        found: set[int] = set()
        waiting = list(places)
        while waiting:
            place = waiting.pop()
            if place in found:
                continue
            found.add(place)
            operation = self.operations[place]
            if through_rows or not operation.per_row:
                waiting += values_in(operation.arguments)
        return sorted(found)

    # One phase

    def _phase(self, level: int) -> Phase:
        operations = self.operations
        row = [
            self._row_operation(place)
            for place in self._live
            if self._levels[place] == level and self._is_row_operation(place)
        ]
        reductions = [
            place
            for place in self._live
            if self._levels[place] == level + 1 and operations[place].name in ROW_REDUCTIONS
        ]
        reduced = [
            value for place in reductions for value in values_in(operations[place].arguments)
        ]
        wanted: Sequence[int] = reduced or self._results
        needed = self._needed(wanted, through_rows=False)
        row += self._broadcast(place for place in needed if operations[place].per_row)
        tiles = _PhaseLowering(self, needed, wanted, writes=not reductions)
        tile = tiles.run()
        for place, value in zip(reductions, reduced, strict=True):
            register = self._new_row_register(place)
            tile.append(Instruction(operations[place].name, register, (tiles.register_of(value),)))
        return Phase(row, tile)

    def _is_row_operation(self, place: int) -> bool:
        name, _, per_row = self.operations[place]
        return per_row and name != "input" and name not in ROW_REDUCTIONS

    def _row_operation(self, place: int) -> Instruction:
        name, arguments, _ = self.operations[place]
        operands = tuple(
            self._row_states + a.place if isinstance(a, ConstantRef) else self._row_registers[a]
            for a in arguments
        )
        return Instruction(name, self._new_row_register(place), operands)

    def _new_row_register(self, place: int) -> int:
        self._row_registers[place] = self._next_row_register
        self._next_row_register += 1
        return self._row_registers[place]

    def _broadcast(self, places: Iterable[int]) -> list[Instruction]:
        """Broadcast values per row to tiles, unless done already."""
        made = []
        for place in places:
            if place not in self._spread:
                self._spread[place] = self.next_register
                self.next_register += 1
                operand = self._row_registers[place]
                made.append(Instruction("spread", self._spread[place], (operand,)))
        return made

    def given(self, argument: Argument) -> int | None:
        """The register of an argument that no phase computes."""
        if isinstance(argument, ConstantRef):
            return self.inputs + argument.place
        return argument if argument < self.inputs else self._spread.get(argument)
