"""What the gradients of embeddings have in common: from ids and rows to a part of a Compact."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sparsestep._torch import uses, uses_of_memory
from sparsestep.grads.indexed import Touched


def part(
    weight: torch.Size,
    ids: Tensor,
    values: Tensor,
    source: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    padding: int = -1,
    by_frequency: bool = False,
) -> Touched:
    """The part of a table's gradient that comes from one lookup.

    Args:
        weight: the table's shape.
        ids: which rows were looked up.
        values: the gradient of the output, a row for each id or bag.
        source: the row of ``values`` for each id, where that is not its own number.
        scale: a factor for each id.
        padding: the id that gets no gradient; -1 if there is none.
        by_frequency: whether each id's gradient is divided by how often it comes.
    """
    ids = ids.reshape(-1)
    if padding >= 0:
        present = (ids != padding).nonzero().squeeze(1)
        positions = ids[present].long()
        source = present if source is None else source[present]
        scale = None if scale is None else scale[present]
    else:
        # A copy in any case: ids may be a buffer that the next batch is read into.
        positions = _copy(ids, torch.int64)
    return part_of(weight, positions, values, source, scale, by_frequency=by_frequency)


def part_of(
    weight: torch.Size,
    positions: Tensor,
    values: Tensor,
    source: Tensor | None = None,
    scale: Tensor | None = None,
    *,
    by_frequency: bool = False,
) -> Touched:
    """The same from ids without padding that nobody else has, int64."""
    rows, dim = weight
    if scale is not None:  # which may be a parameter that the same step updates
        scale = _copy(scale, scale.dtype)
    if by_frequency:
        shares = _shares(positions, values.dtype)
        scale = shares if scale is None else scale * shares
    return Touched(positions, values, rows, dim, source, scale)


def _copy(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype, copy=True, memory_format=torch.contiguous_format)


def _shares(positions: Tensor, dtype: torch.dtype) -> Tensor:
    """One divided by how often each id comes."""
    _, which, counts = torch.unique(positions, return_inverse=True, return_counts=True)
    shares: Tensor = counts.to(dtype.to_real()).reciprocal()
    return shares[which]


def unshared(grad: Tensor) -> Tensor:
    """The gradient of an output, or a copy if others may come to write to its memory.

    Autograd passes the same tensor to whatever was added up. A view of it may become the gradient
    of a parameter, to which the next backward adds in place, before the optimizer reads it here.
    """
    if not grad.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    users = _users(grad)
    return grad if users is not None and users == _users_when_alone() else grad.clone()


def _users(tensor: Tensor) -> tuple[int, int] | None:
    """How many hold the tensor, and how many its memory; ``None`` if this torch does not tell."""
    of_tensor, of_memory = uses(tensor), uses_of_memory(tensor)
    return None if of_tensor is None or of_memory is None else (of_tensor, of_memory)


@functools.cache
def _users_when_alone() -> tuple[int, int] | None:
    """What ``_users`` says of a tensor that nobody else has: that depends on torch's version."""
    return _users(torch.zeros(1, device="cpu"))


def first_derivative(backward: Callable[..., Any], ctx: Any, *grads: Any) -> Any:
    """Run a backward function whose result cannot be differentiated once more.

    Torch's ``once_differentiable`` makes trying that an error. It is costly, and not needed where
    gradients are not recorded, which is the usual case. Where ``backward()`` is called in a
    function that is compiled, the compiler comes across it, and is to leave it as it is.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(first_derivative)(backward, ctx, *grads)
    if torch.is_grad_enabled():
        return once_differentiable(backward)(ctx, *grads)
    return backward(ctx, *grads)
