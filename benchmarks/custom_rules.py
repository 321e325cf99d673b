"""Five formulas of ``sparsestep.rule`` beside the rules of the library and the classes of torch.

A table of 1,000,000 x 64 with 65,536 lookups, uniform and Zipf, one thread. What is measured is CPU
time, so other work on the machine disturbs little; contestants take turns on the same gradients,
after steps that touch every row, so that all memory is there. "of the native rule" is the formula's
time divided by that of the rule in C++; "ahead" is the time of torch's own class for sparse
gradients, or of a class as one writes it by hand (gather, compute, scatter on the coalesced
gradient), divided by the formula's. ``python -m benchmarks --suite rules`` measures wall time, with
the limit.

``docs/pictures.py`` draws what ``--json`` has kept.
"""

# mypy: allow-untyped-defs

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

import sparsestep
from benchmarks.harness import results
from benchmarks.harness.cases import DISTRIBUTIONS, Formula
from benchmarks.harness.contestants import (
    Contestant,
    GatherScatterOptimizer,
    Native,
    OptimizerContestant,
)
from benchmarks.harness.limit import Limit
from benchmarks.harness.race import Follow, add_rounds, race, threads, timings
from benchmarks.harness.results import CaseResult, Refusal
from benchmarks.harness.workload import Unavailable, Workload
from sparsestep.cli.options import int_in_range, output_path
from sparsestep.optim.optimizer import RuleOptimizer

ROWS, DIM, LOOKUPS, ROUNDS = 1_000_000, 64, 65_536, 21
LR = 1e-3


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def adam(param, grad, exp_avg, exp_avg_sq, *, step, lr=1e-3, betas=(0.9, 0.999), eps=1e-8):
    """Adam."""
    beta1, beta2 = betas
    exp_avg = beta1 * exp_avg + (1 - beta1) * grad
    exp_avg_sq = beta2 * exp_avg_sq + (1 - beta2) * grad * grad
    denominator = exp_avg_sq.sqrt() / math.sqrt(1 - beta2**step) + eps
    return param - lr / (1 - beta1**step) * exp_avg / denominator, exp_avg, exp_avg_sq


@sparsestep.rule(state={"sum": 0.0})
def adagrad(param, grad, sum, *, lr=1e-2, eps=1e-10):
    """Adagrad."""
    sum = sum + grad.square()
    return param - lr * grad / (sum.sqrt() + eps), sum


@sparsestep.rule(state={"exp_avg": 0.0})
def lion(param, grad, exp_avg, *, lr=1e-4, betas=(0.9, 0.99)):
    """Lion."""
    beta1, beta2 = betas
    direction = (beta1 * exp_avg + (1 - beta1) * grad).sign()
    return param - lr * direction, beta2 * exp_avg + (1 - beta2) * grad


@sparsestep.rule(state={"square_avg": 0.0})
def rmsprop(param, grad, square_avg, *, lr=1e-2, alpha=0.99, eps=1e-8):
    """RMSprop."""
    square_avg = alpha * square_avg + (1 - alpha) * grad * grad
    return param - lr * grad / (square_avg.sqrt() + eps), square_avg


@sparsestep.rule(row_state={"sum": 0.0})
def rowwise_adagrad(param, grad, sum, *, lr=1e-2, eps=1e-10):
    """Adagrad with one sum for each row."""
    sum = sum + grad.square().mean(1, keepdim=True)
    return param - lr * grad / (sum.sqrt() + eps), sum


def _lion(param: Tensor, grad: Tensor, exp_avg: Tensor, lr: float) -> tuple[Tensor, ...]:
    direction = torch.lerp(exp_avg, grad, 0.1).sign_()
    return param.sub_(direction, alpha=lr), exp_avg.lerp_(grad, 0.01)


def _rmsprop(param: Tensor, grad: Tensor, square_avg: Tensor, lr: float) -> tuple[Tensor, ...]:
    square_avg.mul_(0.99).addcmul_(grad, grad, value=0.01)
    return param.addcdiv_(grad, square_avg.sqrt().add_(1e-8), value=-lr), square_avg


def _rowwise(param: Tensor, grad: Tensor, sum: Tensor, lr: float) -> tuple[Tensor, ...]:
    sum += grad.square().mean(1, keepdim=True)
    return param.addcdiv_(grad, sum.sqrt().add_(1e-10), value=-lr), sum


class Rivals(NamedTuple):
    """A formula, the library's rule, and what torch has or one writes by hand.

    Attributes:
        formula: made by ``sparsestep.rule``.
        native: the class whose rule is in C++.
        torch: takes parameters and ``lr``.
        torch_name: whose that is.
    """

    formula: type[RuleOptimizer]
    native: type[RuleOptimizer]
    torch: Callable[..., Optimizer]
    torch_name: str


BY_HAND = "torch, by hand"
FORMULAS: dict[str, Rivals] = {
    "Adam": Rivals(adam, sparsestep.Adam, torch.optim.SparseAdam, "torch SparseAdam"),
    "Adagrad": Rivals(adagrad, sparsestep.Adagrad, torch.optim.Adagrad, "torch Adagrad sparse"),
    "Lion": Rivals(
        lion,
        sparsestep.Lion,
        lambda p, lr: GatherScatterOptimizer(p, lr, _lion, ["exp_avg"]),
        BY_HAND,
    ),
    "RMSprop": Rivals(
        rmsprop,
        sparsestep.RMSprop,
        lambda p, lr: GatherScatterOptimizer(p, lr, _rmsprop, ["square_avg"]),
        BY_HAND,
    ),
    "RowwiseAdagrad": Rivals(
        rowwise_adagrad,
        sparsestep.RowwiseAdagrad,
        lambda p, lr: GatherScatterOptimizer(p, lr, _rowwise, ["sum"], 1),
        BY_HAND,
    ),
}
FORMULA = "sparsestep.rule"


class _Torch(OptimizerContestant):
    states = 2

    def __init__(self, workload: Workload, make: Callable[..., Optimizer]) -> None:
        self._make = make
        super().__init__(workload)

    def make(self, params: list[Parameter]) -> Optimizer:
        """What torch has."""
        return self._make(params, lr=LR)


def make_contestants(
    case: Formula, workload: Workload
) -> tuple[list[str], list[Contestant], list[Refusal]]:
    """Those who take part, by name, and those who cannot."""
    rivals = FORMULAS[case.rule]
    makers: dict[str, Callable[[], Contestant]] = {
        Native.name: lambda: Native(workload, rivals.native),
        FORMULA: lambda: Native(workload, rivals.formula),
        rivals.torch_name: lambda: _Torch(workload, rivals.torch),
        Limit.name: lambda: Limit(workload, rivals.native),
    }
    names, found, refusals = [], [], []
    for name, make in makers.items():
        try:
            found.append(make())
            names.append(name)
        except Unavailable as error:
            refusals.append(Refusal(name, str(error)))
    return names, found, refusals


def measure_rule(
    case: Formula, suite: str, seconds: float, follow: Follow = lambda done: None
) -> CaseResult:
    """Race a formula and its rivals."""
    with threads(case.threads), torch.sparse.check_sparse_tensor_invariants(False):
        workload = Workload(case)
        names, racers, refusals = make_contestants(case, workload)
        times = race(racers, seconds, follow) if racers else []
        return CaseResult(
            suite=suite,
            case=case,
            threads=torch.get_num_threads(),
            unique=workload.unique(),
            shared=workload.shared,
            timings=timings(names, times, base=FORMULAS[case.rule].torch_name),
            unavailable=refusals,
        )


def touch_all(optimizer: torch.optim.Optimizer, table: torch.nn.Parameter, values: Tensor) -> None:
    """Take steps until every row has been updated, and the memory is as a long training has it."""
    for first in range(0, len(table), len(values)):
        rows = torch.arange(first, min(first + len(values), len(table)))
        table.grad = coo_grad(table, rows, values[: len(rows)])
        optimizer.step()
    if isinstance(optimizer, RuleOptimizer):
        optimizer.store.huge_pages.move_all()


def coo_grad(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """As an embedding makes it."""
    return torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False)


def measure_cpu_time(
    name: str, kind: str, table_rows: int, lookups: int, rounds: int
) -> dict[str, Any]:
    """The medians of CPU time of one formula and its two rivals."""
    rivals, draw = FORMULAS[name], torch.Generator().manual_seed(0)
    tables = [torch.nn.Parameter(torch.zeros(table_rows, DIM)) for _ in range(3)]
    makers: tuple[Callable[..., torch.optim.Optimizer], ...] = (
        rivals.formula,
        rivals.native,
        rivals.torch,
    )
    racers = [make([table], lr=LR) for make, table in zip(makers, tables, strict=True)]
    values = torch.randn(lookups, DIM, generator=draw)
    for racer, table in zip(racers, tables, strict=True):
        touch_all(racer, table, values)
    times: list[list[float]] = [[], [], []]
    for number in range(rounds + 2):
        rows = DISTRIBUTIONS[kind](table_rows, lookups, draw)
        for place in range(3):
            which = (place + number) % 3
            tables[which].grad = coo_grad(tables[which], rows, values)
            begin = time.process_time()
            racers[which].step()
            spent = time.process_time() - begin
            if number >= 2:
                times[which].append(spent)
    ours, native, other = (statistics.median(each) for each in times)
    return {
        "rule": name,
        "lookups": kind,
        "torch": rivals.torch_name,
        "formula_ms": ours * 1e3,
        "native_ms": native * 1e3,
        "torch_ms": other * 1e3,
        "of_native": ours / native,
        "ahead_of_torch": other / ours,
    }


def shown(each: dict[str, Any]) -> str:
    times = ", ".join(f"{who} {each[f'{who}_ms']:.1f} ms" for who in ("formula", "native", "torch"))
    return (
        f"{each['rule']:14}  {each['lookups']:7}  {each['of_native']:.2f} of the native rule, "
        f"{each['ahead_of_torch']:.1f} times ahead of {each['torch']}  ({times})"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_rounds(parser, ROUNDS)
    parser.add_argument("--rules", nargs="+", choices=FORMULAS, default=list(FORMULAS))
    parser.add_argument("--rows", type=int_in_range(2, 10**9), default=ROWS, metavar="N")
    parser.add_argument("--lookups", type=int_in_range(1, 10**8), default=LOOKUPS, metavar="N")
    parser.add_argument("--json", type=output_path(".json"), metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.sparse.check_sparse_tensor_invariants.disable()
    found = []
    for name in options.rules:
        for kind in ("uniform", "zipf"):
            found.append(
                measure_cpu_time(name, kind, options.rows, options.lookups, options.rounds)
            )
            print(shown(found[-1]), flush=True)
            gc.collect()
    if options.json:
        shape = {"rows": options.rows, "dim": DIM, "lookups": options.lookups}
        data = {**asdict(results.header()), **shape, "rounds": options.rounds, "rules": found}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
