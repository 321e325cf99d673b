"""Dense gradients on the CPU: our default against torch's default and torch's fused kernel.

All contestants of a line take turns within one run, with the same gradients. Lines without a class
in torch compare our state in bfloat16 and int8 with float32.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

import sparsestep
from benchmarks.harness.race import Stepping, add_rounds, medians
from benchmarks.harness.workload import SETS
from sparsestep.cli.options import int_in_range

FUSED = ("AdamW", "Adagrad", "SGD")
OPTIONS: dict[str, dict[str, Any]] = {"SGD": {"momentum": 0.9}}
GRADS = 3  # enough that no gradient stays in a cache


def contestants(name: str) -> dict[str, Any]:
    """Return the optimizers of a line: torch's, if torch has the class, and ours."""
    options = {"lr": 1e-3, **OPTIONS.get(name, {})}
    ours, theirs = getattr(sparsestep, name), getattr(torch.optim, name, None)
    found: dict[str, Any] = {}
    if theirs is not None:
        found["torch"] = partial(theirs, **options)
        if name in FUSED:
            found["torch fused"] = partial(theirs, fused=True, **options)
    found["ours"] = partial(ours, **options)
    return found


def compare(title: str, optimizers: dict[str, Any], shape: tuple[int, ...], rounds: int) -> None:
    """Print the milliseconds of each optimizer, and how many times as fast the last is."""
    grads = [[torch.randn(shape)] for _ in range(GRADS)]
    sets = [grads[number % GRADS] for number in range(SETS)]
    racers = []
    for make in optimizers.values():
        param = Parameter(torch.randn(shape))
        racers.append(Stepping(make([param]), [param], sets))
    times = dict(zip(optimizers, medians(racers, rounds), strict=True))
    *others, last = times
    ratios = [f"{times[name] / times[last]:.2f} x {name}" for name in others]
    listed = ", ".join(f"{name} {time:.1f}" for name, time in times.items())
    print(f"{title:<20} {listed} ms{': ' if ratios else ''}{', '.join(ratios)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    size = int_in_range(1, 1 << 16)
    parser.add_argument("--size", type=size, default=4000, help="rows and columns (%(default)s)")
    add_rounds(parser, 20)
    given = parser.parse_args(arguments)
    torch.manual_seed(0)
    matrix, vector = (given.size, given.size), (given.size**2,)
    for name in ("AdamW", "Adagrad", "SGD", "RMSprop", "Lion"):
        compare(name, contestants(name), matrix, given.rounds)
    plain = {"float32": partial(sparsestep.AdamW, lr=1e-3)}
    for dtype in (torch.bfloat16, torch.int8):
        stored = partial(sparsestep.AdamW, lr=1e-3, state_dtype=dtype)
        compare(f"AdamW {str(dtype)[6:]}", {**plain, str(dtype)[6:]: stored}, matrix, given.rounds)
    coded = partial(sparsestep.AdamW, lr=1e-3, state_dtype=torch.int8)
    compare("AdamW int8, 1-D", {**plain, "int8": coded}, vector, given.rounds)


if __name__ == "__main__":
    main()
