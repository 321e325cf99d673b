"""The norm of a gradient in any layout: that of the mathematical tensor that it stands for.

Entries of the same slot are summed, in at least float32, and what a gradient does not hold is zero.
Nothing is made dense.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep._native import ext, isa
from sparsestep._torch import cat, coo_indices, coo_values, stack
from sparsestep.errors import InputError
from sparsestep.grads.compact import CompactGrad, positions_of
from sparsestep.grads.dedup import summed, sums
from sparsestep.grads.indexed import IndexedGrad, bad_index


def elements(grad: Tensor, order: float) -> Tensor:
    """What has the norm of a gradient: a dense one itself; of others, a strided tensor.

    Example:
        >>> grad = torch.sparse_coo_tensor([[1, 1]], torch.tensor([[3.0, 0.0], [0.0, 4.0]]), (5, 2))
        >>> torch.linalg.vector_norm(elements(grad, 2.0), 2.0)
        tensor(5.)
    """
    if isinstance(grad, MaskedTensor):  # first: its is_sparse is a method, hence always true
        values, mask = held_by(grad)
        found = values[mask].to(torch.promote_types(grad.dtype, torch.float32))
        return _with_the_rest(found, found.numel(), grad, order)
    if isinstance(grad, CompactGrad) and grad.is_materialized:
        grad = grad.materialize_()
    if not grad.is_sparse:
        return grad
    rows = _row_norms(grad, order)
    if rows is not None:
        # Some numbers are left out in any case; that there are none at all matters to one order.
        return rows.new_zeros(1) if grad.numel() and not rows.numel() else rows
    if isinstance(grad, CompactGrad):
        values, count = _of_chunks(grad, order)
    else:
        _, values = coo_sums(grad)
        count = values.numel()
    return _with_the_rest(values, count, grad, order)


def held_by(grad: MaskedTensor) -> tuple[Tensor, Tensor]:
    """The values that a masked gradient stores, which may be written to, and which of them count.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore")  # torch's: masked tensors are a prototype
        >>> grad = torch.masked.masked_tensor(torch.ones(2), torch.tensor([True, False]))
        >>> held_by(grad)
        (tensor([1., 1.]), tensor([ True, False]))
    """
    data, mask = grad.get_data(), grad.get_mask()
    if data.layout is torch.strided:
        return data, mask
    if data.layout is torch.sparse_coo:
        return coo_values(data), coo_values(mask)
    return data.values(), mask.values()


def _with_the_rest(values: Tensor, count: int, grad: Tensor, order: float) -> Tensor:
    """With a zero for all elements that are not held, where that makes a difference."""
    if count == grad.numel() or (count and 0 < order < math.inf):
        return values
    return cat([values.flatten(), values.new_zeros(1)])


def _row_norms(grad: Tensor, order: float) -> Tensor | None:
    """The norms of the rows, or whatever else a gradient holds; ``None`` without the core."""
    if isinstance(grad, CompactGrad):
        parts = grad.parts()
        found = slot_norms(parts, order)
        if found is None and len(parts) > 1:
            found = slot_norms((grad.touched(),), order)
    elif grad.sparse_dim() == 1 and not grad.is_coalesced():
        indices, values = coo_indices(grad).contiguous(), coo_values(grad).resolve_neg()
        touched = IndexedGrad(indices, values, grad.shape[0], math.prod(grad.shape[1:]))
        found = slot_norms((touched,), order)
    else:  # its values are all there is to look at, or have to be looked for
        return None
    return None if found is None else found.to(torch.promote_types(grad.dtype, torch.float32))


_NORMS = {1.0: 1, 2.0: 2, math.inf: 3}  # as in native/core/types.h


def slot_norms(parts: tuple[IndexedGrad, ...], order: float) -> Tensor | None:
    """The norm of every slot of a gradient, in float64; no sum is written out.

    Args:
        parts: of the gradient; all have positions.
        order: of the norm.

    Returns:
        A number for each entry: the slot's norm for the first of a slot, zero for the others.
        ``None`` where the core has no way to do it.

    Example:
        >>> values = torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 4.0]])
        >>> slot_norms((IndexedGrad(torch.tensor([3, 1, 3]), values, 5, 2),), 2.0)
        tensor([5., 1., 0.], dtype=torch.float64)
    """
    code = _NORMS.get(order)
    if ext is None or code is None or not all(part.values.is_cpu for part in parts):
        return None
    parts = tuple(part if part.values.is_contiguous() else part.in_rows() for part in parts)
    entries = sum(positions_of(part).numel() for part in parts)
    found = torch.zeros(entries, dtype=torch.float64, device="cpu")
    done = ext.norms(parts, code, found, torch.get_num_threads(), isa.index)
    if done is None:
        return None
    if done[0] is not None:
        raise InputError(bad_index(0, parts[0].num_slots, done[0]))
    return found


def _of_chunks(grad: CompactGrad, order: float) -> tuple[Tensor, int]:
    """What has the norm of all sums: these, or the norm of each chunk; and how many sums."""
    chunks = sums(grad.touched())
    dtype = torch.promote_types(grad.dtype, torch.float32)
    nothing = torch.empty(0, dtype=dtype, device=grad.device)
    first = next((total for _, total in chunks), nothing)
    norms, count = [], first.numel()
    for _, total in chunks:
        count += total.numel()
        norms.append(torch.linalg.vector_norm(total, order))
    if not norms:
        return first, count
    return stack([torch.linalg.vector_norm(first, order), *norms]), count


def coo_sums(grad: Tensor) -> tuple[Tensor | None, Tensor]:
    """The slots of a COO gradient and the sum of each, in at least float32.

    The slots of a coalesced gradient are not asked for; it has ``None``.

    Example:
        >>> coo_sums(torch.sparse_coo_tensor([[3, 1, 3]], torch.tensor([1.0, 2.0, 4.0]), (5,)))
        (tensor([1, 3]), tensor([[2.],
                [5.]]))
    """
    values = coo_values(grad)
    if grad.is_coalesced():
        return None, values.to(torch.promote_types(values.dtype, torch.float32))
    leading, block = grad.shape[: grad.sparse_dim()], math.prod(values.shape[1:])
    positions = _positions(grad, leading)
    if not values.is_complex():
        return summed(IndexedGrad(positions, values, math.prod(leading), block))
    parts = torch.view_as_real(values.resolve_conj())
    slots, total = summed(IndexedGrad(positions, parts, math.prod(leading), 2 * block))
    return slots, torch.view_as_complex(total.reshape(len(total), block, 2))


def _positions(grad: Tensor, leading: torch.Size) -> Tensor:
    """A number for each place that the gradient's indices name."""
    indices = coo_indices(grad)
    positions = indices.new_zeros(indices.shape[1])
    for dim, (row, size) in enumerate(zip(indices, leading, strict=True)):
        bad = (row < 0) | (row >= size)
        if bool(bad.any()):
            raise InputError(bad_index(dim, size, int(row[bad][0])))
        positions.mul_(size).add_(row)
    return positions
