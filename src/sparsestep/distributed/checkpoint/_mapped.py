"""Tables in files: each rank writes the rows that changed, to a folder of its own.

The manifests of these folders are a part of ``sparsestep.json``, so a checkpoint counts for all
ranks or for none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsestep._torch import local_slices
from sparsestep.distributed._handshake import Peers
from sparsestep.distributed.checkpoint._manifest import NAME, damaged
from sparsestep.errors import memory_errors
from sparsestep.memory import formats
from sparsestep.memory.mapped_file import postponed_clearing
from sparsestep.nn.grow import do_nothing
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import journal
from sparsestep.storage.checkpoint import MappedState, Replacements, stage, write
from sparsestep.storage.journal import Manifest

MAPPED = "mapped"  # in what ``sparsestep.json`` says about tensors
_NO_REST: dict[str, Any] = {
    "model": {},
    "optimizer": {"state": {}, "param_groups": []},
    "extra": None,
}


def folder_of(folder: Path, rank: int, world_size: int) -> Path:
    return folder / f"rows-of-{rank}-of-{world_size}"


def pack(manifest: Manifest | None) -> Any:
    """Encode as JSON; ``None``: this rank has no tables in files."""
    return None if manifest is None else formats.loads(formats.dumps(vars(manifest)))


class MappedSave:
    """This rank's part of a save: it counts once ``sparsestep.json`` names it."""

    def __init__(self, folder: Path, peers: Peers, earlier: MappedCheckpoint) -> None:
        self._folder = folder_of(folder, peers.rank, peers.world_size)
        is_alike = len(earlier.manifests) == peers.world_size
        self._before = earlier.manifests[peers.rank] if is_alike else None
        self._left = [] if is_alike else earlier.folders[peers.rank :: peers.world_size]
        self._note = do_nothing
        self.manifest: Manifest | None = None

    def write(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        what = MappedState(model, optimizer)
        if what.files:
            with memory_errors():
                self._folder.mkdir(parents=True, exist_ok=True)
                self.manifest = write(self._folder, self._before, what, _NO_REST)
                self._note = what.prepare_note(self.manifest)

    def finish(self) -> None:
        """The checkpoint is complete: the next one needs the rows that change from now on."""
        self._note()
        with suppress(Exception):  # they only take space
            journal.remove_others(self._folder, self.manifest)
            for folder in self._left:  # of another number of ranks
                journal.remove_others(folder, None)

    def discard(self) -> None:
        journal.remove_others(self._folder, self._before)


class StoredRows(NamedTuple):
    """Where the rows of a tensor are: a folder for each column, with its manifest and table."""

    columns: list[tuple[Path, Manifest, int]]
    is_columns: bool  # False: there is one
    key: str  # in the rows
    shape: torch.Size
    dtype: torch.dtype


class MappedCheckpoint:
    """The tables in files of a checkpoint."""

    def __init__(self, folder: Path, about: Any) -> None:
        self.manifests: list[Manifest | None] = []
        try:
            for each in about.get(MAPPED) or ():
                self.manifests.append(None if each is None else formats.read(Manifest, each))
        except (AttributeError, TypeError, ValueError) as error:
            raise damaged(folder / NAME, str(error)) from None
        world_size = len(self.manifests)
        self.folders: list[Path] = [folder_of(folder, n, world_size) for n in range(world_size)]

    def verify(self, peers: Peers) -> None:
        """Compare files with their checksums: each file on one of the ranks."""
        for folder, manifest in list(zip(self.folders, self.manifests, strict=True))[
            peers.rank :: peers.world_size
        ]:
            if manifest is not None:
                journal.verify(folder, manifest)

    def places(
        self, params: Sequence[str], tables: Mapping[str, tuple[int, int]]
    ) -> dict[str, StoredRows]:
        """The place of each tensor by its key, where parameters have these names, in order."""
        found: dict[str, StoredRows] = {}
        for folder, manifest in zip(self.folders, self.manifests, strict=True):
            for index, table in enumerate([] if manifest is None else manifest.tables):
                assert manifest is not None
                fields = table.layout.header.layout.fields
                for name, key in table.layout.tensors.items():
                    stored, param = _stored_key(name, params)
                    shape = torch.Size([table.layout.shape[0], *fields[key].shape])
                    is_column = tables.get(param, (0, 0))[1] > 0
                    if is_column:
                        shape = torch.Size([shape[0], len(self.folders), *shape[1:]])
                    place = StoredRows([], is_column, key, shape, fields[key].dtype)
                    place = found.setdefault(stored, place)
                    if is_column or not place.columns:
                        place.columns.append((folder, manifest, index))
        for place in found.values():
            if place.is_columns and len(place.columns) != len(self.folders):
                raise ValueError("a rank without its rows")
        return found


def _stored_key(name: str, params: Sequence[str]) -> tuple[str, str]:
    """The key of a tensor in a checkpoint of ranks, and its parameter."""
    kind, _, rest = name.partition(".")
    if kind == "model":
        return name, rest
    index, _, entry = rest.partition(".")
    param = params[int(index)]
    return (f"state.{param}.{entry}", param) if entry else (f"model.{param}", param)


def read(place: StoredRows, target: Any) -> None:
    """Read the rows of a tensor, or this rank's part of them."""
    is_part = hasattr(target, "to_local")
    local: Tensor = target.to_local() if is_part else target
    rows, *others = local_slices(target) if is_part else [slice(0, n) for n in target.shape]
    if not place.is_columns:
        local.copy_(journal.read_rows(*place.columns[0], place.key, rows))
        return
    for number, column in enumerate(place.columns[others[0]]):
        local[:, number] = journal.read_rows(*column, place.key, rows)


class MappedLoad:
    """The files that each rank has saved, restored next to those that it has now."""

    def __init__(self, stack: ExitStack, peers: Peers) -> None:
        self._peers, self._note = peers, do_nothing
        self._stack = stack
        self._replacements = stack.enter_context(Replacements())
        self._undo = stack.enter_context(ExitStack())
        self.tensors: dict[str, Tensor] = {}  # in the restored files, by their keys

    def prepare(
        self,
        checkpoint: MappedCheckpoint,
        model: nn.Module,
        optimizer: RuleOptimizer,
        params: Sequence[str],
    ) -> None:
        """Restore files if every rank has those that it has saved; all ranks call it."""
        peers, is_alike = self._peers, False
        if len(checkpoint.manifests) != peers.world_size or not any(checkpoint.manifests):
            return
        manifest = checkpoint.manifests[peers.rank]
        with peers.agreeing():
            self._stack.enter_context(postponed_clearing(optimizer.params()))
            what = MappedState(model, optimizer)
            tables = [] if manifest is None else manifest.tables
            is_alike = {each.layout.name for each in tables} == set(what.files) and all(
                manifest is not None and what.is_laid_out_alike(manifest, each.layout.name)
                for each in tables
            )
        if not all(peers.gather(is_alike)):
            return
        with peers.agreeing(), memory_errors():
            if manifest is not None:
                folder = checkpoint.folders[peers.rank]
                stage(folder, manifest, what, self._replacements)
                self._note = what.prepare_note(manifest)
                self._replacements.prepare()
            for name, (file, key) in what.tensors.items():
                self.tensors[_stored_key(name, params)[0]] = file.tensor(key)

    def switch(self) -> None:
        """Take the restored files; undone with the stack, unless ``finish`` is called."""
        self._replacements.switch(self._undo)
        self._replacements.rename(self._undo)

    def finish(self) -> None:
        self._undo.pop_all()
        self._replacements.finish()
        self._note()
