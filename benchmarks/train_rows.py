"""Fine-tuning 100 rows of a table of 50,000 x 64, as for new tokens: masked AdamW against dense.

The gradient is dense, as ``nn.Embedding`` gives it, and there is weight decay. Ours has a mask over
the rows; torch's fused AdamW steps over the whole table, for it has no masks. After 200 steps of
ours all other rows must have kept their bits.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch.nn import Parameter

import sparsestep
from benchmarks.harness.race import Stepping, add_rounds, medians
from benchmarks.harness.workload import SETS

ROWS, DIM, TRAINED, STEPS = 50_000, 64, 100, 200
LR, DECAY = 1e-3, 0.1


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 200)
    rounds = parser.parse_args(arguments).rounds
    torch.manual_seed(0)
    start = torch.randn(ROWS, DIM)
    grads = [[torch.randn(ROWS, DIM)] for _ in range(SETS)]
    mask = torch.zeros(ROWS, dtype=torch.bool)
    mask[torch.randperm(ROWS)[:TRAINED]] = True

    def masked() -> Stepping:
        param = Parameter(start.clone())
        group = {"params": [param], "mask": mask}
        return Stepping(sparsestep.AdamW([group], lr=LR, weight_decay=DECAY), [param], grads)

    dense = Parameter(start.clone())
    whole = torch.optim.AdamW([dense], lr=LR, weight_decay=DECAY, fused=True)
    theirs, ours = medians([Stepping(whole, [dense], grads), masked()], rounds)
    print(
        f"{TRAINED} of {ROWS:,} x {DIM}: {theirs / ours:.0f} x torch's fused AdamW: "
        f"{1e3 * ours:.1f} us, torch {1e3 * theirs:.1f} us"
    )

    tuning = masked()
    for number in range(STEPS):
        tuning.before(number % SETS)
        tuning.step()
    # As integers: equal bits, not equal numbers.
    moved = (tuning.params[0].detach().view(torch.int32) != start.view(torch.int32)).any(dim=1)
    assert torch.equal(moved, mask), "other rows than those of the mask have moved"
    print(f"after {STEPS} steps the other {ROWS - TRAINED:,} rows have their bits")


if __name__ == "__main__":
    main()
