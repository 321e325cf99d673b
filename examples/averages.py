"""Averages of weights (EMA and SWA) while rows of a table wait, compared with dense training.

Under ``semantics="dense"`` a row that a batch does not look up catches up when it is next read. An
average reads all rows, so all have to catch up first; after ``track(model)`` they do.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from typing import cast

import torch
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import sparsestep

STEPS, ROWS = 200, 2_000


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[AveragedModel, AveragedModel]:
    """Train; returns an exponential average, and the plain one of the last quarter (SWA)."""
    fading = cast(Callable[..., None], get_ema_multi_avg_fn(0.9))  # torch leaves a type out
    ema = AveragedModel(model, multi_avg_fn=fading)
    swa = AveragedModel(model)
    schedule = SWALR(optimizer, swa_lr=1e-3, anneal_epochs=50)
    generator = torch.Generator().manual_seed(0)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids = torch.randint(0, ROWS, (16, 4), generator=generator)
        (model(ids) - 1).square().mean().backward()
        optimizer.step()
        if step % 10 == 9:  # it reads the whole table, so not in every step
            ema.update_parameters(model)
        if step >= 3 * STEPS // 4:
            schedule.step()
            swa.update_parameters(model)
    return ema, swa


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two weights at the same place."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def main() -> int:
    """Train with sparse and with dense gradients; returns the exit code."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.EmbeddingBag(ROWS, 16), nn.Linear(16, 1))
    sparse = sparsestep.nn.fuse(copy.deepcopy(dense))

    optimizer = sparsestep.AdamW(sparse.parameters(), lr=0.01, semantics="dense")
    optimizer.track(sparse)
    ours = train(sparse, optimizer)
    theirs = train(dense, torch.optim.AdamW(dense.parameters(), lr=0.01))

    apart = [distance(one, other) for one, other in zip(ours, theirs, strict=True)]
    print(f"largest distance from dense training: EMA {apart[0]:.1e}, SWA {apart[1]:.1e}")
    return 0 if max(apart) < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
