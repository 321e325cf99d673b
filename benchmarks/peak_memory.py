"""The most extra memory that a step takes, in bytes per lookup (Linux).

In a process of its own per size: a first step touches all of param and state, then one with a fresh
gradient is made and the growth of the peak of resident memory is read. Every kind of gradient that
needs working memory is there: uniform, one row with half of all lookups, all in one row.
"""

from __future__ import annotations

from benchmarks.harness.memory import growth

CHILD = """
import torch, sparsestep
kind, lookups = sys.argv[1], int(sys.argv[2])
rows, dim = 1_000_000, 4
torch.manual_seed(0)

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
begin()
opt.step()
print(growth())
"""


def main() -> None:
    for kind in ("uniform", "half", "one row"):
        for lookups in (1 << 16, 1 << 18, 1 << 20, 1 << 22):
            each = growth(CHILD, kind, lookups) / lookups
            print(f"{kind:8} {lookups:9,} lookups: {each:5.1f} bytes each")


if __name__ == "__main__":
    main()
