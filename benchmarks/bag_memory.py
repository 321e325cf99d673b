"""Peak memory of backward and step of an embedding bag, ours against torch's (Linux).

4,096 bags of 64 ids, rows of 128: written out, the gradient is 64 times the size of the output's.
In a process of its own per side: steps that touch all of table and state, then the growth of the
peak of resident memory during one more backward and step.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.harness.memory import growth
from sparsestep.cli.options import int_in_range

ROWS, DIM, BAGS, IDS = 100_000, 128, 4_096, 64

CHILD = """
import torch, sparsestep
side, rows, dim, bags, ids = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)

if side == "torch":
    table = torch.nn.EmbeddingBag(rows, dim, mode="sum", sparse=True)
    optimizer = torch.optim.SparseAdam(table.parameters())
else:
    table = sparsestep.nn.EmbeddingBag(rows, dim, mode="sum")
    optimizer = sparsestep.SparseAdam(table.parameters())

table(torch.arange(rows).view(1, -1)).sum().backward()
optimizer.step()                 # touches all of table and state, starts the threads
optimizer.zero_grad()
loss = table(torch.randint(0, rows, (bags, ids))).square().mean()
begin()
loss.backward()
optimizer.step()
print(growth())
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", ROWS), ("dim", DIM), ("bags", BAGS), ("ids", IDS)):
        kind = int_in_range(1, 100_000_000)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"(default: {default:,})")
    options = parser.parse_args(arguments)
    shape = (options.rows, options.dim, options.bags, options.ids)
    torchs, ours = (growth(CHILD, side, *shape, at_once=True) for side in ("torch", "ours"))
    print(f"{options.bags:,} bags of {options.ids} ids x {options.dim}: backward and step take")
    print(f"torch      {torchs / 1e6:7.1f} MB")
    print(f"sparsestep {ours / 1e6:7.1f} MB, {ours / torchs:.3f} of it (goal: under 0.1)")


if __name__ == "__main__":
    main()
