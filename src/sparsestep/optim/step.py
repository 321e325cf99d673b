"""One step: engines claim and prepare the updates of all parameters, then everything is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._process import uninterrupted
from sparsestep._torch import cat, disable_compiler, profiler_range
from sparsestep.deferred.rows import StepCatchUp
from sparsestep.engines import EngineDispatcher, new_native_engine, rounding
from sparsestep.engines.base import GroupSettings, ParamUpdate, finish
from sparsestep.engines.native import StepTraces, can_run_dense
from sparsestep.engines.torch_fused import TorchFusedEngine
from sparsestep.errors import InputError, SlowWarning, message, usable, warn_once
from sparsestep.grads import masks
from sparsestep.grads.exchange import source_of
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.grads.layouts import (
    Gradient,
    GradLayout,
    classify,
    indexed_grad,
    local_grad,
    rows_of,
    slots_to_rows,
    to_row_slots,
)
from sparsestep.memory.mapped_file import (
    about_to_write,
    file_of,
    mapped_files,
    mark_modified,
    written,
)
from sparsestep.memory.tensors import COMPLEX_DTYPES, FLOAT_DTYPES, is_distributed, memory_of
from sparsestep.optim import state as states
from sparsestep.optim.explain import embedding_warning, explain_dense_gradient
from sparsestep.optim.param_groups import ParamGroup, Selections
from sparsestep.rules.options import torch_kernel_choice
from sparsestep.rules.rule import StateSpec

if TYPE_CHECKING:
    from sparsestep.engines.native import Claimed
    from sparsestep.optim.optimizer import RuleOptimizer


def reserve_rows(state: Mapping[Tensor, Any], groups: Iterable[Mapping[str, Any]]) -> bool:
    """Reserve and mark the rows that a replayed step will write; raises if the disk is full.

    Covers the gradients that the core replays. ``False`` if there is a mask: only a plan knows what
    it selects.
    """
    for group in groups:
        mark_modified(group["params"])
        for param in group["params"]:
            if param.grad is None or file_of(param) is None:
                continue
            if group.get("mask") is not None:
                return False
            for rows in rows_of(param, param.grad):
                about_to_write(param, (state.get(param) or {}).values(), rows)
    return True


def reserve_checked(param: Tensor, state: Iterable[Tensor], gradient: IndexedGrad) -> None:
    """Reserve and mark the rows that an engine has claimed."""
    if mapped_files:
        about_to_write(param, state, slots_to_rows(param, gradient.indices, gradient.num_slots))


def to_local(param: Tensor, grad: Gradient, *, by_row: bool) -> tuple[Tensor, Gradient]:
    """The memory of a parameter, and the part of its gradient that belongs there."""
    if type(param) is torch.nn.Parameter:
        return param, grad
    memory = memory_of(param)
    if is_distributed(param):
        grad = local_grad(param, grad, row_slots=by_row)
    return memory, grad


def new_update(
    optimizer: RuleOptimizer,
    group: dict[str, Any],
    settings: GroupSettings,
    index: int,
    param: Tensor,
    grad: Gradient,
    selection: masks.MaskSelection | None,
) -> ParamUpdate:
    """An update with gradient and state checked, in the layout of the mask."""
    param_state = optimizer.state.get(param)
    if settings.elementwise is not None:
        settings, param_state = _settings_of_param(settings, param, grad, param_state)
    rule, dense = settings.rule, optimizer.semantics == "dense"
    memory, grad = to_local(param, grad, by_row=settings.needs_whole_rows or dense)
    optimizer.store.check_writable(param, memory)
    gradient = indexed_grad(memory, grad, row_slots=rule.needs_whole_rows or dense)
    if dense:
        gradient = gradient._replace(element_mask=None)  # other elements of a slot count as zero
    tensors = None
    if selection is not None and selection.shape != memory.shape:
        masks.check_mask("its mask", selection.mask, memory)
    packed = None if selection is None else selection.packed
    if not param_state or not (rule.counts_steps or states.is_complete(rule, param_state)):
        param_state = None  # for torch's SGD, a missing tensor means a first step
    else:
        states.check_step(rule, param_state)
        layout = optimizer.store.layout_of(rule, param, param_state)
        tensors = states.check_state(rule, memory, param_state, layout)
        if tensors and layout is not packed and (layout is None or not layout.same_as(packed)):
            values = states.initial_values(rule, group)
            tensors = states.replace_layout(
                rule.state, tensors, values, memory.shape, layout, packed
            )
            param_state = {**param_state, **dict(zip(rule.state_names, tensors, strict=True))}
    optimizer.store.check_writable(
        param,
        memory,
        tensors,
        gradient,
        num_params=sum(len(each["params"]) for each in optimizer.param_groups),
        iteration=optimizer.iterations,
    )
    update = ParamUpdate(
        settings, group, index, param, memory, grad, gradient, param_state, tensors
    )
    update.packed = packed
    return update


def _settings_of_param(
    settings: GroupSettings, param: Tensor, grad: Gradient, param_state: dict[str, Any] | None
) -> tuple[GroupSettings, dict[str, Any] | None]:
    """Choose between row-wise and element-wise updates, by the gradient of the first step.

    Later steps go by the shape of the state. State that was created in advance is dropped if it
    has the other shape.
    """
    assert settings.elementwise is not None
    has_elements = states.is_elementwise(settings.rule, param, param_state or {})
    if param_state and not states.is_unused(param_state):
        return settings.elementwise if has_elements else settings, param_state
    is_dense = classify(grad) is GradLayout.STRIDED or (
        isinstance(grad, IndexedGrad) and grad.indices is None
    )
    wants_elements = is_dense and (param.dim() > 1 or param.is_complex())
    chosen = settings.elementwise if wants_elements else settings
    return chosen, param_state if has_elements == wants_elements else None


def finish_update(
    update: ParamUpdate, selection: masks.MaskSelection | None, groups_before: Sequence[ParamGroup]
) -> None:
    """Complete an update for engines other than torch's: in real numbers, masked, counted."""
    settings, param = update.settings, update.param
    rule = settings.rule
    if param.dtype not in FLOAT_DTYPES and param.dtype not in COMPLEX_DTYPES:
        raise InputError(message("a parameter must have a real float dtype", param.dtype))
    if update.group.get("differentiable"):
        requirement = (
            "differentiable=True needs dense gradients, no mask, and options that torch's class has"
        )
        grad = update.grad
        got = f"layout {grad.layout}" if isinstance(grad, Tensor) else type(grad).__name__
        if classify(grad) is GradLayout.STRIDED:
            got = "options that it lacks" if selection is None else "a mask"
        raise InputError(message(requirement, got, "Set differentiable=False"))
    if update.state is None:
        update.state = states.new_state(
            rule, param, update.group, settings.state_dtype, update.packed
        )
    gradient = update.indexed
    by_row = settings.needs_whole_rows
    # The core runs the elements that a mask keeps of a dense gradient as one slot.
    is_whole = update.packed is not None and gradient.indices is None
    if selection is not None and (by_row or param.is_complex() or not is_whole):
        gradient = masks.apply_mask(gradient, selection, param.numel(), by_row=by_row)
    reserve_checked(param, update.state, gradient)
    if by_row and param.dim() > 1:
        gradient = to_row_slots(param, gradient)
    update.targets, update.indexed = engine_views(param, update.state, gradient)
    update.step = update.steps_taken() + 1
    if settings.seed is not None:
        # Random bits depend on the parameter's number among all of the optimizer.
        place = sum(len(each["params"]) for each in groups_before) + update.index
        update.seed = rounding.step_seed(settings.seed, place, update.step)
        source = source_of(update.key)
        step, first = (1, 0) if source is None else source.row_layout(update.key)
        if step != 1:
            update.row_stride = rounding.RowStride(update.targets[0][:1].numel(), step, first)


def engine_views(
    param: Tensor, state: list[Tensor], gradient: IndexedGrad
) -> tuple[list[Tensor], IndexedGrad]:
    """A parameter with its state, and its gradient, as real tensors with evenly spaced slots."""
    if not param.is_contiguous():
        gradient = to_row_slots(param, gradient)
    if not param.is_complex():
        return [param, *state], gradient
    real = [torch.view_as_real(t) if t.is_complex() else t for t in (param.detach(), *state)]
    return real, gradient.view_as_real()


class Step:
    """The work of one step."""

    def __init__(self, optimizer: RuleOptimizer, traces: StepTraces | None = None) -> None:
        self._optimizer = optimizer
        self._native = new_native_engine(optimizer.engine)
        if traces is not None and self._native is not None:
            self._native.traces = traces  # a formula is called once per step
        self._torch: TorchFusedEngine | None = None  # created for the first update it may run
        self._catch_up: StepCatchUp | None = None
        if optimizer.semantics == "dense":
            self._catch_up = StepCatchUp(optimizer.deferred, optimizer.engine)
        self._updates: list[ParamUpdate] = []  # for engines other than torch's
        # Parameters with a dense gradient, each with the reason if it is an embedding.
        self._examined: list[tuple[ParamUpdate, str]] = []
        self._has_given_grads = False  # instead of the parameters' own
        self._seen: set[int] = set()  # ids: a tensor's own hash is a call into Python
        self._calls: list[Callable[[], object]] = []  # of the commit, after engines have written
        self.duplicates: list[tuple[int, int]] = []  # (group, parameter) that were seen before

    def add_group(
        self,
        group_index: int,
        group: ParamGroup,
        only: int | None = None,
        grads: Sequence[Gradient | None] | None = None,
    ) -> None:
        """Add the gradients of a param group, or ``grads``; ``only`` one parameter."""
        optimizer, params = self._optimizer, group["params"]
        first = 0 if only is None else only
        some = params if only is None else params[only : only + 1]
        if grads is not None:
            self._has_given_grads = True
            some = some[: len(grads)]  # others may be added meanwhile
        try:
            settings = optimizer.groups.settings(optimizer, group_index, group)
            selections = None
            if group.get("mask") is not None:
                groups = optimizer.groups
                selections = groups.selections(optimizer, group_index, group, settings)
        except InputError as error:
            given = [param.grad for param in some] if grads is None else grads
            if all(grad is None for grad in given):
                return  # as with torch, options do not matter where there is no gradient
            who = f"{type(optimizer).__name__}: param group {group_index}"
            raise InputError(f"{who}: {error}") from None
        for index in self._declined(group, settings, selections, first, some, grads):
            param = params[index]
            grad: Gradient | None = param.grad if grads is None else grads[index - first]
            if grad is None:
                continue
            if id(param) in self._seen:
                self.duplicates.append((group_index, index))
                continue
            self._seen.add(id(param))
            selection = None if selections is None else selections[index]
            try:
                own = settings.for_param(param)
                update = new_update(optimizer, group, own, index, param, grad, selection)
                self._add(update, selection, group_index)
            except InputError as error:  # cheaper than error_prefix for each parameter
                raise type(error)(f"{settings.describe_param(index)}: {error}") from None

    def _add(
        self, update: ParamUpdate, selection: masks.MaskSelection | None, group_index: int
    ) -> None:
        known = self._optimizer.dense_embeddings
        if selection is None and update.indexed.indices is None and update.key not in known:
            reason = explain_dense_gradient(update.param, update.indexed.values)
            self._examined.append((update, reason))
        if self._catch_up is not None:
            self._catch_up.add(update, selection)
        if selection is None and self._should_try_torch(update):
            if self._torch is None:
                kernel = self._optimizer.torch_kernel
                make = partial(_first_param_state, self._optimizer)  # no circle with the plan
                self._torch = TorchFusedEngine(kernel, make, _state_dtype)
            if self._torch.claim(update):
                reserve_checked(update.param, update.state or (), update.indexed)
                return
        finish_update(update, selection, self._optimizer.param_groups[:group_index])
        self._updates.append(update)

    def _should_try_torch(self, update: ParamUpdate) -> bool:
        settings = update.settings
        prefers_core = self._native is not None and not settings.wants_torch_kernel
        return settings.has_torch_kernel and not (prefers_core and can_run_dense(update))

    def _declined(
        self,
        group: ParamGroup,
        settings: GroupSettings,
        selections: Selections | None,
        first: int,
        params: list[Tensor],
        grads: Sequence[Gradient | None] | None,
    ) -> Sequence[int]:
        """Let the core claim the gradients of its fast path; return the indices of the others."""
        optimizer, native = self._optimizer, self._native
        indices = range(first, first + len(params))
        if native is None or group.get("differentiable"):
            return indices
        for_core = None
        if selections is not None:
            if self._catch_up is not None:  # rows that a mask excludes must not catch up
                return indices
            some = selections[first : indices.stop]
            if settings.needs_whole_rows and any(s and s.mask.dim() > 1 for s in some):
                return indices
            layouts = optimizer.store.layouts
            packed = [None if s is None else s.packed for s in some]
            if any(m and layouts.get(p) is not m for m, p in zip(packed, params, strict=True)):
                return indices  # its state has another layout so far
            for_core = [None if s is None else s.native for s in some]
        claimed: list[Claimed] | None = [] if self._catch_up is not None or mapped_files else None
        declined = native.claim_standard(
            settings,
            params,
            optimizer.state,
            optimizer.store.addresses,
            self._seen,
            for_core,
            grads,
            first,
            claimed,
        )
        for index, found in claimed or ():
            param, selected = params[index - first], for_core and for_core[index - first]
            slots = len(param) if param.dim() else 1
            if selected and not isinstance(selected, masks.PackedMask):
                slots = selected[1]
            at = cat([p.flat_indices for p in found]) if isinstance(found, tuple) else found
            param_state = optimizer.state.get(param)
            state = [param_state[spec.name] for spec in settings.rule.state] if param_state else []
            indexed = IndexedGrad(at, param, slots)  # the core has the values
            reserve_checked(param, state, indexed)
            if self._catch_up is not None:
                grad: Any = param.grad if grads is None else grads[index - first]
                update = ParamUpdate(
                    settings, group, index, param, param, grad, indexed, param_state, state
                )
                self._catch_up.add(update, None, is_claimed=True)
        return declined

    @property
    def is_native_only(self) -> bool:
        """Whether the core has claimed every gradient, and no rows catch up first."""
        return self.can_replay and not self._catch_up

    @property
    def can_replay(self) -> bool:
        """Whether the core has claimed every gradient, so that it may repeat the step."""
        return not self._updates and not self._torch

    def run(self) -> None:
        """Prepare and commit. Atomic: on error, nothing has changed."""
        if torch.compiler.is_compiling():  # the functional optimizers' steps are in no graph
            _uncompiled_run(self)
            return
        try:
            self.prepare()
            self.commit()
        except BaseException:
            self.cancel()
            raise

    def run_with_duplicates(self) -> None:
        """Run, then update parameters that were listed more than once."""
        self.run()
        self.run_duplicates()

    def run_duplicates(self) -> None:
        """Update parameters that were listed more than once, each time from the new value."""
        optimizer = self._optimizer
        for group_index, index in self.duplicates:
            another = Step(optimizer)
            another.add_group(group_index, optimizer.param_groups[group_index], only=index)
            another.run()

    def prepare(self) -> None:
        """Do everything that can raise. ``commit`` or ``cancel`` must follow."""
        if mapped_files:
            mark_modified(self._optimizer.params())
        if self.is_native_only:
            if self._native is not None:
                self._native.prepare()
        else:
            with profiler_range("sparsestep: prepare"):
                self._prepare()
        self._note_engines()

    def cancel(self) -> None:
        """Abandon a step that was prepared."""
        if self._catch_up is not None:
            self._catch_up.cancel()

    def commit(self) -> None:
        """Write all updates."""
        if not self.is_native_only:
            with profiler_range("sparsestep: commit"):
                uninterrupted(self._commit)
        elif self._native is not None:
            self._native.commit()  # one call of the core, which counts the steps as well
        if mapped_files:
            finish((lambda: written(self._optimizer.params()),))

    def _warn_of_embeddings(self) -> None:
        for update, reason in self._examined:
            if reason:
                who = update.settings.describe_param(update.index)
                warn_once(SlowWarning, embedding_warning(who, update.key.shape, reason))
            self._optimizer.dense_embeddings[update.key] = reason

    def _note_engines(self) -> None:
        """For ``explain()``. A replayed step is the core's."""
        optimizer = self._optimizer
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) in self._seen:
                    grad = None if self._has_given_grads else param.grad
                    is_dense = grad is not None and grad.layout is torch.strided
                    reason = self._dense_reason(param, "") if is_dense else ""
                    reason = "" if group.get("mask") is not None else reason
                    optimizer.used_engines[param] = ("native", reason)
        for update in self._updates:
            reason = update.fallback_reason
            if update.indexed.indices is None and update.packed is None:
                reason = self._dense_reason(update.key, reason)
            optimizer.used_engines[update.key] = (update.engine, reason)
        for update in () if self._torch is None else self._torch.claimed:
            reason = f"dense gradient: updated by torch's kernel, {self._why_torch(update)}."
            reason = self._dense_reason(update.key, reason)
            optimizer.used_engines[update.key] = ("torch", reason)

    def _dense_reason(self, param: Tensor, reason: str) -> str:
        why = self._optimizer.dense_embeddings.get(param, "")
        return why or reason or "dense gradient: every element is updated."

    def _why_torch(self, update: ParamUpdate) -> str:
        engine = self._optimizer.engine
        if update.settings.wants_torch_kernel:
            return f"since you set {torch_kernel_choice(update.group)}"
        if engine not in ("auto", "native"):
            return f"since you set engine={engine!r}"
        if self._native is None:
            return "since sparsestep was installed without its C++ core"
        memory = f"strides {update.param.stride()} on {update.param.device}"
        return f"since the core needs CPU tensors with evenly spaced rows, got {memory}"

    def _prepare(self) -> None:
        self._engines = EngineDispatcher(
            self._optimizer.engine, self._native, self._optimizer.params
        )
        for update in self._updates:
            self._engines.claim(update)
        self._engines.check()
        if self._torch is not None:
            self._torch.prepare()
        if self._catch_up is not None:
            with profiler_range("sparsestep: catch up"):
                self._catch_up.prepare()
        self._engines.prepare()  # from values that are up to date
        if self._examined:
            self._warn_of_embeddings()
        if self._torch is not None:
            for update in self._torch.first_updates:
                if update.param_state:
                    self._enter(self._optimizer.state, update.key, update.param_state)
        for update in self._updates:
            self._prepare_count(update)
        dense = [] if self._torch is None else self._torch.claimed
        for update in (*self._updates, *dense):
            self._prepare_layout(update)
        apart = [u.key for u in (*self._updates, *dense) if u.key is not u.param]
        if apart:
            self._calls.append(partial(increment_version, apart))
        if self._catch_up is not None:
            for key, deferred in self._catch_up.new:
                self._enter(self._optimizer.deferred, key, deferred)
            self._calls += self._catch_up.calls

    def _commit(self) -> None:
        with torch.no_grad():
            if self._torch is not None:
                finish((self._torch.begin,))
                self._torch.commit()
            self._engines.commit()
            finish(self._calls)
            if self._torch is not None:  # state that a kernel has made itself
                for update in self._torch.first_updates:
                    if update.param_state and update.key not in self._optimizer.state:
                        self._optimizer.state[update.key] = update.param_state

    def _enter(self, entries: dict[Any, Any], key: Any, value: Any) -> None:
        self._calls.append(partial(entries.__setitem__, key, value))

    def _prepare_layout(self, update: ParamUpdate) -> None:
        """Replace state whose layout has changed, in the commit."""
        state, store = self._optimizer.state, self._optimizer.store
        if update.param_state and state.get(update.key) is not update.param_state:
            self._enter(state, update.key, update.param_state)
        if store.layouts.get(update.key) is not update.packed:
            self._calls.append(partial(store.set_layout, update.key, update.packed))

    def _prepare_count(self, update: ParamUpdate) -> None:
        """Count the step, in the commit; the first one also stores the parameter's new state."""
        optimizer, param_state, group = self._optimizer, update.param_state, update.group
        if param_state is None:
            assert update.state is not None
            rule = update.settings.rule
            param_state = states.new_param_state(optimizer, group, rule, update.key, update.state)
            if param_state:  # as with torch's SGD, nothing may show that the parameter is known
                self._enter(optimizer.state, update.key, param_state)
        count = param_state.get("step")
        if isinstance(count, Tensor):
            self._calls.append(partial(count.add_, 1))
        elif count is not None:
            self._calls.append(partial(param_state.__setitem__, "step", update.step))
        elif update.seed is not None:  # a state that came without a count
            count = states.new_step(optimizer, group, update.param, update.step)
            self._enter(param_state, "step", count)


_uncompiled_run = disable_compiler(Step.run)


def _first_param_state(optimizer: RuleOptimizer, update: ParamUpdate) -> dict[str, Any]:
    group, rule = update.group, update.settings.rule
    update.state = states.new_state(rule, update.param, group, update.settings.state_dtype)
    reserve_checked(update.param, update.state, update.indexed)
    return states.new_param_state(optimizer, group, rule, update.key, update.state)


_state_dtype = partial(states.state_dtype_for, StateSpec("any"))


class StepInBackward:
    """The handle of ``optimizer.step_in_backward()``; ``remove()`` undoes it.

    Until then the parameters hold on to the optimizer, and it to them.
    """

    def __init__(
        self, optimizer: RuleOptimizer, params: Iterable[Tensor] | None, backwards: int
    ) -> None:
        if not isinstance(backwards, int) or backwards < 1:
            raise InputError(message("backwards must be an integer, at least 1", backwards))
        places = {
            id(param): (group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, param in enumerate(group["params"])
        }
        # The gradient of a sharded table is complete when all ranks need it: in step().
        everything = (each for each in optimizer.params() if source_of(each) is None)
        with usable("step_in_backward needs a list of parameters"):
            wanted = list(params if params is not None else everything)
        for param in wanted:
            if id(param) not in places:
                requirement = "step_in_backward needs parameters of this optimizer"
                raise InputError(message(requirement, states.describe_other(param)))
            if source_of(param) is not None:
                requirement = "step_in_backward needs gradients that are complete after backward"
                remedy = "Leave it to step()"
                raise InputError(message(requirement, "the weight of a sharded table", remedy))
            if param.grad is not None:
                requirement = (
                    "step_in_backward must start without gradients, or backward would add to them"
                )
                raise InputError(message(requirement, "a gradient", "Call zero_grad() first"))
        self._optimizer = optimizer
        self._backwards = backwards
        self._places = places
        # id -> gradients so far, and in which round: with step() or zero_grad() a new one begins.
        self._seen: dict[int, tuple[int, int]] = {}
        self._began = optimizer.iterations
        self._handles = [
            param.register_post_accumulate_grad_hook(self._arrived)
            for param in wanted
            if param.requires_grad
        ]

    def _arrived(self, param: Tensor) -> None:
        rounds = self._optimizer.iterations
        count, latest = self._seen.get(id(param), (0, rounds))
        if latest != rounds:
            count = 0
        if count == self._backwards:
            # A loop that calls step() or zero_grad() at all calls it once per step.
            if rounds != self._began:
                param.grad = None
                raise InputError(self._one_too_many())
            count = 0
        self._seen[id(param)] = (count + 1, rounds)
        if count + 1 == self._backwards:
            try:
                self._update(param)
            except BaseException:
                del self._seen[id(param)]
                raise
            finally:
                param.grad = None

    def _one_too_many(self) -> str:
        one = "a second" if self._backwards == 1 else f"one after {self._backwards}"
        return message(
            f"{type(self._optimizer).__name__}: step_in_backward frees a gradient as soon as it "
            "is used, so gradients of several backward calls cannot be accumulated",
            f"{one} before step() or zero_grad()",
            "Pass backwards=n to step once in n backward calls",
        )

    def _update(self, param: Tensor) -> None:
        optimizer = self._optimizer
        group_index, index = self._places[id(param)]
        step = Step(optimizer)
        step.add_group(group_index, optimizer.param_groups[group_index], only=index)
        step.run()
        optimizer.updates += 1

    def remove(self) -> None:
        """Leave gradients to ``step()`` again."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
