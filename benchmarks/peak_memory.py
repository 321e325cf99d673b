"""The most extra memory that a step takes, in bytes per lookup (Linux).

In a process of its own per size: a first step touches all of param and state, then one with a fresh
gradient is made and the growth of the peak of resident memory is read. Every kind of gradient that
needs working memory is there: uniform, one row with half of all lookups, all in one row.
"""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys, torch, sparsestep
kind, lookups = sys.argv[1], int(sys.argv[2])
rows, dim = 1_000_000, 4
torch.manual_seed(0)

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

def gradient():
    ids = torch.randint(0, rows, (lookups,))
    if kind != "uniform":
        ids[: lookups // 2 if kind == "half" else lookups] = 7
    return torch.sparse_coo_tensor(ids[None], torch.ones(lookups, dim), (rows, dim),
                                   check_invariants=False)

param = torch.nn.Parameter(torch.zeros(rows, dim))
opt = sparsestep.SparseAdam([param], engine="native")
param.grad = torch.ones(rows, dim)
opt.step()                       # touches all of param and state, starts the threads
param.grad = gradient()
with open("/proc/self/clear_refs", "w") as refs:
    refs.write("5")              # from here on, the peak counts anew
before = kilobytes("VmRSS")
opt.step()
print((kilobytes("VmHWM") - before) * 1024 / lookups)
"""


def main() -> None:
    for kind in ("uniform", "half", "one row"):
        for lookups in (1 << 16, 1 << 18, 1 << 20, 1 << 22):
            command = [sys.executable, "-c", CHILD, kind, str(lookups)]
            done = subprocess.run(command, capture_output=True, text=True, check=True)
            print(f"{kind:8} {lookups:9,} lookups: {float(done.stdout):5.1f} bytes each")


if __name__ == "__main__":
    main()
