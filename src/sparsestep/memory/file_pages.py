"""Which pages of a file hold which rows, and requests to the operating system to read them.

The core does it; without the core, torch operations do, more slowly. A map records which pages were
requested before.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep.core import core

# After so many pages that were asked for, the earlier ones may have been given up again.
REMEMBERED = 1 << 16


class Rows(NamedTuple):
    """Where the rows of a file lie.

    Attributes:
        total: how many there are.
        row_bytes: how long each is.
        offset: where the first begins.
        page_bytes: how long a page is.
    """

    total: int
    row_bytes: int
    offset: int
    page_bytes: int


def count(of: Rows) -> int:
    """How many pages the file has.

    Example:
        >>> count(Rows(3, 2048, 4096, 4096))
        3
    """
    return -(-(of.offset + of.total * of.row_bytes) // of.page_bytes)


def reserve(of: Rows, rows: Tensor | None, descriptor: int, known: Tensor) -> int:
    """Have blocks of the disk held ready for rows, or for all; an errno, or 0."""
    if rows is not None and core is not None:
        return core.reserve_rows(rows, *of, descriptor, known)
    whole = [(0, count(of))]
    for first, pages in whole if rows is None else _unknown(of, rows, known):
        if rows is None and known.all():
            continue
        error = _fallocate(descriptor, first * of.page_bytes, pages * of.page_bytes, of)
        if error:
            return error
        known[first : first + pages] = True
    return 0


def _fallocate(descriptor: int, begin: int, size: int, of: Rows) -> int:
    size = min(size, of.offset + of.total * of.row_bytes - begin)  # the file does not grow
    if not hasattr(os, "posix_fallocate"):
        return 0
    try:
        os.posix_fallocate(descriptor, begin, size)
    except OSError as error:
        unknown = (errno.EOPNOTSUPP, errno.EINVAL)
        return 0 if error.errno in unknown else error.errno or errno.EIO
    return 0


def extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Where a file has something: begin and end, as far as the file system can tell."""
    size = os.fstat(descriptor).st_size
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            begin = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing follows
                return
            raise
        end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        yield begin, end


def prefetch(of: Rows, rows: Tensor, address: int, memory: mmap.mmap, known: Tensor) -> int:
    """Have rows read; how many pages were asked for.

    Args:
        of: where they lie.
        rows: which ones, int64.
        address: where the file begins in memory.
        memory: that memory.
        known: pages that were asked for.
    """
    if core is not None:
        return core.prefetch_rows(rows, *of, address, known)
    asked = 0
    for first, pages in _unknown(of, rows, known):
        if hasattr(mmap, "MADV_WILLNEED"):
            memory.madvise(mmap.MADV_WILLNEED, first * of.page_bytes, pages * of.page_bytes)
        known[first : first + pages] = True
        asked += pages
    return asked


def mark(rows: Tensor | None, marks: Tensor) -> None:
    """Set the marks of rows, or all; what is no row is left out."""
    if rows is None:
        marks.fill_(True)
    elif core is not None:
        core.mark_rows(rows, marks)
    else:
        marks[rows[(rows >= 0) & (rows < len(marks))]] = True


def _unknown(of: Rows, rows: Tensor, known: Tensor) -> list[tuple[int, int]]:
    """The pages of rows that are not known: first pages, and how many follow each other.

    Example:
        >>> _unknown(Rows(9, 2048, 4096, 4096), torch.tensor([1, 2, 7, -5]), torch.zeros(6).bool())
        [(1, 2), (4, 1)]
    """
    rows = rows[(rows >= 0) & (rows < of.total)]
    begin = of.offset + rows * of.row_bytes
    first, last = begin // of.page_bytes, (begin + of.row_bytes - 1) // of.page_bytes
    inside = torch.arange(int((last - first).max()) + 1 if len(rows) else 0)
    each = (first[:, None] + inside).minimum(last[:, None]).unique()
    runs: list[tuple[int, int]] = []
    for page in each[~known[each]].tolist():
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return runs
