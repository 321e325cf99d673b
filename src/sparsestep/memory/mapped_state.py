"""State of parameters in files: in their rows, if these have room, or in files next to them."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import SlowWarning, message, warn_once
from sparsestep.memory import file_pages
from sparsestep.memory.file_header import HEADER_BYTES
from sparsestep.memory.mapped_file import MappedFile, file_of, open_file
from sparsestep.memory.row_layout import Kind
from sparsestep.memory.tensors import address

_CHUNK_BYTES = 1 << 20


def full_beside(
    param: Tensor, name: str, shape: torch.Size, value: complex, dtype: torch.dtype
) -> Tensor | None:
    """State in a parameter's file, or in one beside it; ``None`` where the parameter has no file.

    Args:
        param: the parameter.
        name: of the state, by which it is known in the file, or its file is called.
        shape: of the state.
        value: of every element; any other than zero has to be written, and then takes room.
        dtype: of the state.
    """
    file = _file_of_table(param)
    if file is None:
        return None
    file.lock()
    if _has_room(file, name, Kind(tuple(shape[1:]), dtype)):
        if name in file.header.used and value == 0:
            _clear(file, name)
        if name not in file.header.used:
            file.note_used(name)
        file.saved_in = None  # a checkpoint has what an earlier optimizer has left
        found, tensor = file, file.tensor(name)
    else:
        found = open_file(f"{file.path}.{name}", shape, dtype, replace=True)
        file.beside[name] = weakref.ref(found)
        tensor = found.tensor()
    if value != 0:
        found.reserve(None)
        tensor.fill_(value)
    return tensor


def _file_of_table(param: Tensor) -> MappedFile | None:
    """State, as a parameter of its own, has its own state in memory."""
    file = file_of(param)
    return file if file is not None and file.address == address(param) else None


def _has_room(file: MappedFile, name: str, kind: Kind) -> bool:
    """Whether state is to lie in the rows of a file."""
    if file.record.state.get(name) != kind:
        if file.record.state:
            requirement = f"{file.path}: state must fit the room that the rows have for it"
            room = ", ".join(file.record.state)
            got = f"{name!r} as {kind.dtype}, where there is room for {room}"
            remedy = "It is in a file of its own: create the table for the optimizer that trains it"
            warn_once(SlowWarning, message(requirement, got, remedy))
        return False
    if file.is_in_use(name):
        gc.collect()  # an unreachable optimizer may not be freed yet
    if file.is_in_use(name):
        requirement = f"{file.path}: the rows have room for the state of one optimizer"
        remedy = "The second one's is in files of its own: delete the first, or keep both as it is"
        warn_once(SlowWarning, message(requirement, "two that are in use", remedy))
        return False
    return True


def _clear(file: MappedFile, name: str) -> None:
    """Set state that an earlier optimizer has left to zero, where there is anything on the disk."""
    if file.to_clear is not None:
        file.to_clear.add(name)
        return
    rows, tensor = file.rows, file.tensor(name)
    step = max(1, _CHUNK_BYTES // rows.row_bytes)
    for begin, end in file_pages.extents(file.descriptor):
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
def to_be_replaced(params: Iterable[Tensor]) -> Iterator[None]:
    """While it lasts, state that is made in the rows of these parameters' files is not set to zero.

    Afterwards it is, unless all bytes of the file have been replaced.
    """
    found = {id(file): file for param in params if (file := _file_of_table(param)) is not None}
    for file in found.values():
        file.to_clear = set()
    try:
        yield
    finally:
        for file in found.values():
            names, file.to_clear = file.to_clear or set(), None
            for name in names:
                _clear(file, name)


def copy_beside(
    param: Tensor, name: str, value: Tensor, dtype: torch.dtype, replaced: object = None
) -> Tensor | None:
    """State with these values in or beside a parameter's file; ``None`` where it has none.

    What is there already, in the right form, is not copied.

    Args:
        param: the parameter.
        name: of the state.
        value: what it is to be.
        dtype: of the state.
        replaced: the state that it takes the place of. If that lies in the rows, it is overwritten
            by ``settle``, and not before: what is read after this may be refused.
    """
    file, source = _file_of_table(param), file_of(value)
    if file is None:
        return None
    if source is not None and value.dtype == dtype:
        beside = file.beside.get(name)
        if _is_in_row(file, name, value) or (beside is not None and beside() is source):
            return value.detach()
    kind = Kind(tuple(value.shape[1:]), dtype)
    if _is_in_row(file, name, replaced) and file.record.state.get(name) == kind:
        made = _set_aside(file, name, value.shape, dtype)
        copy_rows(value.detach(), made, room_in=file)
        return made
    found = full_beside(param, name, value.shape, 0, dtype)
    assert found is not None
    copy_rows(value.detach(), found)
    return found


def _is_in_row(file: MappedFile, name: str, value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and file_of(value) is file
        and address(value) == file.address + file.record.offsets.get(name, -1)
    )


def _set_aside(file: MappedFile, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    path = f"{file.path}.{name}.loading"
    found = open_file(path, shape, dtype, replace=True)
    os.unlink(path)  # it goes with its tensor
    found.settles_in = file, name
    return found.tensor()


def settle(state: dict[str, Any]) -> None:
    """Move what ``copy_beside`` has set aside to the rows, in the place of what was there.

    Args:
        state: of a parameter; changed in place.
    """
    for name, value in state.items():
        aside = file_of(value) if isinstance(value, Tensor) else None
        if aside is not None and aside.settles_in is not None:
            file, of_state = aside.settles_in
            _clear(file, of_state)
            file.saved_in = None
            state[name] = file.tensor(of_state)
            copy_rows(value, state[name])


def copy_rows(source: Tensor, target: Tensor, room_in: MappedFile | None = None) -> None:
    """Copy a tensor to one of a file that is zero; rows that are zero take no room.

    Args:
        source: of the same shape, of any dtype.
        target: of the file.
        room_in: another file in which the rows need room, too.
    """
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
            target[first : first + step] = some
