"""Copies of sparse files, without their holes."""

from __future__ import annotations

import errno
import os

from sparsestep.errors import sentence
from sparsestep.memory.file_pages import extents

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
    for begin, end in extents(source):
        _reserve(target, begin, end - begin)
    for begin, end in extents(source):
        while begin < end:
            begin += _copy(source, target, begin, min(end - begin, _CHUNK_BYTES))


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
