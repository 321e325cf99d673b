"""``python -m tests.faults``: faults in every operation, until told to stop."""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import itertools
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

from tests.faults import allocations


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seconds", type=float, help="stop after this many")
    parser.add_argument("--sample", type=int, help="this many fixed events per fault, then stop")
    parser.add_argument("--pairs", nargs="+", default=["*"], help="patterns: 'ranks: */line'")
    parser.add_argument("--module", help="another module with OPERATIONS")
    parser.add_argument("--nth", type=int, nargs="+", help="these events only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args()
    library = allocations.shim()
    if library is None:
        print("faults: failing allocations needs Linux with glibc and a C compiler.")
        return 2
    if str(library) not in os.environ.get("LD_PRELOAD", ""):
        command = [sys.executable, "-W", "ignore", "-m", "tests.faults", *sys.argv[1:]]
        # Threads that spin would take the cores from other cases.
        preloaded = " ".join(filter(None, (str(library), os.environ.get("LD_PRELOAD"))))
        environment = {"LD_PRELOAD": preloaded, "OMP_WAIT_POLICY": "passive"}
        os.execve(sys.executable, command, {**os.environ, **environment})
    return search(options)


def search(options: argparse.Namespace) -> int:
    import torch
    import torch.distributed.tensor

    import sparsestep
    from tests import processes
    from tests.faults import harness, operations, ranks
    from tests.faults.injectors import INJECTORS

    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1)])  # with the first optimizer torch imports its compiler
    # Torch ends the process if memory runs out in the first one: no exception may leave pybind11.
    torch.distributed.tensor.Shard(0)
    sparsestep.SGD([torch.zeros(1)])
    everything = {**operations.OPERATIONS, **ranks.OPERATIONS}
    if options.module:
        everything = importlib.import_module(options.module).OPERATIONS
    pairs = [
        f"{operation}/{fault}" for operation, make in everything.items() for fault in make.faults
    ]
    chosen = [p for p in pairs if any(fnmatch.fnmatch(p, each) for each in options.pairs)]
    expected: dict[str, harness.Expected] = {}
    tally = processes.Tally()

    def work(case: tuple[str, int | None]) -> Any:
        """Calibrate a pair of operation and fault, or run it with the fault at the n-th event."""
        pair, nth = case
        operation, _, fault = pair.rpartition("/")
        return harness.outcome_of(
            everything[operation], INJECTORS[fault](), nth, expected.get(pair)
        )

    def run(batches: Iterator[list[tuple[str, int | None]]]) -> None:
        for (pair, nth), found in processes.run(batches, work, options.workers, harness.TIMEOUT):
            if isinstance(found, harness.Expected):
                expected[pair] = found
                continue
            is_lost = isinstance(found, processes.Lost)
            kind, detail = harness.outcome_of_lost(found) if is_lost else found
            tally.add(f"{pair}: {kind}", nth, *detail.split("\n", 1))

    def cases() -> Iterator[list[tuple[str, int | None]]]:
        chance = random.Random(options.seed)
        turns = len(options.nth) if options.nth else options.sample
        for turn in (range(turns) if turns else itertools.count()) if expected else ():
            for pair, known in expected.items():
                if options.nth:
                    nth = options.nth[turn]
                elif options.sample:
                    nth = (2 * turn + 1) * known.events // (2 * options.sample)
                else:
                    nth = chance.randrange(max(1, known.events))
                if time.monotonic() > end:
                    return
                yield [(pair, nth)]

    run([(pair, None)] for pair in chosen)
    print(f"{len(expected)} pairs of operation and fault", flush=True)
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    try:
        run(cases())
    except KeyboardInterrupt:
        print("stopped")
    print(tally.report())
    return int(bool(tally.findings))


if __name__ == "__main__":
    sys.exit(main())
