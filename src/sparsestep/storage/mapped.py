"""Tensors in memory-mapped files, and reading their rows from the disk before they are needed."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, Generic, TypeVar, cast

import torch
from torch import Tensor

from sparsestep._process import fork_safe_lock
from sparsestep.errors import InputError, message
from sparsestep.memory import disk
from sparsestep.memory.formats import DTYPES, RowField, dtype_name
from sparsestep.memory.mapped_file import MappedFile, about_to_write, file_of, open_file, written
from sparsestep.optim import state as states
from sparsestep.optim.optimizer import RuleOptimizer

Batch = TypeVar("Batch")


class _IsMapped(type(Tensor)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return file_of(instance) is not None


class Mapped(Tensor, metaclass=_IsMapped):
    """An ordinary tensor whose memory is a file, as :func:`mapped` returns it.

    Use it with ``isinstance``; you cannot construct one. Like ``torch.nn.Buffer``, it describes
    plain tensors. A parameter made from such a tensor is one, too.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = mapped(f"{folder}/items", (1000, 16))
        ...     weight = torch.nn.Parameter(table)
        ...     type(table) is Tensor, isinstance(weight, Mapped), isinstance(weight[1:], Mapped)
        (True, True, False)
    """

    def prefetch(self, rows: Tensor) -> None:
        """Read rows from the disk ahead of time; see :func:`sparsestep.storage.prefetch`.

        Args:
            rows: an integer tensor of any shape; may have duplicates.
        """


class _Prefetch:
    """The method ``prefetch`` of one tensor. Copies and pickles of it do nothing."""

    def __init__(self, tensor: Tensor | None = None) -> None:
        # A view of the same memory: the tensor itself would never be freed.
        self._memory = None if tensor is None else tensor.detach()

    def __call__(self, rows: Tensor) -> None:
        if self._memory is not None:
            prefetch(self._memory, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Prefetch:
        return _Prefetch()

    def __reduce__(self) -> tuple[Any, ...]:
        return _Prefetch, ()


def mapped(
    path: str | os.PathLike[str],
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    optimizer: Callable[[list[Tensor]], RuleOptimizer] | None = None,
) -> Mapped:
    """Create or open a tensor in a memory-mapped file.

    It may be larger than memory: the operating system reads the rows in use and writes changes
    back. The file is sparse: rows that were never written are zero and take no disk space. If the
    file exists, it is opened.

    The tensor works like any other, including in ``nn.Embedding.from_pretrained``,
    ``sparsestep.nn.fuse`` and every optimizer. The optimizers of this library store the state of
    such a parameter in files next to it, such as ``<path>.exp_avg``; or, if you pass ``optimizer``,
    in the same file, the state of a row right after the row. Reading a row from the disk then takes
    one access instead of one per tensor.

    Args:
        path: the file.
        shape: the shape of the tensor. If the file exists, it must have been created with it.
        dtype: the dtype, likewise.
        optimizer: the class of the optimizer that will train the table, or a function that makes
            it from a list of parameters if its options matter for its state, such as
            ``lambda params: sparsestep.Adam(params, amsgrad=True)``. The rows of the tensor are
            then not adjacent in memory: look up bags with ``sparsestep.nn.EmbeddingBag`` or
            ``fuse``, because torch's own ``EmbeddingBag`` copies such a table in every lookup.
            You may omit it for a file that exists.

    Returns:
        A plain tensor with an additional method ``prefetch(rows)``.

    Raises:
        InputError: the file was not created by ``mapped``, or with another shape, dtype or room for
            state; or ``optimizer`` does not make an optimizer of this library.
        OSError: for example, the disk is full, or the table does not fit into a tmpfs.

    Example:
        >>> import tempfile, sparsestep
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = mapped(f"{folder}/items", (100_000_000, 64))
        ...     items = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        ...     optimizer = sparsestep.Adam(items.parameters(), lr=0.1)
        ...     table.prefetch(torch.tensor([3, 99_999_999]))
        ...     items(torch.tensor([3, 99_999_999])).sum().backward()
        ...     optimizer.step()
        ...     sorted(os.listdir(folder)), table[99_999_999, :2].tolist()
        ...     os.stat(f"{folder}/items").st_blocks * 512 < 1_000_000
        (['items', 'items.exp_avg', 'items.exp_avg_sq'], [-0.09999..., -0.09999...])
        True

        With the state in the rows:

        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = mapped(f"{folder}/items", (1000, 64), optimizer=sparsestep.Adam)
        ...     items = torch.nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        ...     sparsestep.Adam(items.parameters()).materialize_state()
        ...     os.listdir(folder), table.shape, table.stride()
        (['items'], torch.Size([1000, 64]), (192, 1))
    """
    path = disk.checked_path("mapped", path)
    if not isinstance(dtype, torch.dtype):
        raise InputError(message("dtype must be a torch.dtype", repr(dtype)))
    if dtype_name(dtype) not in DTYPES:
        raise InputError(message("dtype must not be quantized", repr(dtype)))
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        requirement = "shape must be integers, all at least 1: a file cannot be empty"
        raise InputError(message(requirement, tuple(sizes)))
    state = None if optimizer is None else _state_fields(optimizer, torch.Size(sizes), dtype)
    tensor = open_file(path, torch.Size(sizes), dtype, state=state).tensor()
    tensor.prefetch = _Prefetch(tensor)  # type: ignore[attr-defined]
    return cast("Mapped", tensor)


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
        InputError: they are no rows of the table.
        OSError: the disk is full; nothing has changed.

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
    flat = None if rows is None else states.check_rows("rows to write", rows, table)
    file = file_of(table)
    if file is not None:
        beside = (each.tensor() for each in file.live_state_files())
        about_to_write(table, beside, None if flat is None else flat.cpu().contiguous())
    yield
    written([table])


def _state_fields(
    optimizer: Callable[[list[Tensor]], RuleOptimizer], shape: torch.Size, dtype: torch.dtype
) -> dict[str, RowField]:
    """The state that an optimizer keeps for each row of such a table."""
    if not (dtype.is_floating_point or dtype.is_complex):
        requirement = "the dtype of a table that an optimizer trains must be real or complex"
        raise InputError(message(requirement, dtype))
    param = torch.nn.Parameter(torch.zeros(1, *shape[1:], dtype=dtype))
    given: Any = optimizer
    made = given([param]) if callable(given) else None
    if not isinstance(made, RuleOptimizer):
        requirement = (
            "optimizer must be a class of sparsestep, or a function that makes one of these"
        )
        got = type(given).__name__ if made is None else f"one that makes a {type(made).__name__}"
        remedy = "Pass sparsestep.Adam, or lambda params: sparsestep.Adam(params, amsgrad=True)"
        raise InputError(message(requirement, got, remedy))
    (group,) = made.param_groups
    specs = made.stored_rule_for(group, param).state
    return {
        spec.name: RowField(
            tuple(states.state_shape(spec, param)[1:]),
            states.state_dtype_for(spec, param, group.get("state_dtype")),
        )
        for spec in specs
    }


# Prefetching


class _PrefetchThread:
    """A thread that requests rows: a request waits while the queue of the disk is full."""

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._requests: SimpleQueue[tuple[MappedFile, Tensor] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_ending = False

    def submit(self, file: MappedFile, rows: Tensor) -> None:
        with self._lock:
            if self._is_ending:  # called from an exit handler
                return
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._read, daemon=True)
                self._thread.start()
        self._requests.put((file, rows))

    def _read(self) -> None:
        while (request := self._requests.get()) is not None:
            file, rows = request
            try:
                if not self._is_ending:
                    file.prefetch(rows)
            except Exception:  # reported like any other of a thread; the next request may work
                threading.excepthook(
                    threading.ExceptHookArgs((*sys.exc_info(), threading.current_thread()))
                )
            del file, rows, request  # or the last file would stay open

    def reset(self) -> None:
        """Start over: a forked process does not have the thread."""
        self.__init__()  # type: ignore[misc]

    def stop(self) -> None:
        """Wait for the thread: it must not be in the core when the interpreter ends."""
        with self._lock:
            self._is_ending = True
        if self._thread is not None and self._thread.is_alive():
            self._requests.put(None)
            self._thread.join()


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
    flat = states.check_rows("rows to prefetch", rows, table)
    file = file_of(table)
    if file is not None:
        _thread.submit(file, flat.cpu().contiguous())


def check_table(who: str, table: Any) -> None:
    """Refuse a table without rows."""
    if not isinstance(table, Tensor) or not table.dim():
        requirement = f"{who}: the table must be a tensor with rows"
        kind = "one without dims" if isinstance(table, Tensor) else f"a {type(table).__name__}"
        raise InputError(message(requirement, kind))


class Prefetching(Generic[Batch]):
    """An iterable over batches, with their ``len()``, as :func:`prefetching` returns it.

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
