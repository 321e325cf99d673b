"""A parameter that gets more rows: its state grows with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, message
from sparsestep.grads import masks
from sparsestep.memory import lazy as pages
from sparsestep.memory import tensors as parameters
from sparsestep.optim import state as states
from sparsestep.optim.optimizer import RuleOptimizer


def prepare_to_grow(
    optimizer: RuleOptimizer, param: Tensor, rows: int, old: int
) -> Callable[[], None]:
    """Make the state of a parameter for so many rows: all that may raise.

    Args:
        optimizer: whose state.
        param: which still has the rows that it has.
        rows: how many there are to be.
        old: how many of those that it has keep their state.

    Returns:
        What is to be called once the parameter has them, and cannot fail.
    """
    group = optimizer._group_of(param)
    if group.get("mask") is not None:
        listed = masks.listed(group["mask"], group["params"])
        if any(m is not None and p is param for m, p in zip(listed, group["params"], strict=True)):
            requirement = (
                "a parameter with a mask cannot grow: the mask does not cover the new rows"
            )
            remedy = "Remove it from the param group, and set a larger one afterwards"
            raise InputError(message(requirement, "a mask", remedy))
    record, rule = optimizer.state.get(param), optimizer.stored_rule_for(group)
    if record and all(record.get(spec.name) is not None for spec in rule.state):
        states.checked(rule, parameters.memory_of(param), record)
    optimizer.catch_up_rows(param, None)
    initial = {spec.name: states.initial(spec, group) for spec in rule.state}
    new = {
        name: _grown(name, value, old, rows, initial.get(name, 0.0))
        for name, value in (record or {}).items()
        if isinstance(value, Tensor) and value.dim() and len(value) == len(param)
    }
    clock, grow_clock = optimizer.deferred.get(id(param)), None
    if clock is not None and clock.owner is param and clock.state_in(record) is not None:
        grow_clock = clock.prepare_to_grow(rows)
    return partial(_commit, optimizer, param, record, new, grow_clock)


def _grown(name: str, tensor: Tensor, old: int, rows: int, value: float) -> Tensor:
    """A state tensor with more rows, those that are new as in the beginning."""
    if tensor.is_cpu and tensor.is_shared():
        requirement = f"the state {name!r} of a parameter that grows must not be in shared memory"
        raise InputError(message(requirement, "one that other processes may have"))
    shape, dtype = torch.Size([rows, *tensor.shape[1:]]), tensor.dtype
    new = pages.full(shape, states.in_dtype(dtype, value), dtype, tensor.device)
    new[:old] = tensor.detach()[:old]
    return new


def _commit(
    optimizer: RuleOptimizer,
    param: Tensor,
    record: dict[str, Any] | None,
    new: dict[str, Tensor],
    grow_clock: Callable[[], None] | None,
) -> None:
    if record:
        record.update(new)
    # Whatever was noted about the memory of the parameter and its state.
    optimizer._known.pop(id(param), None)
    optimizer._before = None
    optimizer._huge_pages.remove(param)
    if grow_clock is not None:
        grow_clock()
        optimizer.deferred[id(param)].written(parameters.memory_of(param))
    else:
        optimizer.deferred.pop(id(param), None)  # its state was cleared: it starts over
