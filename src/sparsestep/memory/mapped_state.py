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
from sparsestep.memory import disk
from sparsestep.memory.formats import HEADER_BYTES, RowField
from sparsestep.memory.mapped_file import MappedFile, file_of, open_file
from sparsestep.memory.tensors import address

_CHUNK_BYTES = 1 << 20


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
            file.note_used(name)
        file.saved_in = None  # a checkpoint has the state of an earlier optimizer
        found, tensor = file, file.tensor(name)
    else:
        found = open_file(f"{file.path}.{name}", shape, dtype, replace=True)
        file.state_files[name] = weakref.ref(found)
        tensor = found.tensor()
    if value != 0:
        found.reserve(None)
        tensor.fill_(value)
    return tensor


def _table_file(param: Tensor) -> MappedFile | None:
    """The file whose table this is: state, as a parameter of its own, has its state in memory."""
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
    if file.is_in_use(name):
        gc.collect()  # an unreachable optimizer may not be freed yet
    if file.is_in_use(name):
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
def to_be_replaced(params: Iterable[Tensor]) -> Iterator[None]:
    """Postpone the zeroing of state in the rows of these parameters' files.

    It is zeroed at the end, unless all bytes of the file have been replaced.
    """
    found = {id(file): file for param in params if (file := _table_file(param)) is not None}
    for file in found.values():
        file.to_clear = set()
    try:
        yield
    finally:
        for file in found.values():
            names, file.to_clear = file.to_clear or set(), None
            for name in names:
                _clear(file, name)


def copy_state(
    param: Tensor, name: str, value: Tensor, dtype: torch.dtype, replaced: object = None
) -> Tensor | None:
    """Create state with these values in or next to a parameter's file.

    A value in the right place is not copied. If ``replaced``, the state that it replaces, lies in
    the rows, ``settle`` overwrites it, and not this call: the rest of the checkpoint may be
    refused. Returns ``None`` if the parameter is not in a file.
    """
    file, source = _table_file(param), file_of(value)
    if file is None:
        return None
    if source is not None and value.dtype == dtype:
        beside = file.state_files.get(name)
        if _is_in_row(file, name, value) or (beside is not None and beside() is source):
            return value.detach()
    field = RowField(tuple(value.shape[1:]), dtype)
    if _is_in_row(file, name, replaced) and file.header.state.get(name) == field:
        path = f"{file.path}.{name}.loading"
        aside = open_file(path, value.shape, dtype, replace=True)
        os.unlink(path)  # it goes with its tensor
        aside.settles_in = file, name
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


def settle(state: dict[str, Any]) -> None:
    """Move what ``copy_state`` has set aside to the rows; changes ``state`` in place."""
    for name, value in state.items():
        aside = file_of(value) if isinstance(value, Tensor) else None
        if aside is not None and aside.settles_in is not None:
            file, of_state = aside.settles_in
            _clear(file, of_state)
            file.saved_in = None
            state[name] = file.tensor(of_state)
            copy_rows(value, state[name])


def copy_rows(source: Tensor, target: Tensor, room_in: MappedFile | None = None) -> None:
    """Copy a tensor to zeros of its shape in a file; rows of zeros take no disk space.

    The rows are reserved in ``room_in``, too.
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
