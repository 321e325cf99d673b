"""From a CSR, CSC, BSR or BSC gradient to a :class:`Touched`."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.errors import InputError, sentence
from sparsestep.grads.indexed import Touched, check_index

BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
BY_COLUMN = (torch.sparse_csc, torch.sparse_bsc)
_BLOCKED = (torch.sparse_bsr, torch.sparse_bsc)
_INTEGERS = {torch.int64, torch.int32}


def from_compressed(grad: Tensor) -> Touched:
    """A slot is an element; of a blocked layout, one row's run of a block's columns.

    The layouts may have batch dims in front and dense dims behind. All batches have equally many
    entries, so their entries are simply one after the other.
    """
    by_row = grad.layout in BY_ROW
    starts = grad.crow_indices() if by_row else grad.ccol_indices()
    others = grad.col_indices() if by_row else grad.row_indices()
    values = grad.values().detach()  # as a view of a sparse tensor it could not be seen as real
    block_rows, block_columns = _block_of(grad, starts, others, values)
    batch_dims = starts.dim() - 1
    rows, columns = grad.shape[batch_dims : batch_dims + 2]
    blocks_down, blocks_across = rows // block_rows, columns // block_columns
    dense = math.prod(grad.shape[batch_dims + 2 :])

    starts, others = starts.long(), others.long()
    values = values.resolve_neg().reshape(others.numel() * block_rows, block_columns * dense)
    slots = math.prod(grad.shape[: batch_dims + 1]) * blocks_across
    if by_row and not batch_dims and ext is not None and starts.is_cpu:
        found = _in_order(starts.contiguous(), others.contiguous(), block_rows, blocks_across)
        if found is not None:
            return Touched(found[0], values, slots, block_columns * dense, found[1])
    entries = others.shape[-1]
    _check_starts(starts, entries)
    check_index(batch_dims + int(by_row), others, blocks_across if by_row else blocks_down)
    # The number of the compressed row or column of each entry, counted through all batches.
    grouped = torch.repeat_interleave(starts.diff(dim=-1).reshape(-1))
    others = others.reshape(-1)
    down = block_rows * blocks_across  # from a slot to the same one in the next row of blocks
    if by_row:
        first = torch.add(others, grouped, alpha=down)
    else:
        first = grouped.add_(others, alpha=down)
        batches = math.prod(grad.shape[:batch_dims])
        if batches > 1:
            batch = torch.arange(batches, device=starts.device).repeat_interleave(entries)
            first.add_(batch, alpha=(rows - 1) * blocks_across)
    positions = first
    if block_rows > 1:
        inside = torch.arange(block_rows, device=starts.device) * blocks_across
        positions = (first[:, None] + inside).reshape(-1)
    return Touched(positions, values, slots, block_columns * dense)


def _in_order(
    starts: Tensor, others: Tensor, block_rows: int, row_slots: int
) -> tuple[Tensor, Tensor | None] | None:
    """Slots row by row, by the core: in one pass, and so that memory is visited in order.

    Returns ``None`` for indices that are not valid; what is wrong with them is said elsewhere.
    """
    assert ext is not None
    positions = others.new_empty(others.numel() * block_rows)
    source = torch.empty_like(positions) if block_rows > 1 else None
    threads = torch.get_num_threads()
    valid = ext.slots_of(starts, others, block_rows, row_slots, positions, source, threads)
    return (positions, source) if valid else None


def _block_of(grad: Tensor, starts: Tensor, others: Tensor, values: Tensor) -> tuple[int, int]:
    """Rows and columns of a block; refuses indices and values that do not fit together."""
    batch_dims, shape = starts.dim() - 1, grad.shape
    blocked = grad.layout in _BLOCKED
    block = values.shape[batch_dims + 1 : batch_dims + 3] if blocked else torch.Size([1, 1])
    matrix = shape[batch_dims : batch_dims + 2]
    fits = batch_dims >= 0 and len(matrix) == len(block) == 2
    if fits and 0 not in block:
        batch, dense = shape[:batch_dims], shape[batch_dims + 2 :]
        groups = matrix[0] // block[0] if grad.layout in BY_ROW else matrix[1] // block[1]
        inner = block if blocked else ()
        if (
            matrix[0] % block[0] == 0
            and matrix[1] % block[1] == 0
            and starts.shape == (*batch, groups + 1)
            and others.shape[:-1] == batch
            and values.shape == (*others.shape, *inner, *dense)
            and {starts.dtype, others.dtype} <= _INTEGERS
        ):
            return block[0], block[1]
    raise InputError(
        sentence(
            f"the indices and values of a {grad.layout} gradient must fit its shape, "
            f"{tuple(shape)}",
            f"{starts.dtype} indices of shapes {tuple(starts.shape)} and {tuple(others.shape)}, "
            f"values of shape {tuple(values.shape)}",
        )
    )


def _check_starts(starts: Tensor, entries: int) -> None:
    fits = (
        bool((starts[..., 0] == 0).all())
        and bool((starts[..., -1] == entries).all())
        and bool((starts.diff(dim=-1) >= 0).all())
    )
    if not fits:
        contract = f"compressed indices must increase from 0 to the number of entries, {entries}"
        raise InputError(sentence(contract, starts.tolist() if starts.numel() < 20 else "others"))
