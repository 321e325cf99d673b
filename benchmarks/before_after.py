"""Is a commit slower than an earlier one? ``python -m benchmarks.before_after BEFORE AFTER``.

``BEFORE`` and ``AFTER`` are Python interpreters, each with its own sparsestep. Both run the same
cases in processes that take turns, a few steps at a time, so that a slow second of the machine
meets both. The table shows medians and the median of the ratios, after / before. On a busy machine,
``--cpu`` compares the CPU time of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

Run = Callable[[], Any]
WORKER, CPU_WORKER = "--worker", "--cpu-worker"


def worker(clock: Callable[[], float], threads: int) -> None:
    """Answer lines of ``case steps`` with seconds per step; runs under either interpreter."""
    import torch

    import sparsestep

    torch.manual_seed(0)
    torch.set_num_threads(threads)

    def ids_of(rows: int, lookups: int, zipf: bool) -> torch.Tensor:
        if not zipf:
            return torch.randint(rows, (lookups,))
        return (rows ** torch.rand(lookups, dtype=torch.float64)).long() - 1

    def table(
        name: str,
        rows: int,
        dim: int,
        lookups: int,
        *,
        zipf: bool = False,
        dtype: torch.dtype = torch.float32,
        tables: int = 1,
        **options: Any,
    ) -> Run:
        params = [torch.nn.Parameter(torch.randn(rows, dim, dtype=dtype)) for _ in range(tables)]
        optimizer = getattr(sparsestep, name)(params, lr=1e-3, **options)
        batches = [
            [
                torch.sparse_coo_tensor(
                    ids_of(rows, lookups, zipf)[None],
                    torch.randn(lookups, dim, dtype=dtype),
                    (rows, dim),
                    check_invariants=False,
                )
                for _ in params
            ]
            for _ in range(8)
        ]
        turn = iter(range(1 << 60))

        def run() -> None:
            for param, grad in zip(params, batches[next(turn) % 8], strict=True):
                param.grad = grad
            optimizer.step()

        return run

    def dense(name: str, shape: tuple[int, ...], **options: Any) -> Run:
        param = torch.nn.Parameter(torch.randn(shape))
        param.grad = torch.randn(shape)
        optimizer: torch.optim.Optimizer = getattr(sparsestep, name)([param], lr=1e-3, **options)
        return optimizer.step

    def loop(bag: bool, tables: int, rows: int, batch: int, **options: Any) -> Run:
        make = sparsestep.nn.EmbeddingBag if bag else sparsestep.nn.Embedding
        modules = torch.nn.ModuleList([make(rows, 64) for _ in range(tables)])
        optimizer = sparsestep.Adam(modules.parameters(), lr=1e-3, **options)
        if options.get("semantics") == "dense":
            optimizer.track(modules)
        batches = [[torch.randint(rows, (batch, 4)) for _ in modules] for _ in range(8)]
        turn = iter(range(1 << 60))

        def run() -> None:
            optimizer.zero_grad()
            ids = batches[next(turn) % 8]
            sum(m(i).sum() for m, i in zip(modules, ids, strict=True)).backward()
            optimizer.step()

        return run

    def functional() -> Run:
        param = torch.randn(1000, 16)
        grad = torch.sparse_coo_tensor(
            torch.randint(1000, (1, 64)), torch.randn(64, 16), (1000, 16), check_invariants=False
        )
        state = torch.zeros_like(param), torch.zeros_like(param)
        counts = iter(range(1, 1 << 60))

        def run() -> None:
            sparsestep.functional.sparse_adam_(param, grad, *state, step=next(counts))

        return run

    cases: dict[str, Callable[[], Run]] = {
        "Adam 1M x 64, 65,536 Zipf": lambda: table("Adam", 1_000_000, 64, 65_536, zipf=True),
        "Adam 1M x 64, 65,536 uniform": lambda: table("Adam", 1_000_000, 64, 65_536),
        "Adam 100k x 16, 8,192": lambda: table("Adam", 100_000, 16, 8_192),
        "SparseAdam 2M x 32, 65,536": lambda: table("SparseAdam", 2_000_000, 32, 65_536),
        "Adagrad 1M x 64, 65,536": lambda: table("Adagrad", 1_000_000, 64, 65_536),
        "SGD 1M x 64, 65,536": lambda: table("SGD", 1_000_000, 64, 65_536),
        "Lion 1M x 64, 65,536": lambda: table("Lion", 1_000_000, 64, 65_536),
        "RowwiseAdagrad 1M x 64": lambda: table("RowwiseAdagrad", 1_000_000, 64, 65_536),
        "Adam int8 state": lambda: table("Adam", 1_000_000, 64, 65_536, state_dtype=torch.int8),
        "Adam float64": lambda: table("Adam", 500_000, 64, 32_768, dtype=torch.float64),
        "Adam bfloat16": lambda: table("Adam", 1_000_000, 64, 65_536, dtype=torch.bfloat16),
        "26 tiny tables": lambda: table("SparseAdam", 1000, 16, 64, tables=26),
        "one tiny table": lambda: table("SparseAdam", 1000, 16, 64),
        "dense AdamW 1000 x 1000": lambda: dense("AdamW", (1000, 1000)),
        "dense SGD 1000 x 1000": lambda: dense("SGD", (1000, 1000), momentum=0.9),
        "26 bags, forward to step": lambda: loop(True, 26, 100_000, 1024),
        "embedding, forward to step": lambda: loop(False, 1, 500_000, 16_384),
        "dense semantics, forward to step": lambda: loop(
            False, 1, 500_000, 16_384, semantics="dense"
        ),
        "functional, 64 rows": functional,
    }
    print(json.dumps(list(cases)), flush=True)
    current: tuple[str, Run] | None = None
    for line in sys.stdin:
        name, steps = json.loads(line)
        if current is None or current[0] != name:
            current = None
            current = (name, cases[name]())
        started = clock()
        for _ in range(steps):
            current[1]()
        print(json.dumps((clock() - started) / steps), flush=True)


class Worker:
    """A process with one of the two installations."""

    def __init__(self, python: str, mode: str) -> None:
        self._process = subprocess.Popen(
            [python, "-W", "ignore", __file__, mode],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.cases: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def seconds(self, case: str, steps: int) -> float:
        """Run some steps of a case; seconds for each."""
        assert self._process.stdin is not None
        print(json.dumps((case, steps)), file=self._process.stdin, flush=True)
        return float(self._read())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("before", help="a Python interpreter")
    parser.add_argument("after", help="another one")
    parser.add_argument("--seconds", type=float, default=10, help="per case")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--cpu", action="store_true", help="CPU time of one thread")
    options = parser.parse_args()
    mode = CPU_WORKER if options.cpu else WORKER
    workers = [Worker(python, mode) for python in (options.before, options.after)]
    print(f"{'case':36}{'before':>10}{'after':>10}{'ratio':>8}{'spread':>8}")
    for case in workers[0].cases:
        if options.only not in case:
            continue
        for each in workers:  # touches the memory that later steps use
            seconds = each.seconds(case, 16)
        steps = max(1, round(0.05 / seconds))
        times: list[list[float]] = [[], []]
        end = time.monotonic() + options.seconds
        while time.monotonic() < end or len(times[0]) < 9:
            for index in (0, 1) if len(times[0]) % 2 else (1, 0):
                times[index].append(workers[index].seconds(case, steps))
        ratios = sorted(after / before for before, after in zip(*times, strict=True))
        medians = [statistics.median(each) * 1e3 for each in times]
        spread = (ratios[len(ratios) * 3 // 4] - ratios[len(ratios) // 4]) / 2
        ratio = statistics.median(ratios)
        print(
            f"{case:36}{medians[0]:8.3f}ms{medians[1]:8.3f}ms{ratio:8.3f}{spread:8.3f}", flush=True
        )


if __name__ == "__main__":
    if sys.argv[1:] == [WORKER]:
        worker(time.perf_counter, threads=2)
    elif sys.argv[1:] == [CPU_WORKER]:
        worker(time.process_time, threads=1)
    else:
        main()
