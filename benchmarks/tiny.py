"""The cost of one step on a tiny table, where Python is what counts.

1,000 x 16 with 64 lookups. "Again and again" is a loop of steps; "in turn" has a step of torch's
SparseAdam before each of ours, which leaves the processor's caches to us as a training loop would.
"""

from __future__ import annotations

import cProfile
import gc
import pstats
import statistics
import sys
import time

import torch

import sparsestep
from benchmarks.harness.gradients import SETS, uniform

ROWS, DIM, LOOKUPS, ROUNDS = 1_000, 16, 64, 2_000


def main() -> None:
    grads = uniform(ROWS, DIM, LOOKUPS)
    params = [torch.nn.Parameter(torch.randn(ROWS, DIM)) for _ in range(2)]
    theirs, ours = torch.optim.SparseAdam(params[:1]), sparsestep.SparseAdam(params[1:])

    def seconds(optimizer: torch.optim.Optimizer, number: int) -> float:
        params[0].grad = params[1].grad = grads[number % SETS]
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    gc.disable()
    alone = statistics.median(seconds(ours, k) for k in range(ROUNDS))
    turns = [(seconds(theirs, k), seconds(ours, k + 1)) for k in range(ROUNDS)]
    torch_median, our_median = (statistics.median(column) for column in zip(*turns, strict=True))
    print(f"again and again  {alone * 1e6:6.1f} us")
    print(
        f"in turn          {our_median * 1e6:6.1f} us, torch {torch_median * 1e6:.1f} us,", end=""
    )
    print(f" ratio {torch_median / our_median:.1f}")
    if "--profile" in sys.argv:
        profile = cProfile.Profile()
        profile.runcall(lambda: [seconds(ours, k) for k in range(ROUNDS)])
        pstats.Stats(profile).sort_stats("tottime").print_stats(15)


if __name__ == "__main__":
    main()
