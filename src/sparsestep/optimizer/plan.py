"""One step of an optimizer: planned and prepared in full, then committed.

Per parameter and step it is decided who does the work: torch's own kernel where the gradient is
dense and torch has the formula, an engine everywhere else. Whatever may raise does so before
anything is written, and what is written is written as a whole: no exception and no signal comes
between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep import engines
from sparsestep.contract.rule import Batch, Rule, Settings, State, Update
from sparsestep.dense.pending import PendingCatchUp
from sparsestep.engines import rounding
from sparsestep.engines.signals import uninterrupted
from sparsestep.errors import InputError, StaleWarning, sentence, usable, warn_once
from sparsestep.gradients import masks
from sparsestep.gradients.layouts import Gradient, touched
from sparsestep.gradients.touched import COMPLEX, FLOATS, Touched
from sparsestep.memory import parameters
from sparsestep.optimizer import state as states
from sparsestep.optimizer.groups import SWITCHES
from sparsestep.optimizer.records import StateKeeper
from sparsestep.torch_internals import capturable_devices, check_fused

Group = dict[str, Any]
Record = dict[str, Any]


@dataclass(slots=True)
class Planned:
    """What is to be done with one parameter.

    Attributes:
        group: its param group.
        rule: the formula.
        owner: the parameter as the optimizer has it.
        param: its memory: the same, but for a DTensor.
        grad: its gradient, for that memory.
        gradient: the same in canonical form.
        kept: the optimizer's record of its state; ``None`` before the first step.
        tensors: the state tensors; ``None`` where they still have to be made.
    """

    group: Group
    rule: Rule
    owner: Tensor
    param: Tensor
    grad: Gradient
    gradient: Touched
    kept: Record | None
    tensors: list[Tensor] | None


def _say_once_that_it_was_stale() -> None:
    warn_once(
        StaleWarning,
        "rows got a gradient that were read before they were brought up to date "
        "(semantics='dense'). Call optimizer.track(model) once, or "
        "optimizer.catch_up(param, rows) before each look-up.",
    )


class Step:
    """The work of one step. ``repeats`` are parameters that were given more than once."""

    def __init__(self, optimizer: StateKeeper) -> None:
        self._optimizer = optimizer
        self._natively = engines.native_step(optimizer.engine)
        self._dense_semantics = optimizer.semantics == "dense"
        self._idle: list[PendingCatchUp] = []
        self._updates: list[Update] = []
        self._updated: list[Planned] = []
        self._dense: list[list[Planned]] = []
        self._records: list[list[Record]] = []  # of those: the state as it is, or is to be
        self._seen: set[int] = set()  # ids: a tensor's own hash is a call into Python
        self._numbers = 0  # of parameters in the groups before
        self.repeats: list[tuple[int, int]] = []

    def plan(
        self,
        number: int,
        group: Group,
        only: int | None = None,
        grads: Sequence[Gradient | None] | None = None,
    ) -> None:
        """Take the gradients of a param group.

        Args:
            number: the group's.
            group: the param group.
            only: the number of the one parameter that is meant.
            grads: gradients passed by hand, one for each parameter that is meant.
        """
        optimizer, params = self._optimizer, group["params"]
        try:
            settings = optimizer.groups.settings_of(optimizer, number, group)
            selections = optimizer.groups.selections_of(optimizer, group, settings)
        except InputError as error:
            raise InputError(f"{type(optimizer).__name__}: {error}") from None
        dense: list[Planned] = []
        first = 0 if only is None else only
        meant = params if only is None else params[only : only + 1]
        if grads is not None:
            meant = meant[: len(grads)]  # others may be added meanwhile
        for index in self._unusual(group, settings, selections, first, meant, grads):
            param = params[index]
            grad: Gradient | None = param.grad if grads is None else grads[index - first]
            if grad is None:
                continue
            if id(param) in self._seen:
                self.repeats.append((number, index))
                continue
            self._seen.add(id(param))
            selection = None if selections is None else selections[index]
            try:
                planned = self._planned(group, settings, param, grad)
                if self._dense_semantics:
                    memory, positions = planned.param, planned.gradient.positions
                    kept, tensors = planned.kept, planned.tensors
                    self._idle.append(
                        PendingCatchUp(param, memory, positions, kept, tensors, settings, selection)
                    )
                if selection is None and settings.uses_torch and _fits_torch(planned, settings):
                    dense.append(planned)
                else:
                    self._take(planned, settings, index, selection)
            except InputError as error:
                raise InputError(f"{settings.who(index)}: {error}") from None
        batches = [dense]
        if group.get("fused") and not settings.rule.counts:
            # Torch's fused SGD wants all momentum buffers or none. Its other kernels do not, and
            # round the buffers of half precision differently where one is missing.
            known = [planned for planned in dense if planned.kept is not None]
            batches = [known, [planned for planned in dense if planned.kept is None]]
        self._dense += [batch for batch in batches if batch]
        self._numbers += len(params)

    def _unusual(
        self,
        group: Group,
        settings: Settings,
        selections: list[masks.Selection | None] | None,
        first: int,
        meant: list[Tensor],
        grads: Sequence[Gradient | None] | None,
    ) -> Sequence[int]:
        """The numbers of the parameters that the core does not take at once."""
        optimizer = self._optimizer
        numbers = range(first, first + len(meant))
        if self._natively is None or group.get("differentiable"):
            return numbers
        chosen = None
        if selections is not None:
            if self._dense_semantics:  # what a mask excludes must not be brought up to date
                return numbers
            chosen = [None if s is None else s.chosen for s in selections[first : numbers.stop]]
        left = self._natively.take(
            settings, meant, optimizer.state, optimizer.known, self._seen, chosen, grads, first
        )
        if self._dense_semantics:
            self._lag_but_for(left, numbers, meant, grads, settings)
        return left

    def _lag_but_for(
        self,
        left: Sequence[int],
        numbers: Sequence[int],
        meant: list[Tensor],
        grads: Sequence[Gradient | None] | None,
        settings: Settings,
    ) -> None:
        """Note that what the core has taken has to be brought up to date."""
        not_taken = set(left)
        for place, (index, param) in enumerate(zip(numbers, meant, strict=True)):
            grad: Gradient | None = param.grad if grads is None else grads[place]
            if grad is None or index in not_taken:
                continue
            kept = self._optimizer.state.get(param)
            tensors = [kept[spec.name] for spec in settings.rule.state] if kept else []
            try:
                positions = touched(param, grad).positions
                self._idle.append(
                    PendingCatchUp(param, param, positions, kept, tensors, settings, None)
                )
            except InputError as error:
                raise InputError(f"{settings.who(index)}: {error}") from None

    def _planned(self, group: Group, settings: Settings, param: Tensor, grad: Gradient) -> Planned:
        """A parameter's gradient and state, checked."""
        rule, memory = settings.rule, param
        kept = self._optimizer.state.get(param)
        if type(param) is not torch.nn.Parameter:
            memory = parameters.memory_of(param)
            if parameters.is_distributed(param):
                by_row = rule.by_row or self._dense_semantics
                grad = parameters.local_gradient(param, grad, by_row=by_row)
        self._optimizer.look_at(param, memory)
        gradient = touched(memory, grad, by_row=rule.by_row or self._dense_semantics)
        if self._dense_semantics:
            gradient = gradient._replace(held=None)  # what is not held is zero, and counts
        tensors = None
        if not kept or (not rule.counts and any(kept.get(s.name) is None for s in rule.state)):
            kept = None
        else:
            states.check_count(rule, kept)
            tensors = states.checked(rule, memory, kept)
        self._optimizer.look_at(param, memory, tensors, gradient)
        return Planned(group, rule, param, memory, grad, gradient, kept, tensors)

    def _take(
        self,
        planned: Planned,
        settings: Settings,
        index: int,
        selection: masks.Selection | None,
    ) -> None:
        """Make it an engine's update."""
        rule, param, group = settings.rule, planned.param, planned.group
        gradient = planned.gradient
        if selection is not None and parameters.is_distributed(planned.owner):
            contract = "a DTensor parameter takes no mask"
            raise InputError(sentence(contract, "one", "Use a group of its own without mask"))
        if param.dtype not in FLOATS and param.dtype not in COMPLEX:
            raise InputError(sentence("a parameter must be of a real float dtype", param.dtype))
        if group.get("differentiable"):
            contract = "differentiable=True needs dense gradients under torch's own formulas"
            raise InputError(sentence(contract, _kind(planned.grad)))
        if planned.tensors is None:
            dtype = settings.state_dtype
            planned.tensors = states.new(rule, param, group, dtype, gradient)
        state = planned.tensors
        if selection is not None:
            if selection.shape != planned.param.shape:
                masks.checked(selection.mask, [planned.param], by_row=rule.by_row)
            gradient = masks.select(gradient, selection, param.numel())
        if param.is_complex():
            gradient = gradient.as_real()
            param = torch.view_as_real(param.detach())
            state = [torch.view_as_real(t) if t.is_complex() else t for t in state]
        step = 1
        if planned.kept is not None:
            with usable("the state's 'step' must say how many steps were taken"):
                step = int(planned.kept.get("step", 1)) + 1
            if step < 1:
                contract = "the state's 'step' must say how many steps were taken"
                raise InputError(sentence(contract, step - 1))
        seed = None
        if settings.seed is not None:
            seed = rounding.seed_for(settings.seed, self._numbers + index, step)
        owner = planned.owner
        self._updates.append(Update(settings, index, param, gradient, state, step, seed, owner))
        self._updated.append(planned)

    def run(self) -> None:
        """Do what was planned: all of it, or raise and nothing."""
        try:
            work = self._prepare()
        except BaseException:
            for pending in self._idle:
                pending.cancel()
            raise
        if work.is_native and not (self._updates or self._dense or self._idle):
            work.commit()  # one call of the core, which counts the steps as well
        else:
            uninterrupted(lambda: self._commit(work))

    def _prepare(self) -> engines.Work:
        """Do all that may fail."""
        optimizer = self._optimizer
        work = engines.Work(self._updates, optimizer.engine, self._natively)
        work.prepare()
        self._records = [[self._record(planned) for planned in dense] for dense in self._dense]
        stale = 0
        for pending in self._idle:
            stale += pending.prepare(optimizer.clocks, optimizer.engine)
        if stale:
            _say_once_that_it_was_stale()
        if not work.is_native:
            work.compute(p for group in optimizer.param_groups for p in group["params"])
        return work

    def _record(self, planned: Planned) -> Record:
        """The state for torch's kernel; new state is not the optimizer's before the commit."""
        if planned.kept is not None:
            return planned.kept
        group, rule, param = planned.group, planned.rule, planned.param
        if not rule.counts:
            return {}  # torch takes a missing tensor for a first step
        dtype = group.get("state_dtype")
        planned.tensors = states.new(rule, param, group, dtype, planned.gradient)
        return self._optimizer.new_record(group, rule, planned.owner, planned.tensors)

    def _commit(self, work: engines.Work) -> None:
        """Write everything; nothing can fail."""
        optimizer = self._optimizer
        for dense, records in zip(self._dense, self._records, strict=True):
            self._run_torch(dense, records)
        work.commit()
        for planned, update in zip(self._updated, self._updates, strict=True):
            self._count(planned, update)
        apart = [p for p in (*self._updated, *self._dense_planned()) if p.owner is not p.param]
        if apart:
            increment_version([planned.owner for planned in apart])
        for pending in self._idle:  # in the end: it remembers how often a parameter was written
            pending.commit(optimizer.clocks)

    def _dense_planned(self) -> list[Planned]:
        return [planned for dense in self._dense for planned in dense]

    def _count(self, planned: Planned, update: Update) -> None:
        """Count the step; with the first, the parameter gets its state."""
        optimizer, kept = self._optimizer, planned.kept
        if kept is None:
            tensors = planned.tensors
            assert tensors is not None
            kept = optimizer.new_record(planned.group, planned.rule, planned.owner, tensors)
            if kept:  # as with torch's SGD, nothing may show that the parameter is known
                optimizer.state[planned.owner] = kept
        count = kept.get("step")
        if isinstance(count, Tensor):
            with torch.no_grad():
                count.add_(1)
        elif count is not None:
            kept["step"] = update.step
        elif update.seed is not None:  # a state that came without a count
            kept["step"] = optimizer.new_count(planned.group, planned.param, update.step)

    def _run_torch(self, dense: list[Planned], records: list[Record]) -> None:
        optimizer, group, rule = self._optimizer, dense[0].group, dense[0].rule
        names = [spec.name for spec in rule.state]
        memory = [
            {name: parameters.memory_of(r[name]) for name in names if r.get(name) is not None}
            for r in records
        ]
        batch = Batch(
            {**group, **{name: bool(group[name]) for name in SWITCHES if name in group}},
            [planned.param for planned in dense],
            [planned.gradient.values for planned in dense],
            {name: [state.get(name) for state in memory] for name in names},
            [record["step"] for record in records] if rule.counts else [],
        )
        with torch.set_grad_enabled(bool(group.get("differentiable"))):
            optimizer.torch_kernel(batch)
        for name, tensors in batch.state.items():
            for planned, record, state, tensor in zip(dense, records, memory, tensors, strict=True):
                if tensor is not state.get(name):  # the kernel has made it
                    record[name] = parameters.laid_out_like(planned.owner, tensor)
        for planned, record in zip(dense, records, strict=True):
            if planned.kept is None and record:
                optimizer.state[planned.owner] = record


def _kind(grad: Gradient) -> str:
    return f"layout {grad.layout}" if isinstance(grad, Tensor) else type(grad).__name__


_ANY = State("any")


def _fits_torch(planned: Planned, settings: Settings) -> bool:
    """Whether torch's kernel can take it: everything dense, of one dtype, where it runs at all."""
    group, param, grad = planned.group, planned.param, planned.grad
    if isinstance(grad, Touched) or type(grad) not in (Tensor, torch.nn.Parameter):
        return False
    if grad.layout is not torch.strided:
        return False
    if planned.tensors:
        dtypes = {tensor.dtype for tensor in planned.tensors}
    else:  # also without state: torch would do a half-precision step in half precision
        dtypes = {states.dtype_for(_ANY, param, settings.state_dtype)}
    if dtypes != {param.dtype} or grad.dtype != param.dtype:
        return False
    if settings.rule.counts and planned.kept and not isinstance(planned.kept["step"], Tensor):
        return False  # its kernels count in tensors
    if group.get("fused"):
        # Torch's fused kernels take for granted that all elements lie in the same order, without
        # gaps.
        tensors = (param, planned.gradient.values, *(planned.tensors or ()))
        if not parameters.lie_alike(tensors):
            return False
        try:
            check_fused(param)
        except RuntimeError as error:
            raise InputError(str(error)) from None
    if group.get("differentiable") and param.is_leaf and param.requires_grad:
        contract = "differentiable=True needs parameters that are computed from others"
        remedy = "Use clones of them, or differentiable=False"
        raise InputError(sentence(contract, "a leaf that requires a gradient", remedy))
    if group.get("capturable"):
        devices = capturable_devices()
        if param.device.type not in devices:
            contract = f"If capturable=True, params and state_steps must be on {devices}"
            raise InputError(sentence(contract, param.device))
    return True
