"""The race: contestants take turns within one run, so that what disturbs one disturbs all."""

from __future__ import annotations

import argparse
import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median, quantiles
from time import perf_counter, perf_counter_ns
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from benchmarks.harness.cases import Case
from benchmarks.harness.contestants import (
    Contestant,
    DglSparseAdam,
    FbgemmAdagrad,
    Native,
    Reference,
    TorchAdagrad,
    TorchDenseAdam,
    TorchSparseAdam,
)
from benchmarks.harness.limit import Limit
from benchmarks.harness.results import WIDEST_SPREAD, CaseResult, Refusal, Timing, spread
from benchmarks.harness.workload import SETS, Unavailable, Workload
from sparsestep.cli.options import int_in_range

# In the order of their turns. Where memory is short, the last are left out.
CONTESTANTS: tuple[type[Contestant], ...] = (
    TorchSparseAdam,
    Native,
    TorchDenseAdam,
    Reference,
    Limit,
    TorchAdagrad,
    FbgemmAdagrad,
    DglSparseAdam,
)

# Every contestant has met every set once, and touched all memory that it will use.
WARM_UP_ROUNDS = SETS
LEAST_ROUNDS = 16
MOST_ROUNDS = 200

# Called after each round, with the part of the work that is done.
Follow = Callable[[float], None]


class Racer(Protocol):
    """What takes turns; see ``Contestant``."""

    def before(self, set_index: int, /) -> None:
        """Get ready for a step with the gradients of ``set_index``; not timed."""

    def step(self) -> None:
        """The step; timed."""


def race(
    racers: Sequence[Racer],
    seconds: float,
    follow: Follow = lambda done: None,
    most: int = MOST_ROUNDS,
) -> list[list[float]]:
    """The milliseconds of each racer's steps, warm-up left out.

    Args:
        racers: one or more; they take turns within each round. Racer ``c`` uses set
            ``(round + 3 * c) % SETS``, so that none finds in the cache what another has just used:
            with factor 1, a set would come to the one before as soon as the next round.
        seconds: more than 0; when counted rounds have taken so long there is no further one, within
            ``LEAST_ROUNDS`` and ``most``.
        follow: is called after each round, off the clock.
        most: how many rounds are counted at most; with infinite ``seconds``, exactly so many.
    """
    times: list[list[float]] = [[] for _ in racers]
    with _no_garbage_collection():
        for round_index in range(WARM_UP_ROUNDS):
            _round(racers, round_index)
            follow(0.0)
        began = perf_counter()
        for round_index in range(WARM_UP_ROUNDS, WARM_UP_ROUNDS + most):
            for each, elapsed in zip(times, _round(racers, round_index), strict=True):
                each.append(elapsed)
            count, used = len(times[0]), perf_counter() - began
            follow(max(min(count / LEAST_ROUNDS, used / seconds), count / most))
            if count >= LEAST_ROUNDS and used >= seconds:
                break
    return times


def _round(racers: Sequence[Racer], round_index: int) -> list[float]:
    times = []
    for turn, racer in enumerate(racers):
        racer.before((round_index + 3 * turn) % SETS)
        began = perf_counter_ns()
        racer.step()
        times.append((perf_counter_ns() - began) / 1e6)
    return times


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """Let torch, and with it everyone, use so many threads; ``None`` changes nothing."""
    before = torch.get_num_threads()
    torch.set_num_threads(count or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure(
    case: Case,
    suite: str,
    contestants: Sequence[type[Contestant]],
    seconds: float,
    follow: Follow = lambda done: None,
) -> CaseResult:
    """Race the contestants on a case."""
    racers: list[Contestant] = []
    refusals: list[Refusal] = []
    # Off is torch's default, too; but when that is left unsaid, torch's Adagrad warns of it.
    with threads(case.threads), torch.sparse.check_sparse_tensor_invariants(False):
        workload = Workload(case)
        for contestant in contestants:
            try:
                racers.append(contestant(workload))
            except Unavailable as error:
                refusals.append(Refusal(contestant.name, str(error)))
        times = race(racers, seconds, follow) if racers else []
        return CaseResult(
            suite=suite,
            case=case,
            threads=torch.get_num_threads(),
            unique=workload.unique(),
            shared=workload.shared,
            timings=timings([racer.name for racer in racers], times),
            unavailable=refusals,
        )


def timings(
    names: Sequence[str], times: Sequence[Sequence[float]], base: str = TorchSparseAdam.name
) -> list[Timing]:
    """What the times of each contestant come to, the fastest first; ratios are to ``base``.

    Example:
        >>> slow, fast = [4.0, 4.0, 4.0, 5.0], [1.0, 2.0, 2.0, 2.0]
        >>> first, second = timings([TorchSparseAdam.name, Native.name], [slow, fast])
        >>> first.contestant, first.median_ms, first.lower_ms, first.times_torch, first.of_limit
        ('sparsestep', 2.0, 1.75, 2.0, None)
    """
    medians = {name: median(each) for name, each in zip(names, times, strict=True)}
    theirs, least = medians.get(base), medians.get(Limit.name)
    result = []
    for name, each in zip(names, times, strict=True):
        lower, middle, upper = quantiles(each, n=4, method="inclusive")
        result.append(
            Timing(
                contestant=name,
                median_ms=middle,
                lower_ms=lower,
                upper_ms=upper,
                rounds=len(each),
                times_torch=None if theirs is None else theirs / middle,
                of_limit=None if least is None else least / middle,
            )
        )
    return sorted(result, key=lambda timing: timing.median_ms)


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
