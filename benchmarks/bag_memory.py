"""Peak memory of backward and step of an embedding bag, ours against torch's (Linux).

4,096 bags of 64 ids, rows of 128: written out, the gradient is 64 times the size of the output's.
In a process of its own per side: steps that touch all of table and state, then the growth of the
peak of resident memory during one more backward and step.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence

from sparsestep.cli.options import whole_number

ROWS, DIM, BAGS, IDS = 100_000, 128, 4_096, 64

CHILD = """
import sys, torch, sparsestep
side, rows, dim, bags, ids = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

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
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")              # from here on, the peak counts anew
before = kilobytes("VmRSS")
loss.backward()
optimizer.step()
print((kilobytes("VmHWM") - before) * 1024)
"""


def growth(side: str, shape: Sequence[int]) -> int:
    """Bytes by which the peak of resident memory grows during backward and step."""
    # Large blocks go back to the system at once, so that what counts is what is in use.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, side, *map(str, shape)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("rows", ROWS), ("dim", DIM), ("bags", BAGS), ("ids", IDS)):
        kind = whole_number(1, 100_000_000)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"(default: {default:,})")
    options = parser.parse_args(arguments)
    shape = (options.rows, options.dim, options.bags, options.ids)
    torchs, ours = (growth(side, shape) for side in ("torch", "ours"))
    print(f"{options.bags:,} bags of {options.ids} ids x {options.dim}: backward and step take")
    print(f"torch      {torchs / 1e6:7.1f} MB")
    print(f"sparsestep {ours / 1e6:7.1f} MB, {ours / torchs:.3f} of it (goal: under 0.1)")


if __name__ == "__main__":
    main()
