"""``sparsestep.json``, the file that makes a folder a checkpoint.

It lists the other files with size and checksum, the place of each tensor in them, and the options
of the optimizer. It is JSON, so reading it executes no code. ``.metadata``, which is a pickle, is
there for ``torch.distributed.checkpoint``; this library writes it and never unpickles it.
"""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsestep.errors import InputError, message
from sparsestep.memory.formats import DTYPES, check_version, dtype_name, require_integer

NAME = "sparsestep.json"
METADATA = ".metadata"
PART = ".distcp"
VERSION = 2
_READ_BYTES = 1 << 22


class Sum(NamedTuple):
    """Size in bytes and CRC-32 of a file."""

    size: int
    crc: int


class Chunk(NamedTuple):
    """A part of a tensor, and where it is stored."""

    offsets: list[int]  # first index of the part in each dim
    sizes: list[int]  # number of indices in each dim
    # The names that FileSystemReader reads:
    relative_path: str
    offset: int  # first byte in the file
    length: int  # number of bytes
    transform_descriptors: None = None


class Entry(NamedTuple):
    shape: torch.Size
    dtype: torch.dtype
    chunks: list[Chunk]


class ShardManifest(NamedTuple):
    """The content of ``sparsestep.json``."""

    id: str  # unique for each call of save
    files: dict[str, Sum]  # the other files, by name
    entries: dict[str, Entry]  # the tensors, by key
    about: Mapping[str, Any]  # TensorLayouts as JSON

    def encode(self) -> bytes:
        entries = {
            key: [list(each.shape), dtype_name(each.dtype), [chunk[:5] for chunk in each.chunks]]
            for key, each in self.entries.items()
        }
        body = {"id": self.id, "files": self.files, "tensors": entries, "about": self.about}
        return _sealed(VERSION, body)


def _sealed(version: int, body: Any) -> bytes:
    """A document with its version and the checksum of its body."""
    text = json.dumps(body, separators=(",", ":"))
    crc = zlib.crc32(text.encode())
    return f'{{"version":{version},"crc32":{crc},"body":{text}}}\n'.encode()


def read(folder: Path) -> ShardManifest:
    """Read the manifest; raises if there is none, it is damaged, or of another version."""
    path = folder / NAME
    if not path.is_file():  # to open a pipe would wait forever
        requirement = (
            f"load: {str(folder)!r} must be a folder that sparsestep.distributed.save wrote"
        )
        raise InputError(message(requirement, f"no file {NAME}"))
    raw = path.read_bytes()
    try:
        document = json.loads(raw)
        version = document["version"]
        check_version(path, str(version).encode(), VERSION)
        # Even a changed byte without a change of meaning, such as the case of an escape, counts.
        if raw != _sealed(version, document["body"]):
            raise ValueError("wrong checksum")
        return _parsed(document["body"])
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise damaged(path, "other content") from None


def damaged(path: Path, got: str) -> InputError:
    requirement = f"load: {str(path)!r} must be unchanged since the checkpoint was saved"
    remedy = "Nothing has been loaded. Use another checkpoint"
    return InputError(message(requirement, got, remedy))


def verify(folder: Path, manifest: ShardManifest, names: list[str]) -> None:
    """Compare the size of every file with the manifest, and the checksum of ``names``."""
    for name, each in manifest.files.items():
        path = path_of(folder, manifest.id, name)
        try:
            size = os.stat(path).st_size
            if size != each.size:
                raise damaged(path, f"{size} bytes instead of {each.size}")
            if name in names and _crc_of(path) != each.crc:
                raise damaged(path, "other content")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise damaged(path, "no such file") from None


def path_of(folder: Path, save_id: str, name: str) -> Path:
    """The path of a file of a checkpoint.

    ``.metadata`` gets its name after the manifest is in place. If a process ends in between, it is
    still under the name that it was written with.
    """
    pending = folder / pending_name(save_id)
    return pending if name == METADATA and pending.exists() else folder / name


def pending_name(save_id: str) -> str:
    """The name of ``.metadata`` before a checkpoint is complete."""
    return f".{save_id}{METADATA}"


def _crc_of(path: Path) -> int:
    crc = 0
    with open(path, "rb") as file:
        while some := file.read(_READ_BYTES):
            crc = zlib.crc32(some, crc)
    return crc


# Parsing. A crafted file can have the right checksum, so nothing here is trusted.


def _parsed(body: Mapping[str, Any]) -> ShardManifest:
    files = {_file_name(name): Sum(*map(count, each)) for name, each in body["files"].items()}
    _require(METADATA in files and _is_plain(f"_{body['id']}"))
    entries = {key: _entry(files, *each) for key, each in body["tensors"].items()}
    return ShardManifest(body["id"], files, entries, body["about"])


def _entry(files: Mapping[str, Sum], shape: Any, dtype: str, chunks: Any) -> Entry:
    entry = Entry(torch.Size(map(count, shape)), DTYPES[dtype], [])
    for offsets, sizes, file, offset, length in chunks:
        chunk = Chunk(list(map(count, offsets)), list(map(count, sizes)), file, offset, length)
        ends = [begin + size for begin, size in zip(chunk.offsets, chunk.sizes, strict=True)]
        _require(all(end <= size for end, size in zip(ends, entry.shape, strict=True)))
        _require(count(offset) + count(length) <= files[file].size)
        entry.chunks.append(chunk)
    stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    _require(stored == math.prod(entry.shape))
    return entry


def count(value: Any) -> int:
    return require_integer("a size", value)


def _file_name(name: str) -> str:
    _require(name == METADATA or (name.endswith(PART) and _is_plain(name.removesuffix(PART))))
    return name


def _is_plain(name: Any) -> bool:
    """Letters, digits, dashes and underscores alone: no path leads out of the folder."""
    return isinstance(name, str) and name.isascii() and name.replace("-", "_").isidentifier()


def _require(condition: bool) -> None:
    if not condition:
        raise ValueError("not a value that save() writes")


# Options of param groups as JSON


def pack(value: Any) -> Any:
    """Encode an option of a param group as JSON."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, list):
        return [pack(each) for each in value]
    if isinstance(value, tuple):
        return {"tuple": [pack(each) for each in value]}
    if isinstance(value, dict):
        return {"dict": [[pack(key), pack(each)] for key, each in value.items()]}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if isinstance(value, Tensor) and not value.is_complex():
        flat = value.detach().reshape(-1).tolist()
        return {"tensor": [dtype_name(value.dtype), list(value.shape), flat]}
    requirement = (
        "save: options of param groups must be numbers, strings, dtypes, tensors or None, "
        "or lists, tuples and dicts of these"
    )
    raise InputError(message(requirement, type(value).__name__))


def unpack(value: Any) -> Any:
    if isinstance(value, list):
        return [unpack(each) for each in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(unpack(each) for each in content)
    if kind == "dict":
        return {unpack(key): unpack(each) for key, each in content}
    if kind == "dtype":
        return DTYPES[content]
    _require(kind == "tensor")
    dtype, shape, flat = content
    return torch.tensor(flat, dtype=DTYPES[dtype]).view([count(size) for size in shape])
