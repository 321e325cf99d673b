"""Copies and checksums of sparse files, without reading their holes."""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from functools import partial

import torch

from sparsestep._process import uninterrupted
from sparsestep.errors import sentence
from sparsestep.memory.file_pages import extents

_PAGE_BYTES = 4096
_CHUNK_BYTES = 16 << 20


def copy_sparse(source: int, target: int) -> int:
    """Copy a file into an empty one; pages of zeros become holes.

    A full disk is an error before anything is copied.

    Args:
        source: descriptor of the file to read.
        target: descriptor of the file to write.

    Returns:
        The ``checksum`` of the bytes that were copied.
    """
    os.ftruncate(target, os.fstat(source).st_size)
    for begin, end in extents(source):
        reserve(target, begin, end - begin)
    crc = 0
    for begin, data in _runs(source):
        crc = _updated(crc, begin, data)
        while data:
            written = os.pwrite(target, data, begin)
            begin, data = begin + written, data[written:]
    return crc


def checksum(descriptor: int) -> int:
    """Checksum of a file's content: the same whether zeros are holes or written.

    It is the CRC-32 of all pages that are not zero, each run of them preceded by its offset and
    length. A run does not cross a multiple of 16 MiB.
    """
    crc = 0
    for begin, data in _runs(descriptor):
        crc = _updated(crc, begin, data)
    return crc


def _updated(crc: int, begin: int, data: memoryview) -> int:
    return zlib.crc32(data, zlib.crc32(struct.pack("<QQ", begin, len(data)), crc))


def _runs(descriptor: int) -> Iterator[tuple[int, memoryview]]:
    """Yield the offset and content of each run of pages that are not zero."""
    pages_of_file = -(-os.fstat(descriptor).st_size // _PAGE_BYTES)
    buffer = bytearray(min(_CHUNK_BYTES, max(1, pages_of_file) * _PAGE_BYTES))
    memory, pages = memoryview(buffer), torch.frombuffer(buffer, dtype=torch.uint8)
    for begin, end in _chunks(descriptor):
        size = end - begin
        _read(descriptor, memory[:size], begin)
        count = -(-size // _PAGE_BYTES)
        memory[size : count * _PAGE_BYTES] = bytes(count * _PAGE_BYTES - size)
        used = pages[: count * _PAGE_BYTES].view(count, _PAGE_BYTES).any(1)
        edges = torch.nn.functional.pad(used, (1, 1)).diff().nonzero().squeeze(1).tolist()
        for first, last in zip(edges[::2], edges[1::2], strict=True):
            at, until = first * _PAGE_BYTES, min(last * _PAGE_BYTES, size)
            yield begin + at, memory[at:until]


def _chunks(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a file that may hold data, cut at multiples of the chunk size."""
    for begin, end in _whole_pages(descriptor):
        while begin < end:
            stop = min(end, (begin // _CHUNK_BYTES + 1) * _CHUNK_BYTES)
            yield begin, stop
            begin = stop


def _whole_pages(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield extents rounded to pages; adjacent ones are merged, so that runs are maximal."""
    size, found = os.fstat(descriptor).st_size, (0, 0)
    for begin, end in extents(descriptor):
        begin = begin // _PAGE_BYTES * _PAGE_BYTES
        end = min(size, -(-end // _PAGE_BYTES) * _PAGE_BYTES)
        if begin <= found[1]:
            found = found[0], max(found[1], end)
        else:
            yield found
            found = begin, end
    yield found


def _read(descriptor: int, memory: memoryview, begin: int) -> None:
    while memory:
        count = os.preadv(descriptor, [memory], begin)
        if not count:
            raise OSError(errno.EIO, "the file was truncated while it was read")
        begin, memory = begin + count, memory[count:]


def reserve(file: int, begin: int, size: int) -> None:
    """Reserve disk blocks, if the file system can; raises ``OSError`` if the disk is full."""
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


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the names in a folder to the disk."""
    if os.name != "nt":  # Windows opens no folders, and writes names by itself
        uninterrupted(partial(_sync_folder, folder))  # or its descriptor might stay open


def _sync_folder(folder: str | os.PathLike[str]) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
