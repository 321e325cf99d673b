"""Checkpoints of models with tables in files: only the rows that changed since the last one."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsestep.errors import InputError, sentence
from sparsestep.memory import pages
from sparsestep.memory.files import MappedFile, about_to_write, file_of, written
from sparsestep.optimizer.arguments import check_model_and_optimizer
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.catching_up import row_numbers
from sparsestep.storage import journal
from sparsestep.storage.ahead import check_table
from sparsestep.storage.copies import copy_data
from sparsestep.storage.journal import Manifest, Table
from sparsestep.torch_internals import version_of

# Journals are written into the base when they are this much of it, but not for less than so much.
_MOST_OF_BASE = 0.5
_LEAST_BYTES = 64 << 20


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
        InputError: ``extra`` holds something else.
        OSError: for example, the disk is full. The previous checkpoint stays valid.

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
    _check_extra(extra)
    folder = Path(os.path.abspath(path))
    folder.mkdir(parents=True, exist_ok=True)
    what = _Contents(model, optimizer)
    before = journal.read_manifest(folder)
    number = 1 if before is None else before.number + 1
    rest = journal.write_rest(folder, number, {**what.rest, "extra": extra})
    if before is not None and what.is_saved_in(folder, before):
        rows = journal.write_rows(folder, number, what.written_rows(before))
        journals = [*before.journals, rows] if rows.bytes else before.journals
        manifest = Manifest(number, before.tables, journals, rest)
    else:
        manifest = Manifest(number, what.copy_to(folder, number), [], rest)
    journal.commit(folder, manifest)
    what.note_as_saved(folder, number)
    journal.remove_others(folder, manifest)
    _compact_now_and_then(folder, manifest)


def load(path: str | os.PathLike[str], model: nn.Module, optimizer: RuleOptimizer) -> Any:
    """Load the latest checkpoint that :func:`save` has written to a folder.

    The files of the tables are restored, whatever was written to them since.

    Args:
        path: the folder.
        model: a model with the same tables in files, of the same shapes, as the saved one.
        optimizer: an optimizer with the same param groups. It gets the options of the checkpoint.

    Returns:
        The ``extra`` that was passed to :func:`save`.

    Raises:
        InputError: there is no checkpoint, it does not match or is damaged; nothing has changed.

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
    folder = Path(os.path.abspath(path))
    manifest = journal.read_manifest(folder)
    if manifest is None:
        contract = f"{folder} must be a folder with a checkpoint of save()"
        raise InputError(sentence(contract, "a folder without one"))
    what = _Contents(model, optimizer)
    what.check(manifest)
    journal.check(folder, manifest)
    rest = journal.read_rest(folder, manifest.rest)
    what.take(rest)
    files = {number: what.files[table.name] for number, table in enumerate(manifest.tables)}
    for number, file in files.items():
        _become(file, folder / manifest.tables[number].base)
    journal.replay(folder, manifest, files)
    what.note_as_saved(folder, manifest.number)
    return rest["extra"]


@contextmanager
def writing(table: Tensor, rows: Tensor | None = None) -> Iterator[None]:
    """Announce that you write rows of a table yourself; a context manager.

    It reserves disk space for them, and the next checkpoint includes them. Without it, a full disk
    would end the process, and the next checkpoint would contain the whole table, because it is
    known that you have written to it, but not where.

    Args:
        table: a tensor from :func:`mapped`, or a parameter made from it. Has no effect on other
            tensors.
        rows: an integer tensor of row numbers; all rows by default.

    Raises:
        OSError: the disk is full; nothing has changed.

    Raises:
        InputError: they are no rows of the table.

    Example:
        >>> import tempfile, sparsestep
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sparsestep.storage.mapped(f"{folder}/items", (1000, 16))
        ...     rows = torch.tensor([3, 5])
        ...     with sparsestep.storage.writing(table, rows):
        ...         table[rows] = torch.randn(2, 16)
    """
    check_table("writing", table)
    # A mask, or a row counted from the end, would be taken for other rows, which are then saved.
    flat = None if rows is None else row_numbers("rows to write", rows, len(table))
    file = file_of(table)
    if file is not None:
        beside = (found.tensor() for at in file.beside.values() if (found := at()) is not None)
        about_to_write(table, beside, None if flat is None else flat.cpu().contiguous())
    yield
    written([table])


class _OfTable(NamedTuple):
    """The files of a parameter and its state, whose rows are written together."""

    tensor: Tensor
    files: dict[str, MappedFile]


class _Contents:
    """What of a model and its optimizer lies in files, and what does not.

    Attributes:
        files: by the name of the table.
        rest: the state dicts without them.
    """

    def __init__(self, model: nn.Module, optimizer: RuleOptimizer) -> None:
        optimizer.catch_up()
        bool(optimizer.state)  # makes what is missing: a checkpoint has the state of all parameters
        self._model, self._optimizer = model, optimizer
        self._tables: dict[int, _OfTable] = {}
        saved: dict[str, Any] = {"model": {}, "optimizer": optimizer.state_dict()}
        self._names: set[str] = set()
        for name, value in model.state_dict().items():
            file = file_of(value) if isinstance(value, Tensor) else None
            if file is None:
                saved["model"][name] = value
                continue
            self._names.add(name)
            self._tables.setdefault(id(file), _OfTable(value, {f"model.{name}": file}))
        self._link_state(saved["optimizer"])
        self.rest = saved
        self.files = {
            name: file for table in self._tables.values() for name, file in table.files.items()
        }

    def _link_state(self, saved: dict[str, Any]) -> None:
        """Take the state that lies in files out of the state dict, and put it beside its table."""
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        self._params = dict(zip(indices, self._optimizer._all_params(), strict=True))
        for index, param in self._params.items():
            file = file_of(param)
            if file is not None:  # the model may not have it
                self._tables.setdefault(id(file), _OfTable(param, {f"param.{index}": file}))
        state: dict[Any, dict[str, Any]] = {index: {} for index in saved["state"]}
        for index, record in saved["state"].items():
            param = self._params.get(index)
            of = None if param is None else file_of(param)
            for key, value in record.items():
                file = file_of(value) if isinstance(value, Tensor) else None
                if file is None or of is None:
                    state[index][key] = value
                else:
                    self._tables[id(of)].files[f"optimizer.{index}.{key}"] = file
        saved["state"] = state

    def is_saved_in(self, folder: Path, manifest: Manifest) -> bool:
        """Whether a checkpoint has all but what is marked."""
        there = (str(folder), manifest.number)
        known = {table.name for table in manifest.tables}
        return known == self.files.keys() and all(
            file.saved_in == there for file in self.files.values()
        )

    def written_rows(self, manifest: Manifest) -> list[tuple[Tensor, dict[int, MappedFile]]]:
        """The rows that were written since, and the tables by their numbers in the manifest."""
        numbers = {table.name: number for number, table in enumerate(manifest.tables)}
        parts = []
        for tensor, files in self._tables.values():
            file = file_of(tensor)
            assert file is not None
            assert file.marks is not None
            if file.was_written_unseen(tensor):
                file.mark(None)
            rows = file.marks.nonzero().squeeze(1)
            if len(rows):
                parts.append((rows, {numbers[name]: each for name, each in files.items()}))
        return parts

    def copy_to(self, folder: Path, number: int) -> list[Table]:
        """Copy the tables as they are, as the base of further checkpoints."""
        tables, made = [], []
        try:
            for index, (name, file) in enumerate(self.files.items()):
                path = folder / f"base-{number:06}.{index}"
                target = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
                made.append(path)
                try:
                    copy_data(file.descriptor, target)
                    os.fsync(target)
                finally:
                    os.close(target)
                dtype = str(file.dtype).removeprefix("torch.")
                tables.append(Table(name, list(file.shape), dtype, path.name))
        except BaseException:
            for path in made:
                path.unlink()
            raise
        return tables

    def note_as_saved(self, folder: Path, number: int) -> None:
        """From now on, mark what is written."""
        for tensor, files in self._tables.values():
            file = file_of(tensor)
            assert file is not None
            rows = torch.Size([file.shape[0]])
            if file.marks is None:
                file.marks = pages.zeros(rows, torch.bool, torch.device("cpu"))
            file.marks.zero_()
            file.version = version_of(tensor)
            for each in (file, *files.values()):
                each.saved_in = (str(folder), number)

    def check(self, manifest: Manifest) -> None:
        """Refuse a checkpoint of something else."""
        own = {name: (list(f.shape), str(f.dtype)) for name, f in self.files.items()}
        there = {t.name: (t.shape, f"torch.{t.dtype}") for t in manifest.tables}
        if own != there:
            contract = "load: model and optimizer must have the same tables in files as they had"
            raise InputError(sentence(contract, f"{own} instead of {there}"))

    def take(self, rest: dict[str, Any]) -> None:
        """Become what was read, but for the tables. The optimizer first, for it may refuse."""
        own, there = self.rest["model"], rest["model"]
        other = own.keys() ^ there.keys()
        for name in own.keys() & there.keys():
            if getattr(own[name], "shape", None) != getattr(there[name], "shape", None):
                other.add(name)
        if other:
            contract = "load: the model must have the checkpoint's parameters, buffers and shapes"
            raise InputError(sentence(contract, f"differences in {', '.join(sorted(other))}"))
        for table in self._tables.values():
            for name, file in table.files.items():
                kind, _, entry = name.partition(".")
                if kind == "optimizer":
                    index, _, key = entry.partition(".")
                    record = rest["optimizer"]["state"].setdefault(int(index), {})
                    record[key] = file.tensor()
        self._optimizer.load_state_dict(rest["optimizer"])
        self._model.load_state_dict(rest["model"], strict=False)


def _become(file: MappedFile, base: Path) -> None:
    """Make a file what it was."""
    source = os.open(base, os.O_RDONLY)
    try:
        file.reserved.zero_()
        copy_data(source, file.descriptor)
    finally:
        os.close(source)


def _compact_now_and_then(folder: Path, manifest: Manifest) -> None:
    journals = sum(each.bytes for each in manifest.journals)
    base = sum((folder / table.base).stat().st_blocks * 512 for table in manifest.tables)
    if journals < max(_LEAST_BYTES, _MOST_OF_BASE * base):
        return
    try:
        journal.compact(folder, manifest)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise  # with a full disk it is left for later: the checkpoint is there


def _check_extra(extra: Any) -> None:
    """Refuse what could not be loaded again."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception:
        contract = "extra must hold only numbers, strings, tensors, and lists and dicts of these"
        raise InputError(sentence(contract, type(extra).__name__)) from None
