"""Peak memory of training with ``step_in_backward`` against backward and then step (Linux).

A model of ten tables with dense gradients, each as large as its table. In a process of its own per
way: a first step makes the state, then the growth of the peak of resident memory during one more
backward and step is read. Afterwards, one gradient in memory at a time or all ten?
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks.harness.memory import growth
from sparsestep.cli.options import int_in_range

TABLES, ROWS, DIM = 10, 50_000, 64

CHILD = """
import torch, sparsestep
way, tables, rows, dim = sys.argv[1], *map(int, sys.argv[2:])
torch.manual_seed(0)

model = torch.nn.ModuleList(torch.nn.Embedding(rows, dim) for _ in range(tables))
optimizer = sparsestep.Adam(model.parameters(), fused=True)  # fused: no working memory of torch's
if way == "step_in_backward":
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in (("tables", TABLES), ("rows", ROWS), ("dim", DIM)):
        kind = int_in_range(1, 100_000_000)
        parser.add_argument(f"--{name}", type=kind, default=default, help=f"(default: {default:,})")
    options = parser.parse_args(arguments)
    shape = (options.tables, options.rows, options.dim)
    ways = {
        way: growth(CHILD, way, *shape, at_once=True)
        for way in ("backward and step", "step_in_backward")
    }
    all_of_them, one_by_one = ways.values()
    print(f"step_in_backward takes {one_by_one / all_of_them:.2f} times the memory for gradients")
    gradient = options.rows * options.dim * 4
    print(f"{options.tables} tables of {options.rows:,} x {options.dim}: the peak grows by")
    for way, grown in ways.items():
        print(f"{way:18} {grown / 1e6:7.1f} MB, {grown / gradient:.1f} gradients")


if __name__ == "__main__":
    main()
