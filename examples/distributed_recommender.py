"""A recommender trained by several processes that share its tables.

    torchrun --nproc-per-node 4 examples/distributed_recommender.py
    python examples/distributed_recommender.py            # one process, the same code

The tables are sharded over the ranks, the layers are DistributedDataParallel's, and one optimizer
updates both. Ranks have different numbers of batches. With --checkpoint FOLDER the state is saved
now and then. Started again, by torchrun after a rank has failed or by you, with any number of
ranks, training continues from there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import sparsestep

FEATURES = {"user": 1, "bought": 10, "seen": 30}  # ids of each in an example
DIM, REPORTS = 16, 5

Batch = tuple[dict[str, Tensor], Tensor]  # ids by feature, and clicks


class Clicks:
    """A made-up click log: every id has a hidden weight, the same on all ranks."""

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.generator = torch.Generator().manual_seed(seed)
        hidden = torch.Generator().manual_seed(0)
        self.weights = {name: torch.randn(rows, generator=hidden) for name in FEATURES}

    def batch(self, size: int) -> Batch:
        """The next examples; low ids are popular."""
        ids: dict[str, Tensor] = {}
        logits = torch.zeros(size)
        for name, length in FEATURES.items():
            uniform = torch.rand(size, length, generator=self.generator)
            ids[name] = (self.rows * uniform**4).long().clamp_(max=self.rows - 1)
            logits += self.weights[name][ids[name]].sum(dim=1) / length**0.5
        return ids, torch.bernoulli(logits.sigmoid(), generator=self.generator)


class Model(nn.Module):
    """Tables, and layers on top."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        tables = dict.fromkeys(FEATURES, (rows, DIM))
        self.tables = sparsestep.nn.EmbeddingBagCollection(tables, mode="sum")
        for table in self.tables.parameters():
            nn.init.normal_(table, std=0.1)
        width = DIM * len(FEATURES)
        self.layers = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, ids: dict[str, Tensor]) -> Tensor:
        """Logits of the probability of a click."""
        logits: Tensor = self.layers(torch.cat(list(self.tables(ids).values()), dim=1))
        return logits.squeeze(1)


def main() -> None:
    """Train, and report the AUC on held-out examples."""
    options = parse()
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model = Model(options.rows)
    plan = sparsestep.distributed.shard(model)
    if rank == 0:
        print(plan.for_batch(options.batch, FEATURES))
    ddp: nn.Module = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = sparsestep.Adam(model.parameters(), lr=0.01)
    first = resume(options.checkpoint, model, optimizer)
    held_out = Clicks(options.rows, seed=1_000_000 + rank).batch(options.held_out)
    began = perf_counter()
    every = max(1, options.steps // REPORTS)
    loader = batches(options, rank, first)
    for step, (ids, clicks) in enumerate(sparsestep.distributed.lockstep(loader), first + 1):
        # The mean of an empty batch would be NaN, though its gradient is zero.
        loss = binary_cross_entropy_with_logits(ddp(ids), clicks, reduction="sum")
        (loss / max(1, len(clicks))).backward()
        sparsestep.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 or step == options.steps:
            auc = evaluate(model, held_out)
            if rank == 0:
                speed = (step - first) / (perf_counter() - began)
                print(f"step {step:5}   AUC {auc:.4f}   {speed:6.1f} steps/s", flush=True)
            if options.checkpoint is not None:
                save(options.checkpoint, step, model, optimizer)
    if dist.is_initialized():
        dist.destroy_process_group()


def batches(options: argparse.Namespace, rank: int, first: int) -> Iterator[Batch]:
    """This rank's part of the click log; each rank has one batch less than the one before."""
    log = Clicks(options.rows, seed=1_000 * first + rank)
    for _ in range(first, max(first, options.steps - rank)):
        yield log.batch(options.batch)


@torch.no_grad()
def evaluate(model: Model, held_out: Batch) -> float:
    """The AUC over the held-out examples of all ranks; all of them look up together."""
    ids, clicks = held_out
    ranks = gather(model(ids)).argsort().argsort() + 1
    clicked = gather(clicks) > 0.5
    positive = int(clicked.sum())
    above = int(ranks[clicked].sum()) - positive * (positive + 1) // 2
    return above / (positive * (len(clicked) - positive))


def gather(mine: Tensor) -> Tensor:
    """The tensors of all ranks, one after the other."""
    if not dist.is_initialized():
        return mine
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.cat(found)


def save(folder: Path, step: int, model: Model, optimizer: sparsestep.Adam) -> None:
    """Save a checkpoint; ``latest`` names it once it is complete."""
    sparsestep.distributed.save(folder / str(step), model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        latest = folder / "latest.part"
        latest.write_text(str(step))
        latest.replace(folder / "latest")


def resume(folder: Path | None, model: Model, optimizer: sparsestep.Adam) -> int:
    """Load the latest checkpoint, if there is one; returns its step."""
    if folder is None or not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    sparsestep.distributed.load(folder / str(step), model, optimizer)
    return step


def parse() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=512, help="examples per rank and step")
    parser.add_argument("--rows", type=int, default=20_000, help="of each table")
    parser.add_argument("--held-out", type=int, default=4_096, help="examples per rank")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all ranks see")
    return parser.parse_args()


if __name__ == "__main__":
    main()
