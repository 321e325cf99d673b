"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from weakref import WeakValueDictionary

import torch.distributed as dist
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import Peers, as_documented
from sparsestep.distributed.checkpoint import _manifest as manifest
from sparsestep.distributed.checkpoint._manifest import METADATA, Chunk, Entry, ShardManifest, Sum
from sparsestep.distributed.checkpoint._mapped import (
    MAPPED,
    MappedCheckpoint,
    MappedLoad,
    MappedSave,
    StoredRows,
    pack,
)
from sparsestep.distributed.checkpoint._mapped import read as read_rows
from sparsestep.distributed.checkpoint._reshard import (
    ReadTarget,
    RowRemap,
    StoredTensor,
    VocabularyReader,
)
from sparsestep.distributed.checkpoint._state import (
    CheckpointState,
    TensorLayouts,
    optimizer_state_dict,
    peers_of,
    read_targets,
    split_key,
)
from sparsestep.distributed.collectives import Collectives, new_group
from sparsestep.errors import InputError, message
from sparsestep.memory.disk import FolderLock, checked_path
from sparsestep.nn.grow import do_nothing
from sparsestep.nn.id_table import Options
from sparsestep.optim.optimizer import RuleOptimizer, check_model_and_optimizer

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

StrPath: TypeAlias = str | os.PathLike[str]

# The latest ``async_save`` to each folder; a later save waits for it. Its thread keeps it alive.
_background_saves: WeakValueDictionary[str, Future[None]] = WeakValueDictionary()


def _agreed_arguments(
    who: str, path: StrPath, model: nn.Module, optimizer: RuleOptimizer
) -> tuple[Path, CheckpointState, Peers]:
    """Check the arguments of a call; raises on all ranks if those of one are invalid."""
    given: Any = model
    peers = peers_of(given if isinstance(given, nn.Module) else nn.Module())
    with peers.agreeing():
        check_model_and_optimizer(who, model, optimizer)
        return checked_path(who, path), CheckpointState(model, optimizer, peers), peers


# Saving


def _lock_folder(folder: Path, peers: Peers) -> ExitStack:
    """Create a folder, and lock it until the returned stack is closed; all ranks call it."""
    with ExitStack() as stack:
        with peers.agreeing():
            if peers.rank == 0:
                if not folder.exists():
                    folder.mkdir(parents=True, exist_ok=True)
                    stack.callback(_remove_empty, folder)
                if not stack.enter_context(FolderLock(folder)):
                    requirement = f"save: {str(folder)!r} can be written by one program at a time"
                    raise InputError(message(requirement, "another that has not finished"))
        return stack.pop_all()


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # it has files
        folder.rmdir()


def _dcp_save(
    entries: dict[str, Any],
    about: Any,
    folder: Path,
    peers: Peers,
    undo: Callable[[], None] = do_nothing,
) -> None:
    """Write the tensors of this rank, and ``about``, the same on all ranks; all ranks call it.

    If it raises, it raises on all ranks, and an earlier checkpoint in the folder is intact. Then
    ``undo`` removes what else belongs to this one.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    from sparsestep.distributed.checkpoint._files import Writer

    writer = Writer(folder)

    def discard() -> None:
        writer.discard()
        undo()

    try:
        with ignore_dcp_warnings():
            metadata = save(entries, storage_writer=writer, **peers.dcp_options)
    except CheckpointException as failure:
        discard()
        raise peers.error_of(failure.failures) from None
    except BaseException:
        discard()
        raise
    save_id = metadata.storage_meta.save_id
    sums = peers.gather(writer.files.sums)
    with peers.agreeing(undo=discard):
        _check_shared_disk(folder, save_id, peers, sums)
    error: BaseException | None = None
    if peers.rank == 0:
        try:
            files = {name: each for some in sums for name, each in some.items()}
            files[METADATA] = files.pop(manifest.pending_name(save_id))
            writer.publish(ShardManifest(save_id, files, _manifest_entries(metadata), about))
        except BaseException as raised:
            error = as_documented(raised)
    peers.agree(None if writer.is_published else error, undo=discard)
    if error is not None:
        raise error


def _check_shared_disk(
    folder: Path, save_id: str, peers: Peers, sums: list[dict[str, Sum]]
) -> None:
    """Refuse a disk on which a rank does not see rank 0's files, or rank 0 another's."""
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


def _manifest_entries(metadata: Metadata) -> dict[str, Entry]:
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


# Loading


class Checkpoint(NamedTuple):
    """A checkpoint whose files are unchanged since it was saved."""

    folder: Path
    manifest: ShardManifest
    peers: Peers
    mapped: MappedCheckpoint
    places: dict[str, StoredRows]  # of tensors in files, by key

    @staticmethod
    def open(folder: Path, peers: Peers) -> Checkpoint:
        """Read the manifest and verify all files; all ranks call it."""
        with peers.agreeing():
            found = manifest.read(folder)
        ids = peers.gather(found.id)
        with peers.agreeing():
            if len(set(ids)) > 1:
                requirement = f"load: {str(folder)!r} must be the same checkpoint for all ranks"
                raise InputError(message(requirement, f"{len(set(ids))} different ones"))
            # Each checksum is compared by one of the ranks.
            manifest.verify(folder, found, sorted(found.files)[peers.rank :: peers.world_size])
            mapped = MappedCheckpoint(folder, found.about)
            mapped.verify(peers)
        return Checkpoint(folder, found, peers, mapped, {})

    def stored_tensors(self, layouts: TensorLayouts) -> dict[str, StoredTensor]:
        """All tensors; from then on, they can be read."""
        self.places.update(self.mapped.places(layouts.params(), layouts.tables))
        found = {}
        entries: dict[str, Entry | StoredRows] = {**self.manifest.entries, **self.places}
        for key, each in entries.items():
            name = split_key(key)[1]
            rows, num_columns = layouts.tables.get(name, (0, 0))
            found[key] = StoredTensor(each.shape, each.dtype, rows, num_columns)
            if name in layouts.tables:
                found[key].check()
        return found

    def read(self, targets: dict[str, Any]) -> None:
        """Read into tensors; all ranks call it, and all raise if one does."""
        from torch.distributed.checkpoint.api import CheckpointException
        from torch.distributed.checkpoint.state_dict_loader import load

        from sparsestep.distributed.checkpoint._files import Reader

        with self.peers.agreeing():
            for key, target in targets.items():
                if key in self.places:
                    read_rows(self.places[key], target)
        targets = {key: each for key, each in targets.items() if key not in self.places}
        try:
            with ignore_dcp_warnings():
                load(targets, storage_reader=Reader(*self[:2]), **self.peers.dcp_options)
        except CheckpointException as failure:
            failures = {
                rank: (self._as_input_error(error), trace)
                for rank, (error, trace) in failure.failures.items()
            }
            raise self.peers.error_of(failures) from None

    def read_shards(self, targets: Mapping[str, ReadTarget]) -> dict[str, Tensor]:
        """Read the shards of this rank."""
        self.read({key: each.target for key, each in targets.items()})
        with self.peers.agreeing():
            found = {k: each.finish() for k, each in targets.items() if not each.is_collective}
        found |= {k: each.finish() for k, each in targets.items() if each.is_collective}
        return {key: found[key] for key in targets}

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Raise an ``InputError`` for content that ``save`` never writes."""
        try:
            yield
        except Exception as error:
            if self.peers.world_size > 1 and type(error) is RuntimeError:
                raise  # from the process group
            raise self._as_input_error(error) from None

    def _as_input_error(self, error: BaseException) -> BaseException:
        error = as_documented(error)
        if isinstance(error, FileNotFoundError) and error.filename is not None:
            return manifest.damaged(Path(error.filename), "no such file")
        if isinstance(error, InputError | MemoryError | OSError | KeyboardInterrupt):
            return error
        requirement = f"load: {str(self.folder)!r} must be what sparsestep.distributed.save wrote"
        return InputError(message(requirement, f"{type(error).__name__}: {error}"))


@contextmanager
def ignore_dcp_warnings() -> Iterator[None]:
    """Ignore torch's warnings of a single process, and of its own storages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        warnings.filterwarnings("ignore", "TypedStorage is deprecated", UserWarning)
        yield


def save(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Save a model and its optimizer; all ranks call it.

    A checkpoint is a folder of ``torch.distributed.checkpoint``, to which each rank writes its
    shards. Any number of ranks can load it, or a single process. A sharded model can load the
    checkpoint of one that is not sharded, and vice versa.

    Atomic: if it raises, it raises on all ranks, and an earlier checkpoint in the folder is intact.

    Args:
        path: a folder on a disk that all ranks share.
        model: the model, with its vocabularies; may be in ``DistributedDataParallel``.
        optimizer: its optimizer. Options of param groups must be numbers, strings, dtypes, tensors
            or ``None``, or lists, tuples and dicts of these.

    Raises:
        InputError: ranks do not share the disk, an option is of another kind, or another program is
            saving to the folder.
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
    folder, state, peers = _agreed_arguments("save", path, model, optimizer)
    with peers.agreeing():
        if (saving := _background_saves.get(os.path.realpath(folder))) is not None:
            wait([saving])
    with _lock_folder(folder, peers):
        earlier = MappedCheckpoint(folder, {})
        with suppress(InputError, OSError):  # there is none that this one could continue
            earlier = MappedCheckpoint(folder, manifest.read(folder).about)
        files = MappedSave(folder, peers, earlier)
        with peers.agreeing(undo=files.discard):
            files.write(state.model, optimizer)
            entries, about = state.entries(has_files=True), state.layouts().pack()
        about[MAPPED] = peers.gather(pack(files.manifest))
        _dcp_save(entries, about, folder, peers, files.discard)
        uninterrupted(files.finish)


def async_save(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> Future[None]:
    """Save in the background, while training continues; all ranks call it.

    Everything is copied first, which takes as much memory as the checkpoint: later steps do not
    change what is saved. Ranks write it in a process group of its own. A later save to the same
    folder waits for it. If only some of the processes share the tables, it is written before this
    returns.

    Args:
        path: a folder on a disk that all ranks share.
        model: as for :func:`save`.
        optimizer: its optimizer.

    Returns:
        A future. Its ``result()`` waits until this rank has written its part, and raises if saving
        failed. A process that ends waits for it, too.

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
    folder, state, peers = _agreed_arguments("async_save", path, model, optimizer)
    with peers.agreeing():
        entries, about = state.entries(copy=True), state.layouts().pack()
    # Torch cannot make another group of some ranks: it derives the name from the number of groups
    # that a process belongs to, which differs, and they would wait for each other forever.
    is_part = peers.group is not None and peers.world_size < dist.get_world_size()
    group = None
    if peers.group is not None and not is_part:  # the thread and training must not share a group
        group = new_group("gloo")
        peers = Peers(group)
    key = os.path.realpath(folder)
    earlier = _background_saves.get(key)

    def write() -> None:
        try:
            if earlier is not None:
                wait([earlier])
            with _lock_folder(folder, peers):
                _dcp_save(entries, about, folder, peers)
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    writer = ThreadPoolExecutor(1, "sparsestep-save")
    saving = _background_saves[key] = writer.submit(write)
    writer.shutdown(wait=is_part)
    return saving


def load(path: StrPath, model: nn.Module, optimizer: RuleOptimizer) -> None:
    """Load a checkpoint of :func:`save`, with any number of ranks; all ranks call it.

    If another number of ranks loads a vocabulary, ids get new owners, and the rows and state of
    its tables move with them. An owner with too few rows drops the ids that it would evict first.

    All files are verified first: size and checksum. Loading executes no code from them.

    Args:
        path: the folder.
        model: a model with the same tables, sharded in any way, or not.
        optimizer: its optimizer, with the same param groups. All options but masks are loaded.

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
    folder, state, peers = _agreed_arguments("load", path, model, optimizer)
    checkpoint = Checkpoint.open(folder, peers)
    with peers.agreeing(), checkpoint.refusing():
        layouts = TensorLayouts.unpack(checkpoint.manifest.about)
        stored = checkpoint.stored_tensors(layouts)
        tensors, vocabularies = state.model_tensors(), layouts.vocabularies
        state.check_matches(tensors, stored)
        state.check_groups(layouts.groups)
        readers = state.vocabulary_readers(vocabularies, stored)
    with checkpoint.refusing():
        for reader in readers:
            checkpoint.read(reader.entries)
        remaps = state.reassign_rows(readers, vocabularies, stored)
    with ExitStack() as stack:
        files = MappedLoad(stack, peers)
        if not remaps:
            with checkpoint.refusing():
                files.prepare(checkpoint.mapped, state.model, optimizer, layouts.params())
        with peers.agreeing(), checkpoint.refusing():
            chosen = {}
            for key, each in stored.items():
                kind, name, _ = split_key(key)
                is_known = name in (tensors if kind == "model" else state.params)
                if is_known and key not in files.tensors:
                    chosen[key] = each
            targets = read_targets(layouts, chosen, remaps, state.tables)
        with checkpoint.refusing():
            read = checkpoint.read_shards(targets)
            state.commit(tensors, read, layouts.groups, readers, files)


def consolidate(path: StrPath) -> dict[str, Any]:
    """Read a checkpoint as an ordinary dict, in one process.

    Args:
        path: the folder that :func:`save` wrote. It is verified as by :func:`load`.

    Returns:
        ``"model"``, the state dict of the model before ``shard``, with ordinary
        ``sparsestep.nn.Vocabulary`` in place of shared ones; and ``"optimizer"``, a state dict for
        this library's optimizers, and for torch's of the same name.
    """
    checkpoint = Checkpoint.open(checked_path("consolidate", path), Peers(None))
    with checkpoint.refusing():
        layouts = TensorLayouts.unpack(checkpoint.manifest.about)
        others = checkpoint.stored_tensors(layouts)
        remaps: dict[str, RowRemap] = {}
        model: dict[str, Tensor] = {}
        for name, layout in layouts.vocabularies.items():
            options = Options(layout.rows, layout.shared, layout.admit, None)
            each = VocabularyReader(name, Collectives(None), options, layout, others)
            checkpoint.read(each.entries)
            weights = {name: others[f"model.{name}"] for name in layout.tables}
            each.reassign(weights, {}, layout.tables)
            remaps.update(each.remaps)
            model.update(each.state_dict())
            others = {key: other for key, other in others.items() if key not in each.entries}
        read = checkpoint.read_shards(read_targets(layouts, others, remaps, {}))
        for key, tensor in read.items():
            kind, name, _ = split_key(key)
            if kind == "model":
                model[name] = tensor
        return {"model": model, "optimizer": optimizer_state_dict(layouts.groups, read)}
