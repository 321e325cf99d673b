"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

The core reads addresses and strides of tensors itself, keeps none of them beyond the step, and
checks indices before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext, isa
from sparsestep.engines.base import GroupSettings, ParamUpdate
from sparsestep.engines.lowering import lower
from sparsestep.errors import RangeError
from sparsestep.grads.indexed import IndexedGrad, index_error
from sparsestep.grads.layouts import Gradient
from sparsestep.memory.tensors import has_even_rows, lie_alike
from sparsestep.rules import int8
from sparsestep.rules.trace import Program, TraceError, trace

if TYPE_CHECKING:
    from sparsestep._C import _NativeGroup as NativeGroup
    from sparsestep._C import _Program as NativeProgram
    from sparsestep.grads.masks import CachedMask, PackedMask, SelectedSlots

    # A group when it was read: its values, the core's view of it, and its masks, if it has any.
    CachedGroup = tuple[tuple[Any, ...], NativeGroup | None, list[CachedMask] | None]
    # A parameter's index, and the indices of its gradient, or the parts of a compact one; ``None``
    # for a dense one.
    Claimed = tuple[int, Tensor | tuple[IndexedGrad, ...] | None]

_RULES: dict[str, tuple[int, int, int, int]] = ext.rules() if ext else {}
# By structure. The cache is bounded: a rule may change structure every step.
_lowered: dict[tuple[Any, ...], NativeProgram] = {}
_MAX_LOWERED = 256


class TracedGroup(NamedTuple):
    """A param group whose formula was traced for one step."""

    settings: GroupSettings  # kept alive: traces are found by its id
    group: NativeGroup
    casts_to_float32: bool  # which rules out float64


class StepTraces:
    """The programs of one step."""

    def __init__(self) -> None:
        self._traced: dict[tuple[int, int], TracedGroup] = {}  # by id of the settings, and step
        self.errors: dict[int, str] = {}  # why a formula cannot be traced, by id of its settings

    def clear(self) -> None:
        """Begin the next step."""
        self._traced.clear()
        self.errors.clear()

    def native_group(
        self, settings: GroupSettings, step: int, *, in_double: bool
    ) -> NativeGroup | None:
        """Return the core's view of a param group; ``None`` if its rule cannot be traced."""
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
        """The same for all parameters of a group; the core declines those at another step."""
        if settings.rule.traceable_update is None:
            return None
        step = _next_step(params, state, grads)
        found = self._find(settings, step) if step else None
        return None if found is None or found.casts_to_float32 else found.group

    def _find(self, settings: GroupSettings, step: int) -> TracedGroup | None:
        key = (id(settings), step)
        found = self._traced.get(key)
        if found is not None:
            return found
        if ext is None or settings.rule.traceable_update is None or id(settings) in self.errors:
            return None
        try:
            found = self._traced[key] = _trace_group(settings, step)
        except TraceError as error:
            self.errors[id(settings)] = str(error)
        except MemoryError:
            raise
        except Exception as error:  # a formula may do anything with its symbolic arguments
            self.errors[id(settings)] = f"{type(error).__name__}: {error}"
        return found


def _next_step(
    params: Sequence[Tensor], state: Mapping[Tensor, Any], grads: Sequence[Any] | None
) -> int | None:
    """The number of the next update of the first parameter with a gradient; ``None`` if unknown."""
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
        settings.constraint,
    )
    return TracedGroup(settings, group, program.casts_to_float32)


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


class NativeEngine:
    """The updates of one step that the core runs, all at once."""

    def __init__(self) -> None:
        assert ext is not None
        self._jobs = ext.NativeStep(isa.index)
        self.traces: StepTraces = StepTraces()
        # Applies the updates, and advances the step counts of ``claim_standard``.
        self.commit: Callable[[], None] = self._jobs.commit

    def claim_standard(
        self,
        settings: GroupSettings,
        params: list[Tensor],  # consecutive ones of the group
        state: dict[Tensor, Any],
        addresses: dict[int, tuple[Any, ...]],  # as ``StateStore`` has them
        seen: set[int],  # ids of parameters that were claimed in this step
        selections: list[SelectedSlots | PackedMask | None] | None,  # of the parameters' masks
        grads: Sequence[Gradient | None] | None,  # passed by hand, one for each parameter
        first: int,  # the index of the first of these parameters in the group
        claimed: list[Claimed] | None = None,  # to append the claimed parameters to
    ) -> Sequence[int]:
        """Fast path: the core claims the parameters of a group that it can read itself.

        These have contiguous CPU tensors and a row-sparse or dense gradient. The core declines the
        rest without an error, and this returns their indices: Python handles every case and raises
        every message.
        """
        group = None
        if settings.seed is None:
            group = native_group(settings) or self.traces.standard_group(
                settings, params, state, grads
            )
        if group is None:
            return range(first, first + len(params))
        return self._jobs.try_claim(
            group, settings, params, state, addresses, seen, selections, grads, first, claimed
        )

    def claim(self, update: ParamUpdate) -> bool:
        """Claim an update; false if the core cannot run it."""
        settings = update.settings
        group = native_group(settings)
        if group is None and update.param.is_cpu:
            tensors = (*update.targets, update.indexed.values)
            in_double = any(tensor.dtype == torch.float64 for tensor in tensors)
            group = self.traces.native_group(settings, update.step, in_double=in_double)
        if group is None:
            return False
        grad, targets = update.indexed, update.targets
        if (
            grad.indices is None
            and grad.element_mask is None
            and update.packed is None
            and not settings.needs_whole_rows
            and settings.rule.traceable_update is None  # a formula may reduce over slots
        ):
            grad, targets = _as_one_slot(grad, targets)
        param, *state = targets
        if not grad.values.is_contiguous():
            grad = grad.with_value_rows()

        def add(grad: IndexedGrad) -> bool:
            return self._jobs.add(
                group,
                update.step,
                grad,
                param,
                state,
                update.seed,
                update.row_stride,
                update.packed,
                settings,
                update.index,
            )

        if update.packed is None or grad.indices is not None:
            return add(grad)
        # A formula that reduces over slots has to see every element as one.
        return add(grad) or add(update.packed.select(grad))

    def prepare(self) -> None:
        """Do everything that can fail; raises if an index is out of range."""
        bad = self._jobs.prepare(torch.get_num_threads())
        if bad is not None:
            settings, param_index, num_slots, index = bad
            why = index_error(index, num_slots)
            raise RangeError(f"{settings.describe_param(param_index)}: {why}")


def _as_one_slot(grad: IndexedGrad, targets: list[Tensor]) -> tuple[IndexedGrad, list[Tensor]]:
    """Flatten a dense update if all its tensors have their elements in the same order."""
    tensors, count = (grad.values, *targets), grad.values.numel()
    if not count or not lie_alike(tensors):
        return grad, targets
    values, *flat = (t.detach().as_strided((count,), (1,)) for t in tensors)
    return IndexedGrad(None, values, 1, count), flat


def can_run_dense(update: ParamUpdate) -> bool:
    """Whether the core can run a dense gradient of a rule that torch has a kernel for, too."""
    if not update.param.is_cpu or native_group(update.settings) is None:
        return False
    tensors = [update.param, update.indexed.values, *(update.state or ())]
    if any(tensor.is_conj() for tensor in tensors):
        return False
    if update.param.is_complex():
        tensors = [torch.view_as_real(tensor.detach()) for tensor in tensors]
    return lie_alike(tensors) or all(map(has_even_rows, tensors))


def native_group(settings: GroupSettings) -> NativeGroup | None:
    """Return the core's view of a param group; ``None`` if it has no kernel for the rule."""
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
            not settings.wants_torch_kernel and settings.elementwise is None,
            settings.constraint,
        )
    return found


def apply_standard(
    group: NativeGroup,
    param: Tensor,
    grad: Gradient,
    state: list[Tensor | None],
    step: int | Tensor,
) -> bool:
    """Update one parameter in one call of the core; false, and unchanged, if it declines."""
    assert ext is not None
    return ext.apply_standard(isa.index, group, param, grad, state, step, torch.get_num_threads())


class CachedPlan(NamedTuple):
    """The core's cache of each param group, so that an identical step needs one call."""

    cached_groups: list[CachedGroup]
    settings: list[GroupSettings]
    traced: list[tuple[int, GroupSettings]]  # groups whose formula is traced in every step
    traces: StepTraces  # which a step that is planned after all takes over


def replay_step(
    groups: list[dict[str, Any]],
    cached: CachedPlan,
    state: dict[Tensor, Any],
    addresses: dict[int, tuple[Any, ...]],
    grads: Sequence[Gradient | None] | None = None,
    first: int = 0,
) -> bool:
    """Repeat a step with new gradients, in one call of the core.

    Gradients passed by hand are those of parameters of the first group, from ``first`` on. Returns
    false, and nothing has changed, if the core declines: options or kinds of gradients differ.
    """
    assert ext is not None
    cached_groups, _, traced, traces = cached
    if traced and len(groups) != len(cached_groups):
        return False
    for index, settings in traced:
        values, _, masked = cached_groups[index]
        group = groups[index]
        if len(values) != len(group) or not all(map(is_, group.values(), values)):
            return False
        native = traces.standard_group(settings, group["params"], state, None)
        if native is None:
            return False
        cached_groups[index] = (values, native, masked)
    threads = torch.get_num_threads()
    is_done = ext.replay_step(
        isa.index, groups, cached_groups, state, addresses, threads, grads, first
    )
    if is_done and traced:
        traces.clear()
    return is_done
