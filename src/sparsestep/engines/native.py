"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

The core reads the tensors' addresses and strides itself, keeps none of them beyond the step, and
checks the positions before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext, isa
from sparsestep.engines.base import GroupSettings, ParamUpdate
from sparsestep.engines.lowering import lower
from sparsestep.errors import RangeError
from sparsestep.grads.indexed import index_error
from sparsestep.grads.layouts import Gradient
from sparsestep.rules import int8
from sparsestep.rules.trace import Program, TraceError, trace

if TYPE_CHECKING:
    from sparsestep._C import _NativeGroup as NativeGroup
    from sparsestep._C import _Program as NativeProgram

# By structure. The cache is bounded: a rule may change structure every step.
_lowered: dict[tuple[Any, ...], NativeProgram] = {}
_MAX_LOWERED = 256


class TracedGroup(NamedTuple):
    """A param group as the core is told of it, for one step.

    Attributes:
        settings: of the group.
        step: the number of the update that it is for.
        group: what the core is told.
        asks_for_float32: whether the formula does, so that it cannot have float64.
    """

    settings: GroupSettings
    step: int
    group: NativeGroup
    casts_to_float32: bool

    @property
    def key(self) -> tuple[int, int]:
        """Under which it is looked up."""
        return id(self.settings), self.step


class StepTraces:
    """The programs of one step.

    Attributes:
        errors: why a formula could not be traced, by id of its settings.
    """

    def __init__(self) -> None:
        self._recorded: dict[tuple[int, int], TracedGroup] = {}  # by id of the settings, and step
        self.errors: dict[int, str] = {}

    def adopt(self, traced: Iterable[TracedGroup]) -> None:
        """Adopt traces of this very step: a formula is called once per step."""
        self._recorded.update({each.key: each for each in traced})

    def native_group(
        self, settings: GroupSettings, step: int, *, in_double: bool
    ) -> NativeGroup | None:
        """Return the core's view of a param group; ``None`` if its rule cannot be traced.

        Args:
            settings: of the group.
            step: the number of the parameter's update.
            in_double: whether the arithmetic is in float64.
        """
        found = self._find(settings, step)
        if found is None:
            return None
        if in_double and found.casts_to_float32:
            self.errors[id(settings)] = "it converts float64 values to float32"
            return None
        return found.group

    def standard_group(
        self,
        settings: GroupSettings,
        params: Sequence[Tensor],
        state: Mapping[Tensor, Any],
        grads: Sequence[Any] | None,
    ) -> NativeGroup | None:
        """The same for all parameters of a group, of which the core takes those it is for.

        Args:
            settings: of the group.
            params: of the group.
            state: of the optimizer.
            grads: the gradients, where they are not those that the parameters have.
        """
        if settings.rule.traceable_update is None:
            return None
        step = next_step_number(params, state, grads)
        found = self._find(settings, step) if step else None
        return None if found is None or found.casts_to_float32 else found.group

    def _find(self, settings: GroupSettings, step: int) -> TracedGroup | None:
        key = (id(settings), step)
        found = self._recorded.get(key)
        if found is not None:
            return found
        if ext is None or settings.rule.traceable_update is None or id(settings) in self.errors:
            return None
        try:
            found = self._recorded[key] = _trace_group(settings, step)
        except TraceError as error:
            self.errors[id(settings)] = str(error)
        except MemoryError:
            raise
        except Exception as error:  # whatever a formula does with what is no tensor
            self.errors[id(settings)] = f"{type(error).__name__}: {error}"
        return found


def next_step_number(
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


def retrace(
    values: tuple[Any, ...],
    settings: GroupSettings,
    group: dict[str, Any],
    state: Mapping[Tensor, Any],
) -> TracedGroup | None:
    """Trace a param group again, for ``replay_step``.

    Args:
        values: those of the group when it was read.
        settings: what they say.
        group: the param group.
        state: of the optimizer.

    Returns:
        ``None`` where the step is to be planned: the formula cannot be traced this time, the
        group says something else, or has no gradient.
    """
    if len(values) != len(group) or not all(map(is_, group.values(), values)):
        return None
    step = next_step_number(group["params"], state)
    try:
        return _trace_group(settings, step) if step else None
    except Exception:  # planning the step raises it again
        return None


def _trace_group(settings: GroupSettings, step: int) -> TracedGroup:
    assert ext is not None
    rule = settings.rule
    program = trace(rule, step, settings.hyperparams)
    group = ext.NativeGroup(
        _lower_cached(program),
        rule.state_names,
        step,
        settings.grad_sign,
        settings.coupled_decay,
        settings.decay_factor,
        tuple(program.constants),
        settings.stochastic_rounding,
    )
    return TracedGroup(settings, step, group, program.casts_to_float32)


def _lower_cached(program: Program) -> NativeProgram:
    assert ext is not None
    structure = program.structure
    known = _lowered.get(structure)
    if known is None:
        known = ext.Program(*lower(program).encoded)
        if len(_lowered) >= _MAX_LOWERED:
            _lowered.clear()
        _lowered[structure] = known
    return known


if TYPE_CHECKING:
    from sparsestep._C import _NativeGroup as NativeGroup
    from sparsestep.grads.masks import CachedMask

    # Of a group as it was read: its values, what the core was told, its masks, if it has any.
    CachedGroup = tuple[tuple[Any, ...], NativeGroup | None, list[CachedMask] | None]

_RULES: dict[str, tuple[int, int, int, int]] = ext.rules() if ext else {}


class NativeEngine:
    """The updates of one step that the core runs, all at once."""

    def __init__(self) -> None:
        assert ext is not None
        self._jobs = ext.NativeStep(isa.index)
        self.traces: StepTraces = StepTraces()
        # Applies the updates, and counts those that were claimed in groups: one call of the core.
        self.commit: Callable[[], None] = self._jobs.commit

    def claim_standard(
        self,
        settings: GroupSettings,
        params: list[Tensor],
        state: dict[Tensor, Any],
        known: dict[int, tuple[Any, ...]],
        seen: set[int],
        selections: list[tuple[Tensor, int, torch.Size] | None] | None,
        grads: Sequence[Gradient | None] | None,
        first: int,
    ) -> Sequence[int]:
        """Fast path: let the core claim the parameters of a group that it can read itself.

        That is a row-sparse gradient on the CPU, or a dense one with a selection; state that fits;
        everything contiguous. It declines whatever is unusual, so all cases and all messages are on
        this side alone.

        Args:
            settings: of the group.
            params: of the group, all or some that follow each other.
            state: of the optimizer.
            known: where the memory of each parameter and its state was when it was looked at.
            seen: ids of parameters that were taken in this step.
            selections: what masks select, for each parameter.
            grads: the gradients, where they are not those that the parameters have.
            first: the number of the first of these parameters in the group.

        Returns:
            The numbers of the parameters that the core declines, of those that have a gradient.
        """
        group = None
        if settings.seed is None:
            group = native_group(settings)
            if group is None:
                group = self.traces.standard_group(settings, params, state, grads)
        if group is None:
            return range(first, first + len(params))
        return self._jobs.try_claim(
            group, settings, params, state, known, seen, selections, grads, first
        )

    def claim(self, update: ParamUpdate) -> bool:
        """Take an update; false where the core has no way to run it."""
        settings = update.settings
        group = native_group(settings)
        if group is None and update.param.is_cpu:
            tensors = (*update.targets, update.indexed.values)
            in_double = any(tensor.dtype == torch.float64 for tensor in tensors)
            group = self.traces.native_group(settings, update.step, in_double=in_double)
        if group is None:
            return False
        touched = update.indexed
        if not touched.values.is_contiguous():
            touched = touched.with_value_rows()
        param, *state = update.targets
        return self._jobs.add(
            *(group, update.step, touched, param, state, update.seed, update.row_stride),
            *(settings, update.index),
        )

    def trace_error(self, settings: GroupSettings) -> str | None:
        """Return why a rule's formula could not be traced, or ``None``."""
        return self.traces.errors.get(id(settings))

    def prepare(self) -> None:
        """Do all that may fail; raises if any position is no slot."""
        bad = self._jobs.prepare(torch.get_num_threads())
        if bad is not None:
            settings, index, slots, position = bad
            why = index_error(position, slots)
            raise RangeError(f"{settings.describe_param(index)}: {why}")


def native_group(settings: GroupSettings) -> NativeGroup | None:
    """What the core is told of a param group; ``None`` where it does not know the rule."""
    rule = settings.rule
    kernel = _RULES.get(rule.name)
    if ext is None or kernel is None or not rule.has_native_kernel:
        return None
    found: NativeGroup | None = settings.core.get("group")
    if found is None:
        found = settings.core["group"] = ext.NativeGroup(
            kernel[0],
            rule.state_names,
            rule.counts_steps,
            settings.grad_sign,
            settings.coupled_decay,
            settings.decay_factor,
            rule.pack_hyperparams(settings.hyperparams),
            settings.stochastic_rounding,
            tuple(
                spec.int8_format == "signed" for spec in rule.state[: int8.num_encoded(rule.state)]
            ),
        )
    return found


class CachedPlan(NamedTuple):
    """What the core knows about each param group, so that an identical step needs one call.

    Attributes:
        cached_groups: for each group, its values when it was read, the core's view of it, if any,
            and its masks.
        traced: groups whose formula is traced in every step, by index.
        unused_traces: traces of a step that could not be replayed after all.
    """

    cached_groups: list[CachedGroup]
    traced: list[tuple[int, GroupSettings]]
    unused_traces: list[TracedGroup]


def replay_step(
    groups: list[dict[str, Any]],
    cached: CachedPlan,
    state: dict[Tensor, Any],
    known: dict[int, tuple[Any, ...]],
) -> bool:
    """Do a whole step in one call of the core, where it is like one before.

    Args:
        groups: the param groups.
        cached: what the core knows about them.
        state: of the optimizer.
        known: where the memory of each parameter and its state was when it was looked at.

    Returns:
        Whether it was done. If not, nothing was: a group says something else now, or a gradient is
        not one that the core reads.
    """
    assert ext is not None
    cached_groups, traced, unused_traces = cached
    if traced and len(groups) != len(cached_groups):
        return False
    for index, settings in traced:
        values, _, masked = cached_groups[index]
        found = retrace(values, settings, groups[index], state)
        if found is None:
            return False
        unused_traces.append(found)
        if found.casts_to_float32:
            return False
        cached_groups[index] = (values, found.group, masked)
    threads = torch.get_num_threads()
    is_done = ext.replay_step(isa.index, groups, cached_groups, state, known, threads)
    if is_done and traced:
        unused_traces.clear()
    return is_done
