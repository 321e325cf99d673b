"""Tensors in files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from sparsestep.errors import InputError, sentence
from sparsestep.memory.files import file_of, open_file
from sparsestep.storage.ahead import prefetch


class _IsMapped(type(Tensor)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, Tensor) and file_of(instance) is not None


class Mapped(Tensor, metaclass=_IsMapped):
    """What :func:`mapped` returns: an ordinary tensor whose memory is a file.

    It is a kind, not a class: like ``torch.nn.Buffer``, it says of plain tensors what they are, and
    a parameter made from one is one too. There is nothing to construct.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     table = mapped(f"{folder}/items", (1000, 16))
        ...     weight = torch.nn.Parameter(table)
        ...     type(table) is Tensor, isinstance(weight, Mapped), isinstance(weight[1:], Mapped)
        (True, True, False)
    """

    def prefetch(self, rows: Tensor) -> None:
        """Have rows read from the disk ahead of time; see :func:`sparsestep.storage.prefetch`.

        Args:
            rows: integers of any shape, with repetitions.
        """


class _Prefetch:
    """The method ``prefetch`` of one tensor. Whatever is copied or pickled from it has none."""

    def __init__(self, tensor: Tensor) -> None:
        # A view of the same memory: the tensor itself would never be freed.
        self._memory: Tensor | None = tensor.detach()

    def __call__(self, rows: Tensor) -> None:
        if self._memory is not None:
            prefetch(self._memory, rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Prefetch:
        copied = _Prefetch.__new__(_Prefetch)
        copied._memory = None  # a copy lies in memory, where there is nothing to read
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return _Prefetch.__new__, (_Prefetch,), {"_memory": None}


def mapped(
    path: str | os.PathLike[str], shape: Sequence[int], dtype: torch.dtype = torch.float32
) -> Mapped:
    """A tensor in a file, mapped into memory.

    It may be larger than memory: the operating system reads what is used and writes back what was
    changed. The file is sparse, so rows that were never written take no room on the disk; they are
    zero. A file that is there is opened again.

    The tensor works everywhere as any other does, ``nn.Embedding.from_pretrained``,
    ``sparsestep.nn.fuse`` and every optimizer included. Optimizers here keep the state of such a
    parameter in files beside it, ``<path>.exp_avg`` and the like.

    Args:
        path: of the file.
        shape: of the tensor. A file that is there must have been made with it.
        dtype: likewise.

    Returns:
        A plain tensor, which has a method ``prefetch(rows)`` besides.

    Raises:
        InputError: the file is another's, or was made with another shape or dtype.

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
    """
    if not isinstance(dtype, torch.dtype):
        raise InputError(sentence("dtype must be a torch.dtype", repr(dtype)))
    sizes = [shape] if isinstance(shape, int) else list(shape)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        contract = "shape must be integers, all at least 1: a file cannot be empty"
        raise InputError(sentence(contract, tuple(sizes)))
    tensor = open_file(path, torch.Size(sizes), dtype).tensor()
    tensor.prefetch = _Prefetch(tensor)  # type: ignore[attr-defined]
    return cast("Mapped", tensor)
