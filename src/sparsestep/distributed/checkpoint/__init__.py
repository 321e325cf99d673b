"""Checkpoints of sharded models, by ``torch.distributed.checkpoint``."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from sparsestep._process import uninterrupted
from sparsestep.distributed._handshake import Peers, as_documented
from sparsestep.distributed._table import ShardedTable
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
    ModelVocabulary,
    ReadTarget,
    RowRemap,
    StoredTensor,
    VocabularyLayout,
    VocabularyReader,
    find_vocabularies,
    read_target,
    to_stored,
)
from sparsestep.distributed.collectives import Caught, Collectives, new_group
from sparsestep.distributed.shard import sharded_table
from sparsestep.engines.base import finish
from sparsestep.errors import InputError, message
from sparsestep.memory.mapped_file import about_to_write, file_of, written
from sparsestep.nn.grow import do_nothing
from sparsestep.nn.id_table import Options
from sparsestep.optim.optimizer import RuleOptimizer, check_model_and_optimizer
from sparsestep.optim.state import initial_value
from sparsestep.optim.state_dict import unpacked_state
from sparsestep.storage.journal import check_folder

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import Metadata

StrPath: TypeAlias = str | os.PathLike[str]


# A model and its optimizer, by the names of the parameters


class TensorLayouts(NamedTuple):
    """How the tensors of a checkpoint were laid out."""

    tables: dict[str, tuple[int, int]]  # rows, and ranks that they were assigned to, or 0
    groups: list[dict[str, Any]]  # param groups, with names for parameters
    vocabularies: dict[str, VocabularyLayout]
    initial: dict[str, dict[str, float]]  # state of tables of vocabularies

    def pack(self) -> dict[str, Any]:
        """Encode as JSON."""
        return {**self._asdict(), "groups": [manifest.pack(group) for group in self.groups]}

    def params(self) -> list[str]:
        """The names of all parameters of the optimizer, in their order."""
        return list(dict.fromkeys(name for group in self.groups for name in group["params"]))

    @staticmethod
    def unpack(found: Mapping[str, Any]) -> TensorLayouts:
        """Decode; raises if :meth:`pack` has not encoded it."""
        layouts = {}
        count = manifest.count
        for name, (rows, num_columns, shared, admit, tables) in found["vocabularies"].items():
            paddings = {key: None if row is None else count(row) for key, row in tables.items()}
            sizes = count(rows), max(1, count(num_columns)), count(shared), count(admit)
            layouts[name] = VocabularyLayout(*sizes, paddings)
        groups = [manifest.unpack(group) for group in found["groups"]]
        for group in groups:
            group["params"] = [str(name) for name in group["params"]]
        return TensorLayouts(
            tables={name: (count(a), count(b)) for name, (a, b) in found["tables"].items()},
            groups=groups,
            vocabularies=layouts,
            initial={
                name: {key: float(value) for key, value in each.items()}
                for name, each in found["initial"].items()
            },
        )


class _CheckpointState:
    """A model and its optimizer, by the names of the parameters."""

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        if isinstance(model, DistributedDataParallel):
            model = model.module
        self.model: nn.Module = model
        self._optimizer = optimizer
        self.vocabularies: dict[str, ModelVocabulary] = find_vocabularies(self.model)
        sharded = {
            id(table.weight): table
            for module in self.model.modules()
            if (table := sharded_table(module)) is not None
        }
        self.tables: dict[str, ShardedTable] = {}  # the sharded ones, by each of their names
        names: dict[int, str] = {}
        self._all_names: dict[int, list[str]] = {}
        for name, param in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(param), name)
            self._all_names.setdefault(id(param), []).append(name)
            if id(param) in sharded:
                self.tables[name] = sharded[id(param)]
        self.params: dict[str, Tensor] = {}  # of the optimizer
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in names:
                    requirement = "the parameters of the optimizer must be those of the model"
                    raise InputError(
                        message(requirement, f"another, of shape {tuple(param.shape)}")
                    )
                self.params[names[id(param)]] = param
        self._names = names

    def entries(self, *, copy: bool = False, has_files: bool = False) -> dict[str, Any]:
        """The tensors that this rank stores, by key; copied if training continues meanwhile.

        With ``has_files``, those in files are stored otherwise.
        """
        self._optimizer.catch_up()
        self._optimizer.complete_state()
        found: dict[str, Any] = {}
        for name, tensor in self.model_tensors().items():
            if not has_files or file_of(tensor) is None:
                found[f"model.{name}"] = to_stored(self.tables.get(name), tensor, copy=copy)
        for name, param in self.params.items():
            table = self.tables.get(name)
            if table is None or table.has_rows:
                for key, value in (unpacked_state(self._optimizer, param) or {}).items():
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    if has_files and file_of(tensor) is not None:
                        continue
                    found[f"state.{name}.{key}"] = to_stored(table, tensor, copy=copy)
        found = {key: value for key, value in found.items() if value is not None}
        for vocabulary in self.vocabularies.values():
            found.update(vocabulary.entries())
        return found

    def layouts(self) -> TensorLayouts:
        vocabularies = {
            name: each.layout(self._tables_of(each)) for name, each in self.vocabularies.items()
        }
        tables = {
            name: (table.rows, table.row_stride if table.row_stride > 1 else 0)
            for name, table in self.tables.items()
        }
        return TensorLayouts(tables, self.named_groups(), vocabularies, self._initial_state())

    def model_tensors(self) -> dict[str, Tensor]:
        """The state dict of the model, but for its vocabularies."""
        others = {key for vocabulary in self.vocabularies.values() for key in vocabulary.keys}
        return {key: each for key, each in self.model.state_dict().items() if key not in others}

    def _tables_of(self, vocabulary: ModelVocabulary) -> dict[str, int | None]:
        """The tables of a vocabulary by all their names, with their padding rows."""
        found: dict[str, int | None] = {}
        for each in vocabulary.local.attached:
            for name in self._all_names.get(id(each.table.weight), []):
                table = self.tables.get(name)
                found[name] = each.table.padding_idx if table is None else table.padding_idx
        return found

    def _initial_state(self) -> dict[str, dict[str, float]]:
        """Initial values of the state of tables whose rows are reused."""
        given = {
            name
            for vocabulary in self.vocabularies.values()
            for name in self._tables_of(vocabulary)
        }
        found: dict[str, dict[str, float]] = {}
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                name, state = self._names[id(param)], self._optimizer.state.get(param)
                if name not in given:
                    continue
                rule = self._optimizer.stored_rule_for(group, param, state)
                found[name] = {spec.name: initial_value(spec, group) for spec in rule.state}
        return found

    def vocabulary_readers(
        self, layouts: dict[str, VocabularyLayout], stored: dict[str, StoredTensor]
    ) -> list[VocabularyReader]:
        """Readers of all vocabularies; raises if the checkpoint does not fit them."""
        found = []
        for name, vocabulary in self.vocabularies.items():
            if name not in layouts:
                requirement = "load: the checkpoint must have all vocabularies of the model"
                raise InputError(message(requirement, f"none for {name!r}"))
            layout = layouts[name]
            vocabulary.check(layout)
            options = vocabulary.local.options
            each = VocabularyReader(name, vocabulary.collectives, options, layout, stored)
            names = self._tables_of(vocabulary)
            if each.is_resharded and any(
                id(a.table.weight) not in self._names for a in vocabulary.local.attached
            ):
                requirement = (
                    f"load: the tables of {name!r} must be in the model, since their rows move"
                )
                raise InputError(message(requirement, f"only {', '.join(names) or 'none'}"))
            found.append(each)
        return found

    def reassign_rows(
        self,
        readers: list[VocabularyReader],
        layouts: dict[str, VocabularyLayout],
        stored: dict[str, StoredTensor],
    ) -> dict[str, RowRemap]:
        """Assign ids to their new owners, and say how rows of tables follow; all ranks call it."""
        remaps: dict[str, RowRemap] = {}
        for each in readers:
            vocabulary = self.vocabularies[each.name]
            paddings = {**layouts[each.name].tables, **self._tables_of(vocabulary)}
            inits = {
                name: attached.init
                for attached in vocabulary.local.attached
                for name in self._all_names.get(id(attached.table.weight), [])
            }
            weights = {
                name: stored[f"model.{name}"] for name in paddings if f"model.{name}" in stored
            }
            each.reassign(weights, inits, paddings)
            remaps.update(each.remaps)
        return remaps

    def peers(self) -> Peers:
        """The ranks that save and load together: the ranks that share tables, else all."""
        for table in self.tables.values():
            return Peers(table.collectives.group)
        is_initialized = dist.is_available() and dist.is_initialized()
        return Peers(dist.group.WORLD if is_initialized else None)

    def named_groups(self) -> list[dict[str, Any]]:
        """The param groups with names for parameters, and without masks."""
        return [
            {
                **{key: value for key, value in group.items() if key != "mask"},
                "params": [self._names[id(param)] for param in group["params"]],
            }
            for group in self._optimizer.param_groups
        ]

    def check_matches(self, tensors: dict[str, Any], stored: dict[str, StoredTensor]) -> None:
        for name, tensor in tensors.items():
            each, table = stored.get(f"model.{name}"), self.tables.get(name)
            if each is None:
                requirement = (
                    "load: the checkpoint must have all parameters and buffers of the model"
                )
                raise InputError(message(requirement, f"none for {name!r}"))
            shape = tuple(tensor.shape) if table is None else (table.rows, table.dim)
            there = (each.rows, *each.shape[2:]) if each.has_columns else tuple(each.shape)
            if shape != there:
                requirement = f"load: {name!r} must have the shape of the checkpoint, {there}"
                raise InputError(message(requirement, shape))

    def check_groups(self, saved: list[dict[str, Any]]) -> None:
        mine, theirs = (
            [group["params"] for group in each] for each in (self.named_groups(), saved)
        )
        if mine != theirs:
            requirement = "load: the optimizer must have the groups of the checkpoint"
            raise InputError(message(requirement, f"{mine} instead of {theirs}"))

    def commit(
        self,
        tensors: dict[str, Tensor],
        read: dict[str, Tensor],
        groups: list[dict[str, Any]],
        readers: list[VocabularyReader],
        files: MappedLoad,
    ) -> None:
        """Replace everything by what was read, on all ranks or on none; all ranks call it."""
        peers, optimizer = self.peers(), self._optimizer
        ranks = next((table.collectives for table in self.tables.values()), Collectives(None))
        with peers.agreeing():
            found = _state_dict(groups, {**read, **files.tensors})
            values = [
                (tensor, read[f"model.{name}"].to(tensor.dtype))
                for name, tensor in tensors.items()
                if f"model.{name}" in read
            ]
            for tensor, _ in values:
                about_to_write(tensor, (), None)
            restored = [
                self.vocabularies[each.name].local.prepare_restore(*each.found)
                for each in readers
                if each.found is not None
            ]

        def commit_together() -> None:
            before = optimizer.state, optimizer.param_groups, dict(optimizer.store.layouts)
            with Caught() as caught, peers.agreeing():
                files.switch()
                optimizer.load_state_dict(found)
            # Agreeing takes memory: a rank may have run out of it after the others got its consent.
            try:
                ranks.check(caught.error)
            except BaseException:
                optimizer.state, optimizer.param_groups, optimizer.store.layouts = before
                raise
            with torch.no_grad():
                for tensor, value in values:
                    tensor.copy_(value)
            written(tensor for tensor, _ in values)
            files.finish()
            finish(restored)

        # Once a rank has agreed, the others rely on it.
        uninterrupted(commit_together)


def _state_dict(groups: list[dict[str, Any]], read: dict[str, Tensor]) -> dict[str, Any]:
    """State dict of an optimizer, of param groups with names and tensors by key."""
    names = dict.fromkeys(name for group in groups for name in group["params"])
    indices = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Tensor]] = {}
    for key, tensor in read.items():
        kind, name, entry = split_key(key)
        if kind == "state":
            state.setdefault(indices[name], {})[entry] = tensor
    numbered = [{**group, "params": [indices[n] for n in group["params"]]} for group in groups]
    return {"state": state, "param_groups": numbered}


def split_key(key: str) -> tuple[str, str, str]:
    """``"model"`` or ``"state"``, the name of the parameter, and that of the state."""
    kind, _, name = key.partition(".")
    if kind == "model":
        return kind, name, ""
    name, _, entry = name.rpartition(".")
    return kind, name, entry


def _read_targets(
    layouts: TensorLayouts,
    stored: dict[str, StoredTensor],
    remaps: dict[str, RowRemap],
    tables: dict[str, ShardedTable],
) -> dict[str, ReadTarget]:
    found = {}
    for key, each in stored.items():
        kind, name, entry = split_key(key)
        table, remap = tables.get(name), remaps.get(name)
        if table is not None and not table.has_rows:
            continue
        if remap is not None and len(each.shape) > 0:
            initial = None if kind == "model" else layouts.initial.get(name, {}).get(entry, 0.0)
            found[key] = remap.read_target(table, each, initial)
        else:
            found[key] = read_target(table, each)
    return found


# Saving


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
    sums = peers.gather(writer.sums)
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


def _dcp_async_save(entries: Any, about: Any, folder: Path, peers: Peers) -> Future[None]:
    """Write copied tensors in a thread; all ranks call it.

    If these are only some of the ranks, they write before this returns. Torch cannot make another
    group of some ranks: it derives the name from the number of groups that a process belongs to,
    which differs, and they would wait for each other forever.
    """
    is_part = peers.group is not None and peers.world_size < dist.get_world_size()
    group = None
    if peers.group is not None and not is_part:  # the thread and training must not share a group
        group = new_group("gloo")
        peers = Peers(group)

    def write() -> None:
        try:
            _dcp_save(entries, about, folder, peers)
        finally:
            if group is not None:
                dist.destroy_process_group(group)

    writer = ThreadPoolExecutor(1, "sparsestep-save")
    saving = writer.submit(write)
    writer.shutdown(wait=is_part)
    return saving


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
    folder, state = check_folder("save", path), _CheckpointState(model, optimizer)
    peers = state.peers()
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
    change what is saved. Ranks write it in a process group of its own. Do not save to the same
    folder again before it has finished. If only some of the processes share the tables, it is
    written before this returns.

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
    return _dcp_async_save(*_collect("async_save", path, model, optimizer, copy=True))


def _collect(
    who: str, path: StrPath, model: nn.Module, optimizer: RuleOptimizer, *, copy: bool = False
) -> tuple[dict[str, Any], Any, Path, Peers]:
    check_model_and_optimizer(who, model, optimizer)
    folder, state = check_folder(who, path), _CheckpointState(model, optimizer)
    peers = state.peers()
    with peers.agreeing():
        return state.entries(copy=copy), state.layouts().pack(), folder, peers


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
    check_model_and_optimizer("load", model, optimizer)
    folder, state = check_folder("load", path), _CheckpointState(model, optimizer)
    peers = state.peers()
    checkpoint = Checkpoint.open(folder, peers)
    with peers.agreeing(), checkpoint.refusing():
        layouts = TensorLayouts.unpack(checkpoint.manifest.about)
        stored = stored_tensors(checkpoint, layouts)
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
            targets = _read_targets(layouts, chosen, remaps, state.tables)
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
    checkpoint = Checkpoint.open(check_folder("consolidate", path), Peers(None))
    with checkpoint.refusing():
        return _consolidated(checkpoint)


def _consolidated(checkpoint: Checkpoint) -> dict[str, Any]:
    layouts = TensorLayouts.unpack(checkpoint.manifest.about)
    stored = stored_tensors(checkpoint, layouts)
    readers, remaps = list[VocabularyReader](), dict[str, RowRemap]()
    for name, layout in layouts.vocabularies.items():
        options = Options(layout.rows, layout.shared, layout.admit, None)
        each = VocabularyReader(name, Collectives(None), options, layout, stored)
        checkpoint.read(each.entries)
        each.reassign({name: stored[f"model.{name}"] for name in layout.tables}, {}, layout.tables)
        remaps.update(each.remaps)
        readers.append(each)
    of_vocabularies = {key for each in readers for key in each.entries}
    others = {key: each for key, each in stored.items() if key not in of_vocabularies}
    read = checkpoint.read_shards(_read_targets(layouts, others, remaps, {}))
    model = {
        key.removeprefix("model."): each for key, each in read.items() if key.startswith("model.")
    }
    for each in readers:
        model.update(each.state_dict())
    return {"model": model, "optimizer": _state_dict(layouts.groups, read)}


def stored_tensors(checkpoint: Checkpoint, layouts: TensorLayouts) -> dict[str, StoredTensor]:
    """The tensors of a checkpoint."""
    params = layouts.params()
    checkpoint.places.update(checkpoint.mapped.places(params, layouts.tables))
    found = {}
    entries: dict[str, Entry | StoredRows] = {**checkpoint.manifest.entries, **checkpoint.places}
    for key, each in entries.items():
        name = split_key(key)[1]
        rows, num_columns = layouts.tables.get(name, (0, 0))
        found[key] = StoredTensor(each.shape, each.dtype, rows, num_columns)
        if name in layouts.tables:
            found[key].check()
    return found
