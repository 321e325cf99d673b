"""Touched: the one canonical form of a gradient, and how each layout becomes one.

A parameter is seen as ``[slots, block]``: a slot is the smallest contiguous piece that is touched
or not as a whole. A gradient in row-sparse COO form touches rows, so its slots are rows; one that
is sparse in every dimension touches single elements.

Everything that can be checked without reading the positions is checked here. The positions
themselves are checked by the engine, which reads them anyway.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.masked import MaskedTensor

from sparsestep.errors import InputError, sentence


FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
COMPLEX = frozenset({torch.complex64, torch.complex128})


class Touched(NamedTuple):
    """Which slots of a parameter a gradient touches, and with what values.

    Attributes:
        positions: int64, contiguous, ``n`` elements (``[n]`` or, as COO has it, ``[1, n]``): a
            slot for each entry. A slot may come several times: its values are summed. ``None``
            when every slot comes once, in order; then ``values`` has the parameter's shape.
        values: ``[n, ...]``, a block for each entry.
        slots: how many slots the parameter has.
        block: how many elements a slot has.
        source: int64, contiguous, ``[n]``: the row of ``values`` that each entry takes, where that
            is not the entry's own number. So a part of a gradient is chosen without copying it.
    """

    positions: Tensor | None
    values: Tensor
    slots: int
    block: int
    source: Tensor | None = None

    def as_real(self) -> Touched:
        """Complex values as pairs of real numbers."""
        values = torch.view_as_real(self.values.resolve_conj())
        return self._replace(values=values, block=2 * self.block)


def touched(param: Tensor, grad: Tensor, *, by_row: bool = False) -> Touched:
    """Bring the gradient of ``param`` into canonical form, without copying its values.

    Args:
        param: the parameter.
        grad: its gradient.
        by_row: slots have to be rows, for a rule that keeps numbers per row.

    Example:
        >>> param = torch.zeros(5, 2)
        >>> rows = torch.tensor([[3, 1, 3]])
        >>> t = touched(param, torch.sparse_coo_tensor(rows, torch.ones(3, 2), (5, 2)))
        >>> t.positions.tolist(), t.slots, t.block
        ([[3, 1, 3]], 5, 2)
    """
    if isinstance(grad, MaskedTensor):  # first: its is_sparse is a method, hence always true
        raise InputError(_unsupported("a MaskedTensor"))
    shape = param.shape
    if (
        grad.shape != shape
        or (grad.dtype != param.dtype and not _may_mix(param.dtype, grad.dtype))
        or (
            not (grad.is_cpu and param.is_cpu)  # the usual case, told without making two devices
            and grad.device != param.device
        )
    ):
        raise InputError(_mismatch(param, grad))
    if not param.is_contiguous() and has_internal_overlap(param):
        raise InputError(
            sentence(
                "every element of a parameter must have memory of its own",
                f"shape {tuple(shape)} with strides {param.stride()}",
                "Make the parameter contiguous",
            )
        )
    if grad.is_sparse:
        return _from_coo(param, shape, grad, by_row)
    if grad.layout is torch.strided:
        values = grad.resolve_neg() if grad.is_neg() else grad
        if by_row and shape:
            return Touched(None, values, shape[0], math.prod(shape[1:]))
        return Touched(None, values, 1, grad.numel())
    raise InputError(_unsupported(f"layout {grad.layout}"))


def _may_mix(param: torch.dtype, grad: torch.dtype) -> bool:
    """Real with real, of any precision: the arithmetic is done in the widest anyway."""
    return param in FLOATS and grad in FLOATS


def _mismatch(param: Tensor, grad: Tensor) -> str:
    again = "after backward? Call zero_grad() and backward() again"
    if grad.shape != param.shape:
        contract = f"the gradient must have the parameter's shape, {tuple(param.shape)}"
        return sentence(contract, tuple(grad.shape), f"Was the parameter resized {again}")
    if grad.dtype != param.dtype:
        contract = f"the gradient of a {param.dtype} parameter must be of a like dtype"
        return sentence(contract, grad.dtype, f"Was the parameter converted {again}")
    contract = f"the gradient must be on the parameter's device, {param.device}"
    return sentence(contract, grad.device)


def has_internal_overlap(tensor: Tensor) -> bool:
    """Whether two elements share memory, as in an expanded tensor."""
    return any(
        size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _unsupported(what: str) -> str:
    return sentence(
        "the gradient must be a strided or a COO tensor", what, "Convert it with .to_sparse_coo()"
    )


def _from_coo(param: Tensor, shape: torch.Size, grad: Tensor, by_row: bool) -> Touched:
    indices, values = grad._indices(), grad._values()
    sparse_dim, entries = indices.shape
    if by_row and sparse_dim != 1 and shape:
        raise InputError(
            sentence(
                "a rule that keeps numbers per row takes gradients that hold whole rows",
                f"a COO gradient over {sparse_dim} dims",
                "Make it sparse in its first dim alone, or use a rule without row-wise state",
            )
        )
    if sparse_dim == 1:
        positions = indices
        slots = shape[0]
    else:
        _check_indices(indices, shape)
        positions = _flatten(indices, shape[:sparse_dim])
        slots = math.prod(shape[:sparse_dim])
    block = param.numel() // slots if slots else math.prod(shape[sparse_dim:])
    if not positions.is_contiguous():
        positions = positions.contiguous()
    if values.numel() != entries * block:
        raise InputError(
            sentence(
                f"the gradient's {entries} indices over {sparse_dim} dims need values of shape "
                f"{(entries, *shape[sparse_dim:])}",
                tuple(values.shape),
            )
        )
    if values.is_neg():  # torch may keep a sign that is still to be flipped beside the values
        values = values.resolve_neg()
    return Touched(positions, values, slots, block)


def _check_indices(indices: Tensor, shape: torch.Size) -> None:
    """Refuse an index outside its own dimension, which flattening would hide."""
    if indices.numel() == 0:
        return
    for dim, row in enumerate(indices):
        low, high = (int(bound) for bound in row.aminmax())
        if low < 0 or high >= shape[dim]:
            raise InputError(bad_index(dim, shape[dim], low if low < 0 else high))


def bad_index(dim: int, size: int, index: int) -> str:
    """Phrase the refusal of an index that its dimension does not have."""
    return sentence(
        f"the gradient's indices of dim {dim} must be in [0, {size})",
        index,
        "Check the ids that went into the embedding",
    )


def _flatten(indices: Tensor, leading: torch.Size) -> Tensor:
    positions = indices.new_zeros(indices.shape[1])
    for row, size in zip(indices, leading, strict=True):
        positions.mul_(size).add_(row)
    return positions
