"""The limit: the least that any implementation of the update must do (``native/limit.h``)."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from sparsestep import SparseAdam
from sparsestep.cli.bench.contestants import Contestant
from sparsestep.cli.bench.workload import LEARNING_RATE, Gradient, Unavailable, Workload
from sparsestep.engines import native
from sparsestep.rules import sparse_adam

_BETAS = (0.9, 0.999)
_EPS = 1e-8
_MOST_DIM = 512

# Below this much memory traffic a second thread makes it slower, and it would be no limit.
_SERIAL_BYTES = 1 << 18


class Plan(NamedTuple):
    """What the limit is told in advance about one gradient.

    Attributes:
        slots: each touched row once, in order of first appearance.
        offsets: the entries of slot ``i`` are ``entries[offsets[i]:offsets[i + 1]]``.
        entries: rows of the gradient's values.
        shares: where the share of each thread ends, in slots.
    """

    slots: Tensor
    offsets: Tensor
    entries: Tensor
    shares: tuple[int, ...]


def plan(positions: Tensor, threads: int) -> Plan:
    """Find the order and the duplicates of a gradient, and share the work out evenly.

    Example:
        >>> slots, offsets, entries, shares = plan(torch.tensor([7, 3, 7, 5]), threads=1)
        >>> slots.tolist(), offsets.tolist(), entries.tolist(), shares
        ([7, 3, 5], [0, 2, 3, 4], [0, 2, 1, 3], (3,))
    """
    ascending, inverse, counts = positions.unique(return_inverse=True, return_counts=True)
    first = torch.argsort(inverse, stable=True)[counts.cumsum(0) - counts]
    by_appearance = torch.argsort(first)
    rank = torch.empty_like(by_appearance)
    rank[by_appearance] = torch.arange(len(rank))
    counts = counts[by_appearance]
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    entries = torch.argsort(rank[inverse], stable=True)
    return Plan(ascending[by_appearance], offsets, entries, shares(counts, threads))


def shares(counts: Tensor, threads: int) -> tuple[int, ...]:
    """Where each thread's share ends, if an entry weighs 1 and the three rows of a slot 1 each.

    Example:
        >>> shares(torch.tensor([5, 1, 1, 1]), threads=2)
        (2, 4)
    """
    weights = (counts + 3).cumsum(0)
    wanted = weights[-1] * torch.arange(1, threads + 1) / threads
    ends = torch.searchsorted(weights, wanted).add_(1).clamp_(max=len(counts))
    return (*ends[:-1].tolist(), len(counts))


def _threads(gradient: Gradient, tables: int) -> int:
    """One for what is tiny, and for the tables of an optimizer that has many; else all."""
    traffic = 7 * gradient.values.nbytes  # a gradient row is read, three rows are read and written
    return 1 if tables > 1 or traffic < _SERIAL_BYTES else torch.get_num_threads()


class Limit(Contestant):
    """A loop that knows the order and the duplicates in advance, and only moves the memory."""

    name = "limit"

    def __init__(self, workload: Workload) -> None:
        if native.core is None:
            raise Unavailable("installed without the C++ core")
        self._dim = workload.case.dim
        if self._dim % 16 or self._dim > _MOST_DIM:
            raise Unavailable(f"only for dims that are multiples of 16, up to {_MOST_DIM}")
        moments = workload.moments
        if not moments:
            workload.reserve(2)
        self.params = workload.params()
        self._sets = workload.sets
        tables = zip(self.params, self._sets[0], strict=True)
        self._moments = moments or [_moments(param, gradient) for param, gradient in tables]
        self._plans = [
            [plan(g.positions, _threads(g, workload.case.tables)) for g in gradients]
            for gradients in workload.sets
        ]
        self._run = native.core.limit
        self._instruction_set = native._isa.index
        self._calls: list[tuple[tuple[float, ...], tuple[int, ...]]] = []
        self._step = 0

    def before(self, number: int) -> None:
        """Look up the addresses."""
        self._step += 1
        coefficients = sparse_adam.coefficients(
            step=self._step, lr=LEARNING_RATE, betas=_BETAS, eps=_EPS
        )
        self._calls = []
        tables = zip(
            self._plans[number], self.params, self._moments, self._sets[number], strict=True
        )
        for each, param, moments, gradient in tables:
            tensors = (*each[:3], param, *moments, gradient.values)
            addresses = (tensor.data_ptr() for tensor in tensors)
            self._calls.append(((*addresses, self._dim, *coefficients), each.shares))

    def step(self) -> None:
        """One call per table."""
        for work, ends in self._calls:
            self._run(work, ends, self._instruction_set)


def _moments(param: Parameter, gradient: Gradient) -> tuple[Tensor, Tensor]:
    """Zero moments in memory that is allocated just as the optimizer does it: by the optimizer.

    A first step with a learning rate of zero makes them and leaves the parameter alone.
    """
    optimizer = SparseAdam([param], lr=0.0, engine="native")
    param.grad = gradient.coo
    optimizer.step()
    state = optimizer.state[param]
    for moment in (state["exp_avg"], state["exp_avg_sq"]):
        moment[gradient.positions] = 0.0
    return state["exp_avg"], state["exp_avg_sq"]
