"""State memory that costs nothing until it is touched."""

from __future__ import annotations

import errno
import math
import os
from typing import Any

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._torch import coo_indices, coo_values, plain_results
from sparsestep.errors import InputError, message
from sparsestep.memory.tensors import out_of_range

# Below this, zeroing at once is cheaper than asking the system for pages of our own.
_SMALL_BYTES = 1 << 20


@torch.inference_mode(False)  # later steps write to it
def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that the operating system provides page by page, on first touch.

    ``torch.zeros`` writes every byte, so the first step on a large table would cost time and memory
    in proportion to the table. On other devices than the CPU, and without the extension, this is
    ``torch.zeros``.
    """
    size = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or size < _SMALL_BYTES or ext is None:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        return ext.lazy_zeros(size).view(dtype).view(shape)
    except MemoryError:
        requirement = f"the state of a parameter needs {size:,} bytes of address space"
        remedy = "Choose a smaller state_dtype, or an optimizer that keeps its state per row"
        raise MemoryError(message(requirement, os.strerror(errno.ENOMEM), remedy)) from None


@torch.inference_mode(False)
def full(shape: torch.Size, value: complex, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Like ``zeros``, for any initial value; only zero is lazy."""
    if value == 0:
        return zeros(shape, dtype, device)
    return torch.full(shape, value, dtype=dtype, device=device)


_CHUNK_BYTES = 1 << 20
_INDEX_BYTES = 8


class SavedByRow(Tensor):
    """A tensor that ``torch.save`` writes as sparse COO if that takes less than half the space.

    Rows whose bits are all zero are left out. Torch alone can load it.

    Example:
        >>> import io
        >>> state, file = torch.zeros(1000, 8), io.BytesIO()
        >>> state[7] = 1.0
        >>> torch.save(saved_by_row(state), file)
        >>> read = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
        >>> read.layout, read.shape, read.indices().tolist(), len(file.getvalue()) < 4000
        (torch.sparse_coo, torch.Size([1000, 8]), [[7]], True)
    """

    # Results are plain tensors, as with a Parameter.
    __torch_function__ = plain_results

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = self.detach()
        rows = rows_in_use(state)
        row_bytes = state.nbytes // len(state)
        if 2 * len(rows) * (row_bytes + _INDEX_BYTES) > state.nbytes:
            return state.__reduce_ex__(protocol)
        sparse = torch.sparse_coo_tensor(
            rows[None], state[rows], state.shape, check_invariants=True, is_coalesced=True
        )
        return sparse.__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            state = self.detach()
            copied = zeros(state.shape, state.dtype, state.device)
            rows = rows_in_use(state)
            copied[rows] = state[rows]
            memo[id(self)] = saved_by_row(copied)
        found: Tensor = memo[id(self)]
        return found


def saved_by_row(state: Tensor) -> Tensor:
    """View a tensor as ``SavedByRow``; any but a plain contiguous one stays."""
    plain = type(state) is Tensor and state.layout is torch.strided
    if not plain or not state.numel() or not state.dim() or not state.is_contiguous():
        return state
    return state.detach().as_subclass(SavedByRow)


def rows_in_use(state: Tensor) -> Tensor:
    """Rows of which some bit is not zero, in ascending order."""
    row_bytes = state.nbytes // len(state)
    # A dim of one element may have any stride, which torch checks when it changes the dtype.
    row = state.numel() // len(state)
    words = state.as_strided((len(state), row), (row, 1)).view(word_dtype(row_bytes))
    step = max(1, _CHUNK_BYTES // row_bytes)
    used = torch.empty(len(state), dtype=torch.bool, device=state.device)
    for first in range(0, len(state), step):
        torch.any(words[first : first + step], dim=1, out=used[first : first + step])
    return used.nonzero().squeeze(1)


def word_dtype(row_bytes: int) -> torch.dtype:
    """The widest integer dtype whose elements divide a row."""
    words = (torch.int64, torch.int32, torch.int16, torch.uint8)
    return next(word for word in words if row_bytes % word.itemsize == 0)


def strided(name: str, value: Tensor) -> Tensor:
    """Convert a sparse tensor to a strided one, in which rows without entry take no memory."""
    if value.layout is torch.strided:
        return value
    if value.layout is not torch.sparse_coo or value.sparse_dim() != 1:
        return value.to_dense()
    value = value.detach()
    rows, values = coo_indices(value)[0], coo_values(value)
    wrong = out_of_range(rows, len(value))
    if wrong is not None:
        raise InputError(message(f"the rows of {name} must be in [0, {len(value)})", wrong))
    whole = zeros(value.shape, value.dtype, value.device)
    if value.is_coalesced():
        return whole.index_copy_(0, rows, values)
    return whole.index_add_(0, rows, values)
