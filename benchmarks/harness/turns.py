"""Taking turns, for the scripts beside this one: what disturbs one disturbs all."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import quantiles

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.harness.race import Racer, race
from benchmarks.harness.results import WIDEST_SPREAD, spread
from sparsestep.cli.options import int_in_range


@dataclass
class Stepping:
    """An optimizer that takes part in a race.

    Attributes:
        optimizer: whose step is timed.
        params: its parameters.
        sets: their gradients, one list for each set.
    """

    optimizer: Optimizer
    params: Sequence[Parameter]
    sets: Sequence[Sequence[Tensor]]

    def before(self, number: int, /) -> None:
        """Hand out the gradients of a set."""
        for param, grad in zip(self.params, self.sets[number], strict=True):
            param.grad = grad

    def step(self) -> None:
        """The step."""
        self.optimizer.step()


def medians(racers: Sequence[Racer], rounds: int) -> list[float]:
    """The median time of each, in milliseconds; says so where the machine was disturbed."""
    measured = race(racers, math.inf, most=rounds)
    quartiles = [quantiles(times, n=4, method="inclusive") for times in measured]
    if max(spread(*each) for each in quartiles) > WIDEST_SPREAD:
        print("The machine was disturbed: wait and run again before you trust this:")
    return [middle for _, middle, _ in quartiles]


def add_rounds(parser: argparse.ArgumentParser, default: int) -> None:
    """Declare the option ``--rounds``."""
    parser.add_argument(
        "--rounds",
        type=int_in_range(2, 1_000_000),
        default=default,
        metavar="N",
        help=f"how many rounds are counted (default: {default:,})",
    )
