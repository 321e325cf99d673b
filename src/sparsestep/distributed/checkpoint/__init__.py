"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch.distributed as dist
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import Peers, as_documented
from sparsestep.distributed.checkpoint import _manifest as manifest
from sparsestep.distributed.checkpoint._manifest import METADATA, PART, Chunk, Entry, Manifest, Sum
from sparsestep.distributed.checkpoint._reshard import Move, Restoring, Stored, alone
from sparsestep.distributed.checkpoint._state import About, Contents, parted, targets
from sparsestep.distributed.collectives import Wire, new_group_like
from sparsestep.errors import InputError, message
from sparsestep.memory.replace_file import sync_folder
from sparsestep.nn.vocabulary.id_table import Options
from sparsestep.optim.optimizer import RuleOptimizer, check_model_and_optimizer

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
        raise InputError(message(f"{who}: path must be a str or os.PathLike", repr(given)))
    if "\0" in os.fspath(given):
        raise InputError(message(f"{who}: path must not contain null characters", repr(given)))
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

    from sparsestep.distributed.checkpoint._manifest import Writer

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
    requirement = f"save: {str(folder)!r} must be on a disk that all ranks share"
    for rank, files in enumerate(sums):
        for name, each in files.items():
            if peers.rank == 0 or name == manifest.pending_name(save_id):
                try:
                    is_seen = os.stat(folder / name).st_size == each.size
                except (FileNotFoundError, NotADirectoryError):
                    is_seen = False
                if not is_seen:
                    got = f"a path where rank {peers.rank} does not see {name!r} of rank {rank}"
                    raise InputError(message(requirement, got, "The checkpoint was not saved"))


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
                requirement = f"load: {str(folder)!r} must be the same checkpoint for all ranks"
                raise InputError(message(requirement, f"{len(set(ids))} different ones"))
            # Each checksum is compared by one of the ranks.
            manifest.verify(folder, found, sorted(found.files)[peers.rank :: peers.world])
        return Checkpoint(folder, found, peers)

    def read(self, targets: dict[str, Any]) -> None:
        """Read into tensors; all ranks call it, and all raise if one does."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from sparsestep.distributed.checkpoint._manifest import Reader

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
        requirement = f"load: {str(self.folder)!r} must be what sparsestep.distributed.save wrote"
        return InputError(message(requirement, f"{type(error).__name__}: {error}"))


@contextmanager
def _quiet() -> Iterator[None]:
    """Without torch's warnings that there is one process, and of its own storages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield


def save(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Save a model and its optimizer; all ranks call it.

    This is ``torch.distributed.checkpoint`` underneath: a folder, to which each rank writes what
    it has. Any number of ranks loads it, one process too; and a model that was not sharded may be
    saved and loaded by one that is.

    Atomic: if it raises, it raises on all ranks, and an earlier checkpoint in the folder is intact.

    Args:
        path: a folder on a disk that all ranks share.
        model: sharded or not; within ``DistributedDataParallel`` or not. Its vocabularies are saved
            with it.
        optimizer: of its parameters. Options in its param groups must be numbers, strings, dtypes,
            tensors or ``None``, or lists, tuples and dicts of these.

    Raises:
        InputError: ranks do not share the disk, or an option is of another kind.
        OSError: on all ranks, if a rank cannot write.

    Example:
        >>> import tempfile, sparsestep
        >>> model = nn.EmbeddingBag(10, 4)
        >>> plan = sparsestep.distributed.shard(model, plan="rows")
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     save(path, model, optimizer)
        ...     load(path, model, optimizer)
        ...     found = consolidate(path)
        >>> tuple(found["model"]["weight"].shape), list(found["optimizer"]["state"][0])
        ((10, 4), ['step', 'exp_avg', 'exp_avg_sq'])
        >>> nn.EmbeddingBag(10, 4).load_state_dict(found["model"])
        <All keys matched successfully>
    """
    check_model_and_optimizer("save", model, optimizer)
    folder, what = folder_of("save", path), Contents(model, optimizer)
    peers = what.peers()
    with peers.agreeing():
        content = Content(what.entries(), what.about().pack())
    write(content, folder, peers)


def async_save(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> Future[None]:
    """Save in the background, while training goes on; all ranks call it.

    Everything is copied first: that takes as much memory as the checkpoint has, and what is saved
    is of this moment, whatever the next steps do. The ranks write it by a process group of its own.
    Do not save to the same folder again before it has finished. If only some of the processes share
    the tables, it is written before this returns.

    Args:
        path: a folder on a disk that all ranks share.
        model: as for :func:`save`.
        optimizer: of its parameters.

    Returns:
        A future, whose ``result()`` waits until this rank has written its part, and raises what
        went wrong. A process that ends waits for it, too.

    Example:
        >>> import tempfile, sparsestep
        >>> model = nn.EmbeddingBag(10, 4)
        >>> optimizer = sparsestep.Adam(model.parameters())
        >>> with tempfile.TemporaryDirectory() as path:
        ...     saving = async_save(path, model, optimizer)
        ...     # train on
        ...     saving.result()
        ...     load(path, model, optimizer)
    """
    check_model_and_optimizer("async_save", model, optimizer)
    folder, what = folder_of("async_save", path), Contents(model, optimizer)
    peers = what.peers()
    with peers.agreeing():
        content = Content(what.entries(copy=True), what.about().pack())
    return write_in_background(content, folder, peers)


def load(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Load what :func:`save` has saved, with any number of ranks; all ranks call it.

    Where a vocabulary is loaded by another number of ranks, ids get new owners, and rows of its
    tables move with them, values and state. Owners that have too few rows give up the ids that they
    would evict first.

    All files are verified first: size and checksum. Loading executes no code from them.

    Args:
        path: the folder.
        model: with the same tables; sharded in whatever way, or not.
        optimizer: of its parameters, in the same groups. Its options become those of the
            checkpoint, but for masks.

    Raises:
        InputError: on all ranks, if the checkpoint does not fit, a file is missing or damaged, or
            a vocabulary with ``evict=None`` has too few rows on a rank; nothing has changed.

    Example:
        >>> import tempfile, torch, sparsestep
        >>> def new(vocabulary, table):
        ...     optimizer = sparsestep.Adam(table.parameters())
        ...     vocabulary.attach(table, optimizer)
        ...     return nn.ModuleDict({"ids": vocabulary, "table": table}), optimizer
        >>> model, optimizer = new(sparsestep.nn.Vocabulary(100), nn.Embedding(100, 4))
        >>> rows = model["ids"](torch.tensor([10**18, -7]))
        >>> table = nn.Embedding(100, 4)
        >>> plan = sparsestep.distributed.shard(table, plan="rows")  # here of one process
        >>> sharded, other = new(sparsestep.distributed.Vocabulary(table), table)
        >>> with tempfile.TemporaryDirectory() as path:
        ...     save(path, model, optimizer)
        ...     load(path, sharded, other)
        >>> sharded["ids"].as_dict()
        {1000000000000000000: 1, -7: 2}
    """
    check_model_and_optimizer("load", model, optimizer)
    folder, what = folder_of("load", path), Contents(model, optimizer)
    peers = what.peers()
    checkpoint = Checkpoint.open(folder, peers)
    with peers.agreeing(), checkpoint.refusing():
        about = About.unpack(checkpoint.manifest.about)
        stored = _stored(checkpoint.manifest, about)
        own, layouts = what.own(), about.vocabularies
        what.check(own, stored)
        groups = what.loaded_groups(about.groups)
        ids = what.restoring(layouts, stored)
    with checkpoint.refusing():
        for vocabulary in ids:
            checkpoint.read(vocabulary.entries)
        moves = what.settle(ids, layouts, stored)
    with peers.agreeing(), checkpoint.refusing():
        chosen = {}
        for key, each in stored.items():
            kind, name, _ = parted(key)
            if name in (own if kind == "model" else what.params):
                chosen[key] = each
        wanted = targets(about, chosen, moves, what.tables)
    with checkpoint.refusing():
        checkpoint.read({key: found.target for key, found in wanted.items()})
        read = {key: found.finish() for key, found in wanted.items()}
        what.take(own, read, groups, ids)


def consolidate(path: StrPath) -> dict[str, Any]:
    """A checkpoint as an ordinary dict, read by one process.

    Args:
        path: the folder that :func:`save` wrote. It is verified as by :func:`load`.

    Returns:
        ``"model"``, which the model loads as it was before ``shard``, with an ordinary
        ``sparsestep.nn.Vocabulary`` where it had one that ranks share; and ``"optimizer"``, which
        this library's optimizers load, and torch's of the same name.
    """
    checkpoint = Checkpoint.open(folder_of("consolidate", path), Peers(None))
    with checkpoint.refusing():
        return _consolidated(checkpoint)


def _consolidated(checkpoint: Checkpoint) -> dict[str, Any]:
    about = About.unpack(checkpoint.manifest.about)
    stored = _stored(checkpoint.manifest, about)
    ids, moves = list[Restoring](), dict[str, Move]()
    for name, layout in about.vocabularies.items():
        options = Options(layout.rows, layout.shared, layout.admit, None)
        each = Restoring(name, Wire(None), options, layout, stored, alone)
        checkpoint.read(each.entries)
        each.settle({name: stored[f"model.{name}"] for name in layout.tables}, {}, layout.tables)
        moves.update(each.moves)
        ids.append(each)
    known = {key for each in ids for key in each.entries}
    others = {key: each for key, each in stored.items() if key not in known}
    wanted = targets(about, others, moves, {})
    checkpoint.read({key: each.target for key, each in wanted.items()})
    groups, indices = [], dict[str, int]()
    for group in about.groups:
        for name in group["params"]:
            indices.setdefault(name, len(indices))
        groups.append({**group, "params": [indices[name] for name in group["params"]]})
    found: dict[str, Any] = {}
    state: dict[int, dict[str, Tensor]] = {}
    for key, target in wanted.items():
        kind, name, entry = parted(key)
        if kind == "model":
            found[name] = target.finish()
        else:
            state.setdefault(indices[name], {})[entry] = target.finish()
    for each in ids:
        found.update(each.state_dict())
    return {"model": found, "optimizer": {"state": state, "param_groups": groups}}


def _stored(manifest: Manifest, about: About) -> dict[str, Stored]:
    """The tensors of a checkpoint."""
    found = {}
    for key, each in manifest.entries.items():
        rows, lanes = about.tables.get(parted(key)[1], (0, 0))
        found[key] = Stored(each.shape, each.dtype, rows, lanes)
    return found
