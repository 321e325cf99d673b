"""Rows are read from the disk before they are needed."""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sparsestep.errors import InputError, message
from sparsestep.memory.mapped_file import MappedFile, file_of
from sparsestep.memory.tensors import INTEGER_DTYPES, out_of_range

Batch = TypeVar("Batch")


class _PrefetchThread:
    """A thread that requests rows: a request waits while the queue of the disk is full."""

    def __init__(self) -> None:
        self._requests: SimpleQueue[tuple[MappedFile, Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def submit(self, file: MappedFile, rows: Tensor) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        self._requests.put((file, rows))

    def _read(self) -> None:
        while (request := self._requests.get()) is not None:
            file, rows = request
            if not self._is_ending:
                file.prefetch(rows)
            del file, rows, request  # or the last file would stay open

    def reset(self) -> None:
        """Start over: a forked process does not have the thread."""
        self.__init__()  # type: ignore[misc]

    def stop(self) -> None:
        """Wait for the thread: it must not be in the core when the interpreter ends."""
        self._is_ending = True
        if self._thread is not None:
            self._requests.put(None)
            self._thread.join()
        self.reset()


_thread = _PrefetchThread()
atexit.register(_thread.stop)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.reset)


def prefetch(table: Tensor, rows: Tensor) -> None:
    """Read rows of a table from the disk ahead of time, with their optimizer state.

    It returns at once, and the disk works in the background. Rows that are already in memory cost
    little.

    Args:
        table: a tensor from :func:`mapped`, or a parameter made from it. Has no effect on other
            tensors, which are in memory anyway.
        rows: an integer tensor of any shape; may have duplicates.

    Raises:
        InputError: ``rows`` is not an integer tensor, or a row is out of range.

    Example:
        >>> import tempfile, sparsestep
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sparsestep.storage.mapped(f"{folder}/items", (1000, 16))
        ...     items = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        ...     sparsestep.storage.prefetch(items.weight, torch.tensor([3, 997]))
    """
    check_table("prefetch", table)
    if not isinstance(rows, Tensor) or rows.dtype not in INTEGER_DTYPES:
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise InputError(message("rows to prefetch must be an integer tensor", got))
    rows = rows.detach().reshape(-1)
    wrong = out_of_range(rows, len(table))
    if wrong is not None:
        raise InputError(message(f"rows to prefetch must be in [0, {len(table)})", wrong))
    file = file_of(table)
    if file is not None:
        _thread.submit(file, rows.to("cpu", torch.int64).contiguous())


def check_table(who: str, table: Any) -> None:
    """Refuse a table without rows."""
    if not isinstance(table, Tensor) or not table.dim():
        requirement = f"{who}: the table must be a tensor with rows"
        kind = "one without dims" if isinstance(table, Tensor) else f"a {type(table).__name__}"
        raise InputError(message(requirement, kind))


class Prefetching(Generic[Batch]):
    """What :func:`prefetching` returns: an iterable over the same batches, with their ``len()``.

    Example:
        >>> len(prefetching([torch.tensor([1]), torch.tensor([2])], {}))
        2
    """

    def __init__(
        self,
        batches: Iterable[Batch],
        rows: Mapping[Tensor, Callable[[Batch], Tensor]],
        ahead: int,
    ) -> None:
        if not isinstance(ahead, int) or ahead < 1:
            raise InputError(message("ahead must be an integer, at least 1", ahead))
        self._batches = batches
        self._rows = dict(rows)
        self._ahead = ahead

    def __iter__(self) -> Iterator[Batch]:
        waiting: deque[Batch] = deque()
        for batch in self._batches:
            for table, rows_of in self._rows.items():
                prefetch(table, rows_of(batch))
            waiting.append(batch)
            if len(waiting) > self._ahead:
                yield waiting.popleft()
        yield from waiting

    def __len__(self) -> int:
        if not isinstance(self._batches, Sized):
            raise TypeError(f"a {type(self._batches).__name__} has no len()")
        return len(self._batches)


def prefetching(
    batches: Iterable[Batch],
    rows: Mapping[Tensor, Callable[[Batch], Tensor]],
    *,
    ahead: int = 1,
) -> Prefetching[Batch]:
    """Iterate over batches while the rows of the next ones are read from the disk.

    Args:
        batches: a ``DataLoader``, or anything else that yields batches.
        rows: for each table, a function that returns the rows which a batch needs.
        ahead: how many batches in advance rows are read.

    Returns:
        The same batches, in the same order.

    Raises:
        InputError: ``ahead`` is less than 1.

    Example:
        >>> import tempfile, sparsestep
        >>> batches = [torch.tensor([1, 2]), torch.tensor([2, 3])]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = sparsestep.storage.mapped(f"{folder}/items", (1000, 16))
        ...     for batch in prefetching(batches, {table: lambda batch: batch}):
        ...         print(batch.tolist())
        [1, 2]
        [2, 3]
    """
    return Prefetching(batches, rows, ahead)
