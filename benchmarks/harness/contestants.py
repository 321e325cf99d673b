"""Who takes part: torch's optimizers, this library's, and the limit of the machine.

A contestant is made for one workload. ``before`` hands it a gradient, off the clock; ``step`` is
what is timed. One that cannot take part raises ``Unavailable`` while it is made.
"""

from __future__ import annotations

import importlib
import itertools
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.harness.workload import LEARNING_RATE, Unavailable, Workload, fill
from sparsestep import SparseAdam, _native
from sparsestep.optim import sparse_adam
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule

# A class of this library: takes the parameters, lr, engine and its own options.
Factory = Callable[..., RuleOptimizer]

_MOST_DENSE_ELEMENTS = 100_000_000

# With the second step an optimizer has looked at the state that the first has made.
_STEPS_UNTIL_STATE_IS_KNOWN = 3


class Contestant(ABC):
    """Something that can do one step of the workload."""

    name: ClassVar[str]

    @abstractmethod
    def __init__(self, workload: Workload) -> None: ...

    @abstractmethod
    def before(self, set_index: int) -> None:
        """Get ready for a step with the gradients of ``set_index``; not timed."""

    @abstractmethod
    def step(self) -> None:
        """The step; timed."""


class OptimizerContestant(Contestant):
    """An optimizer that finds its gradients in ``param.grad``."""

    states: int  # how many copies of the table its state takes

    def __init__(self, workload: Workload) -> None:
        self.reserve(workload)
        self.params: list[Parameter] = workload.params()
        self._gradients = [[gradient.coo for gradient in batch] for batch in workload.sets]
        self.optimizer: Optimizer = self.make(self.params)

    def reserve(self, workload: Workload) -> None:
        """Set the memory for the state aside."""
        workload.reserve(self.states)

    @abstractmethod
    def make(self, params: list[Parameter]) -> Optimizer:
        """The optimizer."""

    def before(self, set_index: int) -> None:
        """Put the gradients where the optimizer looks for them."""
        for param, gradient in zip(self.params, self._gradients[set_index], strict=True):
            param.grad = gradient

    def step(self) -> None:
        """One step of the optimizer."""
        self.optimizer.step()


class TorchSparseAdam(OptimizerContestant):
    """What every other is compared with."""

    name = "torch SparseAdam"
    states = 2

    def make(self, params: list[Parameter]) -> Optimizer:
        """``torch.optim.SparseAdam``."""
        return torch.optim.SparseAdam(params, lr=LEARNING_RATE)


class TorchAdagrad(OptimizerContestant):
    """Torch's other optimizer for sparse gradients; one moment instead of two."""

    name = "torch Adagrad sparse"
    states = 1

    def make(self, params: list[Parameter]) -> Optimizer:
        """``torch.optim.Adagrad``."""
        return torch.optim.Adagrad(params, lr=LEARNING_RATE)


class TorchDenseAdam(OptimizerContestant):
    """What one pays without sparse gradients: every row moves in every step.

    Its one dense gradient covers the whole table, so it does not matter which set is on.
    """

    name = "torch Adam dense fused"
    states = 3  # the gradient is as large as the table too

    def __init__(self, workload: Workload) -> None:
        if workload.case.table_bytes > 4 * _MOST_DENSE_ELEMENTS:
            raise Unavailable("left out on tables of over 100 million elements")
        super().__init__(workload)
        dense = [torch.randn_like(param, requires_grad=False) for param in self.params]
        self._gradients = [dense] * len(workload.sets)

    def make(self, params: list[Parameter]) -> Optimizer:
        """``torch.optim.Adam`` with its fused kernel."""
        return torch.optim.Adam(params, lr=LEARNING_RATE, fused=True)


def rule_of(optimizer: Factory, **options: Any) -> Rule:
    """The rule that an optimizer with these options follows.

    Example:
        >>> rule_of(SparseAdam, bias_correction="per_row").name
        'sparse_adam_per_row'
    """
    made = optimizer([torch.zeros(1, 1)], **options)
    return made.rule_for(made.param_groups[0])


def element_states(rule: Rule) -> int:
    """How many of a rule's state tensors are as large as the table.

    Example:
        >>> element_states(rule_of(SparseAdam))
        2
    """
    return sum(not spec.per_row for spec in rule.state)


def tensors(rule: Rule, optimizer: Optimizer, params: list[Parameter]) -> list[list[Tensor]]:
    """The state of each parameter, in the order in which the rule takes it."""
    return [[optimizer.state[param][spec.name] for spec in rule.state] for param in params]


class Native(OptimizerContestant):
    """This library, on its native engine.

    Args:
        workload: what is measured.
        optimizer: the class; the command measures SparseAdam.
        **options: for the class.
    """

    name = "sparsestep"

    def __init__(self, workload: Workload, optimizer: Factory = SparseAdam, **options: Any) -> None:
        if _native.ext is None:
            raise Unavailable("installed without the C++ core")
        self._optimizer, self._options = optimizer, options
        self._steps = 0
        rule = rule_of(optimizer, **options)
        self.states: int = element_states(rule)
        super().__init__(workload)
        if workload.shared:
            self.before(0)
            self.step()
            workload.states[rule.name] = tensors(rule, self.optimizer, self.params)

    def before(self, set_index: int) -> None:
        """The same; and soon, off the clock, the huge pages that a long training gets in time."""
        super().before(set_index)
        self._steps += 1
        if self._steps == _STEPS_UNTIL_STATE_IS_KNOWN:
            assert isinstance(self.optimizer, RuleOptimizer)
            self.optimizer.store.huge_pages.move_all()

    def make(self, params: list[Parameter]) -> Optimizer:
        """The class that was asked for."""
        return self._optimizer(params, lr=LEARNING_RATE, engine="native", **self._options)


class Reference(OptimizerContestant):
    """This library, on the engine that runs anywhere."""

    name = "sparsestep reference"
    states = 2

    def __init__(self, workload: Workload) -> None:
        super().__init__(workload)
        rule = sparse_adam.RULES[False]
        names = [spec.name for spec in rule.state]
        shared = workload.states.get(rule.name)
        if shared is not None:
            for param, state in zip(self.params, shared, strict=True):
                self.optimizer.state[param] = {"step": 0, **dict(zip(names, state, strict=True))}

    def reserve(self, workload: Workload) -> None:
        """Nothing where the moments are there already."""
        if sparse_adam.RULES[False].name not in workload.states:
            super().reserve(workload)

    def make(self, params: list[Parameter]) -> Optimizer:
        """``sparsestep.SparseAdam``."""
        return SparseAdam(params, lr=LEARNING_RATE, engine="reference")


# Other libraries, where they are installed. They are never a dependency.

_SHARED_MEMORY = Path("/dev/shm")

_numbers = itertools.count()


def import_peer(name: str) -> ModuleType:
    """A module of another library; raises ``Unavailable`` where it cannot be loaded."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:  # OSError: built for another release of torch
        missing = getattr(error, "name", None) or ""
        absent = isinstance(error, ModuleNotFoundError) and name.startswith(missing.split(".")[0])
        reason = "" if absent else f" so that it loads ({error})"
        raise Unavailable(f"not installed{reason}") from None


class PeerContestant(Contestant, ABC):
    """Tries one step while it is made: what does not work here must not end the whole run."""

    def __init__(self, workload: Workload) -> None:
        try:
            self.make(workload)
            self.before(0)
            self.step()
        except Unavailable:
            raise
        except Exception as error:
            raise Unavailable(f"does not run here ({error})") from error

    @abstractmethod
    def make(self, workload: Workload) -> None:
        """Make tables and optimizer."""


class FbgemmAdagrad(PeerContestant):
    """FBGEMM's embedding tables with Adagrad; FBGEMM has no Adam on the CPU.

    It updates inside backward, so backward is what is timed: of bags of one id each, whose sum is
    the row itself, so that the gradient of the output is the gradient's values.
    """

    name = "FBGEMM Adagrad"

    def make(self, workload: Workload) -> None:
        """One module for all tables."""
        training = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_training")
        common = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_common")
        configs = import_peer("fbgemm_gpu.split_embedding_configs")
        workload.reserve(2)
        case = workload.case
        place, device = common.EmbeddingLocation.HOST, training.ComputeDevice.CPU
        self._tables = training.SplitTableBatchedEmbeddingBagsCodegen(
            [(case.rows, case.dim, place, device)] * case.tables,
            optimizer=configs.EmbOptimType.EXACT_ADAGRAD,
            learning_rate=LEARNING_RATE,
            eps=1e-10,  # torch's
            pooling_mode=common.PoolingMode.SUM,
            device=torch.device("cpu"),
        )
        for table in self._tables.split_embedding_weights():
            fill(table.detach())
        # Bags of one: the first table's, then the second table's, and so on.
        self._offsets = torch.arange(case.tables * case.lookups + 1)
        self._sets: list[tuple[Tensor, Tensor]] = []
        for gradients in workload.sets:
            positions = torch.cat([gradient.positions for gradient in gradients])
            values = [gradient.values for gradient in gradients]
            self._sets.append((positions, values[0] if len(values) == 1 else torch.cat(values, 1)))

    def before(self, set_index: int) -> None:
        """Forward."""
        positions, self._gradient = self._sets[set_index]
        self._output = self._tables(positions, self._offsets)

    def step(self) -> None:
        """Backward, which updates."""
        self._output.backward(self._gradient)


class DglSparseAdam(PeerContestant):
    """DGL's optimizer for node embeddings.

    It takes the mean of a row's duplicates where the others take the sum, and counts the steps of
    each row; the work is the same.
    """

    name = "DGL SparseAdam"

    def make(self, workload: Workload) -> None:
        """One embedding per table, one optimizer."""
        os.environ.setdefault("DGLBACKEND", "pytorch")  # else it writes a file into the home
        embeddings, optimizers = import_peer("dgl.nn"), import_peer("dgl.optim")
        workload.reserve(3)
        case = workload.case
        # It keeps its tables there, and a process that writes past the end is killed.
        if _SHARED_MEMORY.exists() and case.table_bytes > shutil.disk_usage(_SHARED_MEMORY).free:
            raise Unavailable(f"too little space in {_SHARED_MEMORY}")
        self._embeddings = [
            embeddings.NodeEmbedding(
                case.rows,
                case.dim,
                f"sparsestep_bench_{os.getpid()}_{next(_numbers)}",
                init_func=fill,
            )
            for _ in range(case.tables)
        ]
        self._optimizer = optimizers.SparseAdam(self._embeddings, lr=LEARNING_RATE)
        self._sets = workload.sets

    def before(self, set_index: int) -> None:
        """Forward and backward."""
        self._optimizer.zero_grad()
        for embedding, gradient in zip(self._embeddings, self._sets[set_index], strict=True):
            embedding(gradient.positions).backward(gradient.values)

    def step(self) -> None:
        """One step of the optimizer."""
        self._optimizer.step()


class GatherScatterOptimizer(Optimizer):
    """What one writes without a library: a formula on the rows of a coalesced gradient.

    Args:
        params: one table.
        lr: the learning rate.
        formula: ``(param, grad, *state, lr)`` to the new values, in place where it can.
        state: its names.
        width: of the state.
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        formula: Callable[..., tuple[Tensor, ...]],
        state: Sequence[str],
        width: int | None = None,
    ) -> None:
        super().__init__(params, {"lr": lr})
        self._formula, self._names, self._width = formula, state, width

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Gather, compute, scatter."""
        [group] = self.param_groups
        for param in group["params"]:
            grad = param.grad.coalesce()
            rows, values = grad.indices()[0], grad.values()
            state = self.state[param]
            for name in self._names:
                if name not in state:
                    state[name] = torch.zeros(len(param), self._width or param.shape[1])
            old = [state[name][rows] for name in self._names]
            new, *kept = self._formula(param[rows], values, *old, group["lr"])
            param[rows] = new
            for name, value in zip(self._names, kept, strict=True):
                state[name][rows] = value
