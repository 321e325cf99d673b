"""Tensors in memory-mapped files: parameters, and their state next to them.

A file starts with a page that describes it. It is sparse: rows that were never written take no disk
space and read as zero. To other code, such a tensor is ordinary memory; this module recognizes it
by its address.

Before you write rows of such a tensor, call ``about_to_write``. It has the disk hold room
ready for them, because memory of a file that the disk has no room for ends the process when it
is written; and it marks the rows, so that a checkpoint knows which ones are other than they were.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.memory import file_pages, pages
from sparsestep.memory.parameters import address
from sparsestep.torch_internals import version_of

HEADER_BYTES = 4096
_CHUNK_BYTES = 1 << 20
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)
_MAGIC = b"sparsestep tensor 1\n"

# By the address of their first element, as long as a tensor of them lives. A step asks only
# whether there are any.
mapped_files: dict[int, weakref.ref[MappedFile]] = {}


class MappedFile(mmap.mmap):
    """A file with one tensor in it, mapped into memory; torch keeps it as long as that lives.

    Attributes:
        path: where it was when it was opened.
        descriptor: of the open file.
        shape: of the tensor.
        dtype: of the tensor.
        address: of its first element.
        beside: the files of its state, by name, the latest of each.
        marks: for each row whether it was written since the marks were cleared; ``None`` where
            nobody wants to know.
        version: how often the tensor had been written when it was last seen; ``None`` where it was
            not yet.
        saved_in: the checkpoint that has its rows as they were when the marks were cleared.
    """

    path: str
    descriptor: int
    shape: torch.Size
    dtype: torch.dtype
    address: int
    beside: dict[str, weakref.ref[MappedFile]]
    marks: Tensor | None
    version: int | None
    saved_in: tuple[str, int] | None
    reserved: Tensor
    asked: Tensor
    pages_asked: int

    @property
    def rows(self) -> file_pages.Rows:
        """Where its rows lie."""
        row_bytes = max(1, math.prod(self.shape[1:]) * self.dtype.itemsize)
        return file_pages.Rows(self.shape[0], row_bytes, HEADER_BYTES, mmap.PAGESIZE)

    def tensor(self) -> Tensor:
        """A tensor of its memory."""
        count = math.prod(self.shape)
        flat = torch.frombuffer(self, dtype=self.dtype, count=count, offset=HEADER_BYTES)
        return flat.view(self.shape)

    def reserve(self, rows: Tensor | None) -> None:
        """Have the disk hold room ready for rows, or for all; raises where there is none."""
        error = file_pages.reserve(self.rows, rows, self.descriptor, self.reserved)
        if error:
            contract = "the disk must have room for the rows that are about to be written"
            remedy = "Nothing has changed: free some space, then continue"
            raise OSError(error, sentence(contract, os.strerror(error), remedy), self.path)

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
        """Whether another hand has written its tensor since it was last seen."""
        return self.version is not None and self.version != version_of(tensor)

    def flush_to_disk(self) -> None:
        """Return when what was written is on the disk."""
        self.flush()
        os.fsync(self.descriptor)


def open_file(
    path: str | os.PathLike[str], shape: torch.Size, dtype: torch.dtype, *, anew: bool = False
) -> MappedFile:
    """Open a file with a tensor, or make it.

    Args:
        path: of the file.
        shape: of the tensor, which a file that is there must have.
        dtype: likewise.
        anew: make it anew, whatever is there. Tensors of a file that was there live on without it.
    """
    path = os.path.abspath(path)
    if anew or not os.path.exists(path):
        _make(path, shape, dtype)
    descriptor = os.open(path, os.O_RDWR)
    try:
        _check(path, descriptor, shape, dtype)
        for file in _alive():
            if os.path.sameopenfile(file.descriptor, descriptor):
                os.close(descriptor)
                return file
        file = MappedFile(descriptor, _size(shape, dtype))
    except BaseException:
        os.close(descriptor)
        raise
    file.path, file.descriptor = path, descriptor
    file.shape, file.dtype = shape, dtype
    file.beside, file.marks, file.version, file.saved_in = {}, None, None, None
    weakref.finalize(file, os.close, descriptor)
    if hasattr(mmap, "MADV_RANDOM"):  # or a read of one row would read megabytes around it
        file.madvise(mmap.MADV_RANDOM)
    count = file_pages.count(file.rows)
    file.reserved, file.asked = (
        pages.zeros(torch.Size([count]), torch.bool, torch.device("cpu")) for _ in range(2)
    )
    file.pages_asked = 0
    file.address = begin = file.tensor().data_ptr()
    mapped_files[begin] = weakref.ref(file, lambda _: mapped_files.pop(begin, None))
    return file


def _alive() -> Iterator[MappedFile]:
    for found in list(mapped_files.values()):
        file = found()
        if file is not None:
            yield file


def _size(shape: torch.Size, dtype: torch.dtype) -> int:
    return HEADER_BYTES + math.prod(shape) * dtype.itemsize


def _make(path: str, shape: torch.Size, dtype: torch.dtype) -> None:
    """Under another name first, so that a file is there as a whole or not at all."""
    about = {"shape": list(shape), "dtype": _name(dtype)}
    folder, name = os.path.split(path)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        os.write(descriptor, (_MAGIC + json.dumps(about).encode()).ljust(HEADER_BYTES))
        os.ftruncate(descriptor, _size(shape, dtype))
        os.fchmod(descriptor, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    finally:
        os.close(descriptor)


def _check(path: str, descriptor: int, shape: torch.Size, dtype: torch.dtype) -> None:
    header = os.pread(descriptor, HEADER_BYTES, 0)
    try:
        about: Any = json.loads(header.removeprefix(_MAGIC)) if header.startswith(_MAGIC) else None
    except ValueError:
        about = None
    whole = os.fstat(descriptor).st_size
    if about is None:
        contract = f"{path} must be a file that mapped() has created, or not exist yet"
        raise InputError(sentence(contract, f"another of {whole:,} bytes", "Choose another path"))
    wanted = {"shape": list(shape), "dtype": _name(dtype)}
    if about != wanted or whole != _size(shape, dtype):
        contract = f"{path} must be opened with the shape and dtype that it was created with"
        was = f"{tuple(about['shape'])} and {about['dtype']}"
        got = f"{tuple(shape)} and {_name(dtype)} instead of {was}"
        raise InputError(sentence(contract, got))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def file_of(tensor: Tensor) -> MappedFile | None:
    """The file that a tensor is, all of it; ``None`` for any other tensor."""
    if not mapped_files:
        return None
    found = mapped_files.get(address(tensor))
    file = None if found is None else found()
    if file is None or tensor.numel() != math.prod(file.shape) or not tensor.is_contiguous():
        return None
    return file


def full_beside(
    param: Tensor, name: str, shape: torch.Size, value: complex, dtype: torch.dtype
) -> Tensor | None:
    """State in a file beside its parameter's; ``None`` where that is no file.

    Args:
        param: the parameter.
        name: of the state, by which its file is called.
        shape: of the state.
        value: of every element; any other than zero has to be written, and then takes room.
        dtype: of the state.
    """
    file = file_of(param)
    if file is None:
        return None
    found = open_file(f"{file.path}.{name}", shape, dtype, anew=True)
    tensor = found.tensor()
    if value != 0:
        found.reserve(None)
        tensor.fill_(value)
    file.beside[name] = weakref.ref(found)
    return tensor


def copy_beside(param: Tensor, name: str, value: Tensor, dtype: torch.dtype) -> Tensor | None:
    """State with these values in a file beside its parameter's; ``None`` where that is no file.

    What is there already, in the right form, is not copied.
    """
    file, source = file_of(param), file_of(value)
    if file is None:
        return None
    beside = file.beside.get(name)
    if source is not None and source.dtype == dtype and beside is not None and beside() is source:
        return value.detach()
    made = full_beside(param, name, value.shape, 0, dtype)
    assert made is not None
    target = file_of(made)
    assert target is not None
    step = max(1, _CHUNK_BYTES // target.rows.row_bytes)
    for first in range(0, len(value), step):
        some = value.detach()[first : first + step].to(made.device, dtype).contiguous()
        if some.view(torch.uint8).any():  # zeros take no room
            target.reserve(torch.arange(first, first + len(some)))
            made[first : first + step] = some
    return made


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
            if beside is not None:
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
