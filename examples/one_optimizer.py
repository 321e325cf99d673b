"""One optimizer for a whole model, against the two that torch needs, on the same batches.

The model has two embeddings with sparse gradients and three linear layers with dense ones.
torch.optim.AdamW refuses the first, torch.optim.SparseAdam the second, so with torch a training
loop needs both. sparsestep.AdamW takes the whole model.

The data is made up: every user and every item has a hidden vector, and the better the two agree,
the more likely is a click. Some items are far more popular than others.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import sparsestep

USERS, ITEMS, HIDDEN = 300, 500, 4
BATCH, WIDTH = 1_024, 16
LEARNING_RATE, DECAY = 1e-2, 1e-2

# SparseAdam adds eps before bias correction, AdamW after it. The gradients of a mean loss are tiny,
# so a smaller eps than the default keeps the two comparable.
EPS = 1e-16


class Clicks:
    """Batches of users, items, and whether there was a click."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.users = torch.randn(USERS, HIDDEN, generator=self.generator)
        self.items = torch.randn(ITEMS, HIDDEN, generator=self.generator)
        self.popularity = 1 / torch.arange(1, ITEMS + 1)  # Zipf's law

    def batch(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """New examples: users, items, and the logit of the probability of a click."""
        users = torch.randint(0, USERS, (size,), generator=self.generator)
        items = self.popularity.multinomial(size, replacement=True, generator=self.generator)
        return users, items, (self.users[users] * self.items[items]).sum(dim=1)

    def drawn(self, logits: Tensor) -> Tensor:
        """Draw the clicks: one or zero for each example."""
        return torch.bernoulli(logits.sigmoid(), generator=self.generator)


class Model(nn.Module):
    """Two embeddings, three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(USERS, WIDTH, sparse=True)
        self.items = nn.Embedding(ITEMS, WIDTH, sparse=True)
        for embedding in self.embeddings():
            nn.init.normal_(embedding, std=0.1)
        self.layers = nn.Sequential(
            *(nn.Linear(3 * WIDTH, 64), nn.ReLU()),
            *(nn.Linear(64, 32), nn.ReLU()),
            nn.Linear(32, 1),
        )

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        """The logit of the probability that a user clicks on an item."""
        user, item = self.users(users), self.items(items)
        logits: Tensor = self.layers(torch.cat([user, item, user * item], dim=1))
        return logits.squeeze(1)

    def embeddings(self) -> list[Tensor]:
        """The parameters with sparse gradients."""
        return [self.users.weight, self.items.weight]


@dataclass
class Run:
    """A model and its optimizers."""

    model: Model
    optimizers: list[torch.optim.Optimizer]

    def train(self, users: Tensor, items: Tensor, clicks: Tensor) -> float:
        """Take one step; returns the loss before it."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        loss = binary_cross_entropy_with_logits(self.model(users, items), clicks)
        loss.backward()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss.item()

    @torch.no_grad()
    def loss(self, users: Tensor, items: Tensor, clicks: Tensor) -> float:
        """The loss on a batch, without training."""
        return binary_cross_entropy_with_logits(self.model(users, items), clicks).item()


def with_sparsestep(model: Model) -> Run:
    """One optimizer. The embeddings have their own group only because they must not decay."""
    groups = [
        {"params": model.embeddings(), "weight_decay": 0.0},
        {"params": model.layers.parameters(), "weight_decay": DECAY},
    ]
    return Run(model, [sparsestep.AdamW(groups, lr=LEARNING_RATE, eps=EPS)])


def with_torch(model: Model) -> Run:
    """Two optimizers: neither of torch's takes both kinds of gradients."""
    sparse = torch.optim.SparseAdam(model.embeddings(), lr=LEARNING_RATE, eps=EPS)
    dense = torch.optim.AdamW(
        model.layers.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=DECAY
    )
    return Run(model, [sparse, dense])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train both in turns and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument(
        "--steps", type=count, default=600, help="batches to train on (default: %(default)s)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of data and weights (default: %(default)s)"
    )
    parser.add_argument(
        "--float32",
        action="store_true",
        help="instead of float64: training amplifies rounding, so the two drift apart a little",
    )
    options = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float32 if options.float32 else torch.float64)
    torch.manual_seed(options.seed)
    data = Clicks(options.seed)
    ours, theirs = Model(), Model()
    theirs.load_state_dict(ours.state_dict())
    runs = [with_sparsestep(ours), with_torch(theirs)]

    print(f"{options.steps} steps, {BATCH} examples each. The loss of each batch before its step;")
    print("a bar shows what is above 0.4.\n")
    print("         one optimizer:            two optimizers:")
    print("  step   sparsestep.AdamW          torch's SparseAdam + AdamW")
    shown = {1 + round(i * (options.steps - 1) / 15) for i in range(16)}
    for step in range(1, options.steps + 1):
        users, items, logits = data.batch(BATCH)
        clicks = data.drawn(logits)
        losses = [run.train(users, items, clicks) for run in runs]
        if step in shown:
            bars = (f"{loss:.4f} {'#' * round(60 * (loss - 0.4)):18}" for loss in losses)
            print(f"{step:6}   {' '.join(bars)}".rstrip(), flush=True)

    users, items, logits = data.batch(32 * BATCH)
    clicks = data.drawn(logits)
    final = [run.loss(users, items, clicks) for run in runs]
    apart = abs(final[0] - final[1]) / final[1]
    print("\nfinal loss, on fresh data")
    print(f"  one optimizer, sparsestep.AdamW             {final[0]:.4f}")
    print(f"  two optimizers, torch's SparseAdam + AdamW  {final[1]:.4f}")
    print(f"  apart                                       {100 * apart:.4f} %")
    print(f"  for comparison: chance level                {math.log(2):.4f}")
    best = binary_cross_entropy_with_logits(logits, clicks).item()
    print(f"  for comparison: knowing the hidden vectors  {best:.4f}")
    if apart > 0.01:
        print("The two should agree within 1 %.", file=sys.stderr)
        return 1
    return 0


def count(text: str) -> int:
    """A whole number of at least one."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
