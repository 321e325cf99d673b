"""What sharing tables costs: CPU time per step and rank, of sharded tables and of those alone.

Ranks on this machine, one thread each. ``alone`` is the same training in each rank by itself,
without a word to the others: what no sharing can be faster than. ``tables`` and ``rows`` are
sharded. ``ddp`` is torch's: DistributedDataParallel with sparse gradients and SparseAdam. Each step
is lookup, backward and update of all tables; contestants take turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsestep

TABLES, ROWS, DIM, BATCH = 8, 100_000, 64, 2_048
Step = Callable[[Sequence[Tensor]], None]


def collection() -> sparsestep.nn.EmbeddingBagCollection:
    torch.manual_seed(0)
    return sparsestep.nn.EmbeddingBagCollection([(ROWS, DIM)] * TABLES, mode="sum")


def ours(kind: str | None) -> Step:
    """Without a kind, each rank for itself."""
    model = collection()
    if kind is not None:
        sparsestep.distributed.shard(model, plan=kind)
    optimizer = sparsestep.SparseAdam(model.parameters())

    def step(ids: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        found: Any = model(list(ids))
        torch.autograd.backward(found, [torch.ones_like(rows) for rows in found])
        optimizer.step()

    return step


class Torchs(nn.Module):
    """Torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        bags = [nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True) for _ in range(TABLES)]
        self.bags = nn.ModuleList(bags)

    def forward(self, ids: Sequence[Tensor]) -> list[Tensor]:
        """Look all tables up."""
        return [bag(each) for bag, each in zip(self.bags, ids, strict=True)]


def theirs() -> Step:
    model = DistributedDataParallel(Torchs())
    optimizer = torch.optim.SparseAdam(list(model.parameters()))

    def step(ids: Sequence[Tensor]) -> None:
        optimizer.zero_grad()
        found = model(ids)
        torch.autograd.backward(found, [torch.ones_like(rows) for rows in found])
        optimizer.step()

    return step


def batch(length: int, draw: torch.Generator) -> list[Tensor]:
    """Ids of Zipf's law, in order of frequency."""
    uniform = torch.rand(TABLES, BATCH, length, generator=draw, dtype=torch.float64)
    return list((float(ROWS) ** uniform - 1).long().clamp_(0, ROWS - 1))


def rank_of_many(rank: int, world: int, meeting: str, length: int, rounds: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    racers = {"alone": ours(None), "tables": ours("tables"), "rows": ours("rows"), "ddp": theirs()}
    draw = torch.Generator().manual_seed(rank)
    spent: dict[str, list[float]] = {name: [] for name in racers}
    for _ in range(rounds):
        ids = batch(length, draw)
        for name, step in racers.items():
            dist.barrier()
            begun = time.process_time()
            step(ids)
            spent[name].append(time.process_time() - begun)
    medians = {name: sorted(times)[rounds // 2] * 1e3 for name, times in spent.items()}
    everybody: list[Any] = [None] * world
    dist.all_gather_object(everybody, medians)
    if rank == 0:
        for name in racers:
            mean = sum(each[name] for each in everybody) / world
            alone = sum(each["alone"] for each in everybody) / world
            print(f"{length:3} ids  {name:7} {mean:8.1f} ms   {alone / mean:5.2f} of alone")
    dist.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="how many processes")
    parser.add_argument("--rounds", type=int, default=30, help="how many steps of each")
    options = parser.parse_args(arguments)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    start = multiprocessing.get_context("spawn").Process
    for length in (1, 20):
        with tempfile.TemporaryDirectory() as folder:
            several = (options.ranks, f"file://{folder}/meeting", length, options.rounds)
            ranks = [start(target=rank_of_many, args=(r, *several)) for r in range(options.ranks)]
            for each in ranks:
                each.start()
            for each in ranks:
                each.join()


if __name__ == "__main__":
    main()
