"""How close does training in float32 stay to float64? Ours, with dense semantics, and torch's.

An embedding gets random gradients for 64 rows per step. torch's optimizer trains it in float64 and
in float32 with dense gradients, ours in float32 with sparse ones and ``semantics="dense"``. Printed
is the largest difference of an entry from the float64 run, divided by the largest entry.

    python -m benchmarks.float64_parity
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Embedding

import sparsestep
from sparsestep.cli.options import int_in_range

ROWS, DIM, LOOKUPS = 2_000, 16, 64
OPTIONS: dict[str, dict[str, Any]] = {
    "AdamW": {"lr": 1e-3, "weight_decay": 0.01},
    "Adam": {"lr": 1e-3},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.05},
}


def trained(make: Callable[..., Any], dtype: torch.dtype, steps: int, *, ours: bool) -> Tensor:
    """The table after so many steps, in float64."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(ROWS, DIM, generator=generator).to(dtype)
    table = Embedding.from_pretrained(start, freeze=False, sparse=ours)
    optimizer = make(table.parameters())
    if ours:
        optimizer.track(table)
    for _ in range(steps):
        ids = torch.randint(ROWS, (LOOKUPS,), generator=generator)
        grad = torch.randn(LOOKUPS, DIM, generator=generator).to(dtype)
        optimizer.zero_grad()
        table(ids).backward(grad)
        optimizer.step()
    weight: Tensor = table.state_dict()["weight"]  # current
    return weight.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int_in_range(1, 1_000_000), default=4_000, metavar="N")
    steps = parser.parse_args().steps
    for name, options in OPTIONS.items():
        theirs = partial(getattr(torch.optim, name), **options)
        mine = partial(getattr(sparsestep, name), semantics="dense", **options)
        exact = trained(theirs, torch.float64, steps, ours=False)
        runs = {
            "ours": trained(mine, torch.float32, steps, ours=True),
            "torch": trained(theirs, torch.float32, steps, ours=False),
        }
        errors = (
            f"{key} {(run - exact).abs().max() / exact.abs().max():.1e}"
            for key, run in runs.items()
        )
        print(f"{name:8} {steps:,} steps: {', '.join(errors)}", flush=True)


if __name__ == "__main__":
    main()
