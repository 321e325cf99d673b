"""The folder of a checkpoint: a manifest, and the files that it names.

``manifest.json`` names the files that count, with their sizes and checksums; any other file is left
over. A new checkpoint writes new files first, flushes them to the disk, and then replaces the
manifest, which the file system does completely or not at all.

The tables lie in *base* files, as they were at some checkpoint. *Journals* hold the rows that have
changed in later ones. To restore a table is to copy its base and then apply every journal, oldest
first. When the journals have grown too long, ``save`` writes a new base instead of another journal.

No file is changed once the manifest names it, so its checksum can always be verified. Checksums are
verified while the files are read into temporary ones, before anything else changes. The folder may
be made by someone else: files are plain names, opened without following links.
"""

from __future__ import annotations

import ctypes
import errno
import io
import os
import re
import stat
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

import torch
from torch import Tensor

from sparsestep._process import uninterrupted
from sparsestep.errors import InputError, first_error, is_out_of_memory, message
from sparsestep.memory import disk, formats
from sparsestep.memory.formats import TABLE, FileHeader, Readable, RowField, check_version
from sparsestep.memory.mapped_file import MappedFile, open_file

MANIFEST = "manifest.json"
_VERSION = 2

# The first bytes of a journal: the name of the format and its version.
_JOURNAL_MAGIC, _JOURNAL_VERSION = b"sparsestep rows ", 1
_JOURNAL_HEADER = (_JOURNAL_MAGIC + b"%d\n" % _JOURNAL_VERSION).ljust(64)

_REST_VERSION = 1

_MAX_MANIFEST_BYTES = 64 << 20
_CHUNK_BYTES = 16 << 20
_NAME = re.compile(r"(base|rows|rest)-[0-9]{6,19}(\.[0-9]{1,9})?", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_REMEDY = "The disk or another program has changed it: use an earlier checkpoint"


# The manifest


@dataclass
class FileEntry(Readable):
    """A file of a checkpoint, which is written once."""

    noun = "a file"

    file: str  # its name in the folder
    bytes: int
    crc: int

    def check_name(self, kind: str) -> None:
        """Refuse a path, and the name of a file of another kind."""
        if not _NAME.fullmatch(self.file) or not self.file.startswith(kind):
            requirement = f"a file must be called {kind}- and a number, and lie in the folder"
            raise ValueError(f"{requirement}, got {self.file[:200]!r}")


@dataclass
class Layout(Readable):
    """How tensors lie in a file."""

    noun = "a table"

    name: str  # of the table; shape and dtype likewise
    shape: tuple[int, ...]
    dtype: torch.dtype
    row_bytes: int  # from one row of the file to the next
    room: dict[str, RowField]  # the state that a row of the file has room for
    inside: dict[str, str]  # the names of the state tensors in this room, each with its key there

    @property
    def tensors(self) -> dict[str, str]:
        """The names of all tensors in the file, each with its key there."""
        return {self.name: TABLE, **self.inside}

    @property
    def header(self) -> FileHeader:
        """Header of a file with this layout, except for which state is in use."""
        return FileHeader(torch.Size(self.shape), self.dtype, self.room)

    def check(self) -> None:
        """Refuse a layout that no file has."""
        formats.require_addressable("the shape of a table", self.shape, self.dtype)
        if not self.shape:
            raise ValueError("the shape of a table must have a size, got none")
        for key in self.inside.values():
            if key not in self.room:
                raise ValueError(f"state must be one that rows have room for, got {key!r}")
        formats.require_unique("state in the rows", list(self.inside.values()))
        expected = self.header.layout.row_bytes
        if self.row_bytes != expected:
            raise ValueError(f"row_bytes must be {expected}, got {self.row_bytes}")


@dataclass
class TableEntry(Readable):
    """A table: how it lies in its file, and its *base*, a copy of that file at some checkpoint."""

    noun = "a table"

    layout: Layout
    base: FileEntry

    def check(self) -> None:
        """Refuse a base of another size."""
        self.base.check_name("base")
        expected = self.layout.header.file_bytes
        if self.base.bytes != expected:
            raise ValueError(f"a base must have {expected} bytes, got {self.base.bytes}")


@dataclass
class JournalPart(Readable):
    """Rows of some tables in a journal: the row numbers, then the rows of each table."""

    noun = "a part of a journal"

    tables: list[int]  # indices in the manifest
    rows: int  # how many


@dataclass
class Journal(Readable):
    """Rows that have changed since the previous checkpoint."""

    noun = "a journal"

    file: FileEntry
    parts: list[JournalPart]

    def check_tables(self, tables: list[TableEntry]) -> None:
        """Refuse rows that no table has."""
        self.file.check_name("rows")
        for part in self.parts:
            for index in part.tables:
                formats.require_integer("the index of a table", index, 0, len(tables) - 1)
            formats.require_unique("tables of a part", part.tables)
            most = min((tables[index].layout.shape[0] for index in part.tables), default=0)
            formats.require_integer("rows", part.rows, 1, most)
        expected = journal_bytes(self.parts, tables)
        if self.file.bytes != expected:
            raise ValueError(f"a journal must have {expected} bytes, got {self.file.bytes}")


def journal_bytes(parts: list[JournalPart], tables: list[TableEntry]) -> int:
    """Size of a journal with these parts."""
    return len(_JOURNAL_HEADER) + sum(
        part.rows * (8 + sum(tables[index].layout.row_bytes for index in part.tables))
        for part in parts
    )


@dataclass
class Manifest(Readable):
    """Content of a checkpoint."""

    id: str  # random: two checkpoints with the same id have the same content
    number: int  # one more than that of the previous checkpoint in the folder
    tables: list[TableEntry]  # in files
    journals: list[Journal]  # the oldest first; applied to the bases in this order
    rest: FileEntry  # everything else

    @property
    def files(self) -> Iterator[FileEntry]:
        """All files that count."""
        yield from (table.base for table in self.tables)
        yield from (journal.file for journal in self.journals)
        yield self.rest

    def check(self) -> None:
        """Refuse contradictions between fields."""
        if not _ID.fullmatch(self.id):
            raise ValueError("id must be 32 hexadecimal digits, got something else")
        formats.require_integer("number", self.number, 1, 1 << 53)
        for journal in self.journals:
            journal.check_tables(self.tables)
        self.rest.check_name("rest")
        formats.require_unique("files", [each.file for each in self.files])
        layouts = [table.layout for table in self.tables]
        names = [name for each in layouts for name in (each.name, *each.inside)]
        formats.require_unique("tensors", names)

    @property
    def crc(self) -> int:
        """Checksum of all fields."""
        return zlib.crc32(formats.dumps(self, sort_keys=True))


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of the latest checkpoint in a folder; ``None`` if there is none."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    with _open(folder, MANIFEST) as raw, io.BufferedReader(raw) as file:
        text = file.read(_MAX_MANIFEST_BYTES + 1)
    try:
        if len(text) > _MAX_MANIFEST_BYTES:
            raise ValueError(f"it must have at most {_MAX_MANIFEST_BYTES:,} bytes, got more")
        found = formats.loads(text)
        version = formats.require_integer("version", found.get("version"), 1, 10**9 - 1)
        check_version(path, b"%d" % version, _VERSION)
        keys = ("version", "crc", "id", "number", "tables", "journals", "rest")
        formats.require_keys("the manifest", found, keys)
        del found["version"]
        crc = found.pop("crc")
        manifest = formats.read(Manifest, found)
        if crc != manifest.crc:
            raise ValueError("crc must be that of the other fields, got another")
    except InputError:
        raise
    except ValueError as error:
        requirement = f"{path} must be a manifest that save() has written"
        raise InputError(message(requirement, f"one in which {error}", _REMEDY)) from None
    return manifest


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint the latest one; its files must be on the disk."""
    temporary = f".{MANIFEST}"
    about = {"version": _VERSION, "crc": manifest.crc, **vars(manifest)}
    with _create(folder, temporary) as raw:
        raw.write_all(formats.dumps(about, indent=1))
        os.fsync(raw.fileno())
    disk.sync_folder(folder)
    os.replace(folder / temporary, folder / MANIFEST)
    disk.sync_folder(folder)


def remove_others(folder: Path, manifest: Manifest | None) -> None:
    """Remove files of earlier checkpoints and of interrupted ones."""
    known = set() if manifest is None else {file.file for file in manifest.files}
    with suppress(OSError):  # they only take space
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in known:
                with suppress(OSError):
                    path.unlink()


# Files are objects and not descriptors: Ctrl-C at any line leaves none open.


class _ChecksummedFile(io.FileIO):
    """A file of a checkpoint, with size and checksum of all that was written to it or read."""

    size, crc = 0, 0

    def _add(self, memory: memoryview) -> None:
        self.size += len(memory)
        self.crc = zlib.crc32(memory, self.crc)

    def write_all(self, data: bytes | memoryview) -> None:
        memory = memoryview(data)
        self._add(memory)
        while memory:
            memory = memory[os.write(self.fileno(), memory) :]

    def read_tensor(self, size: int) -> Tensor:
        data = torch.empty(size, dtype=torch.uint8)
        memory = left = _bytes_of(data)
        while left:
            count = self.readinto(left)
            if not count:
                raise self.changed("fewer bytes")
            left = left[count:]
        self._add(memory)
        return data

    def verify(self, entry: FileEntry) -> None:
        if self.crc != entry.crc:
            raise self.changed("different bytes")

    def verify_all(self, entry: FileEntry) -> None:
        """Read the whole file, and verify it."""
        while self.size < entry.bytes:
            self.read_tensor(min(_CHUNK_BYTES, entry.bytes - self.size))
        self.verify(entry)

    def changed(self, got: str) -> InputError:
        requirement = f"{self.name} must be unchanged since the checkpoint was written"
        return InputError(message(requirement, got, _REMEDY))


def _open(folder: Path, name: str, size: int | None = None) -> _ChecksummedFile:
    """Open a file of a checkpoint for reading; refuses links, devices, and another size."""
    path = folder / name
    requirement = f"{path} must be a regular file"
    try:
        # An interrupt in the opener would leave the descriptor open.
        file = uninterrupted(lambda: _ChecksummedFile(path, "r", opener=_open_itself))
    except FileNotFoundError:
        raise InputError(message(requirement, "no such file", _REMEDY)) from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise
        raise InputError(message(requirement, "a link, folder or device")) from None
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        file.close()
        raise InputError(message(requirement, "something else"))
    if size is not None and found.st_size != size:
        file.close()
        raise file.changed(f"{found.st_size:,} bytes instead of {size:,}")
    return file


def _open_itself(path: str, flags: int) -> int:
    """Open a file without following a link, and without waiting for a writer to a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint with missing, truncated or extended files."""
    for file in manifest.files:
        _open(folder, file.file, file.bytes).close()


def has_all_files(folder: Path, manifest: Manifest) -> bool:
    """Whether all files are there, with the right sizes."""
    try:
        check_sizes(folder, manifest)
    except (InputError, OSError):
        return False
    return True


def _create(folder: Path, name: str) -> _ChecksummedFile:
    """Create a file of a checkpoint, in place of any that an interrupted one has left."""
    path = folder / name
    with suppress(FileNotFoundError):
        path.unlink()
    return _ChecksummedFile(path, "x+")


def _bytes_of(data: Tensor) -> memoryview:
    """The bytes of a contiguous tensor, which must outlive them."""
    if not data.numel():
        return memoryview(b"")
    return memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")


# Bases


def write_base(folder: Path, name: str, file: MappedFile) -> FileEntry:
    """Copy the file of a table."""
    with _create(folder, name) as target:
        crc = disk.copy_sparse(file.descriptor, target.fileno())
        os.fsync(target.fileno())
        file.evict()  # it has been read in order
        return FileEntry(name, os.fstat(target.fileno()).st_size, crc)


def read_base(folder: Path, table: TableEntry, target: int | None = None) -> None:
    """Verify the base of a table, and copy it to an empty file, given by its descriptor."""
    with _open(folder, table.base.file, table.base.bytes) as source:
        header = formats.read_header(str(source.name), source.fileno())
        if header._replace(used=frozenset()) != table.layout.header:
            raise source.changed("a header that differs from the manifest")
        file = source.fileno()
        crc = disk.checksum(file) if target is None else disk.copy_sparse(file, target)
        if crc != table.base.crc:
            raise source.changed("different bytes")


def verify(folder: Path, manifest: Manifest) -> None:
    """Refuse tables that are damaged, without restoring them."""
    check_sizes(folder, manifest)
    for table in manifest.tables:
        read_base(folder, table)
    for journal in manifest.journals:
        with _open(folder, journal.file.file, journal.file.bytes) as source:
            source.verify_all(journal.file)


def read_rows(folder: Path, manifest: Manifest, index: int, key: str, rows: slice) -> Tensor:
    """Consecutive rows of a table, or of state in its rows, as a checkpoint has them."""
    layout = manifest.tables[index].layout
    shape, dtype, room, _ = layout.header
    base = open_file(folder / manifest.tables[index].base.file, shape, dtype, state=room)
    words = base.words()
    found = words[rows].clone()
    base.evict()
    for journal in manifest.journals:
        with _open(folder, journal.file.file, journal.file.bytes) as source:
            _check_journal_header(source)
            for part in journal.parts:
                changed = _read_rows(source, part.rows, layout.shape[0])
                for table in part.tables:
                    entry = manifest.tables[table].layout
                    if table != index:
                        source.seek(part.rows * entry.row_bytes, os.SEEK_CUR)
                        continue
                    for some in _chunks(changed, entry.row_bytes):
                        data = source.read_tensor(len(some) * entry.row_bytes)
                        is_one = (some >= rows.start) & (some < rows.stop)
                        values = data.view(words.dtype).view(len(some), -1)[is_one]
                        found[some[is_one] - rows.start] = values
    form = layout.header.layout
    begin, field = form.offsets[key], form.fields[key]
    size = torch.Size(field.shape).numel() * field.dtype.itemsize
    of_rows = found.view(torch.uint8).view(len(found), -1)[:, begin : begin + size]
    return of_rows.contiguous().view(-1).view(field.dtype).view(len(found), *field.shape)


# Journals


class WrittenRows(NamedTuple):
    """Rows, ascending, of tables that are about to be saved; files by index of the table."""

    rows: Tensor
    files: Mapping[int, MappedFile]

    @property
    def part(self) -> JournalPart:
        """Their entry in the manifest."""
        return JournalPart(list(self.files), len(self.rows))


def write_journal(folder: Path, number: int, size: int, parts: Sequence[WrittenRows]) -> Journal:
    """Write the journal of a checkpoint, whose size ``journal_bytes`` has computed."""
    name = f"rows-{number:06}"
    with _create(folder, name) as file:
        disk.reserve(file.fileno(), 0, size)
        file.write_all(_JOURNAL_HEADER)
        for part in parts:
            file.write_all(_bytes_of(part.rows))
            for table in part.files.values():
                for some in _chunks(part.rows, table.rows.row_bytes):
                    data = table.words().index_select(0, some)
                    file.write_all(_bytes_of(data))
        os.fsync(file.fileno())
    return Journal(FileEntry(name, size, file.crc), [part.part for part in parts])


def _chunks(rows: Tensor, row_bytes: int) -> tuple[Tensor, ...]:
    chunks: tuple[Tensor, ...] = rows.split(max(1, _CHUNK_BYTES // row_bytes))
    return chunks


def replay(folder: Path, manifest: Manifest, files: Mapping[int, MappedFile]) -> None:
    """Apply all journals to copies of the bases, by index of the table, and verify them."""
    for journal in manifest.journals:
        with _open(folder, journal.file.file, journal.file.bytes) as source:
            _check_journal_header(source)
            for part in journal.parts:
                some_files = [files[index] for index in part.tables]
                rows = _read_rows(source, part.rows, min(file.rows.total for file in some_files))
                for file in some_files:
                    file.reserve(rows)
                    words = file.words()
                    for some in _chunks(rows, file.rows.row_bytes):
                        data = source.read_tensor(len(some) * file.rows.row_bytes)
                        words.index_copy_(0, some, data.view(words.dtype).view(len(some), -1))
            source.verify(journal.file)


def _check_journal_header(source: _ChecksummedFile) -> None:
    header = bytes(source.read_tensor(len(_JOURNAL_HEADER)).tolist())
    if header != _JOURNAL_HEADER:
        version = header.removeprefix(_JOURNAL_MAGIC).split(b"\n", 1)[0]
        if header.startswith(_JOURNAL_MAGIC) and version.isdigit() and len(version) < 10:
            check_version(source.name, version, _JOURNAL_VERSION)
        raise source.changed("another header")


def _read_rows(source: _ChecksummedFile, count: int, num_rows: int) -> Tensor:
    """Read row numbers, which must be ascending and in range."""
    rows = source.read_tensor(count * 8).view(torch.int64)
    if int(rows[0]) < 0 or int(rows[-1]) >= num_rows or not (rows[1:] > rows[:-1]).all():
        raise source.changed(f"rows outside of [0, {num_rows})")
    return rows


# The rest


class _Writer:
    """A file for ``torch.save``, which ends the process if a write raises at the wrong time."""

    def __init__(self, target: _ChecksummedFile) -> None:
        self._target = target
        self.error: BaseException | None = None

    def write(self, data: Any) -> int:
        memory = memoryview(data).cast("B")
        if self.error is None:
            try:
                self._target.write_all(memory)
            except BaseException as error:
                self.error = error
        return len(memory)

    def flush(self) -> None:
        pass


def write_rest(folder: Path, number: int, content: dict[str, Any]) -> FileEntry:
    """Write everything but the tables."""
    name = f"rest-{number:06}"
    handled = sys.exc_info()[1]
    with _create(folder, name) as file:
        writer = _Writer(file)
        content = {"version": _REST_VERSION, **content}
        try:
            uninterrupted(lambda: torch.save(content, cast("IO[bytes]", writer)))
            if writer.error is not None:
                raise writer.error
        except BaseException as error:
            # Torch then tries to complete its archive, which raises another error.
            raise first_error(error, handled) from None
        finally:
            writer.error = None  # in a circle through torch, which the garbage collector cannot see
        os.fsync(file.fileno())
        return FileEntry(name, file.size, file.crc)


def read_rest(folder: Path, file: FileEntry) -> dict[str, Any]:
    """Read everything but the tables, and verify it."""
    handled = sys.exc_info()[1]
    with _open(folder, file.file, file.bytes) as source, io.BufferedReader(source) as buffered:
        source.verify_all(file)
        buffered.seek(0)
        try:
            found = torch.load(buffered, weights_only=True, map_location="cpu")
        except Exception as error:
            first = first_error(error, handled)
            if isinstance(first, OSError) or is_out_of_memory(first):
                raise first from None
            raise source.changed(f"{type(error).__name__}: {error}") from None
    return _check_rest(folder / file.file, found)


def _check_rest(path: Path, content: Any) -> dict[str, Any]:
    found: dict[str, Any] = content if isinstance(content, dict) else {}
    if type(found.get("version")) is int and found["version"] >= 0:
        check_version(path, str(found["version"])[:9].encode(), _REST_VERSION)
    is_valid = (
        found.keys() == {"version", "model", "optimizer", "extra"}
        and isinstance(found["model"], dict)
        and isinstance(found["optimizer"], dict)
        and found["optimizer"].keys() >= {"state", "param_groups"}
        and isinstance(found["optimizer"]["state"], dict)
        and all(isinstance(each, dict) for each in found["optimizer"]["state"].values())
    )
    if not is_valid:
        requirement = f"{path} must hold the state dicts of a model and of an optimizer"
        raise InputError(message(requirement, "something else"))
    return found
