"""The state tensors of a parameter: created, checked, loaded."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakMethod

import torch
from torch import Tensor

from sparsestep.errors import InputError, message
from sparsestep.grads.indexed import COMPLEX, FLOATS
from sparsestep.memory import lazy as pages
from sparsestep.memory import mapped_state as beside
from sparsestep.memory.tensors import memory_of
from sparsestep.rules.options import to_number
from sparsestep.rules.rule import Rule, State

_COUNTS = {*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}


# Who has what is missing made by asking whether there is any state.
_CHECKPOINTS = ("torch.distributed.checkpoint.", "sparsestep.")


class Records(defaultdict[Tensor, Any]):
    """An optimizer's state by parameter. A checkpoint that asks whether there is any has it made.

    ``torch.distributed.checkpoint`` asks; where there is none it runs a step of zeros to have some,
    which would count, and where some parameters have none, what it saves cannot be loaded. Anybody
    else, PyKEEN for one, wants to know whether there was a step.

    Args:
        records: what there is.
        complete: makes what is missing; a method, which is not spec alive.
    """

    def __init__(self, records: Mapping[Tensor, Any], complete: Callable[[], None]) -> None:
        super().__init__(dict, records)
        self._complete = WeakMethod(complete)

    def __bool__(self) -> bool:
        asking: str = sys._getframe(1).f_globals.get("__name__", "")
        complete = self._complete() if asking.startswith(_CHECKPOINTS) else None
        if complete is not None:
            complete()
        return len(self) > 0

    def __reduce__(self) -> tuple[Any, ...]:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __copy__(self) -> Any:
        return defaultdict(dict, self)

    copy = __copy__


def shape_for(spec: State, param: Tensor) -> torch.Size:
    """The shape of a state tensor: the parameter's, or its first dim alone."""
    return param.shape[:1] if spec.per_row else param.shape


def dtype_for(spec: State, param: Tensor, state_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a state tensor: what was asked for, else the parameter's, at least float32.

    Running averages in half precision stall: an average of 0.25 in bfloat16 no longer moves when a
    thousandth of the new value is added to it.
    """
    if spec.dtype is not None:
        return spec.dtype
    if param.dtype in COMPLEX:
        return param.real.dtype if spec.per_row else param.dtype
    if state_dtype is not None:
        return state_dtype
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def new(
    rule: Rule, param: Tensor, options: Mapping[str, Any], state_dtype: torch.dtype | None
) -> list[Tensor]:
    """State for a parameter's first step."""
    return [_made(spec, param, options, state_dtype) for spec in rule.state]


def _made(
    spec: State,
    param: Tensor,
    options: Mapping[str, Any],
    state_dtype: torch.dtype | None,
) -> Tensor:
    dtype = dtype_for(spec, param, state_dtype)
    value = initial(spec, options)
    shape, begins_with = shape_for(spec, param), in_dtype(dtype, value)
    in_file = beside.full_beside(param, spec.name, shape, begins_with, dtype)
    if in_file is not None:
        return in_file
    if not spec.per_row and not param.is_contiguous():
        # Elements in the parameter's own order, as torch does it.
        return torch.full_like(param, begins_with, dtype=dtype, requires_grad=False)
    return pages.full(shape, begins_with, dtype, param.device)


def initial(spec: State, options: Mapping[str, Any]) -> float:
    """What every element of a state begins with; of a complex one, both of its parts."""
    value = options[spec.initial] if isinstance(spec.initial, str) else spec.initial
    value = float(to_number(value))
    return value if spec.first is None else spec.first(value)


def in_dtype(dtype: torch.dtype, value: float) -> complex:
    """A value that state begins with; both parts of a complex number have it."""
    return complex(value, value) if dtype in COMPLEX and value else value


def checked(rule: Rule, param: Tensor, state: Mapping[str, Any]) -> list[Tensor]:
    """The rule's tensors from a parameter's state; raises if they do not fit the parameter."""
    tensors = []
    shape, on_cpu = param.shape, param.is_cpu
    for spec in rule.state:
        tensor = state.get(spec.name)
        if not isinstance(tensor, Tensor):
            requirement = f"the state must have a tensor {spec.name!r}"
            raise InputError(message(requirement, ", ".join(map(str, state))))
        tensor = memory_of(tensor)
        same_device = (on_cpu and tensor.is_cpu) or tensor.device == param.device
        wanted = shape[:1] if spec.per_row else shape
        if tensor.shape != wanted or not same_device:
            raise InputError(
                message(
                    f"the state {spec.name!r} must have shape {tuple(wanted)} and be on "
                    f"{param.device}, like the parameter",
                    f"{tuple(tensor.shape)} on {tensor.device}",
                    "Was the parameter replaced? Make a new optimizer for it",
                )
            )
        if param.is_complex() and tensor.is_complex() == spec.per_row:
            # Real state would be half as large as what is written.
            wanted_dtype = dtype_for(spec, param)
            requirement = (
                f"the state {spec.name!r} of a {param.dtype} parameter must be {wanted_dtype}"
            )
            raise InputError(message(requirement, tensor.dtype))
        coded = tensor.dtype is torch.int8 or spec.dtype is torch.int8
        if tensor.dtype != spec.dtype if coded else not _is_float(tensor, param):
            requirement = f"the state {spec.name!r} must have {_kind(spec)}"
            raise InputError(message(requirement, tensor.dtype))
        if tensor.layout is not torch.strided:
            requirement = f"the state {spec.name!r} must be a strided tensor"
            raise InputError(message(requirement, tensor.layout, "Load it with load_state_dict"))
        tensors.append(tensor)
    return tensors


def _is_float(tensor: Tensor, param: Tensor) -> bool:
    return tensor.dtype in FLOATS or tensor.dtype == param.dtype


def _kind(spec: State) -> str:
    return "dtype torch.int8" if spec.dtype is torch.int8 else "a real float dtype"


def check_count(rule: Rule, state: Mapping[str, Any]) -> None:
    """Refuse a state that does not say how many steps were taken, under a rule that needs it."""
    count = state.get("step")
    if isinstance(count, int | float) or (count is None and not rule.counts):
        return
    if not isinstance(count, Tensor):
        requirement = "the state must have 'step', the number of steps taken"
        got = ", ".join(map(str, state)) if count is None else f"a {type(count).__name__}"
        raise InputError(message(requirement, got, "To start over, clear the parameter's state"))
    if count.numel() != 1 or count.layout is not torch.strided or count.dtype not in _COUNTS:
        requirement = "the state 'step' must be a number or a one-element tensor"
        raise InputError(message(requirement, f"{count.dtype} of shape {tuple(count.shape)}"))
    if count.is_inference() and not torch.is_inference_mode_enabled():
        requirement = "outside torch.inference_mode(), 'step' must not be an inference tensor"
        raise InputError(message(requirement, "an inference tensor", "Use a clone of it"))


def loaded(
    rule: Rule,
    param: Tensor,
    saved: Mapping[str, Any],
    state_dtype: torch.dtype | None,
    given: Mapping[str, Any],
    replaced: Mapping[str, Any],
) -> dict[str, Any]:
    """A parameter's state from a checkpoint, in the dtype that this parameter's state has.

    Torch would cast it to the parameter's dtype, which costs a bfloat16 parameter its float32
    moments. The tensors are copies: the checkpoint stays as it is while training goes on.

    Args:
        rule: what the state is of.
        param: whose it is.
        saved: its tensors are strided.
        state_dtype: what the group says.
        given: the checkpoint's own; any other tensor was made for this one.
        replaced: what the parameter has now.
    """
    known = {spec.name: spec for spec in rule.state}
    result = dict(saved)
    for name, value in saved.items():
        if name in known and isinstance(value, Tensor):
            dtype = dtype_for(known[name], param, state_dtype)
            copied = beside.copy_beside(param, name, value, dtype, replaced.get(name))
            if copied is None:
                copied = value.detach().to(param.device, dtype, copy=value is given.get(name))
            result[name] = copied
    return result
