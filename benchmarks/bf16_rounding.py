"""Small updates in half precision: lost when rounded to nearest, kept when rounded at random.

A table trained for 5,000 steps with gradients that point the same way on average, so that every
element drifts. Printed is the mean displacement along that way, relative to a float32 table that
was given the same gradients.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch.nn import Parameter

import sparsestep
from sparsestep.cli.options import int_in_range

ROWS, DIM, LOOKUPS, STEPS = 1_000, 16, 256, 5_000
LR = 1e-4  # between 1 and 2, rounded to nearest, bfloat16 keeps no update below 4e-3


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--steps", type=int_in_range(1, 1_000_000), default=STEPS, help=f"(default: {STEPS:,})"
    )
    steps = parser.parse_args(arguments).steps
    torch.set_num_threads(1)  # too little work for more
    torch.manual_seed(0)
    # Values that bfloat16 has, between 1 and 2, so that all three start alike.
    start = (1 + torch.rand(ROWS, DIM)).bfloat16()
    way = torch.where(torch.rand(ROWS, DIM) < 0.5, -1.0, 1.0)

    def table(dtype: torch.dtype, stochastic: bool) -> tuple[Parameter, sparsestep.SparseAdam]:
        param = Parameter(start.to(dtype, copy=True))
        return param, sparsestep.SparseAdam([param], lr=LR, stochastic_rounding=stochastic)

    tables = {
        "float32": table(torch.float32, stochastic=False),
        "bfloat16, to nearest": table(torch.bfloat16, stochastic=False),
        "bfloat16, stochastic": table(torch.bfloat16, stochastic=True),
    }
    for _ in range(steps):
        rows = torch.randint(ROWS, (1, LOOKUPS))
        values = (torch.randn(LOOKUPS, DIM) - way[rows[0]]).bfloat16()
        for param, optimizer in tables.values():
            param.grad = torch.sparse_coo_tensor(
                rows, values.to(param.dtype), (ROWS, DIM), check_invariants=False
            )
            optimizer.step()
    moved = {
        name: float(((param.detach().double() - start.double()) * way).mean())
        for name, (param, _) in tables.items()
    }
    print(f"{ROWS:,} x {DIM}, {LOOKUPS} lookups, {steps:,} steps; the mean displacement:")
    for name, distance in moved.items():
        print(f"{name:22} {distance / moved['float32']:6.3f} of float32's ({distance:.5f})")


if __name__ == "__main__":
    main()
