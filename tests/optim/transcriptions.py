"""What was published, transcribed: float64 and plain loops, with our names for the options.

Gradients are the same as tensors and as the sum of each row that they hold.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

ROWS, COLUMNS = 7, 5
STEPS = 8
Table = np.ndarray
Sums = dict[int, Table]  # the sum of a gradient's entries for each row that it holds
Result = tuple[Table, dict[str, Table]]


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

    def summed(self, step: int) -> Sums:
        sums: Sums = {}
        for row, values in self.entries[step]:
            sums[row] = sums.get(row, 0.0) + values
        return sums


def start() -> Table:
    return np.random.default_rng(1).normal(size=(ROWS, COLUMNS))


def zeros() -> Table:
    return np.zeros((ROWS, COLUMNS))


def decayed(
    p: Table, g: Table, lr: float, weight_decay: float = 0.0, decoupled_weight_decay: bool = False
) -> Table:
    """The gradient with coupled decay, or the same after the row was shrunk."""
    if decoupled_weight_decay:
        p *= 1 - lr * weight_decay
        return g
    return g + weight_decay * p


def rowwise_adagrad(
    grads: list[Sums],
    *,
    lr: float,
    eps: float,
    initial_accumulator_value: float = 0.0,
    **decay: Any,
) -> Result:
    """FBGEMM's EXACT_ROWWISE_ADAGRAD."""
    p, s = start(), np.full(ROWS, initial_accumulator_value)
    for sums in grads:
        for row, g in sums.items():
            g = decayed(p[row], g, lr, **decay)
            s[row] += sum(float(x) ** 2 for x in g) / COLUMNS
            p[row] -= lr / (math.sqrt(s[row]) + eps) * g
    return p, {"sum": s}


def rowwise_adam(
    grads: list[Sums],
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    bias_correction: str = "global",
    **decay: Any,
) -> Result:
    """FBGEMM's PARTIAL_ROWWISE_ADAM; the count is the table's or the row's own."""
    b1, b2 = betas
    p, m, v, counts = start(), zeros(), np.zeros(ROWS), np.zeros(ROWS)
    for step, sums in enumerate(grads, start=1):
        for row, g in sums.items():
            counts[row] += 1
            t = counts[row] if bias_correction == "per_row" else step
            g = decayed(p[row], g, lr, **decay)
            m[row] = b1 * m[row] + (1 - b1) * g
            v[row] = b2 * v[row] + (1 - b2) * sum(float(x) ** 2 for x in g) / COLUMNS
            p[row] -= lr * (m[row] / (1 - b1**t)) / (math.sqrt(v[row] / (1 - b2**t)) + eps)
    kept = {"exp_avg": m, "exp_avg_sq": v} if b1 else {"exp_avg_sq": v}
    return p, {**kept, "row_step": counts} if bias_correction == "per_row" else kept


def lion(
    grads: list[Sums], *, lr: float, betas: tuple[float, float], weight_decay: float = 0.0
) -> Result:
    """Chen et al., algorithm 2."""
    b1, b2 = betas
    p, m = start(), zeros()
    for sums in grads:
        for row, g in sums.items():
            c = b1 * m[row] + (1 - b1) * g
            p[row] -= lr * (np.sign(c) + weight_decay * p[row])
            m[row] = b2 * m[row] + (1 - b2) * g
    return p, {"exp_avg": m}


def ftrl(
    grads: list[Sums],
    *,
    lr: float,
    beta: float = 1.0,
    l1: float = 0.0,
    l2: float = 0.0,
    initial_accumulator_value: float = 0.0,
) -> Result:
    """McMahan et al., algorithm 1: weights are not stored but follow from z and n."""
    z, n = zeros(), np.full((ROWS, COLUMNS), initial_accumulator_value)

    def weight(z: Table, n: Table) -> Table:
        moved = -(z - np.sign(z) * l1) / ((beta + np.sqrt(n)) / lr + l2)
        return np.where(np.abs(z) <= l1, 0.0, moved)

    for sums in grads:
        for row, g in sums.items():
            sigma = (np.sqrt(n[row] + g**2) - np.sqrt(n[row])) / lr
            z[row] += g - sigma * weight(z[row], n[row])
            n[row] += g**2
    return weight(z, n), {"linear": z, "sum": n}
