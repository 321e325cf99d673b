"""The first page of a file with a tensor: what lies in it.

Three lines, padded with spaces: the name of the format and its version; JSON with the shape and
dtype of the table and, where rows have room for state, which state, and which of it an optimizer
has used; and the CRC-32 of the JSON.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from sparsestep.errors import InputError, message
from sparsestep.memory import file_pages
from sparsestep.memory import file_pages as file_lock
from sparsestep.memory import formats as schema
from sparsestep.memory import row_layout as records
from sparsestep.memory.row_layout import Kind, Record, name_of

HEADER_BYTES = 4096
_VERSION = 2
_MAGIC = b"sparsestep tensor "

# File systems without hard links.
_NO_LINKS = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOTSUP, errno.ENOSYS}


class Header(NamedTuple):
    """What a file says of itself.

    Attributes:
        shape: of the table.
        dtype: of the table.
        state: what each row has room for.
        used: the state that was ever written: the room of other state is zero.
    """

    shape: torch.Size
    dtype: torch.dtype
    state: dict[str, Kind]
    used: frozenset[str] = frozenset()

    @property
    def record(self) -> Record:
        """What a row consists of."""
        return Record.of(Kind(tuple(self.shape[1:]), self.dtype), self.state)

    @property
    def file_bytes(self) -> int:
        """How long the file is."""
        return HEADER_BYTES + self.shape[0] * self.record.row_bytes

    def encoded(self) -> bytes:
        """The page."""
        about: dict[str, Any] = {"shape": list(self.shape), "dtype": name_of(self.dtype)}
        if self.state:
            about["state"] = records.described(self.state)
            about["row_bytes"] = self.record.row_bytes
            about["offsets"] = self.record.offsets
            about["used"] = sorted(self.used)
        text = json.dumps(about).encode()
        lines = _MAGIC + b"%d" % _VERSION, text, b"%08x" % zlib.crc32(text), b""
        return b"\n".join(lines).ljust(HEADER_BYTES)


def make(path: str, header: Header, *, replace: bool) -> int | None:
    """Create a file, whole and locked, or not at all.

    It is written under a temporary name first. A symbolic link is followed, even if its target
    does not exist yet.

    Args:
        path: the path of the file.
        header: what the file holds.
        replace: whether to replace an existing file; its descriptors keep the old one.

    Returns:
        The descriptor; ``None`` if the file exists and is not to be replaced.

    Raises:
        OSError: names ``path``, never the temporary file.
    """
    page = header.encoded()
    most = len(header._replace(used=frozenset(header.state)).encoded())  # note_used adds them
    if most > HEADER_BYTES:
        requirement = f"shape and state of a table must fit into {HEADER_BYTES} bytes, as text"
        raise InputError(message(requirement, f"{most:,} bytes"))
    with naming(path):
        return _make(os.path.realpath(path), page, header.file_bytes, replace=replace)


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Make every ``OSError`` name this path, which is the one that the user knows."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), path) from None


def _make(target: str, page: bytes, size: int, *, replace: bool) -> int | None:
    folder, name = os.path.split(target)
    descriptor, temporary = tempfile.mkstemp(prefix=f".{name}.", dir=folder)
    try:
        file_lock.acquire(descriptor)
        os.ftruncate(descriptor, size)
        _write(descriptor, page)
        file_pages.allocate_in_memory(descriptor)
        if hasattr(os, "fchmod"):
            os.fchmod(descriptor, 0o644)
        if replace:
            os.replace(temporary, target)
        elif not _link(temporary, target):
            os.close(descriptor)
            os.unlink(temporary)
            return None
    except BaseException:
        os.close(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    return descriptor


def _link(temporary: str, target: str) -> bool:
    """Give a file its name; ``False`` if another file has that name."""
    try:
        os.link(temporary, target)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        if os.path.lexists(target):
            return False
        os.rename(temporary, target)
        return True
    os.unlink(temporary)
    return True


def _write(descriptor: int, page: bytes) -> None:
    """Write a header; a file system may write a part only when it is nearly full."""
    done = os.pwrite(descriptor, page, 0)
    while done < len(page):
        done += os.pwrite(descriptor, page[done:], done)


def read(path: str, descriptor: int) -> Header:
    """Read the header of a file; raises if it is another's, damaged, or of a newer version."""
    page = os.pread(descriptor, HEADER_BYTES, 0)
    whole = os.fstat(descriptor).st_size
    if not page.startswith(_MAGIC):
        requirement = f"{path} must be a file that mapped() has created, or not exist yet"
        got = f"another of {whole:,} bytes"
        raise InputError(message(requirement, got, "Choose another path"))
    try:
        version, text, *_ = page.removeprefix(_MAGIC).split(b"\n", 2)
        check_version(path, version, _VERSION)
        header = _parsed(text)
        if header.encoded() != page:
            raise ValueError("the header must be the one that was written, got other bytes")
        if whole != header.file_bytes:
            expected = f"{header.file_bytes:,}"
            raise ValueError(f"the file must have {expected} bytes, got {whole:,}")
    except InputError:
        raise
    except ValueError as error:
        requirement = f"{path} must be as mapped() has created it"
        remedy = "It is damaged: delete it, and load a checkpoint into a new one"
        raise InputError(message(requirement, f"a file in which {error}", remedy)) from None
    return header


def check_version(path: str, found: bytes, known: int) -> None:
    """Refuse a file whose format this release does not know.

    Args:
        path: of the file.
        found: the version in the file, in digits.
        known: the version that this release reads.
    """
    if not found.isdigit() or len(found) > 9:
        raise ValueError("the version must be a number, got other bytes")
    if int(found) > known:
        requirement = f"{path} must be of a format that this sparsestep reads, up to {known}"
        got = f"format {int(found)}, written by a newer sparsestep"
        raise InputError(message(requirement, got, "Update sparsestep"))
    if int(found) < known:
        requirement = f"{path} must be of format {known}"
        got = f"format {int(found)}, written by an older sparsestep"
        raise InputError(message(requirement, got, "Use that one to read it"))


def _parsed(text: bytes) -> Header:
    about = schema.parse(text)
    with_state = ("state", "row_bytes", "offsets", "used") if "state" in about else ()
    schema.fields("the header", about, ("shape", "dtype", *with_state))
    dtype = schema.dtype("dtype", about["dtype"])
    shape = schema.shape("shape", about["shape"], dtype)
    if not shape:
        raise ValueError("shape must have a size, got none")
    used = schema.items("used", about.get("used", []))
    used = [schema.string("a name in used", name) for name in used]
    header = Header(torch.Size(shape), dtype, records.read(about.get("state", {})), frozenset(used))
    if not header.used <= header.state.keys():
        raise ValueError("used must name state of the rows, got others")
    schema.integer("the size of the file", header.file_bytes)
    return header


def check(path: str, found: Header, wanted: Header, state: Mapping[str, Kind] | None) -> None:
    """Refuse a file that was made for something else.

    Args:
        path: of the file.
        found: in the file.
        wanted: shape and dtype count.
        state: what rows must have room for; ``None``: whatever they have.
    """
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        requirement = f"{path} must be opened with the shape and dtype that it was created with"
        was = f"{tuple(found.shape)} and {name_of(found.dtype)}"
        got = f"{tuple(wanted.shape)} and {name_of(wanted.dtype)} instead of {was}"
        raise InputError(message(requirement, got))
    if state is not None and found.state != state:
        requirement = (
            f"{path} must be opened with the optimizer that it was created with, or without"
        )
        got = f"one with state {_listed(state)}, where a row has room for {_listed(found.state)}"
        remedy = "To change it, copy the table to a new file"
        raise InputError(message(requirement, got, remedy))


def _listed(state: Mapping[str, Kind]) -> str:
    kinds = (f"{name} ({name_of(kind.dtype)})" for name, kind in state.items())
    return ", ".join(kinds) or "none"


def note_used(descriptor: int, header: Header, names: Iterable[str]) -> Header:
    """Have a file say that state of these names may have been written."""
    header = header._replace(used=header.used.union(names))
    _write(descriptor, header.encoded())
    return header
