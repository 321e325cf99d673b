"""The beginning of a training: what the first step costs, and the first twenty.

26 tables of 200,000 x 64 with 8,192 lookups each, as in a recommender. CPU time in seconds, since
much of it is the system's, which provides memory. Each measurement has a process of its own.

    python -m benchmarks.first_steps
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

TABLES, ROWS, DIM, LOOKUPS, STEPS, ROUNDS = 26, 200_000, 64, 8_192, 20, 3


def measure(library: str, name: str) -> tuple[float, float]:
    import torch

    import sparsestep

    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch's own optimizer warns

    params = [torch.nn.Parameter(torch.empty(ROWS, DIM).uniform_()) for _ in range(TABLES)]
    made = getattr(sparsestep if library == "sparsestep" else torch.optim, name)(params, lr=0.01)
    values = torch.randn(LOOKUPS, DIM)
    first = spent = 0.0
    for step in range(STEPS):
        for param in params:
            ids = torch.randint(ROWS, (1, LOOKUPS))
            param.grad = torch.sparse_coo_tensor(ids, values, param.shape, check_invariants=False)
        begin = time.process_time()
        made.step()
        spent += time.process_time() - begin
        if step == 0:
            first = spent
    return first, spent


def main() -> None:
    print(f"{'':10} {'':12} first step   {STEPS} steps   (seconds of CPU, medians of {ROUNDS})")
    for name in ("Adagrad", "SparseAdam"):
        for library in ("torch", "sparsestep"):
            runs = []
            for _ in range(ROUNDS):
                command = [sys.executable, __file__, library, name]
                runs.append(json.loads(subprocess.check_output(command)))
            first, all_steps = (statistics.median(column) for column in zip(*runs, strict=True))
            print(f"{name:10} {library:12} {first:10.2f} {all_steps:10.2f}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
