"""The files of a checkpoint besides the manifest: bases, journals, and the rest.

The tables lie in *base* files, as they were at some checkpoint. *Journals* hold the rows that have
changed in later ones. To restore a table is to copy its base and then apply every journal, oldest
first. When the journals have grown too long, ``save`` writes a new base instead of another journal.

No file is changed once the manifest names it, so its checksum can always be verified. Checksums are
verified while the files are read into temporary ones, before anything else changes.
"""

from __future__ import annotations

import ctypes
import io
import os
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor

from sparsestep._process import uninterrupted
from sparsestep.errors import InputError, first_error, is_out_of_memory, message
from sparsestep.memory import file_header
from sparsestep.memory.file_header import check_version
from sparsestep.memory.mapped_file import MappedFile, words_of
from sparsestep.memory.replace_file import copy_sparse, reserve
from sparsestep.storage.manifest import (
    JOURNAL_HEADER,
    JOURNAL_MAGIC,
    JOURNAL_VERSION,
    File,
    Journal,
    Manifest,
    Part,
    Table,
    changed,
    create,
    open_checked,
)

_REST_VERSION = 1
_CHUNK_BYTES = 16 << 20


# Bases


def write_base(folder: Path, name: str, file: MappedFile) -> File:
    """Copy the file of a table."""
    with create(folder, name) as target:
        crc = copy_sparse(file.descriptor, target.fileno())
        os.fsync(target.fileno())
        file.evict()  # it has been read in order
        return File(name, os.fstat(target.fileno()).st_size, crc)


def copy_base(folder: Path, table: Table, target: int) -> None:
    """Copy a base to an empty file, and verify it.

    Args:
        folder: of the checkpoint.
        table: whose base.
        target: descriptor of the file to write.
    """
    with open_checked(folder, table.base) as source:
        header = file_header.read(str(folder / table.base.file), source.fileno())
        if header._replace(used=frozenset()) != table.layout.header:
            raise changed(folder, table.base, "a header that differs from the manifest")
        if copy_sparse(source.fileno(), target) != table.base.crc:
            raise changed(folder, table.base, "different bytes")


# Journals


class WrittenRows:
    """Rows of tables that are about to be saved.

    Attributes:
        rows: row numbers, ascending.
        files: the files that have them, by index of the table in the manifest.
    """

    def __init__(self, rows: Tensor, files: Mapping[int, MappedFile]) -> None:
        self.rows: Tensor = rows
        self.files: Mapping[int, MappedFile] = files

    @property
    def part(self) -> Part:
        """Their entry in the manifest."""
        return Part(list(self.files), len(self.rows))


def write_journal(folder: Path, number: int, size: int, parts: Sequence[WrittenRows]) -> Journal:
    """Write a journal.

    Args:
        folder: of the checkpoint.
        number: of the checkpoint.
        size: of the journal; see ``journal_bytes``.
        parts: its content.
    """
    name = f"rows-{number:06}"
    with create(folder, name) as target:
        descriptor = target.fileno()
        reserve(descriptor, 0, size)
        crc = _append(descriptor, memoryview(JOURNAL_HEADER), 0)
        for part in parts:
            crc = _append(descriptor, _memory(part.rows), crc)
            for file in part.files.values():
                for some in _chunks(part.rows, file):
                    data = words_of(file).index_select(0, some)
                    crc = _append(descriptor, _memory(data), crc)
        os.fsync(descriptor)
    return Journal(File(name, size, crc), [part.part for part in parts])


def _chunks(rows: Tensor, file: MappedFile) -> Iterator[Tensor]:
    step = max(1, _CHUNK_BYTES // file.rows.row_bytes)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _append(descriptor: int, memory: memoryview, crc: int) -> int:
    crc = zlib.crc32(memory, crc)
    while memory:
        memory = memory[os.write(descriptor, memory) :]
    return crc


def _memory(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which must outlive them."""
    if not data.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")


def replay(folder: Path, manifest: Manifest, files: Mapping[int, MappedFile]) -> None:
    """Apply all journals to temporary files, oldest first, and verify them.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        files: a copy of each table's base, by index of the table.
    """
    for journal in manifest.journals:
        with open_checked(folder, journal.file) as source:
            reader = _JournalReader(source, folder, journal.file)
            header = bytes(reader.read(len(JOURNAL_HEADER)).tolist())
            if header != JOURNAL_HEADER:
                _check_journal_version(folder / journal.file.file, header)
                raise changed(folder, journal.file, "another header")
            for part in journal.parts:
                rows = reader.read(part.rows * 8).view(torch.int64)
                count = min(manifest.tables[index].layout.shape[0] for index in part.tables)
                if not _are_rows(rows, count):
                    raise changed(folder, journal.file, f"rows outside of [0, {count})")
                for index in part.tables:
                    _replay_table(reader, rows, files[index])
            if reader.crc != journal.file.crc:
                raise changed(folder, journal.file, "different bytes")


def _check_journal_version(path: Path, header: bytes) -> None:
    version = header.removeprefix(JOURNAL_MAGIC).split(b"\n", 1)[0]
    if header.startswith(JOURNAL_MAGIC) and version.isdigit() and len(version) < 10:
        check_version(str(path), version, JOURNAL_VERSION)


def _are_rows(rows: Tensor, count: int) -> bool:
    """Whether row numbers are ascending and in range."""
    if not len(rows) or int(rows[0]) < 0 or int(rows[-1]) >= count:
        return False
    return bool((rows[1:] > rows[:-1]).all())


def _replay_table(reader: _JournalReader, rows: Tensor, file: MappedFile) -> None:
    file.reserve(rows)
    words = words_of(file)
    for some in _chunks(rows, file):
        data = reader.read(len(some) * file.rows.row_bytes)
        words.index_copy_(0, some, data.view(words.dtype).view(len(some), -1))


class _JournalReader:
    """Reads a file from its beginning, with the checksum of what was read."""

    def __init__(self, source: Any, folder: Path, file: File) -> None:
        self._source, self._folder, self._file = source, folder, file
        self.crc = 0

    def read(self, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        memory = left = _memory(data)
        while left:
            count = self._source.readinto(left)
            if not count:
                raise changed(self._folder, self._file, "fewer bytes")
            left = left[count:]
        self.crc = zlib.crc32(memory, self.crc)
        return data


# The rest


class _Writer:
    """A file for ``torch.save``, with the checksum of what was written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self.bytes, self.crc = 0, 0
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        memory = memoryview(data).cast("B")
        if self.error is None:
            try:
                self.crc = _append(self._descriptor, memory, self.crc)
            except (
                BaseException
            ) as error:  # torch ends the process if this raises at the wrong time
                self.error = error
        self.bytes += len(memory)
        return len(memory)

    def flush(self) -> None:
        pass


def write_rest(folder: Path, number: int, content: dict[str, Any]) -> File:
    """Write everything but the tables."""
    name = f"rest-{number:06}"
    handled = sys.exc_info()[1]
    with create(folder, name) as target:
        writer = _Writer(target.fileno())
        content = {"version": _REST_VERSION, **content}
        try:
            uninterrupted(lambda: torch.save(content, cast("IO[bytes]", writer)))
        except BaseException as error:
            # Torch tries to complete its archive then, and raises what comes of that.
            raise first_error(error, handled) from None
        if writer.error is not None:
            raise writer.error
        os.fsync(target.fileno())
        return File(name, writer.bytes, writer.crc)


def read_rest(folder: Path, file: File) -> dict[str, Any]:
    """Read everything but the tables, and verify it."""
    handled = sys.exc_info()[1]
    with open_checked(folder, file) as raw, io.BufferedReader(raw) as source:
        if _crc_of(source) != file.crc:
            raise changed(folder, file, "different bytes")
        source.seek(0)
        try:
            found = torch.load(source, weights_only=True, map_location="cpu")
        except Exception as error:
            first = first_error(error, handled)
            if isinstance(first, OSError) or is_out_of_memory(first):
                raise first from None
            raise changed(folder, file, f"{type(error).__name__}: {error}") from None
    return _checked_rest(folder / file.file, found)


def _crc_of(source: BinaryIO) -> int:
    crc = 0
    while some := source.read(_CHUNK_BYTES):
        crc = zlib.crc32(some, crc)
    return crc


def _checked_rest(path: Path, found: Any) -> dict[str, Any]:
    if isinstance(found, dict) and type(found.get("version")) is int and found["version"] >= 0:
        check_version(str(path), str(found["version"])[:9].encode(), _REST_VERSION)
    is_valid = (
        isinstance(found, dict)
        and found.keys() == {"version", "model", "optimizer", "extra"}
        and isinstance(found["model"], dict)
        and isinstance(found["optimizer"], dict)
        and found["optimizer"].keys() >= {"state", "param_groups"}
        and isinstance(found["optimizer"]["state"], dict)
        and all(isinstance(each, dict) for each in found["optimizer"]["state"].values())
    )
    if not is_valid:
        requirement = f"{path} must hold the state dicts of a model and of an optimizer"
        raise InputError(message(requirement, "something else"))
    result: dict[str, Any] = found
    return result
