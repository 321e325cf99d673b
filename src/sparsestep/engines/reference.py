"""The reference engine: gather, call the rule, scatter.

It runs on any device and any strides. It is the oracle of the tests, the path for tensors that have
no native kernel, and the documentation of the native engine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsestep.contract import Update
from sparsestep.errors import InputError
from sparsestep.grads import Touched, bad_index


@dataclass(slots=True)
class Result:
    """New values for the touched part of a parameter and its state, not written yet."""

    slots: Tensor | None
    tensors: list[Tensor]
    new: list[Tensor]
    block: int

    @torch.no_grad()
    def write(self) -> None:
        """Store the new values, rounded to each tensor's own dtype."""
        for tensor, new in zip(self.tensors, self.new, strict=True):
            _scatter(tensor, self.slots, self.block, new.to(tensor.dtype))


@torch.no_grad()
def compute(update: Update) -> Result:
    """Evaluate the rule on the touched part; raises if a position is no slot; writes nothing."""
    slots, grad = summed(update.touched)
    block = update.touched.block
    if grad.numel() == 0:
        return Result(slots, [], [], block)
    tensors = [update.param, *update.state]
    dtype = _arithmetic_dtype([*tensors, grad])
    grad = grad.to(dtype)
    if update.maximize:
        grad = -grad
    old = [_gather(tensor, slots, block).to(dtype) for tensor in tensors]
    new = update.rule.update(old[0], grad, *old[1:], step=update.step, **update.hyper)
    return Result(slots, tensors, list(new), block)


def summed(touched: Touched) -> tuple[Tensor | None, Tensor]:
    """The unique slots in ascending order, and the sum of the values of each.

    Duplicates are summed in order of appearance, in at least float32.

    Example:
        >>> values = torch.tensor([[1.0], [2.0], [4.0]])
        >>> summed(Touched(torch.tensor([3, 1, 3]), values, 5, 1))
        (tensor([1, 3]), tensor([[2.],
                [5.]]))
    """
    positions, values = touched.positions, touched.values
    if positions is None:
        return None, values
    positions = positions.reshape(-1)
    _check_positions(positions, touched.slots)
    values = values.reshape(len(positions), touched.block)
    values = values.to(_arithmetic_dtype([values]))
    slots, where, counts = torch.unique(positions, return_inverse=True, return_counts=True)
    if len(slots) == len(positions):
        return slots, values[torch.argsort(positions)]
    # The first value of a slot is copied, the others are added to it: a sum that began with 0.0
    # would turn a single -0.0 into 0.0.
    order = torch.argsort(positions, stable=True)
    first = order[counts.cumsum(0) - counts]
    total = values[first]
    later = torch.ones_like(positions, dtype=torch.bool)
    later[first] = False
    return slots, total.index_add_(0, where[later], values[later])


def _check_positions(positions: Tensor, slots: int) -> None:
    bad = (positions < 0) | (positions >= slots)
    if bool(bad.any()):
        raise InputError(bad_index(0, slots, int(positions[bad][0])))


def _arithmetic_dtype(tensors: list[Tensor]) -> torch.dtype:
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


def _gather(tensor: Tensor, slots: Tensor | None, block: int) -> Tensor:
    if slots is None:
        return tensor
    return tensor[_index(tensor, slots, block)].reshape(len(slots), block)


def _scatter(tensor: Tensor, slots: Tensor | None, block: int, new: Tensor) -> None:
    if slots is None:
        tensor.copy_(new)
        return
    index = _index(tensor, slots, block)
    tensor[index] = new.reshape(tensor[index].shape)


def _index(tensor: Tensor, slots: Tensor, block: int) -> tuple[Tensor, ...]:
    """Slots as indices of the leading dims, so that any strides can be read and written."""
    leading = tensor.dim()
    rest = 1
    while rest < block:
        leading -= 1
        rest *= tensor.shape[leading]
    # No leading dim: the one slot is the whole tensor, and an empty index selects it.
    return torch.unravel_index(slots, tensor.shape[:leading]) if leading else ()
