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
HALVES = frozenset({torch.float16, torch.bfloat16})
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
        held: bool, contiguous, ``[rows of values, block]``: which elements of a slot are touched,
            where that is not all of them. Only for rules that need rows and are given less.
    """

    positions: Tensor | None
    values: Tensor
    slots: int
    block: int
    source: Tensor | None = None
    held: Tensor | None = None

    def as_real(self) -> Touched:
        """Complex values as pairs of real numbers."""
        values = torch.view_as_real(self.values.resolve_conj())
        held = None if self.held is None else self.held.repeat_interleave(2, dim=1)
        return self._replace(values=values, block=2 * self.block, held=held)

    def finer(self, slots: int) -> Touched:
        """The same gradient over smaller slots; no value is copied.

        Example:
            >>> Touched(torch.tensor([1]), torch.ones(1, 4), 2, 4).finer(4).positions.tolist()
            [2, 3]
        """
        assert self.positions is not None
        per = slots // self.slots if self.slots else 1
        inside = torch.arange(per, device=self.positions.device)
        positions = (self.positions.reshape(-1, 1) * per + inside).reshape(-1)
        source = None
        if self.source is not None:
            source = (self.source.reshape(-1, 1) * per + inside).reshape(-1)
        return self._replace(
            positions=positions, slots=slots, block=self.block // per if per else 0, source=source
        )

    def coarser(self, slots: int) -> Touched:
        """The same gradient over larger slots, each of which is held in part.

        The values are copied, summed, into slots of their own: the cost is that of the larger slots
        that are touched.

        Example:
            >>> t = Touched(torch.tensor([5, 1, 5]), torch.ones(3, 1), 6, 1).coarser(2)
            >>> t.positions.tolist(), t.values.tolist()
            ([0, 1], [[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
            >>> t.held.tolist()
            [[False, True, False], [False, False, True]]
        """
        assert self.positions is not None
        assert self.source is None
        positions = self.positions.reshape(-1)
        check_positions(positions, self.slots)
        per = self.slots // slots if slots else 1
        larger, where = torch.unique(positions.div(per, rounding_mode="floor"), return_inverse=True)
        wide = torch.float32 if self.values.dtype in HALVES else self.values.dtype
        values = self.values.reshape(len(positions), self.block).to(wide)
        sums = values.new_zeros(len(larger) * per, self.block)
        held = torch.zeros(sums.shape, dtype=torch.bool, device=sums.device)
        cells = where * per + positions % per
        sums.index_add_(0, cells, values)
        held[cells] = True
        shape = (len(larger), per * self.block)
        return Touched(larger, sums.view(shape), slots, shape[1], held=held.view(shape))


def check_positions(positions: Tensor, slots: int) -> None:
    """Refuse positions that are no slots."""
    if positions.numel():
        low, high = (int(bound) for bound in positions.aminmax())
        if low < 0 or high >= slots:
            raise InputError(bad_index(0, slots, low if low < 0 else high))


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
        found = _from_coo(param, shape, grad)
        if by_row and shape and found.slots != shape[0]:
            if not param.numel():
                return Touched(grad._indices()[:0].reshape(-1)[:0], grad._values(), shape[0], 0)
            finer = found.slots < shape[0]
            return found.finer(shape[0]) if finer else found.coarser(shape[0])
        return found
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


def _from_coo(param: Tensor, shape: torch.Size, grad: Tensor) -> Touched:
    indices, values = grad._indices(), grad._values()
    sparse_dim, entries = indices.shape
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
