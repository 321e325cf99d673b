"""Copies of sparse files, without their holes."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

from sparsestep.errors import sentence

_CHUNK_BYTES = 64 << 20


def copy_data(source: int, target: int) -> None:
    """Make a file the same as another, which has holes where that has them.

    A full disk is an error before anything is copied.

    Args:
        source: descriptor of the file to read.
        target: descriptor of the file to write; what it holds is dropped.
    """
    size = os.fstat(source).st_size
    os.ftruncate(target, 0)
    os.ftruncate(target, size)
    for begin, end in _extents(source, size):
        _reserve(target, begin, end - begin)
    for begin, end in _extents(source, size):
        while begin < end:
            begin += _copy(source, target, begin, min(end - begin, _CHUNK_BYTES))


def _extents(file: int, size: int) -> Iterator[tuple[int, int]]:
    """Where there is something, as far as the file system can tell."""
    if not hasattr(os, "SEEK_DATA"):
        yield 0, size
        return
    end = 0
    while end < size:
        try:
            begin = os.lseek(file, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing follows
                return
            raise
        end = os.lseek(file, begin, os.SEEK_HOLE)
        yield begin, end


def _reserve(file: int, begin: int, size: int) -> None:
    if not hasattr(os, "posix_fallocate"):
        return
    try:
        os.posix_fallocate(file, begin, size)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EINVAL):
            return
        contract = "the disk must have room for the copy"
        reason = os.strerror(error.errno or errno.EIO)
        raise OSError(
            error.errno, sentence(contract, reason, "Free some space, then try again")
        ) from None


def _copy(source: int, target: int, begin: int, size: int) -> int:
    if hasattr(os, "copy_file_range"):
        try:
            copied = os.copy_file_range(source, target, size, begin, begin)
            if copied:
                return copied
        except OSError as error:
            if error.errno not in (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
                raise
    data = os.pread(source, size, begin)
    return os.pwrite(target, data, begin)
