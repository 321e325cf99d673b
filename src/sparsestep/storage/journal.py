"""What a checkpoint consists of on the disk, and how it comes to be there as a whole.

A checkpoint is a folder. ``manifest.json`` names the files that count; a file that it does not name
is nothing. The tables lie in *base* files, as they were at some time, and *journals* hold the rows
that were other in later checkpoints, in order. To read a table is to read its base and then every
journal. A new checkpoint writes new files first, has them on the disk, and then replaces
the manifest, which the file system does at once or not at all.

*Compacting* writes the rows of the journals into the base, and then drops the journals. Should it
be interrupted, the journals still stand, and to read them once more gives the same.
"""

from __future__ import annotations

import ctypes
import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.memory.files import MappedFile, open_file, words_of

_MANIFEST = "manifest.json"
_VERSION = 1
_CHUNK_BYTES = 16 << 20


@dataclass
class Table:
    """A tensor that lies in a file.

    Attributes:
        name: what it is called.
        shape: of the tensor.
        dtype: of the tensor.
        row_bytes: how long a row of the file is.
        base: the file in the checkpoint.
        room: the state that a row of the file has room for.
        inside: the tensors that lie in this room, each with the name of its state.
    """

    name: str
    shape: list[int]
    dtype: str
    row_bytes: int
    base: str
    room: dict[str, dict[str, Any]]
    inside: dict[str, str]


@dataclass
class Part:
    """Rows of some tables, which have the same ones; in a journal, their numbers come first."""

    tables: list[int]
    rows: int


@dataclass
class Written:
    """A file that was written once."""

    file: str
    bytes: int
    crc: int
    parts: list[Part] = field(default_factory=list)


@dataclass
class Manifest:
    """What counts.

    Attributes:
        number: of the checkpoint, one more each time.
        tables: in whatever order.
        journals: from the oldest to the latest.
        rest: everything that is no table.
    """

    number: int
    tables: list[Table]
    journals: list[Written]
    rest: Written

    @property
    def files(self) -> set[str]:
        """The files that it names."""
        bases = {table.base for table in self.tables}
        return {_MANIFEST, self.rest.file, *bases, *(each.file for each in self.journals)}


def read_manifest(folder: Path) -> Manifest | None:
    """What the latest checkpoint in a folder says; ``None`` where there is none."""
    try:
        text = (folder / _MANIFEST).read_text()
    except FileNotFoundError:
        return None
    try:
        found = json.loads(text)
        if found.pop("version") != _VERSION:
            raise ValueError
        tables = [Table(**each) for each in found["tables"]]
        journals = [_written(each) for each in found["journals"]]
        return Manifest(found["number"], tables, journals, _written(found["rest"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        contract = f"{folder / _MANIFEST} must be written by save(), in format version {_VERSION}"
        raise InputError(sentence(contract, "something else")) from None


def _written(found: dict[str, Any]) -> Written:
    parts = [Part(**part) for part in found.pop("parts")]
    return Written(**found, parts=parts)


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint the one that counts; what it names must be on the disk."""
    text = json.dumps({"version": _VERSION, **asdict(manifest)}, indent=1)
    temporary = folder / f".{_MANIFEST}"
    with open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    _sync(folder)
    os.replace(temporary, folder / _MANIFEST)
    _sync(folder)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_others(folder: Path, manifest: Manifest) -> None:
    """Remove files of earlier checkpoints, and of such as were not written to their end."""
    for kind in ("base-", "rows-", "rest-"):
        for path in folder.glob(f"{kind}[0-9]*"):
            if path.name not in manifest.files:
                path.unlink()


def write_rest(folder: Path, number: int, content: dict[str, Any]) -> Written:
    """Write everything that is no table."""
    path = folder / f"rest-{number:06}"
    with open(path, "wb") as file:
        torch.save(content, file)
        file.flush()
        os.fsync(file.fileno())
    return Written(path.name, path.stat().st_size, _crc_of(path))


def read_rest(folder: Path, rest: Written) -> dict[str, Any]:
    """Read it again."""
    found: dict[str, Any] = torch.load(folder / rest.file, weights_only=True, map_location="cpu")
    return found


def write_rows(
    folder: Path, number: int, parts: list[tuple[Tensor, dict[int, MappedFile]]]
) -> Written:
    """Write a journal.

    Args:
        folder: of the checkpoint.
        number: of the checkpoint.
        parts: rows, and the tables of which they are to be written, by number.
    """
    path = folder / f"rows-{number:06}"
    size = sum(
        len(rows) * (8 + sum(file.rows.row_bytes for file in files.values()))
        for rows, files in parts
    )
    crc, descriptor = 0, os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        if size and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)  # a full disk is told before all else
        for rows, files in parts:
            crc = _append(descriptor, rows.view(torch.uint8), crc)
            for file in files.values():
                for some in _chunks(rows, file):
                    data = words_of(file).index_select(0, some)
                    crc = _append(descriptor, data.view(torch.uint8).view(-1), crc)
        os.fsync(descriptor)
    except BaseException:
        path.unlink()
        raise
    finally:
        os.close(descriptor)
    counts = [Part(list(files), len(rows)) for rows, files in parts]
    return Written(path.name, size, crc, counts)


def _chunks(rows: Tensor, file: MappedFile) -> Iterator[Tensor]:
    step = max(1, _CHUNK_BYTES // file.rows.row_bytes)
    for first in range(0, len(rows), step):
        yield rows[first : first + step]


def _append(descriptor: int, data: Tensor, crc: int) -> int:
    memory = _memory(data)
    crc = zlib.crc32(memory, crc)
    while memory:
        memory = memory[os.write(descriptor, memory) :]
    return crc


def _memory(data: Tensor) -> memoryview:
    """The memory of bytes; the tensor must outlive it."""
    if not data.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * data.numel()).from_address(data.data_ptr())).cast("B")


def _crc_of(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while some := file.read(_CHUNK_BYTES):
            crc = zlib.crc32(some, crc)
    return crc


def check(folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint whose files are not what they were when it was written."""
    for each in (*manifest.journals, manifest.rest):
        path = folder / each.file
        size = path.stat().st_size if path.exists() else -1
        if size != each.bytes or _crc_of(path) != each.crc:
            contract = f"{path} must be unchanged since the checkpoint was written"
            got = "no such file" if size < 0 else "different bytes"
            remedy = "The disk or another program has changed it: use an earlier checkpoint"
            raise InputError(sentence(contract, got, remedy))
    for table in manifest.tables:
        if not (folder / table.base).exists():
            contract = "a checkpoint must have all its files"
            raise InputError(sentence(contract, f"no file {table.base}"))


def replay(folder: Path, manifest: Manifest, files: dict[int, MappedFile]) -> None:
    """Write the rows of the journals into tables, from the oldest to the latest.

    Args:
        folder: of the checkpoint.
        manifest: of the checkpoint.
        files: to write into, by the number of the table; those that are missing are left out.
    """
    for journal in manifest.journals:
        with open(folder / journal.file, "rb") as source:
            for part in journal.parts:
                rows = _read(source, part.rows * 8).view(torch.int64)
                for number in part.tables:
                    file = files.get(number)
                    if file is None:
                        row_bytes = manifest.tables[number].row_bytes
                        source.seek(part.rows * row_bytes, os.SEEK_CUR)
                        continue
                    file.reserve(rows)
                    for some in _chunks(rows, file):
                        data = _read(source, len(some) * file.rows.row_bytes)
                        words = words_of(file)
                        words.index_copy_(0, some, data.view(words.dtype).view(len(some), -1))


def _read(source: Any, size: int) -> Tensor:
    data = torch.empty(size, dtype=torch.uint8)
    source.readinto(_memory(data)) if size else None
    return data


def open_base(folder: Path, table: Table) -> MappedFile:
    """The base of a table, mapped into memory."""
    return open_file(folder / table.base, torch.Size(table.shape), getattr(torch, table.dtype))


def compact(folder: Path, manifest: Manifest) -> Manifest:
    """Write the rows of the journals into the base, and do without them from now on."""
    files = {number: open_base(folder, table) for number, table in enumerate(manifest.tables)}
    replay(folder, manifest, files)
    for file in files.values():
        file.flush_to_disk()
    compacted = Manifest(manifest.number, manifest.tables, [], manifest.rest)
    commit(folder, compacted)
    remove_others(folder, compacted)
    return compacted
