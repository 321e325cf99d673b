"""The beginning of a training: what the first step costs, the first twenty, and the whole start.

The start is all that steps take until their time is steady, beyond what steady ones take.
26 tables of 200,000 x 64 with 8,192 lookups each, as in a recommender. CPU time in seconds, since
much of it is the system's, which provides memory. Each measurement has a process of its own.

    python -m benchmarks.first_steps
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time

TABLES, ROWS, DIM, LOOKUPS, STEPS = 26, 200_000, 64, 8_192, 20

# Steps until all pages are touched, and here, until they are huge ones.
UNTIL_STEADY = {"torch": 60, "sparsestep": 2500}


def measure(library: str, name: str) -> tuple[float, float, float]:
    import torch

    import sparsestep

    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch's own optimizer warns

    params = [torch.nn.Parameter(torch.empty(ROWS, DIM).uniform_()) for _ in range(TABLES)]
    made = getattr(sparsestep if library == "sparsestep" else torch.optim, name)(params, lr=0.01)
    values = torch.randn(LOOKUPS, DIM)
    spent = []
    for _ in range(UNTIL_STEADY[library]):
        for param in params:
            ids = torch.randint(ROWS, (1, LOOKUPS))
            param.grad = torch.sparse_coo_tensor(ids, values, param.shape, check_invariants=False)
        begin = time.process_time()
        made.step()
        spent.append(time.process_time() - begin)
    steady = statistics.median(spent[-len(spent) // 10 :])
    return spent[0], sum(spent[:STEPS]), sum(spent) - steady * len(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print(f"{'':23}      first  first {STEPS}      start   (CPU seconds, medians of {rounds})")
    for name in ("Adagrad", "SparseAdam"):
        for library in ("torch", "sparsestep"):
            runs = []
            for _ in range(rounds):
                command = [sys.executable, __file__, library, name]
                runs.append(json.loads(subprocess.check_output(command)))
            medians = [statistics.median(column) for column in zip(*runs, strict=True)]
            listed = " ".join(f"{each:10.2f}" for each in medians)
            print(f"{name:10} {library:12} {listed}", flush=True)


if __name__ == "__main__":
    if sys.argv[1:] and not sys.argv[1].startswith("-"):
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
