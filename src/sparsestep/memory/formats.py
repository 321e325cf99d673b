"""File formats: their schemas, versions and reader.

A file is input: it may be damaged, or crafted. An invalid one raises ``ValueError`` with the
requirement and the value; callers add the path.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import stat
import typing
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch

from sparsestep.errors import InputError, message

T = TypeVar("T")

# Sizes and counts stay below this, so that sums and products of two fit into 64 bits or are caught.
LIMIT = 1 << 62


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without its module."""
    return str(dtype).removeprefix("torch.")


_QUANTIZED = ("qint", "quint")  # torch crashes if it reads such a tensor without a quantizer
DTYPES = {
    dtype_name(each): each
    for each in vars(torch).values()
    if isinstance(each, torch.dtype) and not dtype_name(each).startswith(_QUANTIZED)
}


# JSON


def dumps(value: Any, **options: Any) -> bytes:
    """Encode a value as JSON; it may contain dataclasses and dtypes."""
    return json.dumps(value, default=_plain, **options).encode()


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def loads(text: bytes) -> dict[str, Any]:
    """Parse a JSON object; refuses duplicate keys."""
    try:
        found = json.loads(text.decode(), object_pairs_hook=_unique)
    except RecursionError:
        raise ValueError("it must not be nested deeply") from None
    except UnicodeDecodeError:
        raise ValueError("it must be UTF-8") from None
    if not isinstance(found, dict):
        raise ValueError(f"it must be a JSON object, got {_shown(found)}")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("keys must be unique")
    return found


class Readable:
    """A dataclass that ``read`` reads from JSON: keys are the fields, annotations are checked."""

    noun = ""

    def check(self) -> None:
        """Raise ``ValueError`` if the values do not agree with each other."""


def read(kind: type[T], value: Any) -> T:
    """Read a dataclass from JSON."""
    return typing.cast("T", _read(kind, "", value))


def _read(kind: Any, name: str, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Readable):
        hints = typing.get_type_hints(kind)
        require_keys(kind.noun, value, hints)
        names = {key: f"the {key} of {kind.noun}" if kind.noun else key for key in hints}
        made = kind(**{key: _read(hints[key], names[key], value[key]) for key in hints})
        made.check()
        return made
    if kind is int:
        return require_integer(name, value)
    if kind is str:
        if not isinstance(value, str) or not value:
            raise ValueError(f"{name} must be a string that is not empty, got {_shown(value)}")
        return value
    if kind is torch.dtype:
        if not isinstance(value, str) or value not in DTYPES:
            raise ValueError(f"{name} must be the name of a torch dtype, got {_shown(value)}")
        return DTYPES[value]
    container, element = typing.get_origin(kind), typing.get_args(kind)[-1]
    if container is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be an object, got {_shown(value)}")
        return {
            _read(str, f"a key of {name}", key): _read(element, f"{key!r} in {name}", each)
            for key, each in value.items()
        }
    if not isinstance(value, list):
        raise ValueError(f"{name} must be a list, got {_shown(value)}")
    if container is tuple:  # a shape
        return tuple(require_integer(f"each size in {name}", size, low=1) for size in value)
    return [_read(element, f"each of {name}", each) for each in value]


def require_keys(name: str, value: Any, keys: Iterable[str]) -> None:
    """Require a JSON object with exactly these keys."""
    if not isinstance(value, dict) or value.keys() != set(keys):
        expected = ", ".join(sorted(keys))
        got = ", ".join(sorted(value)) if isinstance(value, dict) else _shown(value)
        raise ValueError(f"{name} must have the keys {expected}, got {got}")


def require_integer(name: str, value: Any, low: int = 0, high: int = LIMIT) -> int:
    """Require an integer in ``[low, high]``."""
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in [{low}, {high}], got {_shown(value)}")
    return value


def require_addressable(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Require the shape of a tensor that can be addressed."""
    if math.prod(shape) * dtype.itemsize > LIMIT:
        raise ValueError(f"{name} must be that of a tensor below 2**62 bytes, got more")


def require_unique(name: str, values: list[Any]) -> None:
    """Require that all values differ."""
    if len(set(values)) != len(values):
        raise ValueError(f"{name} must be different ones, got the same twice")


def _shown(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"a {type(value).__name__} of {len(value)}"
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:50]}…"


def check_version(path: str | os.PathLike[str], found: bytes, known: int) -> None:
    """Refuse a file whose version, in digits, differs from the known one."""
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


# Rows: a row of the table, and maybe the state of that row. A row that is not in memory is read
# from the disk by the page. If its state lies right after it, that is one read for all tensors.

# The field of the table itself.
TABLE = ""

_CACHE_LINE = 64
_MAX_PADDING = 1 / 8


@dataclass(frozen=True)
class RowField(Readable):
    """Shape and dtype of one row of a tensor."""

    noun = "state"

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Size of one row."""
        return math.prod(self.shape) * self.dtype.itemsize

    def check(self) -> None:
        """Refuse a shape that no tensor has."""
        require_addressable("the shape of state", self.shape, self.dtype)


class RowLayout(NamedTuple):
    """The tensors that share a row of a file.

    Example:
        >>> state = {"sum": RowField((), torch.float32)}
        >>> layout = RowLayout.of(RowField((64,), torch.float32), state)
        >>> layout.offsets, layout.row_bytes
        ({'': 0, 'sum': 256}, 260)
    """

    fields: dict[str, RowField]  # by the name of the tensor
    offsets: dict[str, int]  # of each tensor in a row, in bytes
    row_bytes: int  # with padding

    @classmethod
    def of(cls, table: RowField, state: Mapping[str, RowField]) -> RowLayout:
        """The table first, then state from the longest elements to the shortest, without gaps."""
        names = sorted(state, key=lambda name: (-state[name].dtype.itemsize, -state[name].bytes))
        fields = {TABLE: table, **{name: state[name] for name in names}}
        offsets, end = {}, 0
        for name, field in fields.items():
            offsets[name] = end = _rounded_up(end, field.dtype.itemsize)
            end += field.bytes
        if not state:
            return cls(fields, offsets, max(1, end))
        row_bytes = _rounded_up(end, max(field.dtype.itemsize for field in fields.values()))
        lines = _rounded_up(end, _CACHE_LINE)
        return cls(fields, offsets, lines if lines <= end * (1 + _MAX_PADDING) else row_bytes)

    def strides(self, name: str) -> tuple[int, ...]:
        """Strides of a tensor, in elements."""
        field = self.fields[name]
        inside = [math.prod(field.shape[dim + 1 :]) for dim in range(len(field.shape))]
        return (self.row_bytes // field.dtype.itemsize, *inside)


def _rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to


# The first page of a file with a table. Three lines, padded with spaces: the name of the format and
# its version; JSON; and the CRC-32 of the JSON.

HEADER_BYTES = 4096
_VERSION = 2
_MAGIC = b"sparsestep tensor "


class FileHeader(NamedTuple):
    """Content of the first page of a file."""

    shape: torch.Size  # of the table
    dtype: torch.dtype
    state: dict[str, RowField]  # that each row has room for
    used: frozenset[str] = frozenset()  # the state that was ever written; the rest is zero

    @property
    def layout(self) -> RowLayout:
        """Layout of the rows."""
        return RowLayout.of(RowField(tuple(self.shape[1:]), self.dtype), self.state)

    @property
    def file_bytes(self) -> int:
        """Size of the file."""
        return HEADER_BYTES + self.shape[0] * self.layout.row_bytes

    def encode(self) -> bytes:
        """Return the page; refuses a header that would not fit once all state is in use."""
        page, size = self._encode(self.used), len(self._encode(self.state))
        if size > HEADER_BYTES:
            requirement = f"shape and state of a table must fit into {HEADER_BYTES} bytes, as text"
            raise InputError(message(requirement, f"{size:,} bytes"))
        return page

    def _encode(self, used: Iterable[str]) -> bytes:
        about: dict[str, Any] = {"shape": self.shape, "dtype": self.dtype}
        if self.state:
            about["state"] = self.state
            about["row_bytes"] = self.layout.row_bytes
            about["offsets"] = self.layout.offsets
            about["used"] = sorted(used)
        text = dumps(about)
        lines = _MAGIC + b"%d" % _VERSION, text, b"%08x" % zlib.crc32(text), b""
        return b"\n".join(lines).ljust(HEADER_BYTES)


def read_header(path: str, descriptor: int) -> FileHeader:
    """Read the header of a file; raises if it is another's, damaged, or of a newer version."""
    about = os.fstat(descriptor)
    size = about.st_size
    page = os.pread(descriptor, HEADER_BYTES, 0) if stat.S_ISREG(about.st_mode) else b""
    if not page.startswith(_MAGIC):
        requirement = f"{path} must be a file that mapped() has created, or not exist yet"
        raise InputError(message(requirement, f"another of {size:,} bytes", "Choose another path"))
    try:
        version, text, *_ = page.removeprefix(_MAGIC).split(b"\n", 2)
        check_version(path, version, _VERSION)
        header = _read_header(loads(text))
        if header.encode() != page:
            raise ValueError("the header must be the one that was written, got other bytes")
        if size != header.file_bytes:
            raise ValueError(f"the file must have {header.file_bytes:,} bytes, got {size:,}")
    except InputError:
        raise
    except ValueError as error:
        requirement = f"{path} must be as mapped() has created it"
        remedy = "It is damaged: delete it, and load a checkpoint into a new one"
        raise InputError(message(requirement, f"a file in which {error}", remedy)) from None
    return header


def _read_header(about: dict[str, Any]) -> FileHeader:
    with_state = ("state", "row_bytes", "offsets", "used") if "state" in about else ()
    require_keys("the header", about, ("shape", "dtype", *with_state))
    dtype = _read(torch.dtype, "dtype", about["dtype"])
    shape = _read(tuple[int, ...], "shape", about["shape"])
    require_addressable("shape", shape, dtype)
    if not shape:
        raise ValueError("shape must have a size, got none")
    state = _read(dict[str, RowField], "state", about.get("state", {}))
    used = frozenset(_read(list[str], "used", about.get("used", [])))
    if not used <= state.keys():
        raise ValueError("used must name state of the rows, got others")
    header = FileHeader(torch.Size(shape), dtype, state, used)
    require_integer("the size of the file", header.file_bytes)
    return header


def check_header(
    path: str, found: FileHeader, wanted: FileHeader, state: Mapping[str, RowField] | None
) -> None:
    """Refuse a file of another shape, dtype or state; with ``state=None``, any state will do."""
    if (found.shape, found.dtype) != (wanted.shape, wanted.dtype):
        requirement = f"{path} must be opened with the shape and dtype that it was created with"
        was = f"{tuple(found.shape)} and {dtype_name(found.dtype)}"
        got = f"{tuple(wanted.shape)} and {dtype_name(wanted.dtype)} instead of {was}"
        raise InputError(message(requirement, got))
    if state is not None and found.state != state:
        creator = "the optimizer that it was created with"
        requirement = f"{path} must be opened with {creator}, or without"
        got = f"one with state {_listed(state)}, where a row has room for {_listed(found.state)}"
        raise InputError(message(requirement, got, "To change it, copy the table to a new file"))


def _listed(state: Mapping[str, RowField]) -> str:
    fields = (f"{name} ({dtype_name(field.dtype)})" for name, field in state.items())
    return ", ".join(fields) or "none"
