"""One step of an optimizer: planned and checked in full, then run.

Per parameter and step it is decided who does the work: torch's own kernel where the gradient is
dense and torch has the formula, an engine everywhere else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim.optimizer import _device_dtype_check_for_fused, _get_capturable_supported_devices

from sparsestep import engines, masks, rounding
from sparsestep import state as states
from sparsestep.catch_up import Idling
from sparsestep.contract import Batch, Rule, Settings, State, Update
from sparsestep.errors import InputError, StaleWarning, sentence, warn_once
from sparsestep.grads import COMPLEX, FLOATS, Touched, check_positions
from sparsestep.layouts import Gradient, touched

if TYPE_CHECKING:
    from sparsestep.optimizer import RuleOptimizer

Group = dict[str, Any]


@dataclass(slots=True)
class Planned:
    """What is to be done with one parameter.

    Attributes:
        param: the parameter.
        grad: its gradient.
        gradient: the same in canonical form.
        kept: the optimizer's record of its state; ``None`` before the first step.
        tensors: the state tensors; ``None`` where they still have to be made.
    """

    group: Group
    rule: Rule
    param: Tensor
    grad: Gradient
    gradient: Touched
    kept: dict[str, Any] | None
    tensors: list[Tensor] | None


@dataclass(slots=True)
class Lagging:
    """A parameter under dense semantics, before its step.

    Attributes:
        param: the parameter.
        positions: the rows that its gradient holds; ``None`` for all.
        kept: the optimizer's record of its state; ``None`` before the first step.
        tensors: the state tensors; ``None`` before the first step.
        settings: those of its param group.
        selection: what a mask selects.
    """

    param: Tensor
    positions: Tensor | None
    kept: dict[str, Any] | None
    tensors: list[Tensor] | None
    settings: Settings
    selection: masks.Selection | None

    def catch_up(self, optimizer: RuleOptimizer) -> None:
        """Bring up to date what the step touches."""
        idling = self._known(optimizer) or self._anew()
        optimizer.idle[id(self.param)] = idling
        if self.positions is None:
            idling.stamp(idling.among)
            return
        rows = idling.that_may_move(self.positions.reshape(-1))
        if self.tensors is None and idling.rule.state:
            idling.stamp(rows)  # nothing is kept yet, so nothing was missed
            return
        real = rows_of(self.param, self.tensors or [])
        if idling.bring(*real, rows, touch=True, engine=optimizer.engine):
            _say_once_that_it_was_stale()

    @property
    def rows(self) -> int:
        """How many it has."""
        shape = self.param.shape
        return shape[0] if shape else 1

    @property
    def _among(self) -> Tensor | None:
        return None if self.selection is None else self.selection.positions

    def _known(self, optimizer: RuleOptimizer) -> Idling | None:
        """What is known of its rows; ``None`` where the parameter is new, or begins anew."""
        idling = optimizer.idle.get(id(self.param))
        if idling is None or idling.rows != self.rows:  # the parameter was replaced
            return None
        # What was missed is made up for by the rule that was missed, with its own state.
        missed, among = idling.state_in(self.kept), self._among
        if missed is None:
            return None
        other = not idling.is_under(self.settings)
        if other or idling.among is not among or idling.history.is_full or self.positions is None:
            idling.bring_all(*rows_of(self.param, missed), engine=optimizer.engine)
        if other:
            now, fresh = idling.history.now, idling.last < 0
            idling = Idling(self.settings, idling.rows, now, new=False)
            idling.stamp_all(now, fresh=fresh)
        idling.among = among
        return idling

    def _anew(self) -> Idling:
        kept = self.kept
        done = int(kept.get("step", 0)) if kept else 0
        # State that was made in advance has seen no gradient either.
        new = kept is None or (self.settings.rule.counts and not done)
        idling = Idling(self.settings, self.rows, done, new=new)
        idling.among = self._among
        return idling


def rows_of(param: Tensor, state: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """A parameter and its state as real tensors whose first dim are the rows."""
    if param.dim() and not param.is_complex():
        return param, state

    def real(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        return tensor if param.dim() else tensor.unsqueeze(0)

    return real(param), [real(tensor) for tensor in state]


def _say_once_that_it_was_stale() -> None:
    warn_once(
        StaleWarning,
        "rows got a gradient that were read before they were brought up to date "
        "(semantics='dense'). Call optimizer.track(model) once, or "
        "optimizer.catch_up(param, rows) before each look-up.",
    )


class Step:
    """The work of one step. ``repeats`` are parameters that were given more than once."""

    def __init__(self, optimizer: RuleOptimizer) -> None:
        self._optimizer = optimizer
        self._natively = engines.native_step(optimizer.engine)
        self._dense_semantics = optimizer.semantics == "dense"
        self._idle: list[Lagging] = []
        self._updates: list[Update] = []
        self._updated: list[Planned] = []
        self._dense: list[list[Planned]] = []
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
            settings = optimizer.groups.settings_of(number, group)
            selections = optimizer.groups.selections_of(group, settings)
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
                    positions, kept = planned.gradient.positions, planned.kept
                    self._lags(
                        Lagging(param, positions, kept, planned.tensors, settings, selection)
                    )
                if selection is None and settings.uses_torch and _fits_torch(planned, settings):
                    dense.append(planned)
                else:
                    self._take(planned, settings, index, selection)
            except InputError as error:
                raise InputError(f"{settings.who(index)}: {error}") from None
        if settings.rule.counts:
            self._dense += [dense] if dense else []
        else:
            # Torch's fused SGD wants all momentum buffers or none.
            known = [planned for planned in dense if planned.kept is not None]
            fresh = [planned for planned in dense if planned.kept is None]
            self._dense += [each for each in (known, fresh) if each]
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
            settings, meant, optimizer.state, optimizer.settled, self._seen, chosen, grads, first
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
                self._lags(Lagging(param, positions, kept, tensors, settings, None))
            except InputError as error:
                raise InputError(f"{settings.who(index)}: {error}") from None

    def _planned(self, group: Group, settings: Settings, param: Tensor, grad: Gradient) -> Planned:
        """A parameter's gradient and state, checked."""
        rule = settings.rule
        gradient = touched(param, grad, by_row=rule.by_row or self._dense_semantics)
        if self._dense_semantics:
            gradient = gradient._replace(held=None)  # what is not held is zero, and counts
        kept = self._optimizer.state.get(param)
        if not kept or (not rule.counts and any(kept.get(s.name) is None for s in rule.state)):
            planned = Planned(group, rule, param, grad, gradient, None, None)
        else:
            tensors = states.checked(rule, param, kept)
            planned = Planned(group, rule, param, grad, gradient, kept, tensors)
        if id(param) not in self._optimizer.settled:
            self._optimizer.settled.add(id(param))
            states.settle(param, planned.tensors, gradient)
        return planned

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
        step = 1 if planned.kept is None else int(planned.kept.get("step", 1)) + 1
        seed = None
        if settings.seed is not None:
            seed = rounding.seed_for(settings.seed, self._numbers + index, step)
        self._updates.append(Update(settings, index, param, gradient, state, step, seed))
        self._updated.append(planned)

    def _lags(self, lagging: Lagging) -> None:
        """Note that its rows have to be brought up to date before they are updated."""
        if lagging.positions is not None:
            check_positions(lagging.positions, lagging.rows)
        self._idle.append(lagging)

    def run(self) -> None:
        """Do what was planned: all of it, or raise and nothing."""
        optimizer = self._optimizer
        others = [self._run_torch] if self._dense else []
        before = [self._catch_up] if self._idle else []
        engines.run(self._updates, optimizer.engine, self._natively, others, before)
        for lagging in self._idle:
            optimizer.idle[id(lagging.param)].advance(lagging.settings)
        for planned, update in zip(self._updated, self._updates, strict=True):
            kept = planned.kept
            if kept is None:  # the first step: only now does the parameter have a state
                tensors = planned.tensors
                assert tensors is not None
                kept = optimizer.keep(planned.group, planned.rule, planned.param, tensors)
            count = kept.get("step")
            if isinstance(count, Tensor):
                with torch.no_grad():
                    count.add_(1)
            elif count is not None:
                kept["step"] = update.step
            elif update.seed is not None:  # a state that came without a count
                kept["step"] = optimizer.new_count(planned.group, planned.param, update.step)

    def _catch_up(self) -> None:
        for lagging in self._idle:
            lagging.catch_up(self._optimizer)

    def _run_torch(self) -> None:
        optimizer = self._optimizer
        for dense in self._dense:
            group, rule = dense[0].group, dense[0].rule
            records = [planned.kept or self._first_record(planned) for planned in dense]
            batch = Batch(
                group,
                [planned.param for planned in dense],
                [planned.gradient.values for planned in dense],
                {spec.name: [kept.get(spec.name) for kept in records] for spec in rule.state},
                [kept["step"] for kept in records] if rule.counts else [],
            )
            with torch.set_grad_enabled(bool(group.get("differentiable"))):
                optimizer.torch_kernel(batch)
            for name, tensors in batch.state.items():
                for kept, tensor in zip(records, tensors, strict=True):
                    kept[name] = tensor

    def _first_record(self, planned: Planned) -> dict[str, Any]:
        group, rule, param = planned.group, planned.rule, planned.param
        if not rule.counts:  # torch takes a missing tensor for a first step
            return self._optimizer.state[param] if rule.state else {}
        dtype = group.get("state_dtype")
        tensors = states.new(rule, param, group, dtype, planned.gradient)
        record: dict[str, Any] = self._optimizer.keep(group, rule, param, tensors)
        return record


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
    if group.get("fused"):
        try:
            _device_dtype_check_for_fused(param)
        except RuntimeError as error:
            raise InputError(str(error)) from None
    if group.get("capturable"):
        devices = _get_capturable_supported_devices()
        if param.device.type not in devices:
            contract = f"If capturable=True, params and state_steps must be on {devices}"
            raise InputError(sentence(contract, param.device))
    return True
