"""From a parameter, its gradient and its state to the update that an engine gets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparsestep.engines import rounding
from sparsestep.engines.base import ParamUpdate, Settings
from sparsestep.errors import InputError, sentence
from sparsestep.grads import masks
from sparsestep.grads.exchange import source_of
from sparsestep.grads.indexed import COMPLEX, FLOATS, Touched
from sparsestep.grads.layouts import Gradient, in_rows, touched
from sparsestep.memory import tensors as parameters
from sparsestep.memory.mapped_file import mapped_files
from sparsestep.optim import state as states
from sparsestep.optim.announcing import announce_checked
from sparsestep.optim.records import StateKeeper
from sparsestep.rules.rule import Rule


def local(param: Tensor, grad: Gradient, *, by_row: bool) -> tuple[Tensor, Gradient]:
    """The memory of a parameter, and the part of its gradient that belongs there.

    Args:
        param: the parameter.
        grad: its gradient.
        by_row: whether whole rows have to be seen.
    """
    if type(param) is torch.nn.Parameter:
        return param, grad
    memory = parameters.memory_of(param)
    if parameters.is_distributed(param):
        grad = parameters.local_gradient(param, grad, by_row=by_row)
    return memory, grad


def examined(
    optimizer: StateKeeper,
    group: dict[str, Any],
    settings: Settings,
    index: int,
    param: Tensor,
    grad: Gradient,
) -> ParamUpdate:
    """An update with gradient and state checked.

    Args:
        optimizer: whose parameter it is.
        group: the parameter's group.
        settings: what that says.
        index: the parameter's number there.
        param: the parameter.
        grad: its gradient.
    """
    rule, dense = settings.rule, optimizer.semantics == "dense"
    memory, grad = local(param, grad, by_row=rule.by_row or dense)
    optimizer._look_at(param, memory)
    gradient = touched(memory, grad, by_row=rule.by_row or dense)
    if dense:
        gradient = gradient._replace(held=None)  # what is not held is zero, and counts
    record, tensors = optimizer.state.get(param), None
    if not record or _begins_anew(rule, record):
        record = None
    else:
        states.check_count(rule, record)
        tensors = states.checked(rule, memory, record)
    optimizer._look_at(param, memory, tensors, gradient)
    return ParamUpdate(settings, group, index, param, memory, grad, gradient, record, tensors)


def _begins_anew(rule: Rule, record: dict[str, Any]) -> bool:
    """Whether a missing tensor means a first step, as it does for torch's SGD."""
    return not rule.counts and any(record.get(spec.name) is None for spec in rule.state)


def complete(update: ParamUpdate, selection: masks.Selection | None, place: int) -> None:
    """Make it such as engines other than torch's kernels need it: in real numbers, masked, counted.

    Args:
        update: an update that ``examined`` gave.
        selection: what a mask selects.
        place: the parameter's number among all of the optimizer, for its random bits.
    """
    settings, param = update.settings, update.param
    rule = settings.rule
    if selection is not None and parameters.is_distributed(update.owner):
        contract = "a DTensor parameter cannot have a mask"
        raise InputError(sentence(contract, "a mask", "Put it into a group without one"))
    if param.dtype not in FLOATS and param.dtype not in COMPLEX:
        raise InputError(sentence("a parameter must have a real float dtype", param.dtype))
    if update.group.get("differentiable"):
        contract = "differentiable=True needs dense gradients under torch's own formulas"
        raise InputError(sentence(contract, _kind(update.grad)))
    if update.state is None:
        dtype = settings.state_dtype
        update.state = states.new(rule, param, update.group, dtype)
    gradient = update.touched
    if selection is not None:
        if selection.shape != param.shape:
            masks.checked(selection.mask, [param], by_row=rule.by_row)
        gradient = masks.select(gradient, selection, param.numel())
    if mapped_files:
        announce_checked(param, update.state, gradient)
    update.written, update.touched = for_engines(param, update.state, gradient)
    update.step = update.steps_taken() + 1
    if settings.seed is not None:
        update.seed = rounding.seed_for(settings.seed, place, update.step)
        update.dealt = _dealt(update.owner, update.written[0])


def _dealt(owner: Tensor, written: Tensor) -> rounding.Dealt | None:
    """Which rows of a sharded table a parameter has, where that is not all of them."""
    source = source_of(owner)
    step, first = (1, 0) if source is None else source.dealt(owner)
    return None if step == 1 else rounding.Dealt(written[:1].numel(), step, first)


def for_engines(
    param: Tensor, state: list[Tensor], gradient: Touched
) -> tuple[list[Tensor], Touched]:
    """A parameter with its state, and its gradient, in the form that all engines can work with.

    Complex numbers are seen as pairs of real ones. Single elements of rows that lie apart are not
    evenly spaced, but the rows are.
    """
    if not param.is_contiguous():
        gradient = in_rows(param, gradient)
    if not param.is_complex():
        return [param, *state], gradient
    real = [torch.view_as_real(t) if t.is_complex() else t for t in (param.detach(), *state)]
    return real, gradient.as_real()


def _kind(grad: Gradient) -> str:
    return f"layout {grad.layout}" if isinstance(grad, Tensor) else type(grad).__name__
