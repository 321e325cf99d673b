"""Peak memory (Linux): of a step, of an embedding bag's backward, and of ``step_in_backward``.

Each figure comes from a process of its own: steps that touch all of table and state, then the
growth of the peak of resident memory during one more.

*step*: the working memory of a step per lookup, for uniform lookups, for one row that has half of
them, and for one row that has all.

*bags*: backward and step of 4,096 bags of 64 ids, rows of 128, ours against torch's. Written out,
the gradient is 64 times the size of the output's.

*step_in_backward*: ten tables with dense gradients, each as large as its table. One gradient in
memory at a time, or all ten?
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from benchmarks.harness.memory import peak_rss_growth

STEP = """
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

BAGS = """
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

STEP_IN_BACKWARD = """
import torch, sparsestep
mode, tables, rows, dim = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)

model = torch.nn.ModuleList(torch.nn.Embedding(rows, dim) for _ in range(tables))
optimizer = sparsestep.Adam(model.parameters(), fused=True)  # fused: no working memory of torch's
if mode == "step_in_backward":
    optimizer.step_in_backward()
ids = torch.randint(0, rows, (256,))

def train():
    hidden = torch.zeros(256, dim)
    for table in model:
        hidden = torch.tanh(hidden + table(ids))
    hidden.sum().backward()
    optimizer.step()
    optimizer.zero_grad()

train()                          # makes the state, starts the threads
begin()
train()
print(growth())
"""


def measure_step() -> None:
    for kind in ("uniform", "half", "one row"):
        for lookups in (1 << 16, 1 << 18, 1 << 20, 1 << 22):
            each = peak_rss_growth(STEP, kind, lookups) / lookups
            print(f"{kind:8} {lookups:9,} lookups: {each:5.1f} bytes each")


def measure_bags() -> None:
    rows, dim, bags, ids = 100_000, 128, 4_096, 64
    theirs, ours = (
        peak_rss_growth(BAGS, side, rows, dim, bags, ids, return_freed=True)
        for side in ("torch", "ours")
    )
    print(f"{bags:,} bags of {ids} ids x {dim}: backward and step take")
    print(f"torch      {theirs / 1e6:7.1f} MB")
    print(f"sparsestep {ours / 1e6:7.1f} MB, {ours / theirs:.3f} of it (goal: under 0.1)")


def measure_step_in_backward() -> None:
    tables, rows, dim = 10, 50_000, 64
    modes = {
        mode: peak_rss_growth(STEP_IN_BACKWARD, mode, tables, rows, dim, return_freed=True)
        for mode in ("backward and step", "step_in_backward")
    }
    separate, fused = modes.values()
    print(f"step_in_backward takes {fused / separate:.2f} times the memory for gradients")
    print(f"{tables} tables of {rows:,} x {dim}: the peak grows by")
    for mode, growth in modes.items():
        print(f"{mode:18} {growth / 1e6:7.1f} MB, {growth / (rows * dim * 4):.1f} gradients")


CLAIMS: dict[str, Callable[[], None]] = {
    "step": measure_step,
    "bags": measure_bags,
    "step_in_backward": measure_step_in_backward,
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=CLAIMS, help="one figure instead of all of them")
    only = parser.parse_args(arguments).only
    for name in CLAIMS if only is None else [only]:
        CLAIMS[name]()


if __name__ == "__main__":
    main()
