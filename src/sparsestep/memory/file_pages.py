"""Which pages of a file hold which rows, and requests to the operating system to read them.

The core does it; without the core, torch operations do, more slowly. A map records which pages were
requested before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import mmap
import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep.errors import message

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    fcntl: Any = None
else:
    fcntl = _fcntl

# File systems without locks: files on these are not protected.
_UNSUPPORTED = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}


def acquire(descriptor: int) -> bool:
    """Lock an open file; ``False`` if another open file description holds the lock."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _UNSUPPORTED:
            raise
    return True


def holder(descriptor: int) -> str:
    """Describe the process that holds the lock of a file, as far as the system tells."""
    about = os.fstat(descriptor)
    device = os.major(about.st_dev), os.minor(about.st_dev), about.st_ino
    try:
        with open("/proc/locks") as locks:
            fields = [line.split() for line in locks]
    except OSError:
        return "another process"
    for _, kind, *_, pid, file, _, _ in (each for each in fields if len(each) == 8):
        major, minor, inode = file.split(":")
        if kind == "FLOCK" and (int(major, 16), int(minor, 16), int(inode)) == device:
            is_gone = int(pid) == os.getpid() or not os.path.exists(f"/proc/{pid}")
            return f"a process forked from process {pid}" if is_gone else f"process {pid}"
    return "another process"


# On Windows, a mapped file can be neither replaced nor renamed.
CAN_REMAP = sys.platform != "win32"

_MAP_FIXED = 0x10  # the same on Linux and macOS


def map_file(address: int, size: int, descriptor: int) -> None:
    """Map a file, shared and writable, in place of what is mapped at an address.

    Args:
        address: the first byte of an existing mapping of at least ``size`` bytes.
        size: how many bytes to map.
        descriptor: of the file.
    """
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    found = _libc().mmap(address, size, prot, flags, descriptor, 0)
    if found != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@functools.cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    word, number = ctypes.c_size_t, ctypes.c_int
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, word, number, number, number, ctypes.c_ssize_t)
    return libc


# After so many pages that were asked for, the earlier ones may have been given up again.
REMEMBERED = 1 << 16

# The largest unit of the page cache, and blocks that are counted to files without holding data.
_FOLIO_BYTES = 2 << 20
_MARGIN_BYTES = 1 << 20

# Linux 5.14; Python has no name for it.
_MADV_POPULATE_WRITE = 23

_IN_MEMORY = ("tmpfs", "devtmpfs")


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
    """Reserve disk blocks for rows, or for all.

    Returns:
        An errno, or 0; ``EOPNOTSUPP`` if the file system cannot reserve blocks.
    """
    if rows is not None and ext is not None:
        return ext.reserve_rows(rows, *of, descriptor, known)
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
        unsupported = (errno.EOPNOTSUPP, errno.EINVAL)
        return errno.EOPNOTSUPP if error.errno in unsupported else error.errno or errno.EIO
    return 0


def is_short_of_space(of: Rows, rows: Tensor | None, descriptor: int) -> bool:
    """Whether writing rows might need more blocks than the disk has, even if they have theirs.

    The first write to a clean page needs blocks for the whole folio that it is cached in. If
    the file was read in order, that is up to 2 MiB, holes included.
    """
    if rows is None or not hasattr(os, "fstatvfs"):
        return False
    disk, file = os.fstatvfs(descriptor), os.fstat(descriptor)
    pages = rows.numel() * (of.row_bytes // of.page_bytes + 2)
    holes = max(0, file.st_size - file.st_blocks * 512) + _MARGIN_BYTES
    return disk.f_bavail * disk.f_frsize < min(pages * _FOLIO_BYTES, holes)


def populate(of: Rows, rows: Tensor | None, memory: mmap.mmap, known: Tensor | None = None) -> int:
    """Make the pages of rows, or all, writable in memory, so that writing them cannot fail.

    Where a write would end the process with ``SIGBUS``, this call fails.

    Args:
        of: where the rows lie.
        rows: which ones, int64.
        memory: the mapped file.
        known: pages that were populated before and need not be again; updated.

    Returns:
        An errno, or 0; also 0 if the system has no such call.
    """
    if sys.platform != "linux":
        return 0
    runs = [(0, count(of))] if rows is None else _unknown(of, rows, known)
    for first, pages in runs:
        try:
            memory.madvise(_MADV_POPULATE_WRITE, first * of.page_bytes, pages * of.page_bytes)
        except OSError as error:
            if error.errno == errno.EINVAL:  # before Linux 5.14
                return 0
            return errno.ENOSPC if error.errno == errno.EFAULT else error.errno or errno.EIO
        if known is not None:
            known[first : first + pages] = True
    return 0


def allocate_in_memory(descriptor: int) -> None:
    """Allocate all pages of a file that a file system keeps in memory (tmpfs).

    There, even reading a hole takes memory, and ends the process with ``SIGBUS`` if there is none.

    Raises:
        OSError: the file system is full; nothing has changed.
    """
    if not hasattr(os, "posix_fallocate") or _file_system(descriptor) not in _IN_MEMORY:
        return
    try:
        os.posix_fallocate(descriptor, 0, os.fstat(descriptor).st_size)
    except OSError as error:
        requirement = "a table in a file system that is kept in memory (tmpfs) must fit as a whole"
        reason = os.strerror(error.errno or errno.EIO)
        remedy = "Choose a folder on a disk, or free some space"
        raise OSError(error.errno, message(requirement, reason, remedy)) from None


def _file_system(descriptor: int) -> str:
    """The type of the file system of an open file; empty if unknown."""
    device = os.fstat(descriptor).st_dev
    wanted = f"{os.major(device)}:{os.minor(device)}"
    try:
        with open("/proc/self/mountinfo", errors="replace") as mounts:
            for line in mounts:
                fields = line.split()
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except OSError:
        pass
    return ""


def evict(descriptor: int) -> None:
    """Drop the cached pages of a file that are clean and that no process has mapped.

    What was read or written in order is cached in large folios. Touching one row of such a folio
    maps all of it, and writing one row writes all of it.
    """
    if hasattr(os, "posix_fadvise"):
        with contextlib.suppress(OSError):  # only advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


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
    if ext is not None:
        return ext.prefetch_rows(rows, *of, address, known)
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
    elif ext is not None:
        ext.mark_rows(rows, marks)
    else:
        marks[rows[(rows >= 0) & (rows < len(marks))]] = True


def _unknown(of: Rows, rows: Tensor, known: Tensor | None) -> list[tuple[int, int]]:
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
    for page in (each if known is None else each[~known[each]]).tolist():
        if runs and runs[-1][0] + runs[-1][1] == page:
            runs[-1] = runs[-1][0], runs[-1][1] + 1
        else:
            runs.append((page, 1))
    return runs
