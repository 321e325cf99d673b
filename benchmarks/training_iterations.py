"""Whole iterations of real programs: lookups, model, backward, update, by torch and by us.

The shapes are those of public programs: Meta's DLRM script, PyG's Node2Vec, and TransE with
negatives as knowledge-graph libraries train it. Contestants have the same model with the same
weights and the same batches. Ours goes through ``nn.fuse`` and has one optimizer of this library.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsestep
from benchmarks.harness.cases import Program
from benchmarks.harness.race import Follow, race, threads, timings
from benchmarks.harness.results import CaseResult
from benchmarks.harness.workload import LEARNING_RATE, SETS

_MODEL_SEED = 40_000
_NUMBERS = 13  # of an example of DLRM, beside its ids
_BOTTOM, _TOP = (512, 256), (512, 256)
_RELATIONS = 1_000


class BenchModel(nn.Module, ABC):
    """What is trained; makes its own batches."""

    @abstractmethod
    def __init__(self, program: Program) -> None: ...

    @staticmethod
    @abstractmethod
    def batch(program: Program, seed: int) -> tuple[Tensor, ...]:
        """What ``forward`` takes."""


class Dlrm(BenchModel):
    """Tables of ids, a perceptron for numbers, dot products of all with all, a perceptron."""

    def __init__(self, program: Program) -> None:
        nn.Module.__init__(self)
        rows, dim, count = program.rows, program.dim, program.tables
        self.tables: nn.ModuleList = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=True) for _ in range(count)
        )
        self.bottom: nn.Sequential = _mlp(_NUMBERS, *_BOTTOM, dim)
        self.top: nn.Sequential = _mlp(dim + (count + 1) ** 2, *_TOP, 1)

    def forward(self, numbers: Tensor, clicks: Tensor, *ids: Tensor) -> Tensor:
        """The loss."""
        dense = self.bottom(numbers)
        found = [table(each) for table, each in zip(self.tables, ids, strict=True)]
        vectors = torch.stack([dense, *found], dim=1)
        products = torch.bmm(vectors, vectors.mT).flatten(1)
        logits = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return functional.binary_cross_entropy_with_logits(logits, clicks)

    @staticmethod
    def batch(program: Program, seed: int) -> tuple[Tensor, ...]:
        """Numbers, clicks, and bags of ids for each table."""
        examples = _examples(program)
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randn(examples, _NUMBERS, generator=generator)
        clicks = torch.randint(2, (examples,), generator=generator).float()
        seeds = range(seed * program.tables, (seed + 1) * program.tables)
        ids = [_ids(program, each).view(examples, program.length) for each in seeds]
        return numbers, clicks, *ids


class Node2Vec(BenchModel):
    """One table: nodes, those near them, and five drawn at random for each."""

    def __init__(self, program: Program) -> None:
        nn.Module.__init__(self)
        self.nodes: nn.Embedding = nn.Embedding(program.rows, program.dim, sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss."""
        centre, near, others = self.nodes(ids[0]), self.nodes(ids[1]), self.nodes(ids[2:])
        attracted = functional.logsigmoid((centre * near).sum(-1)).mean()
        repelled = functional.logsigmoid(-(centre * others).sum(-1)).mean()
        return -attracted - repelled

    @staticmethod
    def batch(program: Program, seed: int) -> tuple[Tensor, ...]:
        """``[length, examples]``: a node, its neighbour, and negatives."""
        return (_ids(program, seed).view(program.length, -1),)


class TransE(BenchModel):
    """Entities and relations: the tail of a triple should be where head + relation is."""

    def __init__(self, program: Program) -> None:
        nn.Module.__init__(self)
        self.entities: nn.Embedding = nn.Embedding(program.rows, program.dim, sparse=True)
        self.relations: nn.Embedding = nn.Embedding(_RELATIONS, program.dim, sparse=True)

    def forward(self, ids: Tensor, relations: Tensor) -> Tensor:
        """The loss: the right tail is to be nearer than others by a margin."""
        reached = self.entities(ids[0]) + self.relations(relations)
        right = (reached - self.entities(ids[1])).abs().sum(-1)
        wrong = (reached - self.entities(ids[2:])).abs().sum(-1)
        return functional.relu(1 + right - wrong).mean()

    @staticmethod
    def batch(program: Program, seed: int) -> tuple[Tensor, ...]:
        """``[length, examples]``: head, tail and negatives; then the relations."""
        ids = _ids(program, seed).view(program.length, -1)
        generator = torch.Generator().manual_seed(seed)
        return ids, torch.randint(_RELATIONS, ids.shape[1:], generator=generator)


def _mlp(*widths: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _ids(program: Program, seed: int) -> Tensor:
    whole = _examples(program) * program.length
    return replace(program, lookups=whole).positions(seed)


def _examples(program: Program) -> int:
    return max(1, program.lookups // program.length)


# For each kind the model, torch's optimizer and ours.
MODELS: dict[str, tuple[type[BenchModel], Callable[..., Any], Callable[..., Any]]] = {
    "dlrm": (Dlrm, torch.optim.Adagrad, sparsestep.Adagrad),
    "dlrm with SGD": (Dlrm, torch.optim.SGD, sparsestep.SGD),
    "node2vec": (Node2Vec, torch.optim.SparseAdam, sparsestep.SparseAdam),
    "transe": (TransE, torch.optim.SparseAdam, sparsestep.SparseAdam),
}


class TrainingContestant:
    """One contestant: whole iterations.

    Attributes:
        name: of the contestant.
        model: what it trains.

    Args:
        name: of the contestant.
        model: what it trains.
        optimizer: of all its parameters.
        batches: one for each set.
    """

    def __init__(
        self, name: str, model: BenchModel, optimizer: Any, batches: Sequence[tuple[Tensor, ...]]
    ) -> None:
        self.name: str = name
        self.model: BenchModel = model
        self._optimizer, self._batches = optimizer, batches

    def before(self, set_index: int, /) -> None:
        """Take the batch of a set."""
        self._batch = self._batches[set_index]

    def step(self) -> None:
        """Forward, backward, update."""
        self._optimizer.zero_grad()
        self.model(*self._batch).backward()
        self._optimizer.step()


TORCH, PLAIN, FUSED = "torch", "sparsestep, torch's modules", "sparsestep"


def make_contestants(program: Program) -> list[TrainingContestant]:
    """Torch, torch's modules with our optimizer, and with ``nn.fuse`` as well.

    Example:
        >>> from benchmarks.harness.cases import program
        >>> small = program("node2vec", 50, 4, 28, "uniform", length=7)
        >>> for each in make_contestants(small):
        ...     each.before(0)
        ...     each.step()
        ...     print(each.name)
        torch
        sparsestep, torch's modules
        sparsestep
    """
    kind, torchs, ours = MODELS[program.kind]
    found = []
    batches = [kind.batch(program, seed) for seed in range(SETS)]
    with torch.random.fork_rng(devices=[]):
        for name, optimizer in ((TORCH, torchs), (PLAIN, ours), (FUSED, ours)):
            torch.manual_seed(_MODEL_SEED)
            model = kind(program)
            if name == FUSED:
                sparsestep.nn.fuse(model)
            made = optimizer(model.parameters(), lr=LEARNING_RATE)
            found.append(TrainingContestant(name, model, made, batches))
    return found


def measure_iteration(
    program: Program, suite: str, seconds: float, follow: Follow = lambda done: None
) -> CaseResult:
    """Race the contestants on a program."""
    with threads(program.threads), torch.sparse.check_sparse_tensor_invariants(False):
        racers = make_contestants(program)
        times = race(racers, seconds, follow)
        return CaseResult(
            suite=suite,
            case=program,
            threads=torch.get_num_threads(),
            unique=program.tables * program.positions(0).unique().numel(),
            shared=False,
            timings=timings([racer.name for racer in racers], times, base=TORCH),
            unavailable=[],
        )
