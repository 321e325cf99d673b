"""Gradients of a small table, as tensors and as sums."""

from __future__ import annotations

import numpy as np
import torch

ROWS, COLUMNS = 7, 5
STEPS = 8
Table = np.ndarray
IndexedGrad = dict[int, Table]  # the sum of its entries for each row that the gradient holds


class Gradients:
    """The same gradients as tensors and as sums: rows come several times, others not at all."""

    def __init__(self, *, dense: bool) -> None:
        generator = np.random.default_rng(0)
        self.dense = dense
        self.entries: list[list[tuple[int, Table]]] = []
        for _ in range(STEPS):
            rows = range(ROWS) if dense else generator.integers(0, ROWS, 6)
            self.entries.append([(int(r), generator.normal(size=COLUMNS)) for r in rows])

    def tensor(self, step: int) -> torch.Tensor:
        rows, values = zip(*self.entries[step], strict=True)
        stacked = torch.from_numpy(np.stack(values))
        if self.dense:
            return stacked
        return torch.sparse_coo_tensor(torch.tensor([rows]), stacked, (ROWS, COLUMNS))

    def summed(self, step: int) -> IndexedGrad:
        sums: IndexedGrad = {}
        for row, values in self.entries[step]:
            sums[row] = sums.get(row, 0.0) + values
        return sums


def start() -> Table:
    return np.random.default_rng(1).normal(size=(ROWS, COLUMNS))


def row_gradient(row: int, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    return torch.sparse_coo_tensor(torch.tensor([[row]]), values[None], shape)
