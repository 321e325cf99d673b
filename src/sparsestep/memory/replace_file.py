"""Replacing the content of mapped files, all of them or none.

The new content of each file is written to a temporary file next to it. Then tensors are switched to
the new files, and last of all these take the names of the old ones. Until then, every change can be
undone, because the old files are still there. A process that is killed leaves each file as it was
or with its new content, and maybe temporary files, which the next one removes.
"""

from __future__ import annotations

import errno
import io
import os
from contextlib import ExitStack

from sparsestep._process import uninterrupted
from sparsestep.errors import message
from sparsestep.memory import disk
from sparsestep.memory.mapped_file import MappedFile, open_file, temporary_path


class Replacements(ExitStack):
    """New content for mapped files; a context manager that removes its temporary files."""

    def __init__(self) -> None:
        super().__init__()
        self._staged: dict[int, tuple[MappedFile, MappedFile]] = {}
        self._swaps: list[_Swap] = []
        self.callback(self._staged.clear)
        self.callback(self._swaps.clear)

    @property
    def files(self) -> list[MappedFile]:
        """The files whose content is about to be replaced."""
        return [file for file, _ in self._staged.values()]

    def create(self, file: MappedFile, role: str) -> tuple[str, int]:
        """Create an empty temporary file next to a file; returns its path and descriptor."""
        if not disk.CAN_REMAP:
            requirement = "load: the system must be able to replace a file that is in use"
            raise OSError(errno.EOPNOTSUPP, message(requirement, "one that cannot"))
        file.lock()
        path = temporary_path(file.path, role)
        self.callback(disk.remove, path)
        disk.remove(path)
        made = self.enter_context(io.FileIO(path, "x+"))
        os.fchmod(made.fileno(), os.fstat(file.descriptor).st_mode & 0o777)
        return path, made.fileno()

    def create_zeros(self, file: MappedFile) -> MappedFile:
        """Create new content of a file that is all zeros."""
        path, descriptor = self.create(file, "loading")
        disk.write(descriptor, file.header.encode(), 0)
        os.ftruncate(descriptor, file.header.file_bytes)
        staged = open_file(path, file.shape, file.dtype, state=file.header.state)
        self.stage(file, staged)
        return staged

    def stage(self, file: MappedFile, staged: MappedFile) -> None:
        """Register a temporary file of the same layout as the new content of a file."""
        staged.lock()  # before it takes the place of the file
        self._staged[id(file)] = file, staged

    def prepare(self) -> None:
        """Do everything that can fail before the first change."""
        for file, staged in self._staged.values():
            staged.flush_to_disk()
            staged.evict()
            self._swaps.append(_Swap(self, file, staged))

    def switch(self, undo: ExitStack) -> None:
        """Switch all tensors to the new files. How to undo it is registered first."""
        for swap in self._swaps:
            undo.callback(swap.restore)
            swap.switch()

    def rename(self, undo: ExitStack) -> None:
        """Give the new files the names of the old ones. How to undo it is registered first."""
        for swap in self._swaps:
            undo.callback(swap.rename_back)
            swap.rename()


class _Swap:
    """One file and its new content."""

    def __init__(self, stack: ExitStack, file: MappedFile, staged: MappedFile) -> None:
        self._file, self._staged = file, staged
        self._old_header, self._old_reserved = file.header, file.reserved
        duplicated = uninterrupted(lambda: io.FileIO(os.dup(file.descriptor), "r+"))
        old = stack.enter_context(duplicated)
        self._old = old.fileno()
        self._path = os.path.realpath(file.path)
        # A file that was deleted, or replaced by another of its name, has no name to take over.
        self._is_named = _is_same(self._path, file.descriptor)
        self._backup = temporary_path(file.path, "replaced")
        self._has_backup = self._is_named and self._back_up(stack)

    def _back_up(self, stack: ExitStack) -> bool:
        stack.callback(disk.remove, self._backup)
        disk.remove(self._backup)
        try:
            os.link(self._path, self._backup)
        except OSError as error:
            if error.errno not in disk.NO_LINKS:
                raise
            return False
        return True

    def switch(self) -> None:
        self._file.switch_to(self._staged.descriptor, self._staged.header, self._staged.reserved)

    def restore(self) -> None:
        self._file.switch_to(self._old, self._old_header, self._old_reserved)

    def rename(self) -> None:
        if self._is_named:
            os.replace(self._staged.path, self._path)

    def rename_back(self) -> None:
        if self._has_backup and not _is_same(self._path, self._old):
            os.replace(self._backup, self._path)


def _is_same(path: str, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
