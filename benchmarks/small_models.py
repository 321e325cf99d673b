"""What a step costs where a model has many small parameters: the way through Python counts.

Tables: 26 of 1,000 x 16 with 64 lookups each, against torch's SparseAdam. Layers: a perceptron of
50 linear layers 16 to 16, so 100 small dense parameters, against torch's AdamW as it comes; there
torch's own kernel does the work for both, and the ratio shows what our checks add.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

import torch

import sparsestep
from benchmarks.harness.cases import case
from benchmarks.harness.contestants import Native, TorchSparseAdam
from benchmarks.harness.gradients import SETS
from benchmarks.harness.race import Racer
from benchmarks.harness.turns import Stepping, add_rounds, medians
from benchmarks.harness.workload import Workload

TABLES = case(1_000, 16, 64, "uniform", tables=26)
LAYERS, WIDTH = 50, 16


def tables() -> list[Racer]:
    """Torch's optimizer, then ours."""
    workload = Workload(TABLES)
    return [TorchSparseAdam(workload), Native(workload)]


def perceptron(optimizer: Callable[..., torch.optim.Optimizer]) -> Stepping:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
    params = list(torch.nn.Sequential(*layers).parameters())
    sets = [[torch.randn(param.shape) for param in params] for _ in range(SETS)]
    return Stepping(optimizer(params), params, sets)


def show(name: str, parameters: int, racers: Sequence[Racer], rounds: int) -> None:
    theirs, ours = (1e3 * each for each in medians(racers, rounds))
    print(
        f"{name:35} {theirs / ours:5.2f} x torch: {ours:7.1f} us, torch {theirs:7.1f} us; "
        f"per parameter {ours / parameters:.1f} and {theirs / parameters:.1f} us"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 1_000)
    rounds = parser.parse_args(arguments).rounds
    show(TABLES.name, TABLES.tables, tables(), rounds)
    racers = [perceptron(torch.optim.AdamW), perceptron(sparsestep.AdamW)]
    show(f"{2 * LAYERS} dense parameters", 2 * LAYERS, racers, rounds)


if __name__ == "__main__":
    main()
