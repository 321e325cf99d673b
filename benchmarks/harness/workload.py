"""What every contestant of a case is given: the same gradients, and tables filled alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.harness.cases import Case
from sparsestep.cli.info import proc_field

LEARNING_RATE = 1e-3

# Fresh rows every step: with one set of ids, a large cache would hold all that is touched.
SETS = 8

# Above this, several sets of ids come with the same gradient values.
_VALUE_BYTES = 4_000_000_000

# Above this, all contestants work on one table: memory would not hold one for each.
_OWN_TABLE_BYTES = 1_000_000_000

# Left free for what the contestants allocate while they run.
_RESERVE_BYTES = 500_000_000

_VALUES_SEED = 10_000
_TABLE_SEED = 30_000


class Unavailable(Exception):  # noqa: N818  nothing is wrong when it is raised
    """A contestant does not take part in a case; says why."""


class Gradient(NamedTuple):
    """The gradient of one table.

    Attributes:
        positions: int64 ``[lookups]``.
        values: float32 ``[lookups, dim]``.
        coo: the two as an uncoalesced COO tensor, which shares their memory.
    """

    positions: Tensor
    values: Tensor
    coo: Tensor


def gradient_sets(case: Case) -> list[list[Gradient]]:
    """The gradients of ``SETS`` batches, one per table each."""
    generator = torch.Generator().manual_seed(_VALUES_SEED)
    batch_bytes = 4 * case.lookups * case.dim * case.tables
    distinct = max(1, min(SETS, _VALUE_BYTES // batch_bytes))
    shape = (case.lookups, case.dim)
    values = [
        [torch.randn(shape, generator=generator) for _ in range(case.tables)]
        for _ in range(distinct)
    ]
    return [
        [
            _gradient(case, case.positions(set_index * case.tables + table), each)
            for table, each in enumerate(values[set_index % distinct])
        ]
        for set_index in range(SETS)
    ]


def _gradient(case: Case, positions: Tensor, values: Tensor) -> Gradient:
    size = (case.rows, case.dim)
    coo = torch.sparse_coo_tensor(positions[None], values, size, check_invariants=False)
    return Gradient(positions, values, coo)


def fill(table: Tensor) -> Tensor:
    """Fill a new table with what every contestant's table starts with."""
    generator = torch.Generator().manual_seed(_TABLE_SEED)
    return table.uniform_(-0.05, 0.05, generator=generator)


def available_memory(source: Path = Path("/proc/meminfo")) -> float:
    """How many bytes can be allocated without swapping, as Linux estimates; else infinity.

    Args:
        source: where Linux describes its memory.
    """
    available = proc_field(source, "MemAvailable")
    return 1024.0 * int(available.split()[0]) if available else math.inf


class Workload:
    """A case made concrete.

    Attributes:
        case: what is measured.
        sets: the gradients, ``[set][table]``.
        shared: whether all contestants work on one table.
        states: where the tables are shared, the state tensors of sparsestep's optimizers, by the
            name of their rule, ``[table][state]``; what needs state of the same kind uses it too.

    Args:
        case: what is measured.
        shared: let all contestants work on one table, however small it is.
    """

    def __init__(self, case: Case, shared: bool = False) -> None:
        self.case = case
        self.sets: list[list[Gradient]] = gradient_sets(case)
        self.shared: bool = shared or case.table_bytes > _OWN_TABLE_BYTES
        self.states: dict[str, list[list[Tensor]]] = {}
        self._params: list[Parameter] | None = None
        self._free = available_memory() - _RESERVE_BYTES

    def unique(self) -> int:
        """How many rows the first batch touches, in all tables together."""
        return sum(gradient.positions.unique().numel() for gradient in self.sets[0])

    def reserve(self, copies: int) -> None:
        """Set memory aside for so many copies of the tables, or refuse.

        What is promised counts, not what is in use yet: state is allocated page by page, and the
        system would end the whole run when the last page is not there.
        """
        needed = copies * self.case.table_bytes
        if needed > self._free:
            free = max(0.0, self._free)
            raise Unavailable(f"needs {needed / 1e9:.1f} GB, but only {free / 1e9:.1f} GB are free")
        self._free -= needed

    def params(self) -> list[Parameter]:
        """New tables, or the ones that all share."""
        if self._params is not None:
            return self._params
        self.reserve(1)
        size = (self.case.rows, self.case.dim)
        params = [Parameter(fill(torch.empty(size))) for _ in range(self.case.tables)]
        if self.shared:
            self._params = params
        return params


def uniform_coo_grads(rows: int, dim: int, lookups: int) -> list[Tensor]:
    """Uncoalesced COO gradients, as ``nn.Embedding(sparse=True)`` gives them, one per set."""
    torch.manual_seed(0)
    return [
        torch.sparse_coo_tensor(
            torch.randint(0, rows, (1, lookups)),
            torch.randn(lookups, dim),
            (rows, dim),
            check_invariants=False,
        )
        for _ in range(SETS)
    ]
