"""A gradient in any layout, and what it means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.masked import MaskedTensor, masked_tensor

import sparsestep
from sparsestep import IndexedGrad
from tests.generate.source import Source
from tests.table import same_bits

BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass
class Drawn:
    """A gradient as it is given to the library, and its meaning."""

    grad: Any
    dense: Tensor  # the sum of all entries, in float64 or complex128
    held: Tensor  # which elements it holds
    text: str = ""

    def __post_init__(self) -> None:
        self._parts = [part.clone() for part in _parts(self.grad)]

    def is_as_given(self) -> bool:
        """Whether the gradient has not been written to."""
        return all(map(same_bits, _parts(self.grad), self._parts))


def _parts(grad: Any) -> list[Tensor]:
    """The tensors that a gradient consists of."""
    if isinstance(grad, IndexedGrad):
        return [part for part in grad if isinstance(part, Tensor)]
    if isinstance(grad, MaskedTensor):
        return [*_parts(grad.get_data()), *_parts(grad.get_mask())]
    if type(grad) is not Tensor:
        return []
    if grad.layout is torch.strided:
        return [grad]
    if grad.layout is torch.sparse_coo:
        return [grad._indices(), grad._values()]
    by_row = grad.layout in BY_ROW
    starts = grad.crow_indices() if by_row else grad.ccol_indices()
    return [starts, grad.col_indices() if by_row else grad.row_indices(), grad.values()]


Kind = Callable[[Source, Tensor, torch.dtype], Drawn]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.complex128 if dtype.is_complex else torch.float64


def any_grad(
    chance: Source, param: Tensor, *, by_hand: bool, kinds: tuple[Kind, ...] = ()
) -> Drawn:
    """A valid gradient, of one of ``kinds``; by hand also those that ``.grad`` cannot be."""
    dtype = _dtype(chance, param, by_hand)
    allowed = kinds or (_BY_HAND if by_hand else _GRADS)
    weights = {kind: _KINDS[kind][0] for kind in allowed if _KINDS[kind][1](param, dtype)}
    return chance.weighted(weights)(chance, param, dtype)


def _dtype(chance: Source, param: Tensor, by_hand: bool) -> torch.dtype:
    mixed = by_hand and param.dtype in REAL and chance.one_in(5)
    return chance.pick(REAL) if mixed else param.dtype


def disguised(chance: Source, values: Tensor, text: str) -> tuple[Tensor, str]:
    """The same numbers: mostly as they are, or with other strides, or lazily negated."""
    form = chance.integer(0, 9)
    if form == 9 and values.dim() > 1:
        return values.transpose(0, -1).contiguous().transpose(0, -1), text + " transposed"
    if form == 8 and values.dim():
        return values.repeat_interleave(2, -1)[..., ::2], text + " with gaps"
    if form == 7 and values.dim():
        return values.repeat_interleave(2, 0)[::2], text + " with gaps between rows"
    if form == 6 and values.is_complex():
        return values.conj_physical().conj(), text + " conjugated"
    if form == 6:
        return torch._neg_view(values.neg()), text + " negated"
    return values, text


# Strided


def strided(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    values, text = chance.numbers(param.shape, dtype), f"strided {dtype}"
    if values.dim() and values.shape[0] and chance.one_in(10):
        values, text = values[:1].expand(values.shape), text + " expanded"
    else:
        values, text = disguised(chance, values, text)
    dense = values.resolve_conj().resolve_neg().to(wide(dtype), copy=True)
    return Drawn(values, dense, torch.ones(param.shape, dtype=torch.bool), text)


def is_lazy(grad: Tensor) -> bool:
    """Expanded or negated: nothing that torch's own functions write."""
    if grad.layout is not torch.strided:
        return False
    return grad.is_neg() or any(
        s == 0 and n > 1 for s, n in zip(grad.stride(), grad.shape, strict=True)
    )


# COO


def coo(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    shape = tuple(param.shape)
    sparse_dim = chance.integer(min(1, len(shape)), len(shape))
    if chance.one_in(20):
        sparse_dim = 0
    leading = shape[:sparse_dim]
    nnz = chance.pick([0, 1, 2, 5, 12]) if math.prod(leading) else 0
    indices = torch.tensor(
        [chance.integers(nnz, size) for size in leading], dtype=torch.int64
    ).reshape(sparse_dim, nnz)
    values = chance.numbers((nnz, *shape[sparse_dim:]), dtype)
    text = f"COO {dtype} sparse_dim={sparse_dim} indices={indices.tolist()}"
    if chance.one_in(8):
        indices, text = indices.repeat_interleave(2, 1)[:, ::2], text + " indices with gaps"
    if nnz and chance.one_in(8):
        values, text = values[:1].expand(values.shape), text + " values expanded"
    else:
        values, text = disguised(chance, values, text)
    dense, held = scattered(shape, leading, indices, values)
    grad = torch.sparse_coo_tensor(indices, values, shape, check_invariants=False)
    if chance.one_in(3) and sparse_dim:
        plain = values.resolve_neg().clone(memory_format=torch.contiguous_format)
        grad = torch.sparse_coo_tensor(indices, plain, shape, check_invariants=False).coalesce()
        text += " coalesced"
    return Drawn(grad, dense, held, text)


def plain_coo(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    """Of entries that torch.optim.SparseAdam takes as well."""
    rows = param.shape[0] if param.dim() else 1
    nnz = chance.pick([0, 1, 2, 5, 12]) if rows else 0
    indices = torch.tensor([chance.integers(nnz, rows)], dtype=torch.int64)
    values = chance.numbers((nnz, *param.shape[1:]), dtype)
    dense, held = scattered(tuple(param.shape), (rows,), indices, values)
    indices = indices[: param.dim()]
    grad = torch.sparse_coo_tensor(indices, values, param.shape, check_invariants=False)
    return Drawn(grad.coalesce() if param.dim() and chance.one_in(3) else grad, dense, held)


def scattered(
    shape: tuple[int, ...], leading: tuple[int, ...], indices: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    """The sum of all entries, and which elements there is an entry for."""
    slots = math.prod(leading)
    flat = torch.zeros(indices.shape[1], dtype=torch.int64)
    for row, size in zip(indices, leading, strict=True):
        flat = flat * size + row
    return summed(shape, slots, flat, values)


def as_dense(grad: Tensor) -> Tensor:
    """What a gradient stands for, in float64.

    Not by ``to_dense``: where there is one entry, and it lies at a distance as if there were others
    between, torch 2.13 writes behind the end of what it has allocated.
    """
    if type(grad) is Tensor and grad.layout is torch.sparse_coo:
        leading = tuple(grad.shape[: grad.sparse_dim()])
        return scattered(tuple(grad.shape), leading, grad._indices(), grad._values())[0]
    dense = grad.clone().to_dense() if grad.layout is not torch.strided else grad
    return dense.detach().resolve_neg().to(wide(grad.dtype), copy=True)


def summed(
    shape: tuple[int, ...], slots: int, positions: Tensor, values: Tensor
) -> tuple[Tensor, Tensor]:
    block = math.prod(shape) // slots if slots else 0
    dense = torch.zeros(slots, block, dtype=wide(values.dtype))
    held = torch.zeros(slots, block, dtype=torch.bool)
    exact = values.resolve_neg().resolve_conj().to(dense.dtype).reshape(len(positions), block)
    dense.index_add_(0, positions, exact)
    held[positions] = True
    return dense.reshape(shape), held.reshape(shape)


# MaskedTensor


def masked(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    if param.dim() and param.numel() and chance.one_in(3):
        return _masked_coo(chance, param, dtype)
    values, held = chance.numbers(param.shape, dtype), chance.flags(param.shape)
    dense = torch.where(held, values.double(), 0.0)
    data = torch.where(held, values, torch.nan) if chance.one_in(2) else values
    return Drawn(masked_tensor(data, held), dense, held, f"MaskedTensor {dtype}")


def _masked_coo(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    more = chance.flags(param.shape)
    held = more & chance.flags(param.shape)
    values = chance.numbers(param.shape, dtype)
    places, shape = more.nonzero().t(), param.shape
    data = torch.sparse_coo_tensor(places, values[more], shape, is_coalesced=True)
    mask = torch.sparse_coo_tensor(places, held[more], shape, is_coalesced=True)
    dense = torch.where(held, values.double(), 0.0)
    return Drawn(masked_tensor(data, mask), dense, held, f"MaskedTensor of COO {dtype}")


# Compact: what sparsestep.nn gives


def compact(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    """By a lookup of its own, with a gradient of the output that is given."""
    kept, param.grad = param.grad, None
    dense = torch.zeros(param.shape, dtype=torch.float64)
    held = torch.zeros(param.shape, dtype=torch.bool)
    text = "Compact"
    try:
        for _ in range(chance.pick([1, 1, 1, 2])):
            text += _look_up(chance, param, dense, held)
        return Drawn(param.grad, dense, held, text)
    finally:
        param.grad = kept


def _look_up(chance: Source, param: Any, dense: Tensor, held: Tensor) -> str:
    rows, columns = param.shape
    bags = chance.one_in(2)
    count, length = chance.pick([0, 1, 3, 6]), chance.pick([1, 2, 4]) if bags else 1
    ids = torch.tensor(chance.integers(count * length, rows), dtype=torch.int64)
    output_grad = chance.numbers((count, columns), param.dtype)
    table: Any
    with torch.enable_grad():
        if bags:
            mode = chance.pick(["sum", "mean"])
            table = sparsestep.nn.EmbeddingBag(rows, columns, mode=mode, _weight=param)
            table.weight = param
            factor = 1 / length if mode == "mean" else 1.0
            table(ids.reshape(count, length)).backward(output_grad)
        else:
            factor = 1.0
            table = sparsestep.nn.Embedding(rows, columns, _weight=param)
            table.weight = param
            table(ids).backward(output_grad)
    each = output_grad.double().repeat_interleave(length, 0) * factor
    dense.index_add_(0, ids, each)
    held[ids] = True
    return f" of bags of {length}, ids {ids.tolist()}"


# IndexedGrad


def touched(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    shape, numel = tuple(param.shape), param.numel()
    if chance.one_in(8):
        values = chance.numbers(shape, dtype)
        held = torch.ones(shape, dtype=torch.bool)
        return Drawn(
            IndexedGrad(None, values), values.to(wide(dtype)), held, f"IndexedGrad whole {dtype}"
        )
    rows = shape[0] if shape else 1
    by_rows = chance.one_in(2) or not numel
    block = math.prod(shape[1:]) if by_rows else chance.pick(_divisors(numel))
    slots = rows if by_rows else numel // block
    entries = chance.pick([0, 1, 2, 5, 12]) if slots else 0
    positions = torch.tensor(chance.integers(entries, slots or 1), dtype=torch.int64)
    source = scale = None
    blocks = entries
    if chance.one_in(3):
        blocks = chance.integer(1, 4)
        source = torch.tensor(chance.integers(entries, blocks), dtype=torch.int64)
    values = chance.numbers((blocks, block), dtype)
    exact = values.to(wide(dtype)) if source is None else values.to(wide(dtype))[source]
    if chance.one_in(3):
        factors = [chance.pick([0.5, -1.0, 2.0]) for _ in range(entries)]
        scale = torch.tensor(factors, dtype=dtype.to_real())
        exact = exact * scale.double()[:, None]
    dense, held = summed(shape, slots, positions, exact)
    text = f"IndexedGrad {dtype} {slots} x {block} at {positions.tolist()}"
    text += f"{'' if source is None else ' source'}{'' if scale is None else ' scale'}"
    if chance.one_in(3):
        positions = positions.int()
    if chance.one_in(4):
        positions = positions.reshape(1, -1)
    values, text = disguised(chance, values, text)
    sizes = () if by_rows and chance.one_in(2) else (slots, block)
    if not sizes:
        return Drawn(
            IndexedGrad(positions, values, value_index=source, scale=scale), dense, held, text
        )
    return Drawn(IndexedGrad(positions, values, *sizes, source, scale), dense, held, text)


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


# CSR, CSC, BSR and BSC

COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def compressed(chance: Source, param: Tensor, dtype: torch.dtype) -> Drawn:
    """Of a tensor with more dims than two, those in front are batches or those behind are dense."""
    shape = param.shape
    layout = chance.pick(COMPRESSED)
    dense_dims = len(shape) - 2 if len(shape) > 2 and chance.one_in(2) else 0
    batch_dims = len(shape) - 2 - dense_dims
    rows, columns = shape[batch_dims : batch_dims + 2]
    high, width = (1, 1)
    if layout in BLOCKED:
        high, width = chance.pick(_divisors(rows)), chance.pick(_divisors(columns))
    grid = chance.flags((rows // high, columns // width), chance.pick([0.0, 0.2, 0.5, 1.0]))
    values = chance.numbers(shape, dtype)
    batch, matrices = shape[:batch_dims], values.reshape(-1, *shape[batch_dims:])
    starts, others, entries = compress(matrices, grid, layout, (high, width))
    entries = entries.reshape(*batch, *entries.shape[1:])
    integers = chance.pick([torch.int64, torch.int64, torch.int32])
    entries, disguise = disguised(chance, entries, "")
    grad = torch.sparse_compressed_tensor(
        starts.to(integers).expand(*batch, -1).contiguous(),
        others.to(integers).expand(*batch, -1).contiguous(),
        entries,
        shape,
        layout=layout,
        check_invariants=True,
    )
    held = grid.repeat_interleave(high, 0).repeat_interleave(width, 1)
    held = held.reshape(rows, columns, *[1] * dense_dims).expand(shape)
    text = f"{layout} {dtype} {integers} blocks {high} x {width}, {len(others)} entries{disguise}"
    held = held.contiguous()
    return Drawn(grad, torch.where(held, values, 0).to(wide(dtype)), held, text)


def compress(
    values: Tensor, grid: Tensor, layout: torch.layout, block: tuple[int, int] = (1, 1)
) -> tuple[Tensor, Tensor, Tensor]:
    """Both kinds of indices and the entries of a batch of matrices, of which ``grid`` has blocks.

    Entries are ``[batch, entries, *dense]``, or have blocks between.
    """
    (down, across), (high, wide) = grid.shape, block
    by_row = layout in BY_ROW
    grouped, others = (grid if by_row else grid.t()).nonzero(as_tuple=True)
    starts = torch.zeros((down if by_row else across) + 1, dtype=torch.int64)
    starts[1:] = grid.sum(1 if by_row else 0).cumsum(0)
    place = (grouped, others) if by_row else (others, grouped)
    blocks = values.reshape(len(values), down, high, across, wide, *values.shape[3:])
    entries = blocks.transpose(2, 3)[:, place[0], place[1]]
    return starts, others, entries if layout in BLOCKED else entries[:, :, 0, 0]


# Which kinds apply to a parameter


def _always(param: Tensor, dtype: torch.dtype) -> bool:
    return True


def _can_be_masked(param: Tensor, dtype: torch.dtype) -> bool:
    return dtype in (torch.float16, torch.float32, torch.float64)


def _can_be_compact(param: Tensor, dtype: torch.dtype) -> bool:
    usable = type(param) is torch.nn.Parameter and param.requires_grad and not param.is_inference()
    fits = param.dim() == 2 and param.numel() > 0 and dtype == param.dtype
    return usable and fits and not dtype.is_complex


def can_be_compressed(param: Tensor, dtype: torch.dtype) -> bool:
    return param.dim() > 1 and param.numel() > 0


_KINDS: dict[Kind, tuple[int, Callable[[Tensor, torch.dtype], bool]]] = {
    strided: (4, _always),
    coo: (8, _always),
    plain_coo: (1, _always),
    masked: (1, _can_be_masked),
    compact: (2, _can_be_compact),
    touched: (5, _always),
    compressed: (5, can_be_compressed),
}
_GRADS = (strided, coo, masked, compact)
_BY_HAND = (*_GRADS, touched, compressed)
