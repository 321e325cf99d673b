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
from collections import Counter
from collections.abc import Callable, Iterator
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
    chosen = [
        (operation, fault)
        for operation, make in everything.items()
        for fault in make.faults
        if any(fnmatch.fnmatch(f"{operation}/{fault}", pattern) for pattern in options.pairs)
    ]
    expected: dict[tuple[str, str], harness.Expected] = {}

    def call(pair: tuple[str, str], function: Callable[..., Any], *arguments: Any) -> Any:
        make, injector = everything[pair[0]], INJECTORS[pair[1]]
        return harness.outcome_of(lambda: function(make, injector(), *arguments))

    def calibrated(pair: tuple[str, str]) -> Any:
        return call(pair, harness.calibrate)

    def disturbed(case: tuple[tuple[str, str], int]) -> Any:
        pair, nth = case
        return call(pair, harness.run_case, nth, expected[pair])

    def run(batches: Iterator[list[Any]], work: Callable[[Any], Any]) -> Iterator[tuple[Any, Any]]:
        for key, found in processes.run(batches, work, options.workers, harness.TIMEOUT):
            is_lost = isinstance(found, processes.Lost)
            yield key, harness.outcome_of_lost(found) if is_lost else found

    def cases() -> Iterator[list[tuple[tuple[str, str], int]]]:
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

    findings: list[str] = []
    for pair, found in run(([pair] for pair in chosen), calibrated):
        if isinstance(found, harness.Outcome):
            report(findings, pair, None, found.detail)
        else:
            expected[pair] = found
    print(f"{len(expected)} pairs of operation and fault", flush=True)
    counts: Counter[tuple[str, str, str]] = Counter()
    end = time.monotonic() + options.seconds if options.seconds else float("inf")
    told = time.monotonic()
    try:
        for (pair, nth), outcome in run(cases(), disturbed):
            counts[(*pair, outcome.kind)] += 1
            if outcome.kind == "finding":
                report(findings, pair, nth, outcome.detail)
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"{sum(counts.values())} cases, {len(findings)} findings", flush=True)
    except KeyboardInterrupt:
        print("stopped")
    show(counts)
    print(f"{sum(counts.values())} cases, {len(findings)} findings")
    return int(bool(findings))


def report(findings: list[str], pair: tuple[str, str], nth: int | None, detail: str) -> None:
    findings.append(detail)
    if len(findings) <= 200:
        print(f"FOUND in {pair[0]!r} with {pair[1]!r} at {nth}: {detail}\n", flush=True)


def show(counts: Counter[tuple[str, str, str]]) -> None:
    rows = sorted({(operation, injector) for operation, injector, _ in counts})
    names = f"{'done':>8}{'undone':>9}{'aborted':>9}{'limits':>9}{'findings':>9}"
    print(f"{'operation':32} {'fault':11} {names}")
    for pair in rows:
        kinds = ("done", "undone", "aborted", "limit", "finding")
        numbers = "".join(f"{counts[(*pair, kind)]:9}" for kind in kinds)
        print(f"{pair[0]:32} {pair[1]:11}{numbers}")


if __name__ == "__main__":
    sys.exit(main())
