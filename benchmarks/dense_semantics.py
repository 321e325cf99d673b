"""What dense semantics costs: four questions about ``semantics="dense"``.

A tracked step: the rows of a lookup are brought up to date, as ``optimizer.track`` does it, then
updated; against the step of masked semantics, which only updates them. Both are AdamW with sparse
gradients and fresh rows in every step.

The whole table: ``catch_up()`` after some steps, with every row behind that they did not touch;
against one step of torch's fused AdamW with a dense gradient, which passes over the table too.

Tiny gradients: the catch-up of a lookup where gradients are about 1e-6, so that eps matters;
against gradients of 1e-2. On one thread, in CPU time, for several betas and steps.

The history: what a step adds to it, at step 1,000,000. The table does not matter for that.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor
from torch.nn import Embedding, Parameter

import sparsestep
from benchmarks.harness.race import Stepping, add_rounds, medians
from benchmarks.harness.workload import SETS, uniform_coo_grads
from sparsestep.cli.options import int_in_range
from sparsestep.deferred.rows import DeferredRows
from sparsestep.optim.optimizer import RuleOptimizer

ROWS, DIM, LOOKUPS, ROUNDS = 1_000_000, 64, 65_536, 60
BEHIND = 4  # steps between two catch-ups of the whole table
STEP = 1_000_000  # at which the history is looked at
COUNTED = 10_000  # its last steps
LR, DECAY = 1e-3, 0.01


class Lookup(Embedding):
    """An embedding whose lookup is nothing but what was hooked in before it."""

    def forward(self, input: Tensor) -> Tensor:
        """Leave the ids as they are."""
        return input


class Tracked(Stepping):
    """The lookup's part of dense semantics, and the step."""

    def __init__(self, param: Parameter, grads: Sequence[Tensor]) -> None:
        optimizer = sparsestep.AdamW([param], lr=LR, weight_decay=DECAY, semantics="dense")
        super().__init__(optimizer, [param], [[grad] for grad in grads])
        self._lookup = Lookup(1, 1)
        self._lookup.weight = param
        optimizer.track(self._lookup)
        self._ids = [grad._indices()[0] for grad in grads]

    def before(self, number: int, /) -> None:
        """Hand out the gradients of a set, and its ids."""
        super().before(number)
        self._next = self._ids[number]

    def step(self) -> None:
        """Both."""
        self._lookup(self._next)
        super().step()


class WholeTable(Stepping):
    """``catch_up()``, with steps in between that are not timed."""

    def __init__(self, param: Parameter, grads: Sequence[Tensor], first: Tensor) -> None:
        self._dense = sparsestep.AdamW([param], lr=LR, weight_decay=DECAY, semantics="dense")
        super().__init__(self._dense, [param], [[grad] for grad in grads])
        param.grad = first  # every row has momentum, so none is cheaper than another
        self._dense.step()

    def before(self, number: int, /) -> None:
        """Take some steps."""
        for each in range(number, number + BEHIND):
            super().before(each % SETS)
            self._dense.catch_up(self.params[0], self.sets[each % SETS][0]._indices()[0])
            self._dense.step()

    def step(self) -> None:
        """Bring every row up to date."""
        self._dense.catch_up()


class CatchUpCost:
    """The catch-up of lookups, with steps in between that are not timed."""

    def __init__(self, scale: float, done: int, betas: tuple[float, float], rows: int) -> None:
        self._scale, self._random = scale, torch.Generator().manual_seed(0)
        self._param = Parameter(torch.randn(rows, DIM, generator=self._random))
        self._optimizer = sparsestep.AdamW(
            [self._param], lr=LR, betas=betas, weight_decay=DECAY, semantics="dense"
        )
        self._optimizer.materialize_state()
        self._optimizer.state[self._param]["step"].fill_(done)
        self._param.grad = self._drawn(rows)  # every row has momentum
        self._optimizer.step()

    def _drawn(self, rows: int) -> Tensor:
        return self._scale * torch.randn(rows, DIM, generator=self._random)

    def cpu_time(self, lookups: int) -> float:
        """Catch up the rows of a lookup, and take its step."""
        shape = self._param.shape
        ids = torch.randint(0, shape[0], (lookups,), generator=self._random)
        begin = process_time()
        self._optimizer.catch_up(self._param, ids)
        taken = process_time() - begin
        values = self._drawn(lookups)
        self._param.grad = torch.sparse_coo_tensor(ids[None], values, shape, check_invariants=False)
        self._optimizer.step()
        return taken


def show_tiny_gradients(rows: int, lookups: int, rounds: int) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for done, betas in ((0, (0.9, 0.999)), (2000, (0.9, 0.999)), (2000, (0.9, 0.95))):
        racers = [CatchUpCost(scale, done, betas, rows) for scale in (1e-6, 1e-2)]
        times = [[racer.cpu_time(lookups) for racer in racers] for _ in range(rounds)]
        tiny, ordinary = (1e3 * median(each) for each in zip(*times, strict=True))
        print(
            f"{'tiny gradients':30} {tiny / ordinary:5.2f} x ordinary ones (goal: at most 1.2): "
            f"{tiny:.2f} ms, {ordinary:.2f} ms; betas {betas}, from step {done:,}"
        )
    torch.set_num_threads(threads)


def compare(name: str, goal: float, racers: Sequence[Stepping], rounds: int, than: str) -> None:
    for racer in racers:
        racer.before(0)
        racer.step()
        if isinstance(racer.optimizer, RuleOptimizer):
            racer.optimizer.store.huge_pages.move_all()  # which a long training gets in time
    ours, theirs = medians(racers, rounds)
    print(
        f"{name:30} {ours / theirs:5.2f} x {than} (goal: at most {goal:g}): "
        f"{ours:.2f} ms, {theirs:.2f} ms"
    )


def show_history(steps: int) -> None:
    """Take note of so many steps, and time the last ones."""
    param = Parameter(torch.zeros(1, 1))
    optimizer = sparsestep.AdamW([param], lr=LR, weight_decay=DECAY, semantics="dense")
    settings = optimizer.settings(0)
    clock = DeferredRows(settings, num_rows=1, done=0, new=True)
    times = []
    for number in range(steps):
        begin = perf_counter()
        if clock.history.is_full:
            clock.history.clear()
        clock.prepare_commit(settings, None)()
        if number >= steps - COUNTED:
            times.append(perf_counter() - begin)
    assert clock.history.now == steps
    print(
        f"{'the history':30} {1e6 * median(times):5.1f} us for a step (goal: under 20), "
        f"median of the last {len(times):,} of {steps:,}; mean {1e6 * sum(times) / len(times):.1f}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, ROUNDS)
    for name, default, low in (("rows", ROWS, 2), ("lookups", LOOKUPS, 1), ("steps", STEP, 1)):
        parser.add_argument(
            f"--{name}",
            type=int_in_range(low, 1_000_000_000),
            default=default,
            metavar="N",
            help=f"(default: {default:,})",
        )
    options = parser.parse_args(arguments)
    warnings.simplefilter("error", sparsestep.StaleWarning)
    rows, rounds = options.rows, options.rounds
    grads = uniform_coo_grads(rows, DIM, options.lookups)
    start = torch.randn(rows, DIM)
    print(f"{rows:,} x {DIM}, {options.lookups:,} uniform lookups, {rounds:,} rounds")

    masked = Parameter(start.clone())
    stepping = Stepping(
        sparsestep.AdamW([masked], lr=LR, weight_decay=DECAY), [masked], [[g] for g in grads]
    )
    racers = [Tracked(Parameter(start.clone()), grads), stepping]
    compare("a tracked step", 2.5, racers, rounds, "the masked step")

    dense, whole = Parameter(start.clone()), torch.randn(rows, DIM)
    torchs = torch.optim.AdamW([dense], lr=LR, weight_decay=DECAY, fused=True)
    racers = [
        WholeTable(Parameter(start.clone()), grads, whole),
        Stepping(torchs, [dense], [[whole]] * SETS),
    ]
    compare("catch_up() of the whole table", 2, racers, rounds, "torch's fused AdamW")
    show_tiny_gradients(max(2, rows // 4), max(1, options.lookups // 8), rounds)
    show_history(options.steps)


if __name__ == "__main__":
    main()
