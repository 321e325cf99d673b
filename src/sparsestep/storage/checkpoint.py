"""Checkpoints of models with tables in files: only the rows that changed since the last one."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sparsestep._process import uninterrupted
from sparsestep.errors import InputError, first_error, is_out_of_memory, memory_errors, sentence
from sparsestep.memory.mapped_file import about_to_write, file_of, open_file, written
from sparsestep.memory.mapped_state import copy_rows, to_be_replaced
from sparsestep.memory.replace_file import Replacements
from sparsestep.memory.row_layout import TABLE
from sparsestep.optim.arguments import check_model_and_optimizer
from sparsestep.optim.catching_up import row_numbers
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import journal
from sparsestep.storage import manifest as manifests
from sparsestep.storage.contents import Contents
from sparsestep.storage.manifest import Manifest
from sparsestep.storage.prefetch import check_table

# A new base is written when journals have grown to this part of the base, but not below a minimum.
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
        InputError: ``extra`` holds something else, or the folder has a manifest that is damaged or
            of a newer release.
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
    with memory_errors():
        _check_extra(extra)
        folder = Path(os.path.abspath(path))
        folder.mkdir(parents=True, exist_ok=True)
        before = manifests.read(folder)
        what = Contents(model, optimizer)
        try:
            manifest = _write(folder, before, what, extra)
            note_as_saved = what.prepare_note(manifest)
            uninterrupted(partial(_commit, folder, manifest, note_as_saved))
        except BaseException:
            with suppress(Exception):  # whichever checkpoint is the latest now
                manifests.remove_others(folder, manifests.read(folder))
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
    folder = Path(os.path.abspath(path))
    with memory_errors(), Replacements() as replacements:
        manifest = manifests.read(folder)
        if manifest is None:
            contract = f"{folder} must be a folder with a checkpoint of save()"
            raise InputError(sentence(contract, "a folder without one"))
        manifests.check_sizes(folder, manifest)
        rest = journal.read_rest(folder, manifest.rest)
        with to_be_replaced(optimizer._all_params()):
            what = Contents(model, optimizer)
            what.check(manifest)
            what.check_rest(rest)
            _stage(folder, manifest, what, replacements)
            note_as_saved = what.prepare_note(manifest)
            load_rest = what.prepare(rest)
            replacements.prepare()
            uninterrupted(partial(_replace, replacements, load_rest, note_as_saved))
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


def _write(folder: Path, before: Manifest | None, what: Contents, extra: Any) -> Manifest:
    """Write the files of a new checkpoint: a journal if the previous one has the rest."""
    number = 1 if before is None else before.number + 1
    rest = journal.write_rest(folder, number, {**what.rest, "extra": extra})
    manifest = Manifest(manifests.new_id(), number, [], [], rest)
    if before is not None and what.is_saved_in(before) and manifests.has_all_files(folder, before):
        rows = what.written_rows(before)
        size = manifests.journal_bytes([each.part for each in rows], before.tables)
        manifest.tables, manifest.journals = before.tables, list(before.journals)
        if not rows:
            return manifest
        if not _is_base_due(folder, before, size) or not _copy(folder, manifest, what):
            manifest.journals.append(journal.write_journal(folder, number, size, rows))
    else:
        manifest.tables = what.copy_to(folder, number)
    return manifest


def _is_base_due(folder: Path, before: Manifest, size: int) -> bool:
    """Whether journals, with one more of this size, take too much of the disk and of a load."""
    journals = size + sum(each.file.bytes for each in before.journals)
    base = sum((folder / each.base.file).stat().st_blocks * 512 for each in before.tables)
    return journals >= max(_LEAST_BYTES, _MOST_OF_BASE * base)


def _copy(folder: Path, manifest: Manifest, what: Contents) -> bool:
    """Write new bases in place of journals; returns whether the disk has room for them."""
    try:
        manifest.tables, manifest.journals = what.copy_to(folder, manifest.number), []
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        manifests.remove_others(folder, manifest)
        return False
    return True


def _commit(folder: Path, manifest: Manifest, note_as_saved: Callable[[], None]) -> None:
    manifests.commit(folder, manifest)
    note_as_saved()
    with suppress(Exception):  # they only take space
        manifests.remove_others(folder, manifest)


def _stage(folder: Path, manifest: Manifest, what: Contents, replacements: Replacements) -> None:
    """Write what the files of the tables will be to temporary files, and verify it."""
    copies, others = {}, {}
    for number, table in enumerate(manifest.tables):
        layout = table.layout
        is_alike = what.is_laid_out_alike(manifest, layout.name)
        file = what.places[layout.name].file
        role = "loading" if is_alike else f"source-{number}"
        path, descriptor = replacements.create(file, role)
        journal.copy_base(folder, table, descriptor)
        header = layout.header
        copies[number] = open_file(path, header.shape, header.dtype, state=header.state)
        if is_alike:
            replacements.stage(file, copies[number])
        else:
            others[number] = layout
    journal.replay(folder, manifest, copies)
    alike = {id(file) for file in replacements.files}
    staged = {
        id(file): replacements.create_zeros(file)
        for file in what.files.values()
        if id(file) not in alike
    }
    for number, layout in others.items():
        with copies[number].read_in_order():
            for name, key in {layout.name: TABLE, **layout.inside}.items():
                place = what.places[name]
                copy_rows(copies[number].tensor(key), staged[id(place.file)].tensor(place.name))


def _replace(
    replacements: Replacements,
    load_rest: Callable[[ExitStack], None],
    note_as_saved: Callable[[], None],
) -> None:
    """Load a checkpoint that has been verified; undo everything if anything fails after all."""
    with ExitStack() as undo:
        replacements.switch(undo)
        load_rest(undo)
        replacements.rename(undo)
        undo.pop_all()
    note_as_saved()
    for file in replacements.files:
        if file.to_clear is not None:
            file.to_clear.clear()


def _check_extra(extra: Any) -> None:
    """Refuse what could not be loaded again."""
    buffer, handled = io.BytesIO(), sys.exc_info()[1]
    try:
        torch.save(extra, buffer)
        torch.load(io.BytesIO(buffer.getvalue()), weights_only=True)
    except Exception as error:
        first = first_error(error, handled)
        if is_out_of_memory(first):
            raise first from None
        contract = "extra must hold only numbers, strings, tensors, and lists and dicts of these"
        raise InputError(sentence(contract, type(extra).__name__)) from None
