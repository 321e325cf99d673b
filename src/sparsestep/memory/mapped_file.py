"""Tensors in memory-mapped files: parameters, and their state with them.

A file starts with a page that describes it. It is sparse: rows that were never written take no disk
space and read as zero. To other code, such a tensor is ordinary memory; this module recognizes it
by its address.

Before you write rows of such a tensor, call ``about_to_write``. It reserves disk blocks for the
rows, because a write to mapped memory without blocks ends the process if the disk is full, and
marks them for the next checkpoint. ``written`` follows.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import math
import mmap
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext
from sparsestep._process import fork_safe_lock, uninterrupted
from sparsestep._torch import version_of
from sparsestep.errors import InputError, SlowWarning, message, warn_once
from sparsestep.memory import disk, formats, lazy
from sparsestep.memory.formats import HEADER_BYTES, TABLE, FileHeader, RowField, RowLayout
from sparsestep.memory.tensors import address

# By the addresses of the first elements of its tensors, as long as one lives. A step only asks
# whether there are any.
mapped_files: dict[int, weakref.ref[MappedFile]] = {}

# Never ``None`` where a file is open: ``open_file`` needs it.
_core: Any = ext

# After so many prefetched pages, the system may have dropped the earlier ones.
_MAX_PREFETCHED = 1 << 16

# The largest unit of the page cache, and blocks that are counted to files without holding data.
_FOLIO_BYTES = 2 << 20
_MARGIN_BYTES = 1 << 20

_CHUNK_BYTES = 1 << 20  # of a copy


class FileRows(NamedTuple):
    """Position of the rows in a file."""

    total: int
    row_bytes: int
    offset: int  # of the first
    page_bytes: int

    def pages_of(self, rows: Tensor) -> Tensor:
        """The pages that hold rows; ignores rows out of range.

        Example:
            >>> FileRows(9, 2048, 4096, 4096).pages_of(torch.tensor([1, 2, 7, -5])).tolist()
            [1, 2, 4]
        """
        rows = rows[(rows >= 0) & (rows < self.total)]
        begin = self.offset + rows * self.row_bytes
        first, last = begin // self.page_bytes, (begin + self.row_bytes - 1) // self.page_bytes
        inside = torch.arange(int((last - first).max()) + 1 if len(rows) else 0)
        pages: Tensor = (first[:, None] + inside).minimum(last[:, None]).unique()
        return pages


class MappedFile(mmap.mmap):
    """A file with a table in it, mapped into memory; torch keeps it as long as a tensor lives."""

    path: str  # when it was opened
    descriptor: int = -1
    header: FileHeader
    layout: RowLayout
    address: int  # of the table's first element
    # Files of state that is not in the rows, by name, the latest of each.
    state_files: weakref.WeakValueDictionary[str, MappedFile]
    # Whether each row was written since the last checkpoint; None if no checkpoint needs it.
    dirty_rows: Tensor | None = None
    # The table's version counter after the last write that was announced.
    version: int | None = None
    # Whether rows are about to be written: a signal handler that saves them leaves them marked.
    is_being_written: bool = False
    # The id of the checkpoint that has its rows, except for the dirty ones.
    saved_in: str | None = None
    # State in its rows that is still to be zeroed; None outside of `postponed_clearing`.
    to_clear: set[str] | None = None
    # Where state belongs that `load_state_dict` has set aside: a file, and its name in the rows.
    belongs_in: tuple[MappedFile, str] | None = None
    is_locked: bool = False  # by this process, which locks it before it first writes
    reserved: Tensor  # whether each page has blocks on the disk
    prefetched: Tensor  # whether each page was prefetched
    num_prefetched: int = 0
    # The memory of the tensors that live, by name.
    in_use: weakref.WeakValueDictionary[str, Any]

    def register(self, path: str, descriptor: int, header: FileHeader) -> None:
        """Complete a new mapping, and make its tensors known."""
        self.path, self.descriptor = path, os.dup(descriptor)
        self.header, self.layout = header, header.layout
        self.state_files, self.in_use = (weakref.WeakValueDictionary() for _ in range(2))
        self.advise("RANDOM")
        pages = torch.Size([-(-header.file_bytes // mmap.PAGESIZE)])
        cpu = torch.device("cpu")
        self.reserved, self.prefetched = (lazy.zeros(pages, torch.bool, cpu) for _ in range(2))
        self.address = self.tensor().data_ptr()
        known = [self.address + offset for offset in self.layout.offsets.values()]
        reference = weakref.ref(self, lambda _: [mapped_files.pop(begin, None) for begin in known])
        mapped_files.update(dict.fromkeys(known, reference))

    def __del__(self) -> None:
        if self.descriptor >= 0:
            os.close(self.descriptor)

    @property
    def rows(self) -> FileRows:
        """Position of its rows."""
        return FileRows(self.header.shape[0], self.layout.row_bytes, HEADER_BYTES, mmap.PAGESIZE)

    def tensor(self, name: str = TABLE) -> Tensor:
        """The table, or the state of this name that lies in its rows."""
        memory = self.in_use.get(name)
        if memory is None:
            memory = memoryview(self)[HEADER_BYTES + self.layout.offsets[name] :]
            self.in_use[name] = memory
        field = self.layout.fields[name]
        count = len(memory) // field.dtype.itemsize
        flat = torch.frombuffer(memory, dtype=field.dtype, count=count)
        return flat.as_strided((self.rows.total, *field.shape), self.layout.strides(name))

    def words(self) -> Tensor:
        """The bytes of all rows, as rows of the widest integers that divide a row."""
        word = lazy.word_dtype(self.rows.row_bytes)
        count = self.rows.total * self.rows.row_bytes // word.itemsize
        flat = torch.frombuffer(self, dtype=word, count=count, offset=HEADER_BYTES)
        return flat.view(self.rows.total, -1)

    def live_state_files(self) -> list[MappedFile]:
        """The files of state; a copy, because a step of another thread may add one meanwhile."""
        references = self.state_files.valuerefs()
        return [file for each in references if (file := each()) is not None]

    def lock(self) -> None:
        """Lock the file for this process and its forks; refuses another's file."""
        if not self.is_locked:
            _lock(self.path, self.descriptor)
            self.is_locked = True
            _remove_leftovers(self.path)

    def reserve(self, rows: Tensor | None) -> None:
        """Reserve disk blocks for rows, or for all; raises ``OSError`` if the disk is full."""
        self.lock()
        error = self._reserve(rows)
        if error == errno.EOPNOTSUPP:
            error = self._populate(rows, self.reserved)
        elif not error and self._is_short_of_space(rows):
            error = self._populate(rows)
            if error:  # once more, in small folios
                self.evict()
                error = self._populate(rows)
        if error:
            requirement = "the disk must have room for the rows that are about to be written"
            remedy = "Nothing has changed: free some space, then continue"
            raise OSError(error, message(requirement, os.strerror(error), remedy), self.path)

    def _reserve(self, rows: Tensor | None) -> int:
        """Reserve disk blocks; returns an errno, or 0."""
        if rows is not None:
            file, threads = self.descriptor, torch.get_num_threads()
            return int(_core.reserve_rows(rows, *self.rows, file, self.reserved, threads))
        if self.reserved.all():
            return 0
        error = disk.fallocate(self.descriptor, 0, self.header.file_bytes)
        if not error:
            self.reserved.fill_(True)
        return error

    def _is_short_of_space(self, rows: Tensor | None) -> bool:
        """Whether writing rows might need more blocks than the disk has, even if they have theirs.

        The first write to a clean page needs blocks for the whole folio that it is cached in. If
        the file was read in order, that is up to 2 MiB, holes included.
        """
        if rows is None:
            return False
        free, file = os.fstatvfs(self.descriptor), os.fstat(self.descriptor)
        pages = rows.numel() * (self.rows.row_bytes // self.rows.page_bytes + 2)
        holes = max(0, file.st_size - file.st_blocks * 512) + _MARGIN_BYTES
        return free.f_bavail * free.f_frsize < min(pages * _FOLIO_BYTES, holes)

    def _populate(self, rows: Tensor | None, known: Tensor | None = None) -> int:
        """Make the pages of rows writable, except for known ones; returns an errno, or 0."""
        if rows is None:
            error = disk.populate(self, 0, len(self))
            if known is not None and not error:
                known.fill_(True)
            return error
        pages = self.rows.pages_of(rows)
        pages = pages if known is None else pages[~known[pages]]
        for page in pages.tolist():
            error = disk.populate(self, page * mmap.PAGESIZE, mmap.PAGESIZE)
            if error:
                return error
        if known is not None:
            known[pages] = True
        return 0

    def evict(self) -> None:
        """Unmap all pages, and drop clean ones from the page cache; see ``disk.evict``."""
        self.advise("DONTNEED")
        disk.evict(self.descriptor)

    def prefetch(self, rows: Tensor) -> None:
        """Have the operating system begin to read rows, here and in the state files."""
        base = self.address - HEADER_BYTES
        self.num_prefetched += _core.prefetch_rows(rows, *self.rows, base, self.prefetched)
        if self.num_prefetched > _MAX_PREFETCHED:
            self._forget_prefetched()
        for file in self.live_state_files():
            file.prefetch(rows)

    def _forget_prefetched(self) -> None:
        self.prefetched.zero_()
        self.num_prefetched = 0

    def mark(self, rows: Tensor | None) -> None:
        """Note that rows are about to be written, or all; ignores rows out of range."""
        if self.dirty_rows is not None:
            if rows is None:
                self.dirty_rows.fill_(True)
            else:
                _core.mark_rows(rows, self.dirty_rows)

    def was_modified(self, tensor: Tensor) -> bool:
        """Whether other code has written the table since the last write that was announced."""
        return self.version is not None and self.version != version_of(tensor)

    def switch_to(self, descriptor: int, header: FileHeader, reserved: Tensor) -> None:
        """Map another file of the same layout at the same address; its descriptor is duplicated."""
        disk.map_file(self.address - HEADER_BYTES, self.header.file_bytes, descriptor)
        os.dup2(descriptor, self.descriptor, inheritable=False)
        self.header, self.reserved = header, reserved
        self._forget_prefetched()
        self.advise("RANDOM")

    def advise(self, how: str) -> None:
        """Tell the system how pages are used: with ``RANDOM``, it reads no neighbors of a page."""
        advice = getattr(mmap, f"MADV_{how}", None)
        if advice is not None:
            self.madvise(advice)

    def flush_to_disk(self) -> None:
        """Return when everything that was written is on the disk."""
        self.flush()
        os.fsync(self.descriptor)


def open_file(
    path: str | os.PathLike[str],
    shape: torch.Size,
    dtype: torch.dtype,
    *,
    state: Mapping[str, RowField] | None = None,
    replace: bool = False,
) -> MappedFile:
    """Open a file with a table, or create it.

    An existing file must have the shape and dtype, and room in its rows for ``state``; ``None``
    accepts any. With ``replace``, it is replaced, and its tensors live on without it.
    """
    if ext is None:
        requirement = "storage.mapped needs the compiled extension of sparsestep"
        remedy = "Install a wheel, or build with a C++ compiler and without SPARSESTEP_PURE=1"
        raise InputError(message(requirement, "an installation without it", remedy))
    path, wanted = os.path.abspath(path), FileHeader(shape, dtype, dict(state or {}))
    # An interrupt would leave descriptors open.
    return uninterrupted(partial(_open, path, wanted, state, replace))


def _open(
    path: str, wanted: FileHeader, state: Mapping[str, RowField] | None, replace: bool
) -> MappedFile:
    with _opening:
        descriptor = _create_replacement(path, wanted) if replace else _open_or_create(path, wanted)
        try:
            header = formats.read_header(path, descriptor)
            formats.check_header(path, header, wanted, state)
            alive = _live_file_at(descriptor)
            if alive is not None:
                return alive
            with disk.naming(path):
                disk.allocate_in_memory(descriptor)
                disk.evict(descriptor)
                file = _map(descriptor, header.file_bytes)
            file.register(path, descriptor, header)
            return file
        finally:
            os.close(descriptor)


def _map(descriptor: int, size: int) -> MappedFile:
    """Map a file over anonymous memory, so that ``mmap`` keeps no descriptor of its own.

    That one would keep the file on the disk after a load has replaced it.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | disk.NORESERVE
    try:
        file = MappedFile(-1, size, flags=flags)
    except OSError:  # where the system hands out no more addresses than it has memory
        return MappedFile(descriptor, size)
    disk.map_file(ctypes.addressof(ctypes.c_char.from_buffer(file)), size, descriptor)
    return file


def temporary_path(path: str, role: str) -> str:
    """Path next to a file for content that replaces it, or that was replaced."""
    folder, name = os.path.split(os.path.realpath(path))
    return os.path.join(folder, f".{name}.sparsestep-{role}")


def _remove_leftovers(path: str) -> None:
    """Remove temporary files of a process that was killed in ``load``."""
    prefix = temporary_path(path, "")
    with suppress(OSError), os.scandir(os.path.dirname(prefix)) as found:  # they only take space
        for each in list(found):
            if each.name.startswith(os.path.basename(prefix)):
                os.unlink(each.path)


# Only one thread opens files at a time, so that a process maps each file once.
_opening = fork_safe_lock()


def _open_or_create(path: str, wanted: FileHeader) -> int:
    """Open or create a file."""
    while True:
        try:
            return os.open(path, os.O_RDWR)
        except FileNotFoundError:
            made = disk.create(path, wanted.encode(), wanted.file_bytes, replace=False)
            if made is not None:  # or another process was faster
                return made


def _create_replacement(path: str, wanted: FileHeader) -> int:
    """Create a file, replacing an existing one that no other process writes."""
    try:
        old = os.open(path, os.O_RDWR)
    except OSError:  # there is none, or it cannot be locked
        old = None
    try:
        if old is not None and _live_file_at(old) is None:
            _lock(path, old)
        made = disk.create(path, wanted.encode(), wanted.file_bytes, replace=True)
        assert made is not None
        return made
    finally:
        if old is not None:
            os.close(old)


def _lock(path: str, descriptor: int) -> None:
    if not disk.lock(descriptor):
        requirement = f"{path} can be written by one process, and by processes forked from it"
        got = f"a file that {disk.lock_holder(descriptor)} writes"
        remedy = "Nothing has changed: wait for that process to end, or choose another path"
        raise InputError(message(requirement, got, remedy))


def _live_files() -> list[MappedFile]:
    return [file for found in list(mapped_files.values()) if (file := found()) is not None]


def _live_file_at(descriptor: int) -> MappedFile | None:
    """The mapping that this process has of an open file."""
    return next((f for f in _live_files() if os.path.sameopenfile(f.descriptor, descriptor)), None)


def file_of(tensor: object) -> MappedFile | None:
    """The file of a tensor that is all of its table or of a state in its rows; or ``None``."""
    if not mapped_files or not isinstance(tensor, Tensor):
        return None
    begin = address(tensor)
    found = mapped_files.get(begin)
    file = None if found is None else found()
    if file is None:
        return None
    if not file.header.state:
        whole = tensor.numel() == math.prod(file.header.shape) and tensor.is_contiguous()
        return file if whole else None
    name = next(n for n, offset in file.layout.offsets.items() if file.address + offset == begin)
    field = file.layout.fields[name]
    is_all = tensor.shape == (file.rows.total, *field.shape) and tensor.dtype == field.dtype
    return file if is_all and tensor.stride() == file.layout.strides(name) else None


def has_mapped_memory(tensor: Tensor) -> bool:
    """Whether a tensor's memory is a file's, all of it or a part."""
    if not mapped_files or tensor.is_meta:
        return False
    begin = tensor.data_ptr()
    return any(file.address <= begin < file.address + len(file) for file in _live_files())


def about_to_write(param: Tensor, state: Iterable[Any], rows: Tensor | None) -> None:
    """Reserve rows of a parameter and its state, and mark them; raises before anything is written.

    It has no effect if the parameter is not in a file. Values of ``state`` that are not tensors are
    ignored, as are rows out of range; ``None`` means all rows.
    """
    file = file_of(param)
    if file is None:
        return
    for each in dict.fromkeys((file, *map(file_of, state))):
        if each is not None:
            each.reserve(rows)
    file.is_being_written = True
    file.mark(None if file.was_modified(param) else rows)


def mark_modified(params: Iterable[Tensor]) -> None:
    """Mark all rows of tables that other code has written, before ``written`` covers that up."""
    for param in params:
        file = file_of(param)
        if file is not None and file.was_modified(param):
            file.mark(None)


def written(params: Iterable[Tensor]) -> None:
    """Note that the writes that were announced are done."""
    for param in params:
        file = file_of(param)
        if file is not None:
            file.version = version_of(param)
            file.is_being_written = False


# State of parameters in files: in their rows, if these have room, or in files next to them


def new_state(
    param: Tensor, name: str, shape: torch.Size, value: complex, dtype: torch.dtype
) -> Tensor | None:
    """Create state in the rows of a parameter's file, or in a file next to it.

    A value other than zero is written, and takes disk space. Returns ``None`` if the parameter is
    not in a file.
    """
    file = _table_file(param)
    if file is None:
        return None
    file.lock()
    if _fits_in_rows(file, name, RowField(tuple(shape[1:]), dtype)):
        if name in file.header.used and value == 0:
            _clear(file, name)
        if name not in file.header.used:
            file.header = file.header._replace(used=file.header.used | {name})
            disk.write(file.descriptor, file.header.encode(), 0)
        file.saved_in = None  # a checkpoint has the state of an earlier optimizer
        found, tensor = file, file.tensor(name)
    else:
        found = open_file(f"{file.path}.{name}", shape, dtype, replace=True)
        file.state_files[name] = found
        tensor = found.tensor()
    if value != 0:
        found.reserve(None)
        tensor.fill_(value)
    return tensor


def _table_file(param: Tensor) -> MappedFile | None:
    """The file whose table a parameter is; ``None`` for state that is used as a parameter."""
    file = file_of(param)
    return file if file is not None and file.address == address(param) else None


def _fits_in_rows(file: MappedFile, name: str, field: RowField) -> bool:
    """Whether the rows of a file have room for state that no other optimizer uses."""
    if file.header.state.get(name) != field:
        if file.header.state:
            requirement = f"{file.path}: state must fit the room that the rows have for it"
            room = ", ".join(list(file.layout.fields)[1:])
            got = f"{name!r} as {field.dtype}, where there is room for {room}"
            remedy = "It is in a file of its own: create the table for the optimizer that trains it"
            warn_once(SlowWarning, message(requirement, got, remedy))
        return False
    if name in file.in_use:
        gc.collect()  # an unreachable optimizer may not be freed yet
    if name in file.in_use:
        requirement = f"{file.path}: the rows have room for the state of one optimizer"
        remedy = "The second one's is in files of its own: delete the first, or keep both as it is"
        warn_once(SlowWarning, message(requirement, "two that are in use", remedy))
        return False
    return True


def _clear(file: MappedFile, name: str) -> None:
    """Zero the state of an earlier optimizer, where the file has no holes."""
    if file.to_clear is not None:
        file.to_clear.add(name)
        return
    rows, tensor = file.rows, file.tensor(name)
    step = max(1, _CHUNK_BYTES // rows.row_bytes)
    for begin, end in disk.extents(file.descriptor):
        first = max(0, begin - HEADER_BYTES) // rows.row_bytes
        last = min(rows.total, -(-(end - HEADER_BYTES) // rows.row_bytes))
        for some in range(first, last, step):
            chunk = torch.arange(some, min(some + step, last), device="cpu")
            file.prefetch(chunk)  # reading in order would cache, and then write, holes as well
            values = tensor[some : some + len(chunk)].clone(memory_format=torch.contiguous_format)
            chunk = chunk[values.view(torch.uint8).view(len(chunk), -1).ne(0).any(1)]
            file.reserve(chunk)
            tensor.index_fill_(0, chunk, 0)


@contextmanager
def postponed_clearing(params: Iterable[Tensor]) -> Iterator[None]:
    """Zero state in the rows of these files at the end, unless all of the file was replaced."""
    found = {file for param in params if (file := _table_file(param)) is not None}
    for file in found:
        file.to_clear = set()
    try:
        yield
    finally:
        for file in found:
            names, file.to_clear = file.to_clear or set(), None
            for name in names:
                _clear(file, name)


def copy_state(
    param: Tensor, name: str, value: Tensor, dtype: torch.dtype, replaced: object = None
) -> Tensor | None:
    """Create state with these values in or next to a parameter's file, unless it is there already.

    State in the rows (``replaced``) is not overwritten yet, because the rest of the checkpoint may
    be refused: ``store_in_rows`` does it. Returns ``None`` if the parameter is not in a file.
    """
    file, source = _table_file(param), file_of(value)
    if file is None:
        return None
    is_beside = source is not None and file.state_files.get(name) is source
    if value.dtype == dtype and (is_beside or _is_in_row(file, name, value)):
        return value.detach()
    field = RowField(tuple(value.shape[1:]), dtype)
    if _is_in_row(file, name, replaced) and file.header.state.get(name) == field:
        path = f"{file.path}.{name}.loading"
        aside = open_file(path, value.shape, dtype, replace=True)
        os.unlink(path)  # it goes with its tensor
        aside.belongs_in = file, name
        copy_rows(value.detach(), aside.tensor(), room_in=file)
        return aside.tensor()
    found = new_state(param, name, value.shape, 0, dtype)
    assert found is not None
    copy_rows(value.detach(), found)
    return found


def _is_in_row(file: MappedFile, name: str, value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and file_of(value) is file
        and address(value) == file.address + file.layout.offsets.get(name, -1)
    )


def store_in_rows(state: dict[str, Any]) -> None:
    """Move state that ``copy_state`` has set aside to the rows; changes ``state`` in place."""
    for name, value in state.items():
        aside = file_of(value)
        if aside is not None and aside.belongs_in is not None:
            file, of_state = aside.belongs_in
            _clear(file, of_state)
            file.saved_in = None
            state[name] = file.tensor(of_state)
            copy_rows(value, state[name])


def copy_rows(source: Tensor, target: Tensor, room_in: MappedFile | None = None) -> None:
    """Copy a tensor to the first rows of zeros in a file; reserves them in ``room_in``, too."""
    file = file_of(target)
    assert file is not None
    step = max(1, _CHUNK_BYTES // file.rows.row_bytes)
    for first in range(0, len(source), step):
        some = source[first : first + step].to(target.device, target.dtype)
        # Copied even if it is contiguous: one with a single column may have any stride.
        some = some.clone(memory_format=torch.contiguous_format)
        if some.view(torch.uint8).any():
            rows = torch.arange(first, first + len(some), device="cpu")
            for each in (file, room_in):
                if each is not None:
                    each.reserve(rows)
            target[first : first + len(some)] = some


class RowWrites:
    """Collects rows to overwrite: ``add`` does everything that can fail, ``commit`` writes.

    For tensors on the CPU, ``commit`` is one call of the core, which neither allocates nor raises.
    Without the core, and for other tensors, it uses torch's operations. With ``can_undo``, ``add``
    also copies the rows, and ``undo`` writes them back.
    """

    def __init__(self, *, can_undo: bool = False) -> None:
        self._native = None if ext is None else ext.RowWrites()
        self._others: list[tuple[Tensor, Tensor, Tensor]] = []
        self._before: RowWrites | None = RowWrites() if can_undo else None
        self._is_written = False

    def add(self, tensor: Tensor, rows: Tensor, values: Tensor) -> None:
        """Overwrite rows of a tensor with ``commit``.

        The rows are valid, contiguous, and on the CPU; the values are contiguous and of the
        tensor's dtype, a row for each or one for all.
        """
        if self._before is not None and len(rows):
            self._before.add(tensor, rows, tensor.index_select(0, rows.to(tensor.device)))
        if self._native is None or not self._native.add(tensor, rows, values):
            values = values.to(tensor.device).expand(len(rows), *tensor.shape[1:])
            self._others.append((tensor, rows.to(tensor.device), values))

    def commit(self) -> None:
        """Write everything that was added."""
        self._is_written = True
        if self._native is not None:
            self._native.commit()
        if self._others:
            with torch.no_grad():
                for tensor, rows, values in self._others:
                    tensor.index_copy_(0, rows, values)

    def undo(self) -> bool:
        """Write back what the rows had before ``commit``, if it was called; returns whether."""
        if self._is_written and self._before is not None:
            self._before.commit()
        return self._is_written
