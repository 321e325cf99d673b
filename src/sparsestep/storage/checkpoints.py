"""Checkpoints of models with tables in files: only the rows that changed since the last one."""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep.errors import InputError, sentence
from sparsestep.memory.beside import copy_rows, to_be_replaced
from sparsestep.memory.files import MappedFile, about_to_write, file_of, written
from sparsestep.memory.record import TABLE
from sparsestep.optimizer.arguments import check_model_and_optimizer
from sparsestep.optimizer.base import RuleOptimizer
from sparsestep.optimizer.catching_up import row_numbers
from sparsestep.storage import journal
from sparsestep.storage.ahead import check_table
from sparsestep.storage.contents import Contents
from sparsestep.storage.journal import Manifest, Table

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
    what = Contents(model, optimizer)
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
    what.note_as_saved(folder, manifest)
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
    with to_be_replaced(optimizer._all_params()):
        what = Contents(model, optimizer)
        what.check(manifest)
        journal.check(folder, manifest)
        rest = journal.read_rest(folder, manifest.rest)
        what.take(rest)
        _restore(folder, manifest, what)
    what.note_as_saved(folder, manifest)
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


def _restore(folder: Path, manifest: Manifest, what: Contents) -> None:
    """Make tables and state what they were, wherever each of them lies now."""
    alike = {
        number: what.files[table.name]
        for number, table in enumerate(manifest.tables)
        if what.is_laid_out_alike(manifest, table.name)
    }
    others = [table for number, table in enumerate(manifest.tables) if number not in alike]
    if others and manifest.journals:
        manifest = journal.compact(folder, manifest)
    for number, file in alike.items():
        source = os.open(folder / manifest.tables[number].base, os.O_RDONLY)
        try:
            file.become(source)
        finally:
            os.close(source)
    journal.replay(folder, manifest, alike)
    for file in what.files.values():
        if not any(file is each for each in alike.values()):
            file.become(None)
    for table in others:
        _copy_each(journal.open_base(folder, table), table, what)


def _copy_each(base: MappedFile, table: Table, what: Contents) -> None:
    """Copy the tensors of a table that has its state elsewhere than here."""
    with base.read_in_order():
        for name, of_state in {table.name: TABLE, **table.inside}.items():
            place = what.places[name]
            copy_rows(base.tensor(of_state), place.file.tensor(place.name))


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
