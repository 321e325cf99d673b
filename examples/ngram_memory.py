"""A small GPT with and without a memory of n-grams: a table that is looked up by the last tokens.

The text is the manual that Python brings along (``pydoc help()``), byte by byte; every tenth
paragraph is held out. Both models have the same layers and see the same batches. One adds the rows
of the last two, three and four bytes to its tokens, from a table that is hashed into. The layers
are trained by AdamW, the table by row-wise Adam without a first moment, which keeps 4 bytes per
row: one optimizer, made in one line by ``optimizer_for``.

Prints the loss against tokens and time, the step time against the rows of the table, and the
memory.
"""

from __future__ import annotations

import argparse
import sys
import time
from functools import partial
from pydoc_data.topics import topics
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import sparsestep

WIDTH, HEADS, LAYERS, CONTEXT, BATCH = 64, 4, 2, 128, 8
ORDERS = (2, 3, 4)


class Block(nn.Module):
    """Attention and two layers, each added to what came in."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.attend, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.grow, self.shrink = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Look at earlier tokens, then at each alone."""
        heads = self.attend(self.norms[0](x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(found.transpose(1, 2).flatten(2))
        return x + self.shrink(F.gelu(self.grow(self.norms[1](x))))


class GPT(nn.Module):
    """With ``rows``, it has a memory; its rows start at zero, so both models start the same."""

    def __init__(self, rows: int = 0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(CONTEXT, WIDTH) / 10)
        self.blocks = nn.Sequential(*[Block() for _ in range(LAYERS)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)
        self.memory: sparsestep.nn.NgramEmbedding | None = None
        if rows:
            weight = torch.zeros(rows, WIDTH)
            self.memory = sparsestep.nn.NgramEmbedding(rows, WIDTH, orders=ORDERS, weight=weight)

    def forward(self, tokens: Tensor) -> Tensor:
        """Scores of the next byte."""
        x = self.bytes(tokens) + self.positions[: tokens.shape[1]]
        if self.memory is not None:
            x = x + self.memory(tokens)
        return self.head(self.norm(self.blocks(x)))


class Point(NamedTuple):
    """Where a training is."""

    tokens: int
    seconds: float
    loss: float


def load() -> tuple[Tensor, Tensor]:
    """The bytes of the paragraphs to learn, and of those that are held out.

    Pages repeat paragraphs of others, which a memory would know by heart: each is used once.
    """
    pages = (text for _, text in sorted(topics.items()))
    paragraphs = dict.fromkeys(part.strip() for page in pages for part in page.split("\n\n"))
    parts: list[list[str]] = [[], []]
    for number, paragraph in enumerate(paragraphs):
        parts[number % 10 == 9].append(paragraph)
    learned, held_out = (torch.tensor(list("\n\n".join(part).encode())) for part in parts)
    return learned, held_out


def batch(text: Tensor, step: int) -> Tensor:
    """The same for all models."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - CONTEXT - 1, (BATCH, 1), generator=generator)
    return text[starts + torch.arange(CONTEXT + 1)]


def loss_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """The mean loss of the next byte."""
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW for layers, without decay for norms and biases; tables have their own."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() > 1]},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    tables = partial(sparsestep.RowwiseAdam, lr=1e-2, betas=(0.0, 0.999))
    return sparsestep.nn.optimizer_for(
        model, sparsestep.AdamW, lr=2e-3, params=groups, tables=tables
    )


def train(rows: int, steps: int, learned: Tensor, held_out: Tensor) -> list[Point]:
    """Train a model; evaluation is not timed."""
    model = GPT(rows)
    optimizer = optimizer_of(model)
    checks = torch.stack([batch(held_out, step) for step in range(8)]).flatten(0, 1)
    points: list[Point] = []
    seconds = 0.0
    for step in range(steps + 1):
        if step % max(1, steps // 8) == 0:
            model.eval()
            with torch.no_grad():
                points.append(Point(step * BATCH * CONTEXT, seconds, loss_of(model, checks).item()))
            model.train()
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch(learned, step)).backward()
        optimizer.step()
        seconds += time.perf_counter() - start
    return points


def step_time(rows: int, learned: Tensor, steps: int = 44) -> float:
    """The median time of a training step, in milliseconds."""
    model = GPT(rows)
    optimizer = optimizer_of(model)
    times: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss_of(model, batch(learned, step % 4)).backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times[4:])[(steps - 4) // 2]


def tokens_until(points: list[Point], loss: float) -> Point | None:
    """The first point with a loss as low as this."""
    return next((point for point in points if point.loss <= loss), None)


def main() -> int:
    """Train both, and compare; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--sizes", type=int, nargs="*", default=[10_000, 100_000, 1_000_000])
    options = parser.parse_args()
    learned, held_out = load()
    print(f"{len(learned):,} bytes to learn, {len(held_out):,} held out")
    layers = sum(param.numel() for param in GPT().parameters())
    memory = GPT(options.rows).memory
    assert memory is not None
    found = memory.collisions(learned[:100_000].unsqueeze(0))
    print(f"layers: {4 * layers:,} bytes, and {8 * layers:,} of state")
    print(
        f"memory: {memory.weight.nbytes:,} bytes, and {4 * options.rows:,} of state; "
        f"{found['ngrams']:,} n-grams in 100,000 bytes, {found['collision_rate']:.1%} share a row"
    )
    plain = train(0, options.steps, learned, held_out)
    with_memory = train(options.rows, options.steps, learned, held_out)
    print("   tokens   without: loss    time     with: loss    time")
    for one, other in zip(plain, with_memory, strict=True):
        print(
            f"{one.tokens:9,}        {one.loss:8.3f} {one.seconds:6.1f} s"
            f"    {other.loss:8.3f} {other.seconds:6.1f} s"
        )
    reached = tokens_until(with_memory, plain[-1].loss)
    if reached is not None:
        tokens, seconds = plain[-1].tokens / reached.tokens, plain[-1].seconds / reached.seconds
        print(f"with memory, that loss took {tokens:.1f} x fewer tokens, {seconds:.1f} x less time")
    times = {rows: step_time(rows, learned) for rows in (0, *options.sizes)}
    for rows, milliseconds in times.items():
        print(f"{rows:11,} rows: {milliseconds:.1f} ms a step")
    return 0 if with_memory[-1].loss < plain[-1].loss else 1


if __name__ == "__main__":
    sys.exit(main())
