"""What does a lookup cost in a graph of ``torch.compile``, against eager mode?

A table of 1,000,000 x 64, fresh ids in every turn: 4,096 bags of 16 ids, 4,096 x 16 single rows,
and 256 bags of 8 ids, where the fixed cost of a compiled call shows; n-grams of 4 x 1,024 tokens
with two layers behind them, and of 8 x 512 tokens with two blocks of a transformer. Forward alone,
without gradients, and forward with backward; compiled by ``aot_eager``, which runs the graph as it
is, and by inductor. For comparison, what torch's own embedding and a single addition lose.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from benchmarks.harness.race import add_rounds, medians
from benchmarks.harness.workload import SETS

ROWS, DIM = 1_000_000, 64
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, int]]] = {
    "bags": (lambda: sparsestep.nn.EmbeddingBag(ROWS, DIM, mode="sum"), (4_096, 16)),
    "rows": (lambda: sparsestep.nn.Embedding(ROWS, DIM), (4_096, 16)),
    "few bags": (lambda: sparsestep.nn.EmbeddingBag(ROWS, DIM, mode="sum"), (256, 8)),
    "a model": (
        lambda: nn.Sequential(
            sparsestep.nn.NgramEmbedding(ROWS, DIM),
            nn.Linear(DIM, 4 * DIM),
            nn.GELU(),
            nn.Linear(4 * DIM, DIM),
        ),
        (4, 1_024),
    ),
    "a transformer": (
        lambda: nn.Sequential(
            sparsestep.nn.NgramEmbedding(ROWS, DIM),
            *(
                nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
                for _ in range(2)
            ),
        ),
        (8, 512),
    ),
    "torch's rows": (lambda: nn.Embedding(ROWS, DIM), (256, 8)),
    "an addition": (lambda: Add(), (256, 8)),
}
FORWARD_ONLY = ("torch's rows", "an addition")


class Add(nn.Module):
    """As little as a graph can do."""

    def forward(self, ids: Tensor) -> Tensor:
        """One more."""
        return ids + 1


class Lookup:
    """One contestant: the module, or what a compiler made of it."""

    def __init__(self, table: Any, run: Any, sets: Sequence[Tensor], *, backward: bool) -> None:
        self._table, self._run, self._sets = table, run, sets
        self._grad = torch.ones_like(table(sets[0]).detach()) if backward else None
        self._ids = sets[0]

    def before(self, number: int, /) -> None:
        """Choose the ids."""
        self._ids = self._sets[number]
        self._table.zero_grad()

    def step(self) -> None:
        """Look up, and go back."""
        with torch.set_grad_enabled(self._grad is not None):
            found = self._run(self._ids)
        if self._grad is not None:
            found.backward(self._grad)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 40)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args(arguments)
    print(f"{ROWS:,} x {DIM}, {torch.get_num_threads()} threads")
    generator = torch.Generator().manual_seed(0)
    for name in options.cases:
        make, shape = CASES[name]
        torch.compiler.reset()  # all tables have the same code, which is compiled eight times
        table = make()
        sets = [torch.randint(ROWS, shape, generator=generator) for _ in range(SETS)]
        runs: list[Any] = [table]
        for backend in ("aot_eager", "inductor"):
            runs.append(torch.compile(table, backend=backend, fullgraph=True))
        for backward in (False,) if name in FORWARD_ONLY else (False, True):
            lookups = [Lookup(table, run, sets, backward=backward) for run in runs]
            eager, *others = medians(lookups, options.rounds)
            what = "forward and backward" if backward else "forward"
            ratios = ", ".join(f"{other / eager:.2f}" for other in others)
            print(f"{name:13} {what:20} eager {eager:.3f} ms; aot_eager, inductor: {ratios} times")


if __name__ == "__main__":
    main()
