"""What a row of a file consists of: a row of the table, and maybe the state of that row.

A row that is not in memory is read from the disk by the page. If its state lies right after it, all
of it is one read instead of one for each tensor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from sparsestep.memory import formats as schema

# The field of the table itself.
TABLE = ""

_CACHE_LINE = 64
_MOST_PADDING = 1 / 8


class Kind(NamedTuple):
    """What a tensor holds for each row."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Of one row."""
        return math.prod(self.shape) * self.dtype.itemsize


class Record(NamedTuple):
    """Where in a row of a file each tensor has its own.

    Attributes:
        kinds: of the tensors, by name; the table's is ``TABLE``.
        offsets: for each the byte of a row where it begins.
        row_bytes: from the beginning of a row to that of the next.

    Example:
        >>> record = Record.of(Kind((64,), torch.float32), {"sum": Kind((), torch.float32)})
        >>> record.offsets, record.row_bytes
        ({'': 0, 'sum': 256}, 260)
    """

    kinds: dict[str, Kind]
    offsets: dict[str, int]
    row_bytes: int

    @classmethod
    def of(cls, table: Kind, state: Mapping[str, Kind]) -> Record:
        """The table first, and what has the longest elements before others: none needs a gap."""
        kinds = {TABLE: table, **dict(sorted(state.items(), key=lambda item: _order(item[1])))}
        offsets, end = {}, 0
        for name, kind in kinds.items():
            offsets[name] = end = _rounded_up(end, kind.dtype.itemsize)
            end += kind.bytes
        if not state:
            return cls(kinds, offsets, max(1, end))
        row_bytes = _rounded_up(end, max(kind.dtype.itemsize for kind in kinds.values()))
        lines = _rounded_up(end, _CACHE_LINE)
        return cls(kinds, offsets, lines if lines <= end * (1 + _MOST_PADDING) else row_bytes)

    def strides(self, name: str) -> tuple[int, ...]:
        """Of the tensor of this name, in elements."""
        shape, dtype = self.kinds[name]
        inside = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
        return (self.row_bytes // dtype.itemsize, *inside)

    @property
    def state(self) -> dict[str, Kind]:
        """The kinds of the state that has room in a row."""
        return {name: kind for name, kind in self.kinds.items() if name != TABLE}


def _order(kind: Kind) -> tuple[int, int]:
    return -kind.dtype.itemsize, -kind.bytes


def _rounded_up(size: int, to: int) -> int:
    return -(-size // to) * to


def described(state: Mapping[str, Kind]) -> dict[str, Any]:
    """As JSON has it.

    Example:
        >>> described({"sum": Kind((), torch.float32)})
        {'sum': {'shape': [], 'dtype': 'float32'}}
    """
    return {
        name: {"shape": list(shape), "dtype": name_of(dtype)}
        for name, (shape, dtype) in state.items()
    }


def read(found: Any) -> dict[str, Kind]:
    """Parse the output of ``described``; raises ``ValueError`` if it is anything else.

    Example:
        >>> read({"sum": {"shape": [], "dtype": "float32"}})
        {'sum': Kind(shape=(), dtype=torch.float32)}
    """
    kinds = {}
    for name, value in schema.mapping("state", found).items():
        each = schema.fields(f"state {name!r}", value, ("shape", "dtype"))
        dtype = schema.dtype("the dtype of state", each["dtype"])
        shape = schema.shape("the shape of state", each["shape"], dtype)
        kinds[schema.string("the name of state", name)] = Kind(tuple(shape), dtype)
    return kinds


def name_of(dtype: torch.dtype) -> str:
    """A dtype without the name of its module.

    Example:
        >>> name_of(torch.float32)
        'float32'
    """
    return str(dtype).removeprefix("torch.")
