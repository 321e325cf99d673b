"""CSR, CSC, BSR and BSC gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.fuzz.chance import Chance

LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


def compressed(
    chance: Chance, shape: torch.Size, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, str] | None:
    """The gradient, its values as a dense tensor, and which elements it holds.

    Of a tensor with more dims than two, those in front are batches or those behind are dense.
    """
    if len(shape) < 2 or 0 in shape:
        return None
    layout = chance.pick(LAYOUTS)
    dense_dims = len(shape) - 2 if len(shape) > 2 and chance.one_in(2) else 0
    batch_dims = len(shape) - 2 - dense_dims
    rows, columns = shape[batch_dims : batch_dims + 2]
    blocked = layout in (torch.sparse_bsr, torch.sparse_bsc)
    high, wide = _block(chance, rows, columns) if blocked else (1, 1)
    grid = chance.flags((rows // high, columns // wide), chance.pick([0.0, 0.2, 0.5, 1.0]))
    values = chance.numbers(shape, dtype)
    by_row = layout in (torch.sparse_csr, torch.sparse_bsr)
    grouped, others = (grid if by_row else grid.t()).nonzero(as_tuple=True)
    starts = torch.zeros(grid.shape[0 if by_row else 1] + 1, dtype=torch.int64)
    starts[1:] = grid.sum(1 if by_row else 0).cumsum(0)
    down, along = (grouped, others) if by_row else (others, grouped)
    batch = shape[:batch_dims]
    entries = (
        values.reshape(-1, rows // high, high, columns // wide, wide, *shape[batch_dims + 2 :])
        .transpose(2, 3)[:, down, along]
        .reshape(*batch, len(others), high, wide, *shape[batch_dims + 2 :])
    )
    if not blocked:
        entries = entries.squeeze(batch_dims + 2).squeeze(batch_dims + 1)
    integers = chance.pick([torch.int64, torch.int64, torch.int32])
    if chance.one_in(5) and entries.dim():
        entries = entries.repeat_interleave(2, 0)[::2]
    grad = torch.sparse_compressed_tensor(
        starts.to(integers).expand(*batch, -1).contiguous(),
        others.to(integers).expand(*batch, -1).contiguous(),
        entries,
        shape,
        layout=layout,
        check_invariants=True,
    )
    held = grid.repeat_interleave(high, 0).repeat_interleave(wide, 1)
    held = held.reshape(rows, columns, *[1] * dense_dims).expand(shape)
    text = f"{layout} {dtype} {integers} blocks {high} x {wide}, {len(others)} entries"
    return grad, values, held.contiguous(), text


def _block(chance: Chance, rows: int, columns: int) -> tuple[int, int]:
    return (
        chance.pick([d for d in range(1, rows + 1) if rows % d == 0]),
        chance.pick([d for d in range(1, columns + 1) if columns % d == 0]),
    )
