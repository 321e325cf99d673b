"""Steps beside processes that keep the cores busy, as DataLoader workers do.

Prints the time of a step with all threads ÷ with one thread, beside 0, 1, 2 and 4 busy processes,
and beside a process that takes turns with this one. A stall is rare and long, so means count, not
medians. Both run in blocks, in turns.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

import sparsestep
from benchmarks.harness.workload import uniform_coo_grads

CASES = {
    "1,000,000 x 64, 65,536 uniform": (1_000_000, 64, 65_536, 0.0),
    "1,000,000 x 64, 65,536 Zipf": (1_000_000, 64, 65_536, 1.05),
    "100,000 x 16, 8,192 uniform": (100_000, 16, 8_192, 0.0),
}
NEIGHBORS = (0, 1, 2, 4)
WARM_UP = 600  # steps: by then, large tables of ours are in huge pages


def gradients(rows: int, dim: int, lookups: int, exponent: float) -> list[Tensor]:
    """Eight COO gradients with uniform or Zipf ids."""
    if not exponent:
        return uniform_coo_grads(rows, dim, lookups)
    generator = torch.Generator().manual_seed(0)
    odds = torch.arange(1, rows + 1, dtype=torch.float64).pow(-exponent).cumsum(0)
    found = []
    for _ in range(8):
        draws = torch.rand(lookups, dtype=torch.float64, generator=generator) * odds[-1]
        ids = torch.searchsorted(odds, draws).clamp_(max=rows - 1) * 7919 % rows
        values = torch.randn(lookups, dim, generator=generator)
        found.append(torch.sparse_coo_tensor(ids[None], values, (rows, dim)))
    return found


def stepper(
    cls: Callable[..., torch.optim.Optimizer], grads: Sequence[Tensor]
) -> Callable[[], None]:
    """A function that makes one step with the next gradient."""
    param = torch.nn.Parameter(torch.zeros(grads[0].shape))
    optimizer = cls([param], lr=1e-3)
    count = 0

    def step() -> None:
        nonlocal count
        param.grad = grads[count % len(grads)]
        count += 1
        optimizer.step()

    for _ in range(WARM_UP if cls is sparsestep.SparseAdam else len(grads)):
        step()
    return step


def mean_ms(step: Callable[[], None], threads: int, seconds: float, wait: float = 0.0) -> float:
    """Milliseconds per step after a warm-up; with ``wait``, a pause after each 50 ms of work."""
    torch.set_num_threads(threads)
    spent, count, work = 0.0, 0, 0.0
    end = time.perf_counter() + seconds
    counted = time.perf_counter() + seconds / 10
    while (now := time.perf_counter()) < end:
        step()
        used = time.perf_counter() - now
        work += used
        if now >= counted:
            spent += used
            count += 1
        if wait and work > 0.05:
            time.sleep(wait)
            work = 0.0
    return 1e3 * spent / max(count, 1)


def spin() -> None:
    while True:
        pass


def take_turns(lookups: int) -> None:
    """The same work as the benchmark's, 50 ms long, then as long a pause."""
    step = stepper(sparsestep.SparseAdam, gradients(1_000_000, 64, lookups, 0.0))
    while True:
        mean_ms(step, torch.get_num_threads(), 1.0, wait=0.05)


@contextmanager
def beside(count: int, target: Callable[..., None] = spin, *args: int) -> Iterator[None]:
    """Processes that run meanwhile."""
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=target, args=args, daemon=True) for _ in range(count)]
    for each in others:
        each.start()
    time.sleep(8.0 if args else 1.0 if count else 0.0)
    try:
        yield
    finally:
        for each in others:
            each.terminate()
            each.join()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="per contestant and block")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only-ours", action="store_true", help="leave out torch's SparseAdam")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--beside", type=int, nargs="*", default=NEIGHBORS, help="busy processes")
    options = parser.parse_args(arguments)
    threads = torch.get_num_threads()
    classes: list[type[torch.optim.Optimizer]] = [sparsestep.SparseAdam]
    if not options.only_ours:
        classes.append(torch.optim.SparseAdam)
    for name, case in CASES.items():
        if options.only not in name:
            continue
        grads = gradients(*case)
        for cls in classes:
            step = stepper(cls, grads)
            scenes = [(f"{count} busy", beside(count), 0.0) for count in options.beside]
            if cls is sparsestep.SparseAdam:
                scenes.append(("in turns", beside(1, take_turns, 65_536), 0.05))
            line = []
            for scene, neighbors, wait in scenes:
                with neighbors:
                    times = [
                        [mean_ms(step, t, options.seconds, wait) for t in (threads, 1)]
                        for _ in range(options.rounds)
                    ]
                many, one = (sum(each) / len(each) for each in zip(*times, strict=True))
                line.append(f"{scene}: {many:.2f} / {one:.2f} ms = {many / one:.2f}")
            print(f"{name}, {cls.__module__.split('.')[0]}: " + "; ".join(line), flush=True)
    torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
