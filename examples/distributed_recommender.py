"""A recommender with 26 tables, trained by several processes that share the tables.

    torchrun --nproc-per-node 4 examples/distributed_recommender.py
    python examples/distributed_recommender.py            # one process, the same code

The tables are divided among the ranks, the layers are DistributedDataParallel's, and one optimizer
updates both. Ranks have different numbers of batches. With --checkpoint FOLDER the state is saved
now and then, and training goes on from there when it is started again, by torchrun after a rank
has failed or by you, with any number of ranks.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from time import perf_counter

import torch
import torch.distributed as dist
from clicks import Batch, Clicks, auc
from dlrm import DIM, EPS, LEARNING_RATE, Model
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.nn.parallel import DistributedDataParallel

import sparsestep

REPORTS = 5


def main() -> None:
    """Train, and say how it goes."""
    options = parsed()
    if "RANK" in os.environ:  # torchrun has started this process
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    rows = Clicks(0, options.rows).rows
    tables = sparsestep.nn.EmbeddingBagCollection([(each, DIM) for each in rows], mode="sum")
    model = Model(tables, len(rows))
    plan = sparsestep.distributed.shard(model)
    if rank == 0:
        print(plan.for_batch(options.batch))
    ddp: nn.Module = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = sparsestep.AdamW(model.parameters(), lr=LEARNING_RATE, eps=EPS, weight_decay=0.0)
    first = resumed(options.checkpoint, model, optimizer)
    held_out = Clicks(1_000_000 + rank, options.rows).batch(options.held_out)
    began = perf_counter()
    every = max(1, options.steps // REPORTS)
    loader = batches(options, rank, first)
    for step, batch in enumerate(sparsestep.distributed.lockstep(loader), first + 1):
        logits = ddp(batch.numbers, batch.ids)
        # The mean of an empty batch would be NaN, though its gradient is zero.
        loss = binary_cross_entropy_with_logits(logits, batch.clicks, reduction="sum")
        (loss / max(1, len(batch.clicks))).backward()
        sparsestep.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0 or step == options.steps:
            found = measured(model, held_out)
            if rank == 0:
                speed = (step - first) / (perf_counter() - began)
                print(f"step {step:5}   AUC {found:.4f}   {speed:6.1f} steps/s", flush=True)
            if options.checkpoint is not None:
                saved(options.checkpoint, step, model, optimizer)
    if dist.is_initialized():
        dist.destroy_process_group()


def batches(options: argparse.Namespace, rank: int, first: int) -> Iterator[Batch]:
    """This rank's part of the click log; each rank has one batch less than the one before."""
    log = Clicks(1_000 * first + rank, options.rows)
    for _ in range(first, max(first, options.steps - rank)):
        yield log.batch(options.batch)


@torch.no_grad()
def measured(model: Model, held_out: Batch) -> float:
    """The AUC on what all ranks hold out; all of them look up together."""
    scores = gathered(model(held_out.numbers, held_out.ids))
    return auc(scores, gathered(held_out.clicks))


def gathered(mine: Tensor) -> Tensor:
    """What all ranks have."""
    if not dist.is_initialized():
        return mine
    found = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(found, mine)
    return torch.cat(found)


def saved(folder: Path, step: int, model: Model, optimizer: sparsestep.AdamW) -> None:
    """Save, and say so only when it is complete."""
    sparsestep.distributed.save(folder / str(step), model, optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        latest = folder / "latest.part"
        latest.write_text(str(step))
        latest.replace(folder / "latest")


def resumed(folder: Path | None, model: Model, optimizer: sparsestep.AdamW) -> int:
    """The step to go on from."""
    if folder is None or not (folder / "latest").exists():
        return 0
    step = int((folder / "latest").read_text())
    sparsestep.distributed.load(folder / str(step), model, optimizer)
    return step


def parsed() -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="how many; 200 by default")
    parser.add_argument("--batch", type=int, default=512, help="examples per rank and step")
    parser.add_argument("--rows", type=int, default=20_000, help="the most that a table has")
    parser.add_argument("--held-out", type=int, default=4_096, help="examples per rank")
    parser.add_argument("--checkpoint", type=Path, help="a folder that all ranks see")
    return parser.parse_args()


if __name__ == "__main__":
    main()
