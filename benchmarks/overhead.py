"""The cost of a call: steps so small that the way through Python counts.

*tiny*: one table of 1,000 x 16 with 64 lookups, in a loop of its own steps, then with a step of
torch's SparseAdam before each, which leaves us the caches as a training loop would.

*small*: 26 such tables in one optimizer, against torch's SparseAdam; then a perceptron of 50 linear
layers 16 to 16, so 100 small dense parameters, against torch's AdamW. There torch's own kernel does
the work for both, and the ratio shows what our checks add.

*forms*: 64 rows of 16 through the class, ``functional.sparse_adam_`` and ``FunctionalSparseAdam``.

*threads*: a step of ours (1,000,000 x 64, 65,536 lookups) and a matrix product of torch's, both on
all threads: each alone, then in turn. Do two pools of threads cost more than the two apart?
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import statistics
import time
from collections.abc import Callable, Sequence

import torch

import sparsestep
from benchmarks.harness.cases import case
from benchmarks.harness.contestants import Native, TorchSparseAdam
from benchmarks.harness.race import Racer, Stepping, add_rounds, medians
from benchmarks.harness.workload import SETS, Workload, uniform_coo_grads

TABLES = case(1_000, 16, 64, "uniform", tables=26)
LAYERS, WIDTH = 50, 16


def measure_tiny(rounds: int, *, profile: bool = False) -> None:
    grads = uniform_coo_grads(1_000, 16, 64)
    params = [torch.nn.Parameter(torch.randn(1_000, 16)) for _ in range(2)]
    theirs, ours = torch.optim.SparseAdam(params[:1]), sparsestep.SparseAdam(params[1:])

    def seconds(optimizer: torch.optim.Optimizer, number: int) -> float:
        params[0].grad = params[1].grad = grads[number % SETS]
        begin = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - begin

    gc.disable()
    alone = statistics.median(seconds(ours, k) for k in range(rounds))
    turns = [(seconds(theirs, k), seconds(ours, k + 1)) for k in range(rounds)]
    gc.enable()
    torch_median, our_median = (statistics.median(column) for column in zip(*turns, strict=True))
    print(f"tiny, in a loop  {alone * 1e6:6.1f} us")
    print(
        f"tiny, in turn    {our_median * 1e6:6.1f} us, torch {torch_median * 1e6:.1f} us, "
        f"ratio {torch_median / our_median:.1f}"
    )
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(lambda: [seconds(ours, k) for k in range(rounds)])
        pstats.Stats(profiler).sort_stats("tottime").print_stats(15)


def make_tables() -> list[Racer]:
    """Torch's optimizer, then ours."""
    workload = Workload(TABLES)
    return [TorchSparseAdam(workload), Native(workload)]


def make_mlp(optimizer: Callable[..., torch.optim.Optimizer]) -> Stepping:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    params = list(torch.nn.Sequential(*layers).parameters())
    sets = [[torch.randn(param.shape) for param in params] for _ in range(SETS)]
    return Stepping(optimizer(params), params, sets)


def measure_small(rounds: int) -> None:
    mlps = [make_mlp(torch.optim.AdamW), make_mlp(sparsestep.AdamW)]
    for name, count, racers in (
        (TABLES.name, TABLES.tables, make_tables()),
        (f"{2 * LAYERS} dense parameters", 2 * LAYERS, mlps),
    ):
        theirs, ours = (1e3 * each for each in medians(racers, rounds))
        print(
            f"{name:35} {theirs / ours:5.2f} x torch: {ours:7.1f} us, torch {theirs:7.1f} us; "
            f"per parameter {ours / count:.1f} and {theirs / count:.1f} us"
        )


def measure_forms(rounds: int) -> None:
    grads = uniform_coo_grads(1_000, 16, 64)
    params = [torch.nn.Parameter(torch.randn(1_000, 16)) for _ in range(2)]
    optimizer = sparsestep.SparseAdam(params[:1])
    by_hand = sparsestep.FunctionalSparseAdam(params[1:])
    table, *state = (torch.zeros(1_000, 16) for _ in range(3))

    def by_class(number: int) -> None:
        params[0].grad = grads[number % SETS]
        optimizer.step()

    def in_place(number: int) -> None:
        sparsestep.functional.sparse_adam_(table, grads[number % SETS], *state, step=number + 1)

    forms = {
        "class": by_class,
        "functional.sparse_adam_": in_place,
        "FunctionalSparseAdam": lambda number: by_hand.step([grads[number % SETS]]),
    }
    gc.disable()
    times = {name: 1e6 * _median_seconds(form, rounds) for name, form in forms.items()}
    gc.enable()
    print("64 rows of 16  " + ", ".join(f"{name} {time:.1f} us" for name, time in times.items()))


def _median_seconds(work: Callable[[int], object], rounds: int) -> float:
    times = []
    for number in range(SETS + rounds):
        begin = time.perf_counter()
        work(number)
        times.append(time.perf_counter() - begin)
    return statistics.median(times[SETS:])


def measure_threads(rounds: int) -> None:
    rows, dim = 1_000_000, 64
    grads = uniform_coo_grads(rows, dim, 65_536)
    param = torch.nn.Parameter(torch.randn(rows, dim))
    optimizer = sparsestep.SparseAdam([param])
    matrix = torch.randn(768, 768)

    def ours(number: int) -> None:
        param.grad = grads[number % SETS]
        optimizer.step()

    def theirs(number: int) -> None:
        matrix @ matrix

    def both(number: int) -> None:
        theirs(number)
        ours(number)

    # Several passes, so that noise does not fall on one of the three alone.
    passes = [[_median_seconds(work, rounds) for work in (ours, theirs, both)] for _ in range(5)]
    overheads = [together / (step + product) - 1 for step, product, together in passes]
    step, product, together = (statistics.median(column) for column in zip(*passes, strict=True))
    print(
        f"step {step * 1e3:.2f} ms, product {product * 1e3:.2f} ms, in turn {together * 1e3:.2f} ms"
    )
    print(f"taking turns costs {100 * statistics.median(overheads):+.1f} %")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rounds(parser, 1_000)
    parser.add_argument("--only", choices=("tiny", "small", "forms", "threads"))
    parser.add_argument("--profile", action="store_true", help="profile the steps of tiny")
    options = parser.parse_args(arguments)
    if options.only in (None, "tiny"):
        measure_tiny(2 * options.rounds, profile=options.profile)
    if options.only in (None, "small"):
        measure_small(options.rounds)
    if options.only in (None, "forms"):
        measure_forms(2 * options.rounds)
    if options.only in (None, "threads"):
        measure_threads(max(2, options.rounds // 16))


if __name__ == "__main__":
    main()
