"""Storage of ``torch.distributed.checkpoint`` for the files of a checkpoint.

Imported when a checkpoint is saved or loaded: the import of torch's part takes a while.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Size
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

from sparsestep._process import uninterrupted
from sparsestep.distributed.checkpoint._manifest import (
    METADATA,
    NAME,
    PART,
    ShardManifest,
    Sum,
    pending_name,
)
from sparsestep.memory.disk import sync_folder


class Writer(FileSystemWriter):
    """Writes new files, never over an earlier checkpoint's, and computes their checksums."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.files = _Files(self.save_id)
        self._folder = folder
        self.fs: FileSystem = self.files
        # Whether they are the checkpoint of the folder, even if an error or a signal came later.
        self.is_published: bool = False

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

    def publish(self, content: ShardManifest) -> None:
        """Make the files of all ranks the checkpoint of the folder, in place of an earlier one."""
        temporary = self._folder / f".{content.id}.json"
        with self.files.create_stream(temporary, "wb") as file:
            file.write(content.encode())
            file.flush()
            os.fsync(file.fileno())
        uninterrupted(lambda: self._replace(temporary, content))

    def _replace(self, temporary: Path, content: ShardManifest) -> None:
        folder, pending = self._folder, pending_name(content.id)
        os.replace(temporary, folder / NAME)
        self.is_published = True  # so an error below must not make the checkpoint fail
        with suppress(Exception):
            sync_folder(folder)
        with suppress(Exception):
            os.replace(folder / pending, folder / METADATA)
        with suppress(Exception):
            for pattern in (f"__*{PART}", f".*{METADATA}", f".*{METADATA}.tmp", ".*.json"):
                for path in folder.glob(pattern):
                    if path.name not in (*content.files, pending):
                        path.unlink()

    def discard(self) -> None:
        for name in self.files.names:
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
                # In a circle through torch, which the garbage collector cannot see.
                error, summed.error = summed.error, None
                if error is not None:
                    raise error
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
    """A stream that computes the size and the checksum of the written data.

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

    def __init__(self, folder: Path, manifest: ShardManifest) -> None:
        super().__init__(folder)
        self._manifest = manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
