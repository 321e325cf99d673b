"""The limit: the least that any implementation of the update must do (``benchmarks/native/``)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from benchmarks.harness.contestants import Contestant, Factory, element_states, rule_of, tensors
from benchmarks.harness.workload import LEARNING_RATE, Gradient, Unavailable, Workload
from sparsestep import SparseAdam, _native
from sparsestep.optim.optimizer import RuleOptimizer

try:
    from benchmarks.harness import _limit
except ImportError:  # `make bench` builds it
    _limit = None  # type: ignore[assignment]
limit_module = _limit

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


def plan(positions: Tensor, threads: int, rows: int) -> Plan:
    """Find the order and the duplicates of a gradient, and share the work out evenly.

    Args:
        positions: those of the gradient.
        threads: how many take part.
        rows: how many rows are written for each slot: that of the parameter and those of its state.

    Example:
        >>> slots, offsets, entries, shares = plan(torch.tensor([7, 3, 7, 5]), threads=1, rows=3)
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
    return Plan(ascending[by_appearance], offsets, entries, shares(counts, threads, rows))


def shares(counts: Tensor, threads: int, rows: int) -> tuple[int, ...]:
    """Where each thread's share ends, if an entry weighs 1 and each of a slot's rows 1.

    Example:
        >>> shares(torch.tensor([5, 1, 1, 1]), threads=2, rows=3)
        (2, 4)
    """
    weights = (counts + rows).cumsum(0)
    wanted = weights[-1] * torch.arange(1, threads + 1) / threads
    ends = torch.searchsorted(weights, wanted).add_(1).clamp_(max=len(counts))
    return (*ends[:-1].tolist(), len(counts))


def _threads(gradient: Gradient, tables: int, rows: int) -> int:
    """One for what is tiny, and for the tables of an optimizer that has many; else all."""
    traffic = (1 + 2 * rows) * gradient.values.nbytes  # one is read, the others are written too
    return 1 if tables > 1 or traffic < _SERIAL_BYTES else torch.get_num_threads()


class Limit(Contestant):
    """A loop that knows the order and the duplicates in advance, and only moves the memory.

    It does the update of an optimizer's rule. Weight decay is no part of a rule, so it has none.

    Args:
        workload: what is measured.
        optimizer: the class whose rule it is; the command measures SparseAdam.
        **options: for the class.
    """

    name = "limit"

    def __init__(self, workload: Workload, optimizer: Factory = SparseAdam, **options: Any) -> None:
        if _native.ext is None:
            raise Unavailable("installed without the C++ core")
        if limit_module is None:
            raise Unavailable("not built: run make bench")
        self._dim = workload.case.dim
        if self._dim % 16 or self._dim > _MOST_DIM:
            raise Unavailable(f"only for dims that are multiples of 16, up to {_MOST_DIM}")
        rule = rule_of(optimizer, **options)
        states = workload.states.get(rule.name)
        if states is None:
            workload.reserve(element_states(rule))
        self.params: list[Parameter] = workload.params()
        self._sets = workload.sets
        made = optimizer(self.params, lr=LEARNING_RATE, engine="native", **options)
        self._options = rule.pack_hyperparams(made.settings(0).hyperparams)
        self._states = _first_states(made, workload.sets[0]) if states is None else states
        rows = 1 + element_states(rule)
        self._plans = [
            [plan(g.positions, _threads(g, workload.case.tables, rows), rows) for g in gradients]
            for gradients in workload.sets
        ]
        self._rule = limit_module.rules().index(rule.name)
        self._run = limit_module.run
        self._instruction_set = limit_module.instruction_sets().index(
            str(_native.instruction_set())
        )
        self._calls: list[tuple[Any, ...]] = []
        self._step = 0

    def before(self, set_index: int) -> None:
        """Look up the addresses."""
        self._step += 1
        self._calls = []
        tables = zip(
            self._plans[set_index], self.params, self._states, self._sets[set_index], strict=True
        )
        for each, param, state, gradient in tables:
            order = addresses(each.slots, each.offsets, each.entries, gradient.values)
            written = addresses(param, *state)
            self._calls.append(
                (
                    *(self._rule, order, written, self._dim),
                    *(self._options, self._step, each.shares, self._instruction_set),
                )
            )

    def step(self) -> None:
        """One call per table."""
        for call in self._calls:
            self._run(*call)


def addresses(*tensors: Tensor) -> tuple[int, ...]:
    """Where tensors are in memory, as the limit is told."""
    return tuple(tensor.data_ptr() for tensor in tensors)


def _first_states(optimizer: RuleOptimizer, gradients: list[Gradient]) -> list[list[Tensor]]:
    """State as before the first step, in memory that is allocated as the optimizer does it: by it.

    A step with a learning rate of zero makes it and leaves the parameters alone.
    """
    [group] = optimizer.param_groups
    params, rule = group["params"], optimizer.rule_for(group)
    for param, gradient in zip(params, gradients, strict=True):
        param.grad = gradient.coo
    group["lr"] = 0.0
    for _ in range(2):
        optimizer.step()
    optimizer.store.huge_pages.move_all()
    states = tensors(rule, optimizer, params)
    for state, gradient in zip(states, gradients, strict=True):
        for spec, tensor in zip(rule.state, state, strict=True):
            initial = group[spec.initial] if isinstance(spec.initial, str) else spec.initial
            tensor[gradient.positions] = initial
    return states
