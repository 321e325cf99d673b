"""State memory that costs nothing until it is touched."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import platform
import sys
from pathlib import Path

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence

# Below this, zeroing at once is cheaper than asking the system for pages of our own.
_SMALL_BYTES = 1 << 20

# Windows has no private anonymous maps; there, zeros are written at once.
_LAZY = hasattr(mmap, "MAP_PRIVATE") and hasattr(mmap, "MAP_ANONYMOUS")

# The system is not asked to hold memory ready for pages that may never be touched: it would refuse
# whatever is larger than all that it has. Python has a name for it from 3.13 on.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
    _NORESERVE = 0x4000

# Linux. Elsewhere pages have the size that they have.
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_PAGE = 4096
_HUGE_PAGE = 2 << 20
_MADV_COLLAPSE = 25  # Linux 6.1; Python has no name for it yet

# Huge pages make every later step faster, since the processor keeps track of fewer pages, but the
# first touch of a row then brings two megabytes instead of four kilobytes. They are asked for where
# touches are so dense that within this many steps ordinary pages would cover the table as well.
_STEPS_UNTIL_COVERED = 16


def zeros(
    shape: torch.Size, dtype: torch.dtype, device: torch.device, touches: int | None = None
) -> Tensor:
    """Zeros that the operating system provides page by page, on first touch.

    ``torch.zeros`` writes every byte, so the first step on a large table would cost time and memory
    in proportion to the table instead of to the batch.

    Args:
        shape: of the tensor.
        dtype: of the tensor.
        device: of the tensor; elsewhere than on the CPU, zeros are written at once.
        touches: how many places a step touches; ``None`` if it is all of them.

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
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except OSError as error:
        contract = f"the state of a parameter needs {size:,} bytes of address space"
        remedy = "Choose a smaller state_dtype, or an optimizer that keeps numbers per row"
        raise InputError(sentence(contract, error.strerror, remedy)) from None
    if _HUGE is not None and wants_huge_pages(size, touches):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(_HUGE)
    return torch.frombuffer(pages, dtype=dtype, count=count).view(shape)


def gather_into_huge_pages(tensor: Tensor, touches: int | None) -> None:
    """Move a tensor's memory into huge pages, where ``zeros`` would have asked for them.

    The contents and the addresses stay as they are. What cannot be moved (shared memory, a file, a
    kernel that cannot do it) is left alone.
    """
    _advise(tensor, touches, _MADV_COLLAPSE)


def ask_for_huge_pages(tensor: Tensor, touches: int | None) -> None:
    """The same for memory that may not have been touched yet, and shall not be now."""
    if _HUGE is not None:
        _advise(tensor, touches, _HUGE)


def _advise(tensor: Tensor, touches: int | None, advice: int) -> None:
    if tensor.nbytes < _HUGE_PAGE or not tensor.is_cpu or not tensor.is_contiguous():
        return
    begin = -(-tensor.data_ptr() // _HUGE_PAGE) * _HUGE_PAGE
    size = (tensor.data_ptr() + tensor.nbytes) // _HUGE_PAGE * _HUGE_PAGE - begin
    if size > 0 and _system_allows_huge_pages() and wants_huge_pages(tensor.nbytes, touches):
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(begin), ctypes.c_size_t(size), ctypes.c_int(advice)
        )


@functools.cache
def _system_allows_huge_pages() -> bool:
    try:
        setting = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return "[never]" not in setting


def wants_huge_pages(size: int, touches: int | None) -> bool:
    """Whether steps with so many touches will soon cover a tensor of ``size`` bytes.

    Example:
        >>> wants_huge_pages(256 << 20, touches=65_536), wants_huge_pages(256 << 20, touches=64)
        (True, False)
    """
    return touches is None or size <= _STEPS_UNTIL_COVERED * touches * _PAGE


def full(
    shape: torch.Size,
    value: complex,
    dtype: torch.dtype,
    device: torch.device,
    touches: int | None = None,
) -> Tensor:
    """Like ``zeros``, for any initial value; only zero is lazy."""
    if value == 0:
        return zeros(shape, dtype, device, touches)
    return torch.full(shape, value, dtype=dtype, device=device)
