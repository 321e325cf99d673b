"""One of several processes that share tables for a long time, or until one of them is killed."""

from __future__ import annotations

import os
import resource
import signal
from datetime import timedelta

import torch
import torch.distributed as dist

import sparsestep
from tests.distributed import pair
from tests.distributed.shard_behaviour import PLAN, Net

TIMEOUT = 20  # seconds, of the process group
STEPS = int(os.environ.get("SPARSESTEP_SOAK", "2000"))


def soak(rank: int) -> pair.Results:
    """Uneven batches, tables left out, rows that one rank alone has."""
    model = Net()
    sparsestep.distributed.shard(model, plan=PLAN)
    opt = sparsestep.Adam(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank)
    kept, early = 0, 0
    for step in range(STEPS):
        opt.zero_grad()
        size, skips = torch.randint(0, 4, (2,), generator=draw).tolist()
        found = model.tables(torch.randint(0, 3, (size, 3, 2), generator=draw))
        used = [rows for number, rows in enumerate(found.values()) if number != skips]
        if skips != 3 or step % 7:
            sum(used).square().sum().backward()
        opt.step()
        kept = max(kept, len(model.tables._exchange._ledger.answers))
        if step == STEPS // 2:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if rank == 0 and step % 1000 == 0:
            print(f"step {step}", flush=True)  # into its log
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early
    steps = [int(state["step"]) for state in opt.state.values() if "step" in state]
    return {"kept": kept, "grown": grown, "steps": steps}


def killed(rank: int, world: int) -> pair.Results:
    """The last rank is gone while the others need it."""
    table = torch.nn.Embedding(7, 2)
    sparsestep.distributed.shard(table, plan="rows")
    opt = sparsestep.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    try:
        table(torch.tensor([rank])).sum().backward()
        if rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        opt.step()
    except RuntimeError as error:
        return {"said": str(error), "unchanged": torch.equal(before, table.weight)}
    return {"said": "", "unchanged": False}


def work(rank: int, meeting: str) -> pair.Results:
    world = pair.world_size()
    timeout = timedelta(seconds=TIMEOUT)
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=world, timeout=timeout
    )
    if world == 4:
        found = soak(rank)
        dist.destroy_process_group()
        return found
    return killed(rank, world)


if __name__ == "__main__":
    pair.main(work)
