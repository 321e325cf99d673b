"""Our threads and torch's: does taking turns cost more than the two apart?

A step of ours (1,000,000 x 64, 65,536 lookups) and a matrix product of torch's, both on all
threads: each alone, then in turn.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

import sparsestep
from benchmarks.harness.gradients import SETS, uniform

ROWS, DIM, LOOKUPS, ROUNDS = 1_000_000, 64, 65_536, 60


def median(work: Callable[[int], object]) -> float:
    times = []
    for number in range(SETS + ROUNDS):
        begin = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[SETS:])


def main() -> None:
    grads = uniform(ROWS, DIM, LOOKUPS)
    param = torch.nn.Parameter(torch.randn(ROWS, DIM))
    optimizer = sparsestep.SparseAdam([param])
    matrix = torch.randn(768, 768)

    def ours(number: int) -> None:
        param.grad = grads[number % SETS]
        optimizer.step()

    def theirs(number: int) -> None:
        matrix @ matrix

    def both(number: int) -> None:
        theirs(number)
        ours(number)

    # Several passes, so that a disturbance of the machine does not fall on one of the three alone.
    passes = [(median(ours), median(theirs), median(both)) for _ in range(5)]
    overheads = [together / (apart + other) - 1 for apart, other, together in passes]
    apart, other, together = (statistics.median(column) for column in zip(*passes, strict=True))
    print(
        f"step {apart * 1e3:.2f} ms, product {other * 1e3:.2f} ms, in turn {together * 1e3:.2f} ms"
    )
    print(f"taking turns costs {100 * statistics.median(overheads):+.1f} %")


if __name__ == "__main__":
    main()
