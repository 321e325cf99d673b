"""Does a step of an n-gram memory cost the same, whatever the number of rows?

    python -m benchmarks.table_rows --folder /some/local/disk

``NgramEmbedding`` of 1, 10, 100 and 300 million rows x 64, orders 2 and 3, trained by
``RowwiseAdam(betas=(0.0, 0.999))``. A turn is forward, backward and step on 4 x 1,024 tokens, the
same tokens for all tables. Tables are sparse files (``storage.mapped``), whose rows take space once
they are written: 8,192 rows a batch, each on pages of its own. All batches were seen before the
first counted turn, so the pages are in memory, as are the rows that a training uses often.

The limit is a plain loop over the same rows: torch copies them into a buffer, and back.

Before that, a table of 1,000 rows is trained in a file, in memory, and by dense steps of the
formula in torch operations. The first two must have equal bits. Dense steps decay the second moment
of an idle row one by one, ours by a power, so they differ by rounding.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from benchmarks.harness.race import add_rounds, medians
from benchmarks.harness.workload import SETS

SIZES, DIM, SHAPE, TOKENS = (
    (1_000_000, 10_000_000, 100_000_000, 300_000_000),
    64,
    (4, 1_024),
    50_000,
)
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.0, 0.999)}


class Memory:
    """One contestant: a table in a file, and its optimizer."""

    def __init__(
        self, folder: Path, rows: int, sets: Sequence[Tensor], *, apart: bool, layers: bool
    ) -> None:
        make = None if apart else lambda params: sparsestep.RowwiseAdam(params, **OPTIONS)
        weight = sparsestep.storage.mapped(folder / f"{rows}", (rows, DIM), optimizer=make)
        self.table = sparsestep.nn.NgramEmbedding(rows, DIM, weight=weight)
        blocks = (
            nn.TransformerEncoderLayer(DIM, 4, 4 * DIM, dropout=0.0, batch_first=True)
            for _ in range(2 * layers)
        )
        self._model = nn.Sequential(self.table, *blocks)
        self.optimizer: Any = sparsestep.RowwiseAdam(self.table.parameters(), **OPTIONS)
        if layers:
            tables = partial(sparsestep.RowwiseAdam, **OPTIONS)
            self.optimizer = sparsestep.nn.optimizer_for(
                self._model, sparsestep.AdamW, semantics="masked", tables=tables
            )
        self._sets, self._tokens = sets, sets[0]

    def before(self, number: int, /) -> None:
        """Choose the tokens."""
        self._tokens = self._sets[number]
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Forward, backward, update."""
        self._model(self._tokens).square().sum().backward()
        self.optimizer.step()

    def state_bytes_per_row(self) -> float:
        """The size of the state; the step count is one number."""
        shape = self.table.weight.shape
        (found,) = (each for each in self.optimizer.explain() if each.shape == shape)
        return float(found.state_bytes / self.table.num_embeddings)


class Moved:
    """The limit: the rows that a turn reads and writes, moved by torch."""

    def __init__(self, memory: Memory, sets: Sequence[Tensor]) -> None:
        self._weight = memory.table.weight.data
        self._sets = [memory.table.rows(tokens) for tokens in sets]
        self._rows = self._sets[0]
        self._buffer = torch.empty(len(self._rows), DIM)

    def before(self, number: int, /) -> None:
        """Choose the rows."""
        self._rows = self._sets[number]

    def step(self) -> None:
        """Read, write."""
        torch.index_select(self._weight, 0, self._rows, out=self._buffer)
        self._weight.index_put_((self._rows,), self._buffer)


def check_small(folder: Path, sets: Sequence[Tensor]) -> None:
    """Train a table in a file, one in memory, and one by dense steps of the formula in torch."""
    rows, results = 1_000, []
    for kind in ("file", "memory", "dense"):
        torch.manual_seed(0)
        weight = torch.randn(rows, DIM)
        if kind == "file":
            mapped = sparsestep.storage.mapped(folder / "small", (rows, DIM))
            with sparsestep.storage.writing(mapped):
                weight = mapped.copy_(weight)
        table = sparsestep.nn.NgramEmbedding(rows, DIM, weight=weight)
        engine: Any = "reference" if kind == "dense" else "auto"
        optimizer = sparsestep.RowwiseAdam(
            table.parameters(), **OPTIONS, engine=engine, semantics="dense"
        )
        optimizer.track(table)
        for tokens in sets:
            optimizer.zero_grad()
            found = table(tokens[:1, :64])
            found.backward(torch.randn(found.shape))
            if kind == "dense":
                assert table.weight.grad is not None
                table.weight.grad = table.weight.grad.to_dense()
            optimizer.step()
        optimizer.catch_up()
        results.append(table.weight.detach().clone())
    assert torch.equal(results[0], results[1]), "a table in a file has other bits"
    far = float((results[0] - results[2]).abs().max())
    assert far < 1e-6, far
    print(f"{rows:,} rows in a file: the bits of those in memory, within {far:.0e} of dense steps")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 100)
    parser.add_argument("--folder", help="on a local disk with 10 GB; default: a temporary one")
    parser.add_argument("--most", type=int, default=SIZES[-1], help="leave out larger tables")
    parser.add_argument("--apart", action="store_true", help="state in a file of its own")
    parser.add_argument(
        "--layers", action="store_true", help="two blocks of a transformer behind the table"
    )
    options = parser.parse_args(arguments)
    generator = torch.Generator().manual_seed(0)
    sets = [torch.randint(TOKENS, SHAPE, generator=generator) for _ in range(SETS)]
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        check_small(folder, sets)
        sizes = [rows for rows in SIZES if rows <= options.most]
        how = {"apart": options.apart, "layers": options.layers}
        memories = [Memory(folder, rows, sets, **how) for rows in sizes]
        times = medians(memories, options.rounds)
        limits = medians([Moved(memory, sets) for memory in memories], options.rounds)
        for memory, rows, time, limit in zip(memories, sizes, times, limits, strict=True):
            print(
                f"{rows:>11,} rows: {time:.2f} ms, {time / times[0]:.3f} times the first; "
                f"the limit {limit:.2f} ms, {limit / limits[0]:.3f} times; "
                f"{memory.state_bytes_per_row():.0f} bytes of state per row"
            )


if __name__ == "__main__":
    main()
