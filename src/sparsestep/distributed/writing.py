"""Checkpoint folders, written and read by all ranks; written in the background, too.

Saving is atomic. Parts never overwrite files of an earlier checkpoint, and a checkpoint counts when
its manifest has replaced the earlier one. Before that, every rank has written its part, rank 0 sees
all parts, and every rank sees what rank 0 has written.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch.distributed as dist

from sparsestep._process import uninterrupted
from sparsestep.distributed.checkpoint import _manifest as manifest
from sparsestep.distributed.checkpoint._manifest import METADATA, PART, Chunk, Entry, Manifest, Sum
from sparsestep.distributed.groups import new_group_like
from sparsestep.distributed.peers import Peers, as_documented
from sparsestep.errors import InputError, sentence
from sparsestep.memory.copies import sync_folder

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

StrPath: TypeAlias = str | os.PathLike[str]


def folder_of(who: str, path: StrPath) -> Path:
    """The folder that a user names.

    Example:
        >>> try:
        ...     folder_of("save", None)
        ... except InputError as error:
        ...     print(error)
        save: path must be a str or os.PathLike. Got None.
    """
    given: Any = path
    if not isinstance(given, str | os.PathLike) or not isinstance(os.fspath(given), str):
        raise InputError(sentence(f"{who}: path must be a str or os.PathLike", repr(given)))
    if "\0" in os.fspath(given):
        raise InputError(sentence(f"{who}: path must not contain null characters", repr(given)))
    return Path(given)


# Saving


class Content(NamedTuple):
    """The content of a checkpoint.

    Attributes:
        entries: the tensors that this rank stores, by key.
        about: what they are, as JSON; the same on all ranks.
    """

    entries: dict[str, Any]
    about: Mapping[str, Any]


def write(content: Content, folder: Path, peers: Peers) -> None:
    """Write a checkpoint; all ranks call it.

    If it raises, it raises on all ranks, and an earlier checkpoint in the folder is what it was.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from sparsestep.distributed.checkpoint.files import Writer

    writer = Writer(folder)
    try:
        with _quiet():
            metadata = save(content.entries, storage_writer=writer, **peers.arguments)
    except CheckpointException as failure:
        writer.discard()
        raise peers.error_of(failure.failures) from None
    except BaseException:
        writer.discard()
        raise
    save_id = metadata.storage_meta.save_id
    sums = peers.gather(writer.sums)
    with peers.agreeing(undo=writer.discard):
        _check_that_disk_is_shared(folder, save_id, peers, sums)
    publication, error = _Publication(folder), None
    if peers.rank == 0:
        try:
            files = {name: each for some in sums for name, each in some.items()}
            files[METADATA] = files.pop(manifest.pending_name(save_id))
            entries = _entries_of(metadata)
            publication.run(Manifest(save_id, files, entries, content.about))
        except BaseException as raised:
            error = as_documented(raised)
    peers.agree(None if publication.is_done else error, undo=writer.discard)
    if error is not None:
        raise error


def _check_that_disk_is_shared(
    folder: Path, save_id: str, peers: Peers, sums: list[dict[str, Sum]]
) -> None:
    """Every rank must see what rank 0 has written, and rank 0 what every rank has written."""
    contract = f"save: {str(folder)!r} must be on a disk that all ranks share"
    for rank, files in enumerate(sums):
        for name, each in files.items():
            if peers.rank == 0 or name == manifest.pending_name(save_id):
                try:
                    is_seen = os.stat(folder / name).st_size == each.size
                except (FileNotFoundError, NotADirectoryError):
                    is_seen = False
                if not is_seen:
                    got = f"a path where rank {peers.rank} does not see {name!r} of rank {rank}"
                    raise InputError(sentence(contract, got, "The checkpoint was not saved"))


class _Publication:
    """Makes a checkpoint the one that the folder has.

    Attributes:
        is_done: whether it is, even if an error or a signal came later.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.is_done: bool = False

    def run(self, content: Manifest) -> None:
        """Write the manifest and replace the earlier one."""
        temporary = self._folder / f".{content.id}.json"
        try:
            with open(temporary, "wb") as file:
                file.write(content.encode())
                file.flush()
                os.fsync(file.fileno())
            uninterrupted(lambda: self._replace(temporary, content))
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise

    def _replace(self, temporary: Path, content: Manifest) -> None:
        folder, pending = self._folder, manifest.pending_name(content.id)
        os.replace(temporary, folder / manifest.NAME)
        self.is_done = True  # so an error below must not make the checkpoint fail
        with suppress(Exception):
            sync_folder(folder)
        with suppress(Exception):
            os.replace(folder / pending, folder / METADATA)
        with suppress(Exception):
            for pattern in (f"__*{PART}", f".*{METADATA}", f".*{METADATA}.tmp", ".*.json"):
                for path in folder.glob(pattern):
                    if path.name not in (*content.files, pending):
                        path.unlink()


def _entries_of(metadata: Metadata) -> dict[str, Entry]:
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

    found = {}
    for key, each in metadata.state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        chunks = []
        for chunk in each.chunks:
            place = metadata.storage_data[MetadataIndex(key, chunk.offsets)]
            offsets, sizes = list(chunk.offsets), list(chunk.sizes)
            chunks.append(Chunk(offsets, sizes, place.relative_path, place.offset, place.length))
        found[key] = Entry(each.size, each.properties.dtype, chunks)
    return found


def write_in_background(content: Content, folder: Path, peers: Peers) -> Future[None]:
    """Write what nobody changes meanwhile; all ranks call it.

    Some of the processes, where there are others, write it before this returns. Torch cannot make
    another group of these without the others: it takes the name from how many groups a process
    belongs to, which differs, and they wait for each other for ever.
    """
    if peers.group is not None and peers.world < dist.get_world_size():
        done: Future[None] = Future()
        try:
            write(content, folder, peers)
        except Exception as error:
            done.set_exception(error)
        else:
            done.set_result(None)
        return done
    if peers.group is not None:  # what two threads send must not meet
        peers = Peers(new_group_like(None, "gloo"))
    writer = ThreadPoolExecutor(1, "sparsestep-save")
    saving = writer.submit(_write_apart, content, folder, peers)
    writer.shutdown(wait=False)
    return saving


def _write_apart(content: Content, folder: Path, peers: Peers) -> None:
    try:
        write(content, folder, peers)
    finally:
        if peers.group is not None:
            dist.destroy_process_group(peers.group)


# Loading


class Checkpoint(NamedTuple):
    """A checkpoint whose files are what they were when it was saved.

    Attributes:
        folder: where it is.
        manifest: what it contains.
        peers: the ranks that load it.
    """

    folder: Path
    manifest: Manifest
    peers: Peers

    @staticmethod
    def open(folder: Path, peers: Peers) -> Checkpoint:
        """Read the manifest and verify all files; all ranks call it.

        Raises:
            InputError: on all ranks, if a file is missing or damaged, or ranks see other files.
        """
        with peers.agreeing():
            found = manifest.read(folder)
        ids = peers.gather(found.id)
        with peers.agreeing():
            if len(set(ids)) > 1:
                contract = f"load: {str(folder)!r} must be the same checkpoint for all ranks"
                raise InputError(sentence(contract, f"{len(set(ids))} different ones"))
            # Each checksum is compared by one of the ranks.
            manifest.verify(folder, found, sorted(found.files)[peers.rank :: peers.world])
        return Checkpoint(folder, found, peers)

    def read(self, targets: dict[str, Any]) -> None:
        """Read into tensors; all ranks call it, and all raise if one does."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from sparsestep.distributed.checkpoint.files import Reader

        try:
            with _quiet():
                load(targets, storage_reader=Reader(*self[:2]), **self.peers.arguments)
        except CheckpointException as failure:
            failures = {
                rank: (self._refusal_of(error), trace)
                for rank, (error, trace) in failure.failures.items()
            }
            raise self.peers.error_of(failures) from None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise an ``InputError`` for content that ``save`` never writes."""
        try:
            yield
        except Exception as error:
            if self.peers.world > 1 and type(error) is RuntimeError:
                raise  # from the process group
            raise self._refusal_of(error) from None

    def _refusal_of(self, error: BaseException) -> BaseException:
        error = as_documented(error)
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            return manifest.damaged(Path(error.filename), "no such file")
        if isinstance(error, InputError | MemoryError | OSError | KeyboardInterrupt):
            return error
        contract = f"load: {str(self.folder)!r} must be what sparsestep.distributed.save wrote"
        return InputError(sentence(contract, f"{type(error).__name__}: {error}"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that there is one process, and of its own storages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield
