"""Calls to the operating system: locks, blocks on the disk, the page cache, copies of files."""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
import platform
import struct
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from sparsestep._process import uninterrupted
from sparsestep.errors import InputError, message

try:
    import fcntl as _fcntl
except ImportError:  # Windows
    fcntl: Any = None
else:
    fcntl = _fcntl

_PAGE_BYTES = 4096
_CHUNK_BYTES = 16 << 20

# Errors of file systems without locks, without hard links, and without reserved blocks.
_NO_LOCKS = {errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL}
_NO_LOCKS |= {errno.EBADF}  # NFS locks no folders
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK}
_NO_RESERVE = {errno.EOPNOTSUPP, errno.EINVAL}

# Do not reserve memory for pages that may never be touched: the system would refuse more than it
# has. Python has a name for it from 3.13 on.
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0)
if sys.platform == "linux" and platform.machine() in ("x86_64", "aarch64"):
    NORESERVE = 0x4000

_MAP_FIXED = 0x10  # the same on Linux and macOS
_MADV_POPULATE_WRITE = 23  # Linux 5.14; Python has no name for it
_IN_MEMORY = ("tmpfs", "devtmpfs")


# Locks


def lock(descriptor: int) -> bool:
    """Lock an open file; ``False`` if another open file description holds the lock."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
    return True


class FolderLock:
    """A lock on a folder; a context manager that yields whether it could be taken.

    Only one thread gets it at a time; nor does a signal handler get that of its own thread.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder, self._descriptor = folder, -1

    def __enter__(self) -> bool:
        if fcntl is None:
            return True
        uninterrupted(self._open)  # or its descriptor might stay open
        return lock(self._descriptor)

    def _open(self) -> None:
        self._descriptor = os.open(self._folder, os.O_RDONLY)

    def __exit__(self, *_: object) -> None:
        uninterrupted(self._close)

    def _close(self) -> None:
        if self._descriptor >= 0:
            with suppress(OSError):
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)  # a forked process has it open, too
            os.close(self._descriptor)
            self._descriptor = -1

    def __del__(self) -> None:
        self._close()


def lock_holder(descriptor: int) -> str:
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


# Files and their names


def checked_path(who: str, path: Any) -> Path:
    """Return a path that a user names; an empty one would be the current folder."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(path), str):
        raise InputError(message(f"{who}: path must be a str or os.PathLike", repr(path)))
    found = str(os.fspath(path))
    if "\0" in found:
        raise InputError(message(f"{who}: path must not contain null characters", repr(path)))
    if not found:
        raise InputError(message(f"{who}: path must not be empty", repr(path)))
    return Path(found)


@contextmanager
def naming(path: str) -> Iterator[None]:
    """Make every ``OSError`` name this path, the user's."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from None


def create(path: str, head: bytes, size: int, *, replace: bool) -> int | None:
    """Create a file, complete and locked, or not at all; follows symbolic links.

    Its first bytes are ``head``, the others zero. Returns its descriptor; ``None`` if it exists and
    is not to be replaced. An ``OSError`` names ``path``, never the temporary file.
    """
    with naming(path):
        target = os.path.realpath(path)
        folder, name = os.path.split(target)
        descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
        try:
            lock(descriptor)
            os.ftruncate(descriptor, size)
            write(descriptor, head, 0)
            allocate_in_memory(descriptor)
            os.fchmod(descriptor, 0o644)
            if replace:
                os.replace(temporary, target)
            elif link(temporary, target):
                os.unlink(temporary)
            elif os.path.lexists(target):
                raise FileExistsError
            else:
                os.replace(temporary, target)
        except BaseException as error:
            os.close(descriptor)
            remove(temporary)
            if isinstance(error, FileExistsError):
                return None
            raise
    return descriptor


def link(path: str, other: str) -> bool:
    """Give a file another name, which is free; ``False`` on file systems without hard links."""
    try:
        os.link(path, other)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        return False
    return True


def remove(path: str) -> None:
    """Remove a file if there is one."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def write(descriptor: int, data: bytes | memoryview, begin: int) -> None:
    """Write all bytes; a file system that is nearly full may write a part at a time."""
    while data:
        written = os.pwrite(descriptor, data, begin)
        begin, data = begin + written, data[written:]


def sync_folder(folder: str | os.PathLike[str]) -> None:
    """Write the names in a folder to the disk."""

    def sync() -> None:
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    if os.name != "nt":  # Windows opens no folders, and writes names by itself
        uninterrupted(sync)  # or its descriptor might stay open


# Memory and the page cache


def map_file(address: int, size: int, descriptor: int) -> None:
    """Map a file, shared and writable, in place of the mapping at an address."""
    prot, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | _MAP_FIXED
    found = libc().mmap(address, size, prot, flags, descriptor, 0)
    if found != address:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


@functools.cache
def libc() -> ctypes.CDLL:
    """The C library, with the types of ``mmap`` and ``madvise``."""
    library = ctypes.CDLL(None, use_errno=True)
    pointer, word, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    library.mmap.restype = pointer
    library.mmap.argtypes = (pointer, word, number, number, number, ctypes.c_ssize_t)
    library.madvise.argtypes = (pointer, word, number)
    return library


def populate(memory: mmap.mmap, begin: int, size: int) -> int:
    """Make pages writable; returns an errno if a write would end in ``SIGBUS``, else 0."""
    if sys.platform != "linux":
        return 0
    try:
        memory.madvise(_MADV_POPULATE_WRITE, begin, size)
    except OSError as error:
        if error.errno == errno.EINVAL:  # before Linux 5.14
            return 0
        return errno.ENOSPC if error.errno == errno.EFAULT else error.errno or errno.EIO
    return 0


def evict(descriptor: int) -> None:
    """Drop the cached pages of a file that are clean and that no process has mapped.

    Files that are read or written in order are cached in large folios. Touching one row of such a
    folio maps all of it, and writing one row writes all of it.
    """
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):  # only advice
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


# Blocks


def fallocate(descriptor: int, begin: int, size: int) -> int:
    """Reserve blocks; returns an errno, or 0. ``EOPNOTSUPP``: the file system cannot."""
    if not hasattr(os, "posix_fallocate"):
        return 0
    try:
        os.posix_fallocate(descriptor, begin, size)
    except OSError as error:
        return errno.EOPNOTSUPP if error.errno in _NO_RESERVE else error.errno or errno.EIO
    return 0


def reserve(descriptor: int, begin: int, size: int) -> None:
    """Reserve blocks for a copy, if the file system can; raises if the disk is full."""
    error = fallocate(descriptor, begin, size)
    if error and error != errno.EOPNOTSUPP:
        requirement = "the disk must have room for the copy"
        remedy = "Free some space, then try again"
        raise OSError(error, message(requirement, os.strerror(error), remedy))


def allocate_in_memory(descriptor: int) -> None:
    """Allocate all pages of a file that a file system keeps in memory (tmpfs).

    There, even reading a hole takes memory, and ends the process with ``SIGBUS`` if there is none.
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


def extents(descriptor: int) -> Iterator[tuple[int, int]]:
    """Yield begin and end of the parts of a file that are not holes."""
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


# Copies and checksums


def copy_sparse(source: int, target: int) -> int:
    """Copy a file into an empty one, with holes for pages of zeros; returns its checksum."""
    os.ftruncate(target, os.fstat(source).st_size)
    for begin, end in extents(source):
        reserve(target, begin, end - begin)
    return checksum(source, lambda begin, data: write(target, data, begin))


def checksum(source: int, visit: Callable[[int, memoryview], None] | None = None) -> int:
    """A checksum of a file that is the same whether zeros are holes or written.

    It is the CRC-32 of all pages that are not zero, each run of them preceded by its offset and
    length. A run does not cross a multiple of 16 MiB. ``visit`` is called with each.
    """
    crc = 0
    for begin, data in _runs(source):
        crc = zlib.crc32(data, zlib.crc32(struct.pack("<QQ", begin, len(data)), crc))
        if visit is not None:
            visit(begin, data)
    return crc


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
