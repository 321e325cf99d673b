"""Rules without a native twin, recorded: what the core is told of them, for one step.

A formula is recorded in every step, since it may look at the step and at its options; that takes
some microseconds. The program for the core is made once for every structure that is found.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from sparsestep._native import ext
from sparsestep.engines.base import Settings
from sparsestep.engines.lowering import lowered
from sparsestep.rules.program import Program, RecordError
from sparsestep.rules.trace import record

if TYPE_CHECKING:
    from sparsestep._C import _Group as Group
    from sparsestep._C import _Program as CoreProgram

# By structure. A program is small, and there are as many as there are formulas; one whose
# structure changes with every step is not to fill the memory.
_known: dict[tuple[Any, ...], CoreProgram] = {}
_MOST_KNOWN = 256


class Recorded(NamedTuple):
    """A param group as the core is told of it, for one step.

    Attributes:
        settings: of the group.
        step: the number of the update that it is for.
        group: what the core is told.
        asks_for_float32: whether the formula does, so that it cannot have float64.
    """

    settings: Settings
    step: int
    group: Group
    asks_for_float32: bool

    @property
    def key(self) -> tuple[int, int]:
        """Under which it is looked up."""
        return id(self.settings), self.step


class Programs:
    """The programs of one step.

    Attributes:
        refused: why a formula could not be recorded, by id of its settings.
    """

    def __init__(self) -> None:
        self._recorded: dict[tuple[int, int], Recorded] = {}  # by id of the settings, and step
        self.refused: dict[int, str] = {}

    def reuse(self, recorded: Iterable[Recorded]) -> None:
        """Take what was recorded for this very step already: a formula is called once in each."""
        self._recorded.update({each.key: each for each in recorded})

    def group_of(self, settings: Settings, step: int, *, in_double: bool) -> Group | None:
        """What the core is told of a param group; ``None`` where its rule cannot be recorded.

        Args:
            settings: of the group.
            step: the number of the parameter's update.
            in_double: whether the arithmetic is in float64.
        """
        found = self._find(settings, step)
        if found is None:
            return None
        if in_double and found.asks_for_float32:
            self.refused[id(settings)] = "it converts float64 values to float32"
            return None
        return found.group

    def usual_group(
        self,
        settings: Settings,
        params: Sequence[Tensor],
        state: Mapping[Tensor, Any],
        grads: Sequence[Any] | None,
    ) -> Group | None:
        """The same for all parameters of a group, of which the core takes those it is for.

        Args:
            settings: of the group.
            params: of the group.
            state: of the optimizer.
            grads: the gradients, where they are not those that the parameters have.
        """
        if settings.rule.recorded is None:
            return None
        step = next_step(params, state, grads)
        found = self._find(settings, step) if step else None
        return None if found is None or found.asks_for_float32 else found.group

    def _find(self, settings: Settings, step: int) -> Recorded | None:
        key = (id(settings), step)
        found = self._recorded.get(key)
        if found is not None:
            return found
        if ext is None or settings.rule.recorded is None or id(settings) in self.refused:
            return None
        try:
            found = self._recorded[key] = _recorded(settings, step)
        except RecordError as error:
            self.refused[id(settings)] = str(error)
        except MemoryError:
            raise
        except Exception as error:  # whatever a formula does with what is no tensor
            self.refused[id(settings)] = f"{type(error).__name__}: {error}"
        return found


def next_step(
    params: Sequence[Tensor], state: Mapping[Tensor, Any], grads: Sequence[Any] | None = None
) -> int | None:
    """The number of the next update of the first parameter that has a gradient.

    Those that are at another the core declines. ``None`` where it is not known.
    """
    for index, param in enumerate(params):
        if (param.grad if grads is None else grads[index]) is None:
            continue
        taken = state[param].get("step") if param in state else None
        if isinstance(taken, Tensor) and taken.numel() == 1:
            taken = taken.item()
        if not isinstance(taken, int | float) or not 0 <= taken < 2**53:
            return None
        return int(taken) + 1
    return None


def recorded_again(
    values: tuple[Any, ...], settings: Settings, group: dict[str, Any], state: Mapping[Tensor, Any]
) -> Recorded | None:
    """What ``step_again`` is told of a param group, recorded anew.

    Args:
        values: those of the group when it was read.
        settings: what they say.
        group: the param group.
        state: of the optimizer.

    Returns:
        ``None`` where the step is to be planned: the formula cannot be recorded this time, the
        group says something else, or has no gradient.
    """
    if len(values) != len(group) or not all(map(is_, group.values(), values)):
        return None
    step = next_step(group["params"], state)
    try:
        return _recorded(settings, step) if step else None
    except Exception:  # is said by whoever plans the step
        return None


def _recorded(settings: Settings, step: int) -> Recorded:
    assert ext is not None
    rule = settings.rule
    program = record(rule, step, settings.hyper)
    group = ext.Group(
        _for_core(program),
        rule.state_names,
        step,
        settings.sign,
        settings.l2,
        settings.shrink,
        tuple(program.numbers),
        settings.stochastic,
    )
    return Recorded(settings, step, group, program.asks_for_float32)


def _for_core(program: Program) -> CoreProgram:
    assert ext is not None
    structure = program.structure
    known = _known.get(structure)
    if known is None:
        known = ext.Program(*lowered(program).encoded)
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[structure] = known
    return known
