"""The tensors that a rule keeps for a parameter: made, checked, loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from sparsestep import memory
from sparsestep.contract import Rule
from sparsestep.errors import InputError, sentence
from sparsestep.grads import Touched

FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def dtype_for(param: Tensor) -> torch.dtype:
    """The dtype of a parameter's state: its own, but at least float32.

    Running averages in half precision stall: an average of 0.25 in bfloat16 no longer moves when a
    thousandth of the new value is added to it.
    """
    return torch.float64 if param.dtype == torch.float64 else torch.float32


def new(rule: Rule, param: Tensor, gradient: Touched) -> list[Tensor]:
    """State for a parameter's first step, which is with this gradient."""
    touches = None if gradient.positions is None else gradient.positions.numel()
    memory.gather_into_huge_pages(param, touches)
    where = (dtype_for(param), param.device, touches)
    return [memory.full(param.shape, kept.initial, *where) for kept in rule.state]


def checked(rule: Rule, param: Tensor, state: Mapping[str, Any]) -> list[Tensor]:
    """The rule's tensors from a parameter's state; raises if they do not fit the parameter."""
    tensors = []
    shape, on_cpu = param.shape, param.is_cpu
    for kept in rule.state:
        tensor = state.get(kept.name)
        if not isinstance(tensor, Tensor):
            contract = f"the state must hold a tensor {kept.name!r}"
            raise InputError(sentence(contract, ", ".join(map(str, state))))
        same_device = (on_cpu and tensor.is_cpu) or tensor.device == param.device
        if tensor.shape != shape or not same_device:
            raise InputError(
                sentence(
                    f"the state {kept.name!r} must have the parameter's shape and device, "
                    f"{tuple(shape)} on {param.device}",
                    f"{tuple(tensor.shape)} on {tensor.device}",
                    "Was the parameter replaced? Make a new optimizer for it",
                )
            )
        if tensor.dtype not in FLOATS:
            contract = f"the state {kept.name!r} must be of a real float dtype"
            raise InputError(sentence(contract, tensor.dtype))
        tensors.append(tensor)
    return tensors


def loaded(rule: Rule, param: Tensor, saved: Mapping[str, Any]) -> dict[str, Any]:
    """A parameter's state from a checkpoint, in the dtype that this parameter's state has.

    Torch would cast it to the parameter's dtype, which costs a bfloat16 parameter its float32
    moments. The tensors are copies: the checkpoint stays as it is while training goes on.
    """
    names = {kept.name for kept in rule.state}
    result = dict(saved)
    for name, value in saved.items():
        if name in names and isinstance(value, Tensor):
            result[name] = value.detach().to(param.device, dtype_for(param), copy=True)
    if "step" in saved:
        result["step"] = int(saved["step"])
    return result
