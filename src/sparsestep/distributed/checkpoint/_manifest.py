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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from numbers import Integral, Real
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Size, Tensor
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan

from sparsestep.errors import InputError, message


class Writer(FileSystemWriter):
    """Writes new files, never over those of an earlier checkpoint, and computes their checksums."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._files = _Files(self.save_id)
        self._folder = folder
        self.fs: FileSystem = self._files

    @property
    def sums(self) -> dict[str, Sum]:
        """The files that this rank has written."""
        return self._files.sums

    def storage_meta(self) -> StorageMeta:
        """The id of this save, without the path on this machine."""
        return StorageMeta(save_id=self.save_id)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose names of files: torch's, or unique ones if there is a checkpoint already."""
        plans = super().prepare_global_plan(plans)
        if not any(self._folder.glob(f"*{PART}")):
            return plans
        unique = []
        for plan in plans:
            prefix = f"{plan.storage_data.prefix}{self.save_id}_"
            unique.append(replace(plan, storage_data=replace(plan.storage_data, prefix=prefix)))
        return unique

    def discard(self) -> None:
        """Remove what this rank has written."""
        for name in self._files.names:
            with suppress(OSError):
                (self._folder / name).unlink()


class _Files(FileSystem):
    """Files with checksums; ``.metadata`` gets a name that no other checkpoint uses."""

    def __init__(self, save_id: str) -> None:
        self._save_id = save_id
        self.names: set[str] = set()  # as soon as they exist
        self.sums: dict[str, Sum] = {}  # once they are complete

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        self.names.add(Path(path).name)
        with super().create_stream(path, mode) as stream:
            summed = _Summed(stream)
            try:
                yield summed
            finally:
                if summed.error is not None:
                    raise summed.error
        self.sums[Path(path).name] = Sum(summed.size, summed.crc)

    def concat_path(self, path: Any, suffix: str) -> Any:
        if suffix.startswith(METADATA):
            suffix = pending_name(self._save_id) + suffix.removeprefix(METADATA)
        return super().concat_path(path, suffix)

    def rename(self, path: Any, new_path: Any) -> None:
        self.names.add(Path(new_path).name)
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _Summed:
    """A stream that computes the size and the checksum of what is written.

    It keeps the error of a write, since ``torch.save`` raises another one in its place.
    """

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.size: int = 0
        self.crc: int = 0
        self.error: BaseException | None = None

    def write(self, data: Any) -> Any:
        try:
            written = self._stream.write(data)
        except BaseException as error:
            self.error = self.error or error
            raise
        self.size += memoryview(data).nbytes
        self.crc = zlib.crc32(data, self.crc)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Reader(FileSystemReader):
    """Reads tensors from where the manifest says, without reading ``.metadata``, a pickle.

    ``FileSystemReader`` reads them by ``torch.load(..., weights_only=True)``. A manifest has no
    entries of bytes, which the planner would unpickle.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        super().__init__(folder)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Torch's form of the manifest."""
        tensors: dict[str, Any] = {}
        places = {}
        for key, each in self._manifest.entries.items():
            chunks = []
            for chunk in each.chunks:
                index = MetadataIndex(key, chunk.offsets)
                places[index] = chunk
                chunks.append(ChunkStorageMetadata(Size(chunk.offsets), Size(chunk.sizes)))
            properties = TensorProperties(dtype=each.dtype)
            tensors[key] = TensorStorageMetadata(properties, each.shape, chunks)
        return Metadata(tensors, storage_data=places, storage_meta=StorageMeta())


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
    """A part of a tensor, and where it is stored.

    The last four fields have the names that ``FileSystemReader`` reads.

    Attributes:
        offsets: the first index of the part in each dim.
        sizes: the number of indices in each dim.
        relative_path: the name of the file.
        offset: the first byte in the file.
        length: the number of bytes.
    """

    offsets: list[int]
    sizes: list[int]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class Entry(NamedTuple):
    """A stored tensor."""

    shape: torch.Size
    dtype: torch.dtype
    chunks: list[Chunk]


class Manifest(NamedTuple):
    """The content of ``sparsestep.json``.

    Attributes:
        id: unique for each call of ``save``.
        files: the other files, by name.
        entries: the tensors, by key.
        about: what the tensors are, as JSON.
    """

    id: str
    files: dict[str, Sum]
    entries: dict[str, Entry]
    about: Mapping[str, Any]

    def encode(self) -> bytes:
        """The bytes of the file."""
        entries = {
            key: [list(each.shape), _name_of(each.dtype), [chunk[:5] for chunk in each.chunks]]
            for key, each in self.entries.items()
        }
        body = {"id": self.id, "files": self.files, "tensors": entries, "about": self.about}
        return _sealed(VERSION, body)


def _sealed(version: int, body: Any) -> bytes:
    """A document with its version and the checksum of its body."""
    text = json.dumps(body, separators=(",", ":"))
    crc = zlib.crc32(text.encode())
    return f'{{"version":{version},"crc32":{crc},"body":{text}}}\n'.encode()


def read(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint.

    Raises:
        InputError: there is none, it is damaged, or a newer release has written it.
    """
    path = folder / NAME
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        requirement = (
            f"load: {str(folder)!r} must be a folder that sparsestep.distributed.save wrote"
        )
        raise InputError(message(requirement, f"no file {NAME}")) from None
    try:
        document = json.loads(raw)
        version = document["version"]
        if type(version) is int and version > VERSION:
            requirement = f"load: {str(path)!r} must have a format that this release reads"
            got = f"one written by a newer sparsestep (format {version})"
            remedy = f"This one reads up to {VERSION}: upgrade sparsestep"
            raise InputError(message(requirement, got, remedy))
        # A changed byte that leaves the meaning as it is, such as the case of an escape, counts.
        if version != VERSION or raw != _sealed(version, document["body"]):
            raise ValueError("wrong checksum")
        return _parsed(document["body"])
    except InputError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        raise damaged(path, "other content") from None


def damaged(path: Path, got: str) -> InputError:
    """The error for a file that has changed since it was written."""
    requirement = f"load: {str(path)!r} must be unchanged since the checkpoint was saved"
    remedy = "Nothing has been loaded. Use another checkpoint"
    return InputError(message(requirement, got, remedy))


def verify(folder: Path, manifest: Manifest, names: list[str]) -> None:
    """Compare files with the manifest: the size of every file, the checksum of some.

    Args:
        folder: the folder of the checkpoint.
        manifest: its manifest.
        names: the files whose checksum is compared.

    Raises:
        InputError: a file is missing or has changed.
    """
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


# Parsing. Whoever writes a file can also write the right checksum, so nothing here is trusted.


def _parsed(body: Mapping[str, Any]) -> Manifest:
    files = {_file_name(name): Sum(*map(count, each)) for name, each in body["files"].items()}
    _require(METADATA in files and _is_plain(f"_{body['id']}"))
    entries = {key: _entry(files, *each) for key, each in body["tensors"].items()}
    return Manifest(body["id"], files, entries, body["about"])


def _entry(files: Mapping[str, Sum], shape: Any, dtype: str, chunks: Any) -> Entry:
    entry = Entry(torch.Size(map(count, shape)), _dtype_of(dtype), [])
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
    """An integer of at least 0 that torch can take for a size; anything else raises."""
    _require(type(value) is int and 0 <= value < 1 << 63)
    return int(value)


def _file_name(name: str) -> str:
    """The name of a file in the folder itself."""
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
    """Encode an option of a param group as JSON.

    Example:
        >>> pack((0.9, torch.float32, torch.tensor(0.5)))
        {'tuple': [0.9, {'dtype': 'float32'}, {'tensor': ['float32', [], [0.5]]}]}
        >>> unpack(pack((0.9, torch.float32, torch.tensor(0.5))))
        (0.9, torch.float32, tensor(0.5000))
    """
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
        return {"dtype": _name_of(value)}
    if isinstance(value, Tensor) and not value.is_complex():
        flat = value.detach().reshape(-1).tolist()
        return {"tensor": [_name_of(value.dtype), list(value.shape), flat]}
    requirement = (
        "save: options of param groups must be numbers, strings, dtypes, tensors or None, "
        "or lists, tuples and dicts of these"
    )
    raise InputError(message(requirement, type(value).__name__))


def unpack(value: Any) -> Any:
    """Decode what :func:`pack` has encoded."""
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
        return _dtype_of(content)
    _require(kind == "tensor")
    dtype, shape, flat = content
    return torch.tensor(flat, dtype=_dtype_of(dtype)).view([count(size) for size in shape])


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype) or _name_of(found) != name:
        raise ValueError("not a dtype")
    return found
