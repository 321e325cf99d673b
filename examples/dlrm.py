"""A recommender of the usual shape, and the two ways to train it that are compared.

After "Deep Learning Recommendation Model for Personalization and Recommendation Systems" (Naumov et
al., 2019): a table for each list of ids, a perceptron for the numbers, the dot products of all that
with each other, and a perceptron on top.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from time import perf_counter

import torch
from clicks import NUMBERS, Batch, auc
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsestep

DIM = 16
BOTTOM, TOP = (128, 64), (128, 64)
LEARNING_RATE = 5e-3

# SparseAdam adds eps before bias correction, Adam after it. Gradients of an embedding are small,
# since the loss is a mean over the batch; eps is much smaller here, so that it does not matter.
EPS = 1e-16

WARM_UP = 8


class TorchTables(nn.Module):
    """What ``sparsestep.nn.EmbeddingBagCollection`` does, with torch's modules."""

    def __init__(self, rows: Sequence[int]) -> None:
        super().__init__()
        made = (nn.EmbeddingBag(each, DIM, mode="sum", sparse=True) for each in rows)
        self.tables = nn.ModuleList(made)

    def forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """A row for each list of each feature."""
        return [table(each) for table, each in zip(self.tables, ids, strict=True)]


class Model(nn.Module):
    """Tables, two perceptrons, and what is between them."""

    def __init__(self, tables: nn.Module, features: int) -> None:
        super().__init__()
        self.tables = tables
        for table in tables.parameters():
            nn.init.normal_(table, std=0.02)
        self.bottom = perceptron(NUMBERS, *BOTTOM, DIM)
        self.top = perceptron(DIM + (features + 1) ** 2, *TOP, 1)

    def forward(self, numbers: Tensor, ids: Sequence[Tensor]) -> Tensor:
        """The logit of the chance of a click."""
        dense = self.bottom(numbers)
        vectors = torch.stack([dense, *self.tables(ids)], dim=1)
        # Each pair is in there twice. To pick it once would take longer than it saves.
        products = torch.bmm(vectors, vectors.mT).flatten(1)
        logits: Tensor = self.top(torch.cat([dense, products], dim=1))
        return logits.squeeze(1)


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers of these widths, with a ReLU after each but the last."""
    layers: list[nn.Module] = []
    for narrow, wide in pairwise(widths):
        layers += [nn.Linear(narrow, wide), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


@dataclass
class Run:
    """A model and what trains it.

    Attributes:
        name: of its optimizers.
        model: the model.
        optimizers: one, or as many as it takes.
        seconds: what each step took.
        loss: of the last batch, before its step.
    """

    name: str
    model: Model
    optimizers: list[torch.optim.Optimizer]
    seconds: list[float] = field(default_factory=list[float])
    loss: float = 0.0

    def train(self, batch: Batch, rate: float = LEARNING_RATE) -> None:
        """One step with this learning rate, on the clock."""
        for group in (each for optimizer in self.optimizers for each in optimizer.param_groups):
            group["lr"] = rate
        began = perf_counter()
        loss = binary_cross_entropy_with_logits(self.model(batch.numbers, batch.ids), batch.clicks)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.seconds.append(perf_counter() - began)
        self.loss = loss.item()

    def seconds_per_step(self) -> float:
        """The median, without the first steps, in which threads start and memory is new."""
        return median(self.seconds[WARM_UP:] or self.seconds)

    @torch.no_grad()
    def auc(self, held_out: Batch, size: int = 2_048) -> float:
        """On examples that it has not been trained on."""
        parts = (held_out.part(start, size) for start in range(0, len(held_out.clicks), size))
        return auc(torch.cat([self.model(p.numbers, p.ids) for p in parts]), held_out.clicks)


def learning_rate(step: int, steps: int) -> float:
    """It falls to zero: two runs that round differently then end at the same place."""
    return LEARNING_RATE * (1 - step / steps)


def contestants(rows: Sequence[int]) -> tuple[Run, Run]:
    """The same model twice, with the same weights: ours, then plain torch."""
    tables = sparsestep.nn.EmbeddingBagCollection([(each, DIM) for each in rows], mode="sum")
    ours, plain = Model(tables, len(rows)), Model(TorchTables(rows), len(rows))
    plain.load_state_dict(ours.state_dict())
    return with_sparsestep(ours), with_torch(plain)


def with_sparsestep(model: Model) -> Run:
    """One optimizer for everything. No weight decay, since torch's SparseAdam has none."""
    adamw = sparsestep.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.0)
    return Run("sparsestep.AdamW", model, [adamw])


def with_torch(model: Model) -> Run:
    """Two optimizers: neither of torch's takes both kinds of gradients."""
    sparse = torch.optim.SparseAdam(model.tables.parameters(), lr=LEARNING_RATE, eps=EPS)
    layers = [*model.bottom.parameters(), *model.top.parameters()]
    dense = torch.optim.Adam(layers, lr=LEARNING_RATE, eps=EPS)
    return Run("torch SparseAdam + Adam", model, [sparse, dense])
