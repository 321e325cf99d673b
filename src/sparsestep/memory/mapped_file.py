"""Tensors in memory-mapped files: parameters, and their state with them.

A file starts with a page that describes it. It is sparse: rows that were never written take no disk
space and read as zero. To other code, such a tensor is ordinary memory; this module recognizes it
by its address.

Before you write rows of such a tensor, call ``about_to_write``. It has the disk hold room
ready for them, because memory of a file that the disk has no room for ends the process when it
is written; and it marks the rows, so that a checkpoint knows which ones are other than they were.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._process import uninterrupted
from sparsestep._torch import version_of
from sparsestep.errors import InputError, message
from sparsestep.memory import file_header, file_pages
from sparsestep.memory import file_pages as file_lock
from sparsestep.memory import file_pages as mapping
from sparsestep.memory import lazy as pages
from sparsestep.memory.file_header import HEADER_BYTES, Header
from sparsestep.memory.row_layout import TABLE, Kind, Record
from sparsestep.memory.tensors import address

_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)

# By the addresses of the first elements of its tensors, as long as one of them lives. A step asks
# only whether there are any.
mapped_files: dict[int, weakref.ref[MappedFile]] = {}


class MappedFile(mmap.mmap):
    """A file with a table in it, mapped into memory; torch keeps it as long as a tensor lives.

    Attributes:
        path: where it was when it was opened.
        descriptor: of the open file.
        header: what it says of itself.
        record: what a row consists of.
        address: of the table's first element.
        beside: the files of state that is not in the rows, by name, the latest of each.
        marks: for each row whether it was written since the marks were cleared; ``None`` where
            no checkpoint needs them.
        version: how often the table had been written when it was last seen; ``None`` where it was
            not yet.
        saved_in: id of the checkpoint that has its rows as they were when the marks were cleared.
        to_clear: the state in its rows that is still to be zeroed; ``None`` where that
            is not put off.
        is_locked: whether this process has locked it, which it does before it first writes.
        settles_in: the file in whose rows its tensor will lie as state of this name, if it is here
            only until a checkpoint has been read to its end.
    """

    path: str
    descriptor: int = -1
    header: Header
    record: Record
    address: int
    beside: dict[str, weakref.ref[MappedFile]]
    marks: Tensor | None
    version: int | None
    saved_in: str | None
    to_clear: set[str] | None
    settles_in: tuple[MappedFile, str] | None
    is_locked: bool
    reserved: Tensor
    asked: Tensor
    pages_asked: int
    _memory: weakref.WeakValueDictionary[str, Any]

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @property
    def shape(self) -> torch.Size:
        """Of the table."""
        return self.header.shape

    @property
    def dtype(self) -> torch.dtype:
        """Of the table."""
        return self.header.dtype

    @property
    def rows(self) -> file_pages.Rows:
        """Where its rows lie."""
        return file_pages.Rows(self.shape[0], self.record.row_bytes, HEADER_BYTES, mmap.PAGESIZE)

    def tensor(self, name: str = TABLE) -> Tensor:
        """The table, or the state of this name that lies in its rows."""
        memory = self._memory.get(name)
        if memory is None:
            memory = memoryview(self)[HEADER_BYTES + self.record.offsets[name] :]
            self._memory[name] = memory
        (shape, dtype), strides = self.record.kinds[name], self.record.strides(name)
        flat = torch.frombuffer(memory, dtype=dtype, count=len(memory) // dtype.itemsize)
        return flat.as_strided((self.shape[0], *shape), strides)

    def is_in_use(self, name: str) -> bool:
        """Whether a tensor of this state lives."""
        return name in self._memory

    def lock(self) -> None:
        """Lock the file for this process and those forked from it.

        Raises:
            InputError: another process writes it.
        """
        if not self.is_locked:
            _lock(self.path, self.descriptor)
            self.is_locked = True
            _remove_leftovers(self.path)

    def reserve(self, rows: Tensor | None) -> None:
        """Reserve disk blocks for rows, or for all; raises ``OSError`` if the disk is full."""
        self.lock()
        error = file_pages.reserve(self.rows, rows, self.descriptor, self.reserved)
        if error == errno.EOPNOTSUPP:
            error = file_pages.populate(self.rows, rows, self, self.reserved)
        elif not error and file_pages.is_short_of_space(self.rows, rows, self.descriptor):
            error = file_pages.populate(self.rows, rows, self)
            if error:  # once more, in small folios
                self.evict()
                error = file_pages.populate(self.rows, rows, self)
        if error:
            requirement = "the disk must have room for the rows that are about to be written"
            remedy = "Nothing has changed: free some space, then continue"
            raise OSError(error, message(requirement, os.strerror(error), remedy), self.path)

    def evict(self) -> None:
        """Unmap all pages, and drop clean ones from the page cache; see ``file_pages.evict``."""
        if hasattr(mmap, "MADV_DONTNEED"):
            self.madvise(mmap.MADV_DONTNEED)
        file_pages.evict(self.descriptor)

    def prefetch(self, rows: Tensor) -> None:
        """Have the operating system begin to read rows, here and in the state beside."""
        files = (self, *(file for at in self.beside.values() if (file := at()) is not None))
        for file in files:
            base = file.address - HEADER_BYTES
            file.pages_asked += file_pages.prefetch(file.rows, rows, base, file, file.asked)
            if file.pages_asked > file_pages.REMEMBERED:  # it may have lost them meanwhile
                file.asked.zero_()
                file.pages_asked = 0

    def mark(self, rows: Tensor | None) -> None:
        """Note that rows are about to be written, or all."""
        if self.marks is not None:
            file_pages.mark(rows, self.marks)

    def was_written_unseen(self, tensor: Tensor) -> bool:
        """Whether another hand has written its table since it was last seen."""
        return self.version is not None and self.version != version_of(tensor)

    def note_used(self, name: str) -> None:
        """Have the file say that this state of its rows may no longer be zero."""
        self.lock()
        self.header = file_header.note_used(self.descriptor, self.header, [name])

    def switch_to(self, descriptor: int, header: Header, reserved: Tensor) -> None:
        """Map another file of the same layout in place of this one, at the same address.

        Args:
            descriptor: of the other file; it is duplicated.
            header: of the other file.
            reserved: which pages of the other file are known to have blocks on the disk.
        """
        mapping.map_file(self.address - HEADER_BYTES, self.header.file_bytes, descriptor)
        os.dup2(descriptor, self.descriptor, inheritable=False)
        self.header, self.reserved = header, reserved
        self.asked.zero_()
        self.pages_asked = 0
        self._advise()

    def _advise(self) -> None:
        if hasattr(mmap, "MADV_RANDOM"):  # or a read of one row would read megabytes around it
            self.madvise(mmap.MADV_RANDOM)

    @contextmanager
    def read_in_order(self) -> Iterator[None]:
        """While it lasts, the operating system reads ahead: rows are read one after the other."""
        if hasattr(mmap, "MADV_SEQUENTIAL"):
            self.madvise(mmap.MADV_SEQUENTIAL)
        try:
            yield
        finally:
            self._advise()

    def flush_to_disk(self) -> None:
        """Return when what was written is on the disk."""
        self.flush()
        os.fsync(self.descriptor)


def open_file(
    path: str | os.PathLike[str],
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    state: Mapping[str, Kind] | None = None,
    replace: bool = False,
) -> MappedFile:
    """Open a file with a table, or make it.

    Args:
        path: of the file.
        shape: of the table, which a file that is there must have.
        dtype: likewise.
        state: what each row has room for; a file that is there must have room for it. ``None`` for
            whatever that has.
        replace: replace an existing file. Its tensors live on without it.
    """
    path, wanted = os.path.abspath(path), Header(shape, dtype, dict(state or {}))
    # An interrupt would leave descriptors open.
    return uninterrupted(partial(_open, path, wanted, state, replace))


def _open(path: str, wanted: Header, state: Mapping[str, Kind] | None, replace: bool) -> MappedFile:
    with _opening:
        alive, descriptor = (None, _replaced(path, wanted)) if replace else _opened(path, wanted)
        try:
            header = file_header.read(path, descriptor)
            file_header.check(path, header, wanted, state)
            return _mapped(path, descriptor, header) if alive is None else alive
        finally:
            os.close(descriptor)


def _mapped(path: str, descriptor: int, header: Header) -> MappedFile:
    """Map an open file."""
    with file_header.naming(path):
        file_pages.allocate_in_memory(descriptor)
        file_pages.evict(descriptor)
        file = _map(descriptor, header.file_bytes)
    file.path, file.descriptor = path, os.dup(descriptor)
    file.header, file.record = header, header.record
    file.beside, file.marks, file.version, file.saved_in = {}, None, None, None
    file.to_clear, file.settles_in, file._memory = None, None, weakref.WeakValueDictionary()
    file.is_locked = False
    file._advise()
    count = file_pages.count(file.rows)
    file.reserved, file.asked = (
        pages.zeros(torch.Size([count]), torch.bool, torch.device("cpu")) for _ in range(2)
    )
    file.pages_asked = 0
    file.address = file.tensor().data_ptr()
    known = [file.address + offset for offset in file.record.offsets.values()]
    reference = weakref.ref(file, lambda _: [mapped_files.pop(begin, None) for begin in known])
    mapped_files.update(dict.fromkeys(known, reference))
    return file


def _map(descriptor: int, size: int) -> MappedFile:
    """Map a file over anonymous memory, so that ``mmap`` keeps no descriptor of its own.

    That one would keep the file on the disk after a load has replaced it.
    """
    if not mapping.CAN_REMAP:
        return MappedFile(descriptor, size)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | pages.NORESERVE
    try:
        file = MappedFile(-1, size, flags=flags)
    except OSError:  # where the system hands out no more addresses than it has memory
        return MappedFile(descriptor, size)
    mapping.map_file(ctypes.addressof(ctypes.c_char.from_buffer(file)), size, descriptor)
    return file


def temporary_path(path: str, role: str) -> str:
    """Path next to a file for content that replaces it, or that was replaced."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}.sparsestep-{role}")


def _remove_leftovers(path: str) -> None:
    """Remove what a process that was killed in ``load`` has left next to a file."""
    prefix = temporary_path(path, "")
    try:
        with os.scandir(os.path.dirname(prefix)) as found:
            left = [each.path for each in found if each.name.startswith(os.path.basename(prefix))]
        for each in left:
            os.unlink(each)
    except OSError:
        pass  # they only take space


# How often a file may vanish while it is opened.
_ATTEMPTS = 100

# Only one thread opens files at a time, so that a process maps each file once.
_opening = threading.RLock()


def _after_fork() -> None:
    global _opening
    _opening = threading.RLock()  # the thread that held it does not exist here


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _opened(path: str, wanted: Header) -> tuple[MappedFile | None, int]:
    """Open or create a file; or find the mapping that this process has of it."""
    for _ in range(_ATTEMPTS):
        try:
            descriptor = os.open(path, os.O_RDWR)
        except FileNotFoundError:
            made = file_header.make(path, wanted, replace=False)
            if made is None:  # another process was faster
                continue
            return None, made
        try:
            return _alive_at(descriptor), descriptor
        except BaseException:
            os.close(descriptor)
            raise
    raise OSError(errno.EBUSY, "the file is created and removed again and again", path)


def _replaced(path: str, wanted: Header) -> int:
    """Create a file, replacing an existing one that no other process writes."""
    try:
        old = os.open(path, os.O_RDWR)
    except OSError:  # there is none, or it is nothing that could be locked
        old = None
    try:
        if old is not None and _alive_at(old) is None:
            _lock(path, old)
        made = file_header.make(path, wanted, replace=True)
        assert made is not None
        return made
    finally:
        if old is not None:
            os.close(old)


def _lock(path: str, descriptor: int) -> None:
    if not file_lock.acquire(descriptor):
        requirement = f"{path} can be written by one process, and by processes forked from it"
        got = f"a file that {file_lock.holder(descriptor)} writes"
        remedy = "Nothing has changed: wait for that process to end, or choose another path"
        raise InputError(message(requirement, got, remedy))


def _alive() -> Iterator[MappedFile]:
    for found in list(mapped_files.values()):
        file = found()
        if file is not None:
            yield file


def _alive_at(descriptor: int) -> MappedFile | None:
    """The mapping that this process has of an open file."""
    return next((f for f in _alive() if os.path.sameopenfile(f.descriptor, descriptor)), None)


def file_of(tensor: Tensor) -> MappedFile | None:
    """The file that has a tensor, all of it, as its table or as state in its rows; or ``None``."""
    if not mapped_files:
        return None
    begin = address(tensor)
    found = mapped_files.get(begin)
    file = None if found is None else found()
    if file is None:
        return None
    if not file.record.state:
        whole = tensor.numel() == math.prod(file.shape) and tensor.is_contiguous()
        return file if whole else None
    name = next(n for n, offset in file.record.offsets.items() if file.address + offset == begin)
    kind = file.record.kinds[name]
    is_all = tensor.shape == (file.shape[0], *kind.shape) and tensor.dtype == kind.dtype
    return file if is_all and tensor.stride() == file.record.strides(name) else None


def has_mapped_memory(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a file's, all of it or a part."""
    if not mapped_files or tensor.is_meta:
        return False
    begin = tensor.data_ptr()
    return any(file.address <= begin < file.address + len(file) for file in _alive())


def about_to_write(param: Tensor, state: Iterable[Any], rows: Tensor | None) -> None:
    """Make ready for rows to be written, and for those of the state; raises where that cannot be.

    Args:
        param: the parameter.
        state: its state; what is no tensor is left out.
        rows: which ones, int64; ``None`` for all. What is no row is left to others to refuse.
    """
    file = file_of(param)
    if file is None:
        return
    file.reserve(rows)
    for each in state:
        if isinstance(each, Tensor):
            beside = file_of(each)
            if beside is not None and beside is not file:
                beside.reserve(rows)
    if file.marks is not None:
        file.mark(None if file.was_written_unseen(param) else rows)


def written(params: Iterable[Tensor]) -> None:
    """Take note that what was announced has been done."""
    for param in params:
        file = file_of(param)
        if file is not None:
            file.version = version_of(param)


def words_of(file: MappedFile) -> Tensor:
    """The rows of a file as rows of integers, whatever they mean: the longest that divide a row."""
    row_bytes, total = file.rows.row_bytes, file.rows.total
    word = next(word for word in _WORDS if row_bytes % word.itemsize == 0)
    count = total * row_bytes // word.itemsize
    return torch.frombuffer(file, dtype=word, count=count, offset=HEADER_BYTES).view(total, -1)


class RowWrites:
    """Collects rows to overwrite: ``add`` does everything that can fail, ``commit`` writes.

    For tensors on the CPU, ``commit`` is one call of the core, which neither allocates nor raises.
    Without the core, and for other tensors, it uses torch's operations.

    Example:
        >>> table, writes = torch.zeros(3, 2), RowWrites()
        >>> writes.add(table, torch.tensor([2, 0]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> writes.commit()
        >>> table
        tensor([[3., 4.],
                [0., 0.],
                [1., 2.]])
    """

    def __init__(self) -> None:
        self._native = None if ext is None else ext.RowWrites()
        self._others: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, tensor: Tensor, rows: Tensor, values: Tensor) -> None:
        """Overwrite rows of a tensor with ``commit``.

        Args:
            tensor: with at least one dim.
            rows: int64 of one dim, contiguous, on the CPU, all of them rows of the tensor.
            values: contiguous, of the tensor's dtype; a row for each, or one row for all.
        """
        if self._native is None or not self._native.add(tensor, rows, values):
            values = values.to(tensor.device).expand(len(rows), *tensor.shape[1:])
            self._others.append((tensor, rows.to(tensor.device), values))

    def commit(self) -> None:
        """Write everything that was added."""
        if self._native is not None:
            self._native.commit()
        if self._others:
            with torch.no_grad():
                for tensor, rows, values in self._others:
                    tensor.index_copy_(0, rows, values)
