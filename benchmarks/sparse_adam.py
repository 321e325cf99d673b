"""One step of SparseAdam, ours against torch's: ``make bench``.

1,000,000 x 64, 65,536 uniform lookups. The contestants take turns within one run, each step has
fresh rows (eight sets of ids in rotation), and the ratio is one of medians.
"""

from __future__ import annotations

import statistics
import time

import torch

import sparsestep

ROWS, DIM, LOOKUPS, SETS, ROUNDS = 1_000_000, 64, 65_536, 8, 48


def main() -> None:
    torch.manual_seed(0)
    grads = [
        torch.sparse_coo_tensor(
            torch.randint(0, ROWS, (1, LOOKUPS)),
            torch.randn(LOOKUPS, DIM),
            (ROWS, DIM),
            check_invariants=False,
        )
        for _ in range(SETS)
    ]
    contestants: dict[str, tuple[torch.nn.Parameter, torch.optim.Optimizer, list[float]]] = {}
    for name, kind in (("torch", torch.optim.SparseAdam), ("sparsestep", sparsestep.SparseAdam)):
        param = torch.nn.Parameter(torch.zeros(ROWS, DIM))
        contestants[name] = (param, kind([param]), [])
    for round_ in range(SETS + ROUNDS):
        for param, optimizer, times in contestants.values():
            param.grad = grads[round_ % SETS]
            begin = time.perf_counter()
            optimizer.step()
            if round_ >= SETS:  # the first rotation touches the memory for the first time
                times.append(time.perf_counter() - begin)
    medians = {name: statistics.median(times) for name, (_, _, times) in contestants.items()}
    for name, seconds in medians.items():
        print(f"{name:12} {seconds * 1e3:8.2f} ms")
    print(f"{'ratio':12} {medians['torch'] / medians['sparsestep']:8.1f}")


if __name__ == "__main__":
    main()
