"""Dense gradients on the CPU: our default against torch's default and torch's fused kernel.

A line for every optimizer, and for our AdamW with state in bfloat16 and int8 against float32. All
contestants of a line take turns within one run, with the same gradients; so does the limit, the
bandwidth of torch's multiplication in place. ``--processes 8`` runs AdamW in so many processes at
once, each on all cores, and divides the time of a step by a fair share.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

import sparsestep
from benchmarks.harness.contestants import element_states, rule_of
from benchmarks.harness.race import Racer, Stepping, add_rounds, medians
from benchmarks.harness.workload import SETS
from sparsestep.cli.options import int_in_range
from sparsestep.optim import OPTIMIZERS

FUSED = ("Adam", "AdamW", "Adagrad", "SGD")
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}
GRADS = 3  # enough that no gradient stays in a cache


def contestants(name: str) -> dict[str, Any]:
    """Return the optimizers of a line: torch's, if torch has the class, and ours."""
    options = {"lr": 1e-3, **OPTIONS.get(name, {})}
    ours, theirs = getattr(sparsestep, name), getattr(torch.optim, name, None)
    found: dict[str, Any] = {}
    if theirs is not None and name != "SparseAdam":  # torch's takes no dense gradients
        found["torch"] = partial(theirs, **options)
        if name in FUSED:
            found["torch fused"] = partial(theirs, fused=True, **options)
    found["ours"] = partial(ours, **options)
    return found


class InPlace:
    """The limit: torch's multiplication in place, which reads and writes each element."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._tensor = torch.zeros(shape)

    def before(self, number: int, /) -> None:
        """Nothing: there is no gradient."""

    def step(self) -> None:
        """Multiply."""
        self._tensor.mul_(1.0)


def bytes_per_element(make: Any) -> int:
    """Read parameter, gradient and state, write parameter and state, all in float32."""
    return 4 * (3 + 2 * element_states(rule_of(make)))


def compare(title: str, optimizers: dict[str, Any], shape: tuple[int, ...], rounds: int) -> None:
    """Print the milliseconds of each optimizer, and how many times as fast the last is."""
    grads = [[torch.randn(shape)] for _ in range(GRADS)]
    sets = [grads[number % GRADS] for number in range(SETS)]
    racers: list[Racer] = [InPlace(shape)]
    for make in optimizers.values():
        param = Parameter(torch.randn(shape))
        racers.append(Stepping(make([param]), [param], sets))
    in_place, *found = medians(racers, rounds)
    times = dict(zip(optimizers, found, strict=True))
    *others, last = times
    ratios = [f"{times[name] / times[last]:.2f} x {name}" for name in others]
    listed = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    if last == "ours":
        limit = in_place * bytes_per_element(optimizers[last]) / 8
        ratios.append(f"{limit / times[last]:.2f} of the limit")
    print(f"{title:<20} {listed} ms: {', '.join(ratios)}", flush=True)


def mean_ms(size: int, seconds: float) -> float:
    """Milliseconds of a step of AdamW, over so many seconds."""
    param = Parameter(torch.randn(size, size))
    param.grad = torch.randn(size, size)
    optimizer = sparsestep.AdamW([param], lr=1e-3)
    optimizer.step()
    begin, count = time.perf_counter(), 0
    while time.perf_counter() - begin < seconds:
        optimizer.step()
        count += 1
    return 1e3 * (time.perf_counter() - begin) / count


def compare_processes(size: int, processes: int, seconds: float) -> None:
    """Print the time of a step in one of several processes, of a fair share."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(processes) as pool:
        alone = pool.apply(mean_ms, (size, seconds))
        times = pool.starmap(mean_ms, [(size, seconds)] * processes, chunksize=1)
    together = statistics.mean(times)
    print(
        f"{processes} processes: {together:.1f} ms, alone {alone:.1f} ms: "
        f"{together / (processes * alone):.2f} of a fair share"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = int_in_range(1, 1 << 16)
    parser.add_argument("--size", type=size, default=4000, help="rows and columns (%(default)s)")
    parser.add_argument(
        "--processes", type=int_in_range(2, 64), help="only measure so many at once"
    )
    add_rounds(parser, 20)
    given = parser.parse_args(arguments)
    if given.processes:
        compare_processes(given.size, given.processes, seconds=4.0)
        return
    torch.manual_seed(0)
    matrix, vector = (given.size, given.size), (given.size**2,)
    for name in (each.__name__ for each in OPTIMIZERS):
        compare(name, contestants(name), matrix, given.rounds)
    plain = {"float32": partial(sparsestep.AdamW, lr=1e-3)}
    for dtype in (torch.bfloat16, torch.int8):
        stored = partial(sparsestep.AdamW, lr=1e-3, state_dtype=dtype)
        compare(f"AdamW {str(dtype)[6:]}", {**plain, str(dtype)[6:]: stored}, matrix, given.rounds)
    coded = partial(sparsestep.AdamW, lr=1e-3, state_dtype=torch.int8)
    compare("AdamW int8, 1-D", {**plain, "int8": coded}, vector, given.rounds)


if __name__ == "__main__":
    main()
