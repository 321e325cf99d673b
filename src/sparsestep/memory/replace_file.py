"""Replacing the content of mapped files, all of them or none.

The new content of each file is written to a temporary file next to it. Then tensors are switched to
the new files, and last of all these take the names of the old ones. Until then, every change can be
undone, because the old files are still there. A process that is killed leaves each file as it was
or with its new content, and maybe temporary files, which the next one removes.
"""

from __future__ import annotations

import errno
import io
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType

import torch

from sparsestep._process import uninterrupted
from sparsestep.errors import message
from sparsestep.memory import file_pages as mapping
from sparsestep.memory.file_pages import extents
from sparsestep.memory.mapped_file import MappedFile, open_file, temporary_path

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
        requirement = "the disk must have room for the copy"
        reason = os.strerror(error.errno or errno.EIO)
        raise OSError(
            error.errno, message(requirement, reason, "Free some space, then try again")
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


# Errors of file systems without hard links.
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)


class Replacements:
    """New content for mapped files; a context manager that removes its temporary files."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._staged: dict[int, tuple[MappedFile, MappedFile]] = {}
        self._swaps: list[_Swap] = []

    def __enter__(self) -> Replacements:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._staged.clear()
        self._swaps.clear()
        self._stack.close()

    @property
    def files(self) -> list[MappedFile]:
        """The files whose content is about to be replaced."""
        return [file for file, _ in self._staged.values()]

    def create(self, file: MappedFile, role: str) -> tuple[str, int]:
        """Create an empty temporary file next to a file; returns its path and descriptor."""
        if not mapping.CAN_REMAP:
            requirement = "load: the system must be able to replace a file that is in use"
            raise OSError(errno.EOPNOTSUPP, message(requirement, "one that cannot"))
        file.lock()
        path = temporary_path(file.path, role)
        self._stack.callback(_remove, path)
        _remove(path)
        made = self._stack.enter_context(io.FileIO(path, "x+"))
        os.fchmod(made.fileno(), os.fstat(file.descriptor).st_mode & 0o777)
        return path, made.fileno()

    def create_zeros(self, file: MappedFile) -> MappedFile:
        """Create new content of a file that is all zeros."""
        path, descriptor = self.create(file, "loading")
        os.pwrite(descriptor, file.header.encoded(), 0)
        os.ftruncate(descriptor, file.header.file_bytes)
        staged = open_file(path, file.shape, file.dtype, state=file.record.state)
        self.stage(file, staged)
        return staged

    def stage(self, file: MappedFile, staged: MappedFile) -> None:
        """Register a temporary file of the same layout as the new content of a file."""
        staged.lock()  # before it takes the place of the file
        self._staged[id(file)] = file, staged

    def prepare(self) -> None:
        """Do whatever can fail before the first change."""
        for file, staged in self._staged.values():
            staged.flush_to_disk()
            staged.evict()
            self._swaps.append(_Swap(self._stack, file, staged))

    def switch(self, undo: ExitStack) -> None:
        """Switch all tensors to the new files. How to undo it is registered first."""
        for swap in self._swaps:
            undo.callback(swap.restore)
            swap.switch()

    def rename(self, undo: ExitStack) -> None:
        """Give the new files the names of the old ones. How to undo it is registered first."""
        for swap in self._swaps:
            undo.callback(swap.rename_back)
            swap.rename()


class _Swap:
    """One file and its new content."""

    def __init__(self, stack: ExitStack, file: MappedFile, staged: MappedFile) -> None:
        self._file, self._staged = file, staged
        self._old_header, self._old_reserved = file.header, file.reserved
        duplicated = uninterrupted(lambda: io.FileIO(os.dup(file.descriptor), "r+"))
        old = stack.enter_context(duplicated)
        self._old = old.fileno()
        self._path = os.path.realpath(file.path)
        # A file that was deleted, or replaced by another of its name, has no name to take over.
        self._is_named = _is_same(self._path, file.descriptor)
        self._backup = temporary_path(file.path, "replaced")
        self._has_backup = self._is_named and self._back_up(stack)

    def _back_up(self, stack: ExitStack) -> bool:
        stack.callback(_remove, self._backup)
        _remove(self._backup)
        try:
            os.link(self._path, self._backup)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            return False
        return True

    def switch(self) -> None:
        self._file.switch_to(self._staged.descriptor, self._staged.header, self._staged.reserved)

    def restore(self) -> None:
        self._file.switch_to(self._old, self._old_header, self._old_reserved)

    def rename(self) -> None:
        if self._is_named:
            os.replace(self._staged.path, self._path)

    def rename_back(self) -> None:
        if self._has_backup and not _is_same(self._path, self._old):
            os.replace(self._backup, self._path)


def _is_same(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _remove(path: str) -> None:
    with suppress(FileNotFoundError):
        os.unlink(path)
