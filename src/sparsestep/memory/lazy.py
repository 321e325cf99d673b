"""State memory that costs nothing until it is touched."""

from __future__ import annotations

import math
import mmap
import platform
import sys

import torch
from torch import Tensor

from sparsestep.errors import sentence

# Below this, zeroing at once is cheaper than asking the system for pages of our own.
_SMALL_BYTES = 1 << 20

# Windows has no private anonymous maps; there, zeros are written at once.
_LAZY = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")

# The system is not asked to hold memory ready for pages that may never be touched: it would refuse
# whatever is larger than all that it has. Python has a name for it from 3.13 on.
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
    NORESERVE = 0x4000


def zeros(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros that the operating system provides page by page, on first touch.

    ``torch.zeros`` writes every byte, so the first step on a large table would cost time and memory
    in proportion to the table instead of to the batch.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor; elsewhere than on the CPU, zeros are written at once.

    Example:
        >>> zeros(torch.Size([2, 3]), torch.float32, torch.device("cpu"))
        tensor([[0., 0., 0.],
                [0., 0., 0.]])
    """
    count = math.prod(shape)
    size = count * dtype.itemsize
    if device.type != "cpu" or size < _SMALL_BYTES or not _LAZY:
        return torch.zeros(shape, dtype=dtype, device=device)
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE)
    except OSError as error:
        contract = f"the state of a parameter needs {size:,} bytes of address space"
        remedy = "Choose a smaller state_dtype, or an optimizer that keeps its state per row"
        raise MemoryError(sentence(contract, error.strerror, remedy)) from None
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def full(
    shape: torch.Size,
    value: complex,
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Like ``zeros``, for any initial value; only zero is lazy."""
    if value == 0:
        return zeros(shape, dtype, device)
    return torch.full(shape, value, dtype=dtype, device=device)
