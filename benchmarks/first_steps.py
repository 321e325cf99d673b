"""The beginning of a training: the first step, the first twenty, and all until steps are steady.

26 tables of 200,000 x 64 with 8,192 lookups each, as in a recommender. CPU time in seconds, since
much of it is the system's, which provides memory. Each measurement has a process of its own. Steps
are steady once the median of five is within 10 % of the median of the last twenty.

    python -m benchmarks.first_steps
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

TABLES, ROWS, DIM, LOOKUPS, STEPS, ROUNDS = 26, 200_000, 64, 8_192, 60, 3
MANY = 20  # steps that are added up, and the last ones, which are steady


def measure(library: str, name: str) -> tuple[float, float, float, float]:
    import torch

    import sparsestep

    torch.sparse.check_sparse_tensor_invariants.disable()  # or torch's own optimizer warns

    params = [torch.nn.Parameter(torch.empty(ROWS, DIM).uniform_()) for _ in range(TABLES)]
    made = getattr(sparsestep if library == "sparsestep" else torch.optim, name)(params, lr=0.01)
    values = torch.randn(LOOKUPS, DIM)
    times = []
    for _ in range(STEPS):
        for param in params:
            ids = torch.randint(ROWS, (1, LOOKUPS))
            param.grad = torch.sparse_coo_tensor(ids, values, param.shape, check_invariants=False)
        begin = time.process_time()
        made.step()
        times.append(time.process_time() - begin)
    steady = statistics.median(times[-MANY:])
    count = next(n for n in range(STEPS) if statistics.median(times[n : n + 5]) <= 1.1 * steady)
    return times[0], sum(times[:MANY]), sum(times[:count]), steady


def main() -> None:
    print(f"seconds of CPU, medians of {ROUNDS}")
    print(f"{'':10} {'':12} first step   {MANY} steps   until steady   steady step")
    for name in ("Adagrad", "SparseAdam"):
        for library in ("torch", "sparsestep"):
            runs = []
            for _ in range(ROUNDS):
                command = [sys.executable, __file__, library, name]
                runs.append(json.loads(subprocess.check_output(command)))
            found = [statistics.median(column) for column in zip(*runs, strict=True)]
            print("{:10} {:12} {:10.2f} {:10.2f} {:14.2f} {:13.3f}".format(name, library, *found))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(*sys.argv[1:])))
    else:
        main()
