"""The manifest of a checkpoint: which files it consists of, and how to recognize damage.

A checkpoint is a folder. ``manifest.json`` names the files that count, with their sizes and
checksums; any other file is left over. A new checkpoint writes new files first, flushes them to the
disk, and then replaces the manifest, which the file system does completely or not at all.

A manifest is input: it may be damaged, or made by someone else. So ``read`` checks every field, and
files are plain names inside the folder, opened without following links.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import stat
import uuid
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from sparsestep._process import uninterrupted
from sparsestep.errors import InputError, message
from sparsestep.memory import formats as schema
from sparsestep.memory import row_layout as record
from sparsestep.memory.file_header import Header, check_version
from sparsestep.memory.replace_file import sync_folder

MANIFEST = "manifest.json"
VERSION = 2

# The first bytes of a journal: the name of the format and its version.
JOURNAL_MAGIC, JOURNAL_VERSION = b"sparsestep rows ", 1
JOURNAL_HEADER = (JOURNAL_MAGIC + b"%d\n" % JOURNAL_VERSION).ljust(64)

_MOST_BYTES = 64 << 20
_NAME = re.compile(r"(base|rows|rest)-[0-9]{6,19}(\.[0-9]{1,9})?", re.ASCII)
_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)
_REMEDY = "The disk or another program has changed it: use an earlier checkpoint"


@dataclass
class File:
    """A file of a checkpoint, which is written once.

    Attributes:
        file: its name in the folder.
        bytes: its size.
        crc: its checksum.
    """

    file: str
    bytes: int
    crc: int


@dataclass
class Layout:
    """How tensors lie in a file.

    Attributes:
        name: of the table.
        shape: of the table.
        dtype: of the table.
        row_bytes: the distance from one row of the file to the next.
        room: the state that a row of the file has room for.
        inside: the names of the state tensors that lie in this room, each with its key there.
    """

    name: str
    shape: list[int]
    dtype: str
    row_bytes: int
    room: dict[str, dict[str, Any]]
    inside: dict[str, str]

    @property
    def header(self) -> Header:
        """Header of a file with this layout, except for which state is in use."""
        dtype = schema.DTYPES[self.dtype]
        return Header(torch.Size(self.shape), dtype, record.read(self.room))


@dataclass
class Table:
    """A table: how it lies in its file, and its *base*, a copy of that file at some checkpoint."""

    layout: Layout
    base: File


@dataclass
class Part:
    """Rows of some tables in a journal: the row numbers, then the rows of each table.

    Attributes:
        tables: indices of the tables in the manifest.
        rows: how many rows.
    """

    tables: list[int]
    rows: int


@dataclass
class Journal:
    """Rows that have changed since the previous checkpoint."""

    file: File
    parts: list[Part]


@dataclass
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        id: random. Two checkpoints with the same id have the same content.
        number: one more than that of the previous checkpoint in the folder; part of file names.
        tables: the tables in files.
        journals: from the oldest to the latest; to be applied to the bases in this order.
        rest: everything else.
    """

    id: str
    number: int
    tables: list[Table]
    journals: list[Journal]
    rest: File

    @property
    def files(self) -> Iterator[File]:
        """All files that count."""
        yield from (table.base for table in self.tables)
        yield from (journal.file for journal in self.journals)
        yield self.rest


def new_id() -> str:
    """Return a random id for a checkpoint."""
    return uuid.uuid4().hex


def journal_bytes(parts: list[Part], tables: list[Table]) -> int:
    """Size of a journal with these parts."""
    return len(JOURNAL_HEADER) + sum(
        part.rows * (8 + sum(tables[index].layout.row_bytes for index in part.tables))
        for part in parts
    )


# Reading


def read(folder: Path) -> Manifest | None:
    """Read the manifest of the latest checkpoint in a folder; ``None`` if there is none."""
    path = folder / MANIFEST
    if not os.path.lexists(path):
        return None
    with open_file(folder, MANIFEST) as raw, io.BufferedReader(raw) as file:
        text = file.read(_MOST_BYTES + 1)
    try:
        if len(text) > _MOST_BYTES:
            raise ValueError(f"it must have at most {_MOST_BYTES:,} bytes, got more")
        return _parsed(path, text)
    except InputError:
        raise
    except ValueError as error:
        requirement = f"{path} must be a manifest that save() has written"
        raise InputError(message(requirement, f"one in which {error}", _REMEDY)) from None


def _parsed(path: Path, text: bytes) -> Manifest:
    found = schema.parse(text)
    version = schema.integer("version", found.get("version"), 1, 10**9 - 1)
    check_version(str(path), b"%d" % version, VERSION)
    names = ("version", "crc", "id", "number", "tables", "journals", "rest")
    schema.fields("the manifest", found, names)
    if not isinstance(found["id"], str) or not _ID.fullmatch(found["id"]):
        raise ValueError("id must be 32 hexadecimal digits, got something else")
    number = schema.integer("number", found["number"], 1, 1 << 53)
    tables = [_table(each) for each in schema.items("tables", found["tables"])]
    journals = [_journal(each, tables) for each in schema.items("journals", found["journals"])]
    manifest = Manifest(found["id"], number, tables, journals, _file(found["rest"], "rest"))
    _check_unique("files", [each.file for each in manifest.files])
    tensors = [name for each in tables for name in (each.layout.name, *each.layout.inside)]
    _check_unique("tensors", tensors)
    if found["crc"] != _encoded(manifest)["crc"]:
        raise ValueError("crc must be that of the other fields, got another")
    return manifest


def _table(found: Any) -> Table:
    found = schema.fields("a table", found, ("layout", "base"))
    keys = ("name", "shape", "dtype", "row_bytes", "room", "inside")
    about = schema.fields("the layout of a table", found["layout"], keys)
    name = schema.string("the name of a table", about["name"])
    dtype = schema.dtype("the dtype of a table", about["dtype"])
    shape = schema.shape("the shape of a table", about["shape"], dtype)
    if not shape:
        raise ValueError("the shape of a table must have a size, got none")
    room = record.read(about["room"])
    inside = schema.mapping("inside", about["inside"])
    for each, key in inside.items():
        schema.string("the name of state", each)
        if schema.string("the key of state", key) not in room:
            raise ValueError(f"state must be one that rows have room for, got {key!r}")
    _check_unique("state in the rows", list(inside.values()))
    layout = Layout(name, shape, about["dtype"], about["row_bytes"], about["room"], inside)
    header = layout.header
    if schema.integer("row_bytes", layout.row_bytes, 1) != header.record.row_bytes:
        raise ValueError(f"row_bytes must be {header.record.row_bytes}, got {layout.row_bytes}")
    base = _file(found["base"], "base")
    if base.bytes != header.file_bytes:
        raise ValueError(f"a base must have {header.file_bytes} bytes, got {base.bytes}")
    return Table(layout, base)


def _journal(found: Any, tables: list[Table]) -> Journal:
    found = schema.fields("a journal", found, ("file", "parts"))
    journal = Journal(_file(found["file"], "rows"), [])
    for each in schema.items("the parts of a journal", found["parts"]):
        about = schema.fields("a part of a journal", each, ("tables", "rows"))
        indices = schema.items("the tables of a part", about["tables"])
        for index in indices:
            schema.integer("the index of a table", index, 0, len(tables) - 1)
        _check_unique("tables of a part", indices)
        most = min((tables[index].layout.shape[0] for index in indices), default=0)
        journal.parts.append(Part(indices, schema.integer("rows", about["rows"], 1, most)))
    expected = journal_bytes(journal.parts, tables)
    if journal.file.bytes != expected:
        raise ValueError(f"a journal must have {expected} bytes, got {journal.file.bytes}")
    return journal


def _file(found: Any, kind: str) -> File:
    found = schema.fields("a file", found, ("file", "bytes", "crc"))
    name = found["file"]
    if not isinstance(name, str) or not _NAME.fullmatch(name) or not name.startswith(kind):
        requirement = f"a file must be called {kind}- and a number, and lie in the folder"
        raise ValueError(f"{requirement}, got {str(name)[:200]!r}")
    size = schema.integer("the size of a file", found["bytes"])
    return File(name, size, schema.integer("the checksum of a file", found["crc"], 0, 2**32 - 1))


def _check_unique(what: str, values: list[Any]) -> None:
    if len(set(values)) != len(values):
        raise ValueError(f"{what} must be different ones, got the same twice")


# Files


# Files are objects and not descriptors: Ctrl-C at any line leaves none open.


def open_file(folder: Path, name: str) -> io.FileIO:
    """Open a file of a checkpoint for reading; refuses links and anything but a regular file."""
    path = folder / name
    requirement = f"{path} must be a regular file"
    try:
        # An interrupt in the opener would leave the descriptor open.
        file = uninterrupted(lambda: io.FileIO(path, "r", opener=_open_itself))
    except FileNotFoundError:
        raise InputError(message(requirement, "no such file", _REMEDY)) from None
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EMLINK, errno.ENXIO, errno.EISDIR):
            raise
        raise InputError(message(requirement, "a link, folder or device")) from None
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise InputError(message(requirement, "something else"))
    return file


def _open_itself(path: str, flags: int) -> int:
    """Open a file without following a link, and without waiting for a writer to a pipe."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0))


def open_checked(folder: Path, file: File) -> io.FileIO:
    """Open a file of a checkpoint for reading, and check its size."""
    found = open_file(folder, file.file)
    size = os.fstat(found.fileno()).st_size
    if size != file.bytes:
        found.close()
        raise changed(folder, file, f"{size:,} bytes instead of {file.bytes:,}")
    return found


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Refuse a checkpoint with missing, truncated or extended files."""
    for file in manifest.files:
        open_checked(folder, file).close()


def has_all_files(folder: Path, manifest: Manifest) -> bool:
    """Whether all files are there, with the right sizes."""
    try:
        check_sizes(folder, manifest)
    except (InputError, OSError):
        return False
    return True


def changed(folder: Path, file: File, got: str) -> InputError:
    """Return the error for a file that is not as it was written."""
    requirement = f"{folder / file.file} must be unchanged since the checkpoint was written"
    return InputError(message(requirement, got, _REMEDY))


def create(folder: Path, name: str) -> io.FileIO:
    """Create a file of a checkpoint, in place of any that an interrupted one has left."""
    path = folder / name
    with suppress(FileNotFoundError):
        path.unlink()
    return io.FileIO(path, "x+")


# Writing


def _encoded(manifest: Manifest) -> dict[str, Any]:
    about = asdict(manifest)
    crc = zlib.crc32(json.dumps(about, sort_keys=True).encode())
    return {"version": VERSION, "crc": crc, **about}


def commit(folder: Path, manifest: Manifest) -> None:
    """Make a checkpoint the latest one; its files must be on the disk."""
    temporary = f".{MANIFEST}"
    with create(folder, temporary) as raw, io.BufferedWriter(raw) as file:
        file.write(json.dumps(_encoded(manifest), indent=1).encode())
        file.flush()
        os.fsync(raw.fileno())
    sync_folder(folder)
    os.replace(folder / temporary, folder / MANIFEST)
    sync_folder(folder)


def remove_others(folder: Path, manifest: Manifest | None) -> None:
    """Remove files of earlier checkpoints and of interrupted ones."""
    known = set() if manifest is None else {file.file for file in manifest.files}
    with suppress(OSError):  # they only take space
        for path in folder.iterdir():
            if _NAME.fullmatch(path.name) and path.name not in known:
                with suppress(OSError):
                    path.unlink()
