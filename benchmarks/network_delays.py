"""One-way delays of the network in a training step.

Run one process on each of several hosts with ``torchrun``, with a network whose delay is long
beside a step, and that delay as ``--delay``. Network namespaces will do, if something between them
holds packets back. TorchRec takes part where it is installed, without ``lockstep`` and clipping.
TCP with BBR spaces packets, and a delay more is its own: set ``net.ipv4.tcp_congestion_control`` to
``reno`` in each namespace to count those of the exchanges alone.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

import sparsestep
from benchmarks import sharding

TABLES, ROWS, DIM, BATCH = 8, 100_000, 16, 256
WARM = 8


def ours(plan: str, steps: int, prefetch: int, *, clip: bool) -> list[float]:
    """Seconds of each step of a loop with ``lockstep``."""
    torch.manual_seed(0)
    model = sparsestep.nn.EmbeddingBagCollection([(ROWS, DIM)] * TABLES, mode="sum")
    sparsestep.distributed.shard(model, plan=plan)
    optimizer = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(dist.get_rank())
    batches = [
        list(torch.randint(0, ROWS, (TABLES, BATCH, 1), generator=draw)) for _ in range(steps)
    ]
    times = []
    for batch in sparsestep.distributed.lockstep(batches, prefetch):
        optimizer.zero_grad()
        output = list(model(batch))
        torch.autograd.backward(output, [torch.ones_like(each) for each in output])
        if clip:
            sparsestep.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def torchrecs(plan: str, steps: int) -> list[float]:
    """Seconds of each step of TorchRec."""
    step = sharding.torchrec_step(plan, [(ROWS, DIM)] * TABLES, BATCH)
    times = []
    for _ in range(steps):
        step()
        times.append(time.perf_counter())
    return [after - before for before, after in itertools.pairwise(times)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--delay", type=float, required=True, help="one way, in seconds")
    parser.add_argument("--steps", type=int, default=24)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    dist.init_process_group("gloo")

    def report(name: str, times: Sequence[float]) -> None:
        median = sorted(times[WARM:])[len(times[WARM:]) // 2]
        if dist.get_rank() == 0:
            print(f"{name:32}  {median / options.delay:5.1f} delays", flush=True)

    for plan in ("tables", "rows"):
        for prefetch, clip in itertools.product((0, 1), (False, True)):
            name = f"{plan}, prefetch={prefetch}{', clipping' if clip else ''}"
            report(name, ours(plan, options.steps, prefetch, clip=clip))
        if importlib.util.find_spec("torchrec") is not None:
            report(f"torchrec {plan}", torchrecs(plan, options.steps))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
