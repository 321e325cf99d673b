"""Rules without a native twin, recorded: what the core is told of them, for one step.

A formula is recorded in every step, since it may look at the step and at its options; that takes
some microseconds. The program for the core is made once for every structure that is found.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sparsestep.contract.program import Program, RecordError
from sparsestep.contract.stand_in import record
from sparsestep.core import core
from sparsestep.engines.protocol import Settings
from sparsestep.engines.tiles import lowered

if TYPE_CHECKING:
    from sparsestep.core._native import _Group as Group
    from sparsestep.core._native import _Program as CoreProgram

# By structure. A program is small, and there are as many as there are formulas; one whose
# structure changes with every step is not to fill the memory.
_known: dict[tuple[Any, ...], CoreProgram] = {}
_MOST_KNOWN = 256


class Programs:
    """The programs of one step.

    Attributes:
        refused: why a formula could not be recorded, by id of its settings.
    """

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int, bool], tuple[Settings, Group]] = {}
        self.refused: dict[int, str] = {}

    def group_of(self, settings: Settings, step: int, *, in_double: bool) -> Group | None:
        """What the core is told of a param group; ``None`` where its rule cannot be recorded.

        Args:
            settings: of the group.
            step: the number of the parameter's update.
            in_double: whether the arithmetic is in float64.
        """
        key = (id(settings), step, in_double)
        if key in self._groups:
            return self._groups[key][1]
        if core is None or settings.rule.recorded is None or id(settings) in self.refused:
            return None
        try:
            program = record(settings.rule, step, settings.hyper)
            if in_double and program.asks_for_float32:
                raise RecordError("it converts float64 values to float32")
            made = _for_core(program)
        except RecordError as error:
            self.refused[id(settings)] = str(error)
            return None
        except Exception as error:  # whatever a formula does with what is no tensor
            self.refused[id(settings)] = f"{type(error).__name__}: {error}"
            return None
        group = core.Group(
            made,
            tuple(spec.name for spec in settings.rule.state),
            step,
            settings.sign,
            settings.l2,
            settings.shrink,
            tuple(program.numbers),
            settings.stochastic,
        )
        self._groups[key] = (settings, group)  # keeps the settings, whose id is the key
        return group


def _for_core(program: Program) -> CoreProgram:
    assert core is not None
    structure = program.structure
    known = _known.get(structure)
    if known is None:
        known = core.Program(*lowered(program).encoded)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[structure] = known
    return known
