"""Checkpoints of models with tables in files: only the rows that changed since the last one."""

from __future__ import annotations

import copy
import errno
import io
import os
import sys
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep._torch import version_of
from sparsestep.errors import InputError, first_error, is_out_of_memory, memory_errors, message
from sparsestep.memory import disk, lazy
from sparsestep.memory.formats import TABLE, FileHeader, dtype_name
from sparsestep.memory.mapped_file import (
    MappedFile,
    copy_rows,
    file_of,
    open_file,
    postponed_clearing,
    temporary_path,
)
from sparsestep.optim.optimizer import RuleOptimizer, check_model_and_optimizer
from sparsestep.storage import journal
from sparsestep.storage.journal import Layout, Manifest, TableEntry, WrittenRows


class MappedTensor(NamedTuple):
    """A tensor in a file: the table of that file, or the state of this name in its rows."""

    file: MappedFile
    key: str


class _TableFiles(NamedTuple):
    """A table, and all files of it and its state, whose rows change together."""

    tensor: Tensor
    files: dict[str, MappedFile]


class MappedState:
    """The tensors of a model and its optimizer that lie in files, and everything else."""

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        optimizer.catch_up()
        optimizer.complete_state()
        self._model, self._optimizer = model, optimizer
        self._tables: dict[MappedFile, _TableFiles] = {}
        self.tensors: dict[str, MappedTensor] = {}  # every tensor in files, by name
        self.rest: dict[str, Any] = {"model": {}, "optimizer": optimizer.state_dict()}
        for name, value in model.state_dict().items():
            file = file_of(value)
            if file is None:
                self.rest["model"][name] = value
            else:
                self._add_table(f"model.{name}", value, file)
        self._add_state(self.rest["optimizer"])
        self.files: dict[str, MappedFile] = {  # by the name of their table
            name: file for table in self._tables.values() for name, file in table.files.items()
        }

    def _add_table(self, name: str, tensor: Tensor, file: MappedFile) -> None:
        if file not in self._tables:
            self._tables[file] = _TableFiles(tensor, {name: file})
            self.tensors[name] = MappedTensor(file, TABLE)

    def _add_state(self, saved: dict[str, Any]) -> None:
        """Move the state that lies in files from the state dict to the files of its table."""
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        params = dict(zip(indices, self._optimizer.params(), strict=True))
        for index, param in params.items():
            file = file_of(param)
            if file is not None:  # the model may not have it
                self._add_table(f"param.{index}", param, file)
        state: dict[Any, dict[str, Any]] = {index: {} for index in saved["state"]}
        for index, param_state in saved["state"].items():
            of = file_of(params.get(index))
            for key, value in param_state.items():
                file = file_of(value)
                name = f"optimizer.{index}.{key}"
                if file is None or of is None:
                    state[index][key] = value
                elif file is of:  # in the rows of its table
                    self.tensors[name] = MappedTensor(of, key)
                else:
                    self._tables[of].files[name] = file
                    self.tensors[name] = MappedTensor(file, TABLE)
        saved["state"] = state

    def is_saved_in(self, manifest: Manifest) -> bool:
        """Whether a checkpoint has all rows but the dirty ones."""
        known = {table.layout.name for table in manifest.tables}
        return known == self.files.keys() and all(
            file.saved_in == manifest.id for file in self.files.values()
        )

    def written_rows(self, manifest: Manifest) -> list[WrittenRows]:
        """Rows that were written since a checkpoint."""
        numbers = {table.layout.name: number for number, table in enumerate(manifest.tables)}
        parts = []
        for file, (tensor, files) in self._tables.items():
            assert file.dirty_rows is not None
            if file.was_modified(tensor):
                file.mark(None)
            rows = file.dirty_rows.nonzero().squeeze(1)
            if len(rows):
                saved = {numbers[name]: each for name, each in files.items()}
                parts.append(WrittenRows(rows, saved))
        return parts

    def write_bases(self, folder: Path, number: int) -> list[TableEntry]:
        """Copy the tables to a folder, as the bases of this and further checkpoints."""
        tables = []
        for index, (name, file) in enumerate(self.files.items()):
            base = journal.write_base(folder, f"base-{number:06}.{index}", file)
            tables.append(TableEntry(self._layout(name), base))
        return tables

    def _layout(self, name: str) -> Layout:
        file = self.files[name]
        inside = {
            each: place.key
            for each, place in self.tensors.items()
            if place.file is file and place.key != TABLE
        }
        shape, dtype, room, _ = file.header
        return Layout(name, tuple(shape), dtype, file.layout.row_bytes, room, inside)

    def prepare_note(self, manifest: Manifest) -> Callable[[], None]:
        """Prepare to record that all rows are saved; returns a function that cannot fail."""
        for file in self._tables:
            if file.dirty_rows is None:
                rows = torch.Size([file.rows.total])
                file.dirty_rows = lazy.zeros(rows, torch.bool, torch.device("cpu"))
                if file.is_being_written:  # which rows was not noted
                    file.mark(None)
        saved_in = [
            (file, manifest.id if self.is_laid_out_alike(manifest, name) else None)
            for name, file in self.files.items()
        ]

        def note() -> None:
            for file, (tensor, _) in self._tables.items():
                assert file.dirty_rows is not None
                if not file.is_being_written:
                    file.dirty_rows.zero_()
                file.version = version_of(tensor)
            for file, checkpoint in saved_in:
                file.saved_in = checkpoint

        return note

    def is_laid_out_alike(self, manifest: Manifest, name: str) -> bool:
        """Whether a file has the same layout here as in a checkpoint."""
        layouts = [table.layout for table in manifest.tables]
        return name in self.files and self._layout(name) in layouts

    def check(self, manifest: Manifest, rest: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model."""
        in_files = {n: _form_in_file(file.header, key) for n, (file, key) in self.tensors.items()}
        there = {
            name: _form_in_file(table.layout.header, key)
            for table in manifest.tables
            for name, key in table.layout.tensors.items()
        }
        if in_files != there:
            requirement = "load: model and optimizer must have the same tables in files as they had"
            raise InputError(message(requirement, f"{in_files} instead of {there}"))
        own, saved = self.rest["model"], rest["model"]
        # A module that has extra state may have had none when it was saved.
        missing = {name for name in own.keys() - saved.keys() if not name.endswith("_extra_state")}
        other = missing | (saved.keys() - own.keys())
        other |= {
            name for name in own.keys() & saved.keys() if _form(own[name]) != _form(saved[name])
        }
        if other:
            needed = "the checkpoint's parameters, buffers and shapes"
            got = f"differences in {', '.join(sorted(map(str, other)))}"
            raise InputError(message(f"load: the model must have {needed}", got))

    def prepare(self, rest: dict[str, Any]) -> Callable[[ExitStack], None]:
        """Prepare to load everything but the tables; returns a function that registers its undo."""
        for name, (file, key) in self.tensors.items():
            kind, _, entry = name.partition(".")
            if kind == "optimizer":
                index, _, of_state = entry.partition(".")
                param_state = rest["optimizer"]["state"].setdefault(int(index), {})
                param_state[of_state] = file.tensor(key)
        model, optimizer, live = self._model, self._optimizer, self.rest["model"]
        saved, attributes = copy.deepcopy(live), dict(vars(optimizer))

        def load(undo: ExitStack) -> None:
            undo.callback(vars(optimizer).update, attributes)
            optimizer.load_state_dict(rest["optimizer"])
            undo.callback(_restore, model, live, saved)
            try:
                model.load_state_dict(rest["model"], strict=False)
            except RuntimeError as error:
                if isinstance(error, InputError) or is_out_of_memory(error):
                    raise
                requirement = "load: the model must accept the checkpoint"
                raise InputError(message(requirement, f"an error: {error}")) from error

        return load


def _form_in_file(header: FileHeader, key: str) -> tuple[list[int], str]:
    """Shape and dtype of a tensor in a file."""
    field = header.layout.fields[key]
    return [header.shape[0], *field.shape], dtype_name(field.dtype)


def _form(value: Any) -> object:
    """Shape and layout, which must agree for a value to be loaded."""
    return (value.shape, value.layout) if isinstance(value, Tensor) else None


def _restore(model: nn.Module, live: dict[str, Any], saved: dict[str, Any]) -> None:
    """Undo a ``load_state_dict``, even if a module refuses to load once more."""
    try:
        model.load_state_dict(saved, strict=False)
    finally:
        for name, value in live.items():
            if isinstance(value, Tensor):
                value.copy_(saved[name])


# New content of mapped files, for all files or none


class Replacements(ExitStack):
    """New content for mapped files; a context manager that removes its temporary files.

    It is written to a temporary file next to each. Then tensors are switched to the new files, and
    last of all these take the names of the old ones. Until then, every change can be undone. A
    process that is killed leaves each file as it was or with its new content, and maybe temporary
    files, which the next one removes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.staged: dict[MappedFile, MappedFile] = {}  # new content, by the file that it replaces
        self._switches: list[_Change] = []
        self._renames: list[_Change] = []
        self.callback(self.staged.clear)

    def create(self, file: MappedFile, role: str) -> tuple[str, int]:
        """Create an empty temporary file next to a file; returns its path and descriptor."""
        file.lock()
        path = temporary_path(file.path, role)
        self.callback(disk.remove, path)
        disk.remove(path)
        made = self.enter_context(io.FileIO(path, "x+"))
        os.fchmod(made.fileno(), os.fstat(file.descriptor).st_mode & 0o777)
        return path, made.fileno()

    def stage(self, file: MappedFile, path: str) -> MappedFile:
        """Open a temporary file of the same layout as the new content of a file."""
        staged = self.staged[file] = _open_like(path, file.header)
        staged.lock()  # before it takes the place of the file
        return staged

    def stage_zeros(self, file: MappedFile) -> None:
        """Create new content of a file that is all zeros."""
        path, descriptor = self.create(file, "loading")
        disk.write(descriptor, file.header.encode(), 0)
        os.ftruncate(descriptor, file.header.file_bytes)
        self.stage(file, path)

    def prepare(self) -> None:
        """Write the new content to the disk, and keep the old one until this object is closed."""
        for file, staged in self.staged.items():
            staged.flush_to_disk()
            staged.evict()
            path, backup = os.path.realpath(file.path), temporary_path(file.path, "replaced")
            duplicate = uninterrupted(partial(_duplicate, file.descriptor))
            old = self.enter_context(duplicate).fileno()
            switch = partial(file.switch_to, staged.descriptor, staged.header, staged.reserved)
            switch_back = partial(file.switch_to, old, file.header, file.reserved)
            self._switches.append(_Change(switch, switch_back))
            # A file that was deleted, or replaced by another of its name, has no name to take over.
            if _is_same(path, old):
                self.callback(disk.remove, backup)
                disk.remove(backup)
                has_backup = disk.link(path, backup)
                rename_back = partial(_rename_back, backup if has_backup else None, path, old)
                self._renames.append(_Change(partial(os.replace, staged.path, path), rename_back))

    def switch(self, undo: ExitStack) -> None:
        """Switch all tensors to the new files."""
        _apply(self._switches, undo)

    def rename(self, undo: ExitStack) -> None:
        """Give the new files the names of the old ones."""
        _apply(self._renames, undo)

    def finish(self) -> None:
        """Note that nothing of the old content is left."""
        for file in self.staged:
            if file.to_clear is not None:
                file.to_clear.clear()


class _Change(NamedTuple):
    apply: Callable[[], None]
    undo: Callable[[], None]


def _apply(changes: list[_Change], undo: ExitStack) -> None:
    for change in changes:
        undo.callback(change.undo)  # first: a change may raise when it is half done
        change.apply()


def _duplicate(descriptor: int) -> io.FileIO:
    return io.FileIO(os.dup(descriptor), "r+")


def _open_like(path: str, header: FileHeader) -> MappedFile:
    return open_file(path, header.shape, header.dtype, state=header.state)


def _rename_back(backup: str | None, path: str, old: int) -> None:
    if backup is not None and not _is_same(path, old):
        os.replace(backup, path)


def _is_same(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


# Saving and loading

# A new base is written when journals have grown to this part of the base, but not below a minimum.
_COMPACT_RATIO = 0.5
_COMPACT_MIN_BYTES = 64 << 20


def save(
    path: str | os.PathLike[str], model: nn.Module, optimizer: RuleOptimizer, *, extra: Any = None
) -> None:
    """Save a model and its optimizer; of tables in files, only the rows that changed.

    The process may be killed at any moment: the folder then holds this checkpoint or the previous
    one, complete. The first checkpoint copies the tables and takes as much disk space as they do.
    Later ones write the rows that changed since. Everything that is not in files (other parameters,
    step counts, options) is written each time.

    Args:
        path: a folder; created if necessary. Use the same one each time.
        model: the model, whose state dict is saved.
        optimizer: the optimizer, likewise. With ``semantics="dense"``, all rows catch up first.
        extra: anything else you need to resume, such as your position in the data or a random
            state: numbers, strings, tensors, and lists and dicts of these.

    Raises:
        InputError: ``extra`` holds something else, or the folder has a manifest that is damaged or
            of a newer release, or another call is saving to it.
        OSError: for example, the disk is full. The previous checkpoint stays valid.
        MemoryError: memory ran out. The previous checkpoint stays valid.

    Example:
        >>> import tempfile, sparsestep
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sparsestep.storage.mapped(f"{folder}/items", (1000, 16))
        ...     items = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        ...     optimizer = sparsestep.Adam(items.parameters())
        ...     for step in range(3):
        ...         items(torch.tensor([step, 7])).sum().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...         save(f"{folder}/checkpoint", items, optimizer, extra={"step": step})
        ...     load(f"{folder}/checkpoint", items, optimizer)
        {'step': 2}
    """
    check_model_and_optimizer("save", model, optimizer)
    folder = Path(os.path.abspath(disk.checked_path("save", path)))
    with memory_errors():
        _check_extra(extra)
        folder.mkdir(parents=True, exist_ok=True)
        with disk.FolderLock(folder) as is_locked:
            if not is_locked:
                requirement = f"save: {folder} can be written by one call at a time"
                remedy = "In a signal handler, set a flag, and save after the next step"
                raise InputError(message(requirement, "another that has not returned", remedy))
            before = journal.read_manifest(folder)
            state = MappedState(model, optimizer)
            try:
                manifest = write(folder, before, state, {**state.rest, "extra": extra})
                uninterrupted(partial(_commit, folder, manifest, state.prepare_note(manifest)))
            except BaseException:
                with suppress(Exception):  # whichever checkpoint is the latest now
                    journal.remove_others(folder, journal.read_manifest(folder))
                raise


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: RuleOptimizer) -> Any:
    """Load the latest checkpoint that :func:`save` has written to a folder.

    The files of the tables are restored, whatever was written to them since.

    All files are verified before anything changes. The restored tables are written to temporary
    files next to the working ones, which they replace at the end: they need as much disk space.
    If the process is killed meanwhile, open the tables again and call this function again.

    Args:
        path: the folder.
        model: a model with the same tables in files, of the same shapes, as the saved one.
        optimizer: an optimizer with the same param groups. It gets the options of the checkpoint.

    Returns:
        The ``extra`` that was passed to :func:`save`.

    Raises:
        InputError: there is no checkpoint, it does not match or is damaged; nothing has changed.
        OSError: for example, the disk is full; nothing has changed.
        MemoryError: memory ran out; nothing has changed.

    Example:
        >>> import tempfile, sparsestep
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sparsestep.storage.mapped(f"{folder}/items", (1000, 16))
        ...     items = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        ...     optimizer = sparsestep.Adam(items.parameters())
        ...     save(f"{folder}/checkpoint", items, optimizer, extra="before the first step")
        ...     load(f"{folder}/checkpoint", items, optimizer)
        'before the first step'
    """
    check_model_and_optimizer("load", model, optimizer)
    folder = Path(os.path.abspath(disk.checked_path("load", path)))
    with memory_errors():
        while True:
            manifest = journal.read_manifest(folder)
            if manifest is None:
                requirement = f"{folder} must be a folder with a checkpoint of save()"
                raise InputError(message(requirement, "a folder without one"))
            try:
                return _load(folder, manifest, model, optimizer)
            except InputError:
                # Another process may have saved, and have removed the files of this checkpoint.
                if journal.read_manifest(folder) == manifest:
                    raise


def _load(folder: Path, manifest: Manifest, model: nn.Module, optimizer: RuleOptimizer) -> Any:
    with Replacements() as replacements:
        journal.check_sizes(folder, manifest)
        rest = journal.read_rest(folder, manifest.rest)
        with postponed_clearing(optimizer.params()):
            state = MappedState(model, optimizer)
            state.check(manifest, rest)
            stage(folder, manifest, state, replacements)
            note_as_saved = state.prepare_note(manifest)
            load_rest = state.prepare(rest)
            replacements.prepare()
            uninterrupted(partial(_replace, replacements, load_rest, note_as_saved))
    return rest["extra"]


def write(folder: Path, before: Manifest | None, state: MappedState, rest: Any) -> Manifest:
    """Write the files of a new checkpoint: a journal if the previous one has the other rows."""
    number = 1 if before is None else before.number + 1
    manifest = Manifest(uuid.uuid4().hex, number, [], [], journal.write_rest(folder, number, rest))
    if before is not None and state.is_saved_in(before) and journal.has_all_files(folder, before):
        rows = state.written_rows(before)
        size = journal.journal_bytes([each.part for each in rows], before.tables)
        manifest.tables, manifest.journals = before.tables, list(before.journals)
        if not rows:
            return manifest
        if not _is_base_due(folder, before, size) or not _compact(folder, manifest, state):
            manifest.journals.append(journal.write_journal(folder, number, size, rows))
    else:
        manifest.tables = state.write_bases(folder, number)
    return manifest


def _is_base_due(folder: Path, before: Manifest, size: int) -> bool:
    """Whether journals, with one more of this size, take too much of the disk and of a load."""
    journals = size + sum(each.file.bytes for each in before.journals)
    base = sum((folder / each.base.file).stat().st_blocks * 512 for each in before.tables)
    return journals >= max(_COMPACT_MIN_BYTES, _COMPACT_RATIO * base)


def _compact(folder: Path, manifest: Manifest, state: MappedState) -> bool:
    """Write new bases in place of journals; returns whether the disk has room for them."""
    try:
        manifest.tables, manifest.journals = state.write_bases(folder, manifest.number), []
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        journal.remove_others(folder, manifest)
        return False
    return True


def _commit(folder: Path, manifest: Manifest, note_as_saved: Callable[[], None]) -> None:
    journal.commit(folder, manifest)
    note_as_saved()
    with suppress(Exception):  # they only take space
        journal.remove_others(folder, manifest)


def stage(folder: Path, manifest: Manifest, state: MappedState, replacements: Replacements) -> None:
    """Write the new content of the tables' files to temporary files, and verify it."""
    copies, others = {}, {}
    for number, table in enumerate(manifest.tables):
        layout = table.layout
        is_alike = state.is_laid_out_alike(manifest, layout.name)
        file = state.tensors[layout.name].file
        role = "loading" if is_alike else f"source-{number}"
        path, descriptor = replacements.create(file, role)
        journal.read_base(folder, table, descriptor)
        if is_alike:
            copies[number] = replacements.stage(file, path)
        else:
            copies[number] = _open_like(path, layout.header)
            others[number] = layout
    journal.replay(folder, manifest, copies)
    for file in state.files.values():
        if file not in replacements.staged:
            replacements.stage_zeros(file)
    for number, layout in others.items():
        copies[number].advise("SEQUENTIAL")
        for name, key in layout.tensors.items():
            place = state.tensors[name]
            staged = replacements.staged[place.file]
            copy_rows(copies[number].tensor(key), staged.tensor(place.key))


def _replace(
    replacements: Replacements,
    load_rest: Callable[[ExitStack], None],
    note_as_saved: Callable[[], None],
) -> None:
    """Load a verified checkpoint; on error, undo everything."""
    with ExitStack() as undo:
        replacements.switch(undo)
        load_rest(undo)
        replacements.rename(undo)
        undo.pop_all()
    replacements.finish()
    note_as_saved()


def _check_extra(extra: Any) -> None:
    """Refuse values that could not be loaded again."""
    buffer, handled = io.BytesIO(), sys.exc_info()[1]
    try:
        torch.save(extra, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        first = first_error(error, handled)
        if is_out_of_memory(first):
            raise first from None
        requirement = "extra must hold only numbers, strings, tensors, and lists and dicts of these"
        raise InputError(message(requirement, type(extra).__name__)) from None
