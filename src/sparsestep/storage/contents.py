"""What a checkpoint is made of: the tables in files with their state, and the rest."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsestep._torch import version_of
from sparsestep.errors import InputError, is_out_of_memory, sentence
from sparsestep.memory import lazy as pages
from sparsestep.memory.mapped_file import MappedFile, file_of
from sparsestep.memory.row_layout import TABLE, described, name_of
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage.journal import Rows, write_base
from sparsestep.storage.manifest import Layout, Manifest, Table


class Place(NamedTuple):
    """A tensor in a file: the table of that file, or the state of this name in its rows."""

    file: MappedFile
    name: str


class _OfTable(NamedTuple):
    """The files of a parameter and its state, whose rows are written together."""

    tensor: Tensor
    files: dict[str, MappedFile]


class Contents:
    """What of a model and its optimizer lies in files, and what does not.

    Attributes:
        files: by the name of their table.
        places: every tensor in them, by name.
        rest: the state dicts without them.
    """

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        optimizer.catch_up()
        bool(optimizer.state)  # makes what is missing: a checkpoint has the state of all parameters
        self._model, self._optimizer = model, optimizer
        self._tables: dict[int, _OfTable] = {}
        self.places: dict[str, Place] = {}
        saved: dict[str, Any] = {"model": {}, "optimizer": optimizer.state_dict()}
        for name, value in model.state_dict().items():
            file = file_of(value) if isinstance(value, Tensor) else None
            if file is None:
                saved["model"][name] = value
            else:
                self._add_table(f"model.{name}", value, file)
        self._add_state(saved["optimizer"])
        self.rest = saved
        self.files: dict[str, MappedFile] = {
            name: file for table in self._tables.values() for name, file in table.files.items()
        }

    def _add_table(self, name: str, tensor: Tensor, file: MappedFile) -> None:
        if id(file) not in self._tables:
            self._tables[id(file)] = _OfTable(tensor, {name: file})
            self.places[name] = Place(file, TABLE)

    def _add_state(self, saved: dict[str, Any]) -> None:
        """Take the state that lies in files out of the state dict, and put it beside its table."""
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        params = dict(zip(indices, self._optimizer._all_params(), strict=True))
        for index, param in params.items():
            file = file_of(param)
            if file is not None:  # the model may not have it
                self._add_table(f"param.{index}", param, file)
        state: dict[Any, dict[str, Any]] = {index: {} for index in saved["state"]}
        for index, record in saved["state"].items():
            param = params.get(index)
            of = None if param is None else file_of(param)
            for key, value in record.items():
                file = file_of(value) if isinstance(value, Tensor) else None
                name = f"optimizer.{index}.{key}"
                if file is None or of is None:
                    state[index][key] = value
                elif file is of:  # in the rows of its table
                    self.places[name] = Place(of, key)
                else:
                    self._tables[id(of)].files[name] = file
                    self.places[name] = Place(file, TABLE)
        saved["state"] = state

    def is_saved_in(self, manifest: Manifest) -> bool:
        """Whether a checkpoint has everything but the rows that are marked."""
        known = {table.layout.name for table in manifest.tables}
        return known == self.files.keys() and all(
            file.saved_in == manifest.id for file in self.files.values()
        )

    def written_rows(self, manifest: Manifest) -> list[Rows]:
        """Rows that were written since a checkpoint."""
        numbers = {table.layout.name: number for number, table in enumerate(manifest.tables)}
        parts = []
        for tensor, files in self._tables.values():
            file = file_of(tensor)
            assert file is not None
            assert file.marks is not None
            if file.was_written_unseen(tensor):
                file.mark(None)
            rows = file.marks.nonzero().squeeze(1)
            if len(rows):
                parts.append(Rows(rows, {numbers[name]: each for name, each in files.items()}))
        return parts

    def copy_to(self, folder: Path, number: int) -> list[Table]:
        """Copy the tables to a folder, as the bases of this and further checkpoints."""
        return [
            Table(self._layout(name), write_base(folder, f"base-{number:06}.{index}", file))
            for index, (name, file) in enumerate(self.files.items())
        ]

    def _layout(self, name: str) -> Layout:
        file = self.files[name]
        inside = {
            each: place.name
            for each, place in self.places.items()
            if place.file is file and place.name != TABLE
        }
        about = list(file.shape), name_of(file.dtype), file.record.row_bytes
        return Layout(name, *about, described(file.record.state), inside)

    def prepare_note(self, manifest: Manifest) -> Callable[[], None]:
        """Prepare to mark the rows that are written after a checkpoint, now that they are equal.

        Returns:
            A function that does it, and cannot fail.
        """
        marked = []
        for tensor, _ in self._tables.values():
            file = file_of(tensor)
            assert file is not None
            if file.marks is None:
                rows = torch.Size([file.shape[0]])
                file.marks = pages.zeros(rows, torch.bool, torch.device("cpu"))
            marked.append((tensor, file, file.marks))
        saved_in = [
            (file, manifest.id if self.is_laid_out_alike(manifest, name) else None)
            for name, file in self.files.items()
        ]

        def note() -> None:
            for tensor, file, marks in marked:
                marks.zero_()
                file.version = version_of(tensor)
            for file, checkpoint in saved_in:
                file.saved_in = checkpoint

        return note

    def is_laid_out_alike(self, manifest: Manifest, name: str) -> bool:
        """Whether a file has the same layout here as in a checkpoint."""
        if name not in self.files:
            return False
        own = self._layout(name)
        return any(table.layout == own for table in manifest.tables)

    def check(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of other tables."""
        own, there = {}, {}
        for name, (file, key) in self.places.items():
            shape, dtype = file.record.kinds[key]
            own[name] = [file.shape[0], *shape], name_of(dtype)
        for table in manifest.tables:
            layout = table.layout
            there[layout.name] = layout.shape, layout.dtype
            for name, key in layout.inside.items():
                kind = layout.room[key]
                there[name] = [layout.shape[0], *kind["shape"]], kind["dtype"]
        if own != there:
            contract = "load: model and optimizer must have the same tables in files as they had"
            raise InputError(sentence(contract, f"{own} instead of {there}"))

    def check_rest(self, rest: dict[str, Any]) -> None:
        """Refuse a checkpoint of another model."""
        own, there = self.rest["model"], rest["model"]
        other = {str(name) for name in own.keys() ^ there.keys()}
        for name in own.keys() & there.keys():
            if _form(own[name]) != _form(there[name]):
                other.add(name)
        if other:
            contract = "load: the model must have the checkpoint's parameters, buffers and shapes"
            raise InputError(sentence(contract, f"differences in {', '.join(sorted(other))}"))

    def prepare(self, rest: dict[str, Any]) -> Callable[[ExitStack], None]:
        """Prepare to load everything but the content of the tables.

        Returns:
            A function that does it, and registers how to undo it before it changes anything.
        """
        for name, (file, key) in self.places.items():
            kind, _, entry = name.partition(".")
            if kind == "optimizer":
                index, _, of_state = entry.partition(".")
                record = rest["optimizer"]["state"].setdefault(int(index), {})
                record[of_state] = file.tensor(key)
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
                contract = "load: the model must accept the checkpoint"
                raise InputError(sentence(contract, f"an error: {error}")) from error

        return load


def _form(value: Any) -> object:
    """What must agree for a value to be loaded."""
    return (value.shape, value.layout) if isinstance(value, Tensor) else None


def _restore(model: nn.Module, live: dict[str, Any], saved: dict[str, Any]) -> None:
    """Undo a ``load_state_dict``, even if a module refuses to load once more."""
    try:
        model.load_state_dict(saved, strict=False)
    finally:
        for name, value in live.items():
            if isinstance(value, Tensor):
                value.copy_(saved[name])
