"""Speed of each rule's native kernel, against the least that its update must do.

Every optimizer class and its main variants, on a table of 1,000,000 x 64 with 65,536 uniform
lookups, fresh rows in every step. A rule and its own limit (``native/limit.h``) take turns on one
table and one state; Adagrad and RowwiseAdagrad take turns with each other too, so that their ratio
is theirs and not the machine's. "of limit" is the limit's median divided by ours; the limit has no
weight decay, which AdamW has. "bytes" is what a touched row moves at the least: its gradient is
read, its parameter and its state are read and written.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from benchmarks.harness import race as harness
from benchmarks.harness import results
from benchmarks.harness.cases import Case, case
from benchmarks.harness.contestants import Contestant, Native, element_states, rule_of
from benchmarks.harness.limit import Limit
from benchmarks.harness.race import add_rounds
from benchmarks.harness.report import Screen, fraction, milliseconds
from benchmarks.harness.results import Timing
from benchmarks.harness.workload import Unavailable, Workload
from sparsestep import Adagrad, RowwiseAdagrad
from sparsestep.cli.options import int_in_range, output_path
from sparsestep.optim import OPTIMIZERS
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.rules.rule import Rule

ROWS, DIM, LOOKUPS, ROUNDS = 1_000_000, 64, 65_536, 100

# Of the classes that have more than one rule; the others are measured as they come.
PER_ROW = {"bias_correction": "per_row"}
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "SparseAdam": [{}, PER_ROW],
    "Adam": [{}, PER_ROW, {"amsgrad": True}],
    "RowwiseAdam": [{}, PER_ROW],
    "SGD": [{}, {"momentum": 0.9}],
    "RMSprop": [
        {},
        {"momentum": 0.9},
        {"centered": True},
        {"centered": True, "momentum": 0.9},
    ],
}

COMPARED = (RowwiseAdagrad, Adagrad)


class Variant(NamedTuple):
    """An optimizer class and its options."""

    optimizer: type[RuleOptimizer]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """For people."""
        words = [
            name if value is True else f"{name} {value}" for name, value in self.options.items()
        ]
        return ", ".join([self.optimizer.__name__, *words])

    @property
    def rule(self) -> Rule:
        """What it follows."""
        return rule_of(self.optimizer, **self.options)


@dataclass(frozen=True)
class RuleResult:
    """One variant.

    Attributes:
        name: the class and its options.
        rule: the native rule.
        bytes_per_row: what a touched row moves at the least.
        of_limit: the limit's median divided by ours.
        ours: our steps.
        limit: the limit's.
    """

    name: str
    rule: str
    bytes_per_row: int
    of_limit: float
    ours: Timing
    limit: Timing


def races() -> list[list[Variant]]:
    """What takes turns with each other."""
    variants = [
        Variant(each, options)
        for each in OPTIMIZERS
        for options in VARIANTS.get(each.__name__, [{}])
    ]
    together = [each for each in variants if each.optimizer in COMPARED]
    return [*([each] for each in variants if each.optimizer not in COMPARED), together]


def bytes_per_row(rule: Rule, dim: int) -> int:
    """The gradient's row is read; the parameter's and the state's are read and written."""
    elements = element_states(rule)
    return 4 * dim * (1 + 2 * (1 + elements)) + 8 * (len(rule.state) - elements)


def measure(
    measured: Case, variants: Sequence[Variant], rounds: int, follow: harness.Follow
) -> list[RuleResult]:
    """Race the variants and their limits."""
    workload = Workload(measured, shared=True)
    racers: list[Contestant] = []
    for optimizer, options in variants:
        racers.append(Native(workload, optimizer, **options))
        racers.append(Limit(workload, optimizer, **options))
    times = harness.race(racers, math.inf, follow, most=rounds)
    found = []
    for number, variant in enumerate(variants):
        names, pair = (Native.name, Limit.name), times[2 * number : 2 * number + 2]
        timings = {each.contestant: each for each in harness.timings(names, pair)}
        ours, limit = timings[Native.name], timings[Limit.name]
        rule = variant.rule
        found.append(
            RuleResult(
                name=variant.name,
                rule=rule.name,
                bytes_per_row=bytes_per_row(rule, measured.dim),
                of_limit=limit.median_ms / ours.median_ms,
                ours=ours,
                limit=limit,
            )
        )
    return found


def shown(found: Sequence[RuleResult]) -> Table:
    """The results, ratios first."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("rule", no_wrap=True)
    table.add_column("of limit", justify="right", style="bold")
    table.add_column("ms ours", justify="right")
    table.add_column("ms limit", justify="right")
    table.add_column("bytes", justify="right")
    for each in found:
        table.add_row(
            each.name,
            fraction(each.of_limit),
            milliseconds(each.ours.median_ms),
            milliseconds(each.limit.median_ms),
            f"{each.bytes_per_row:,}",
        )
    return table


def compared(found: Sequence[RuleResult]) -> dict[str, Any]:
    """How long RowwiseAdagrad takes as a part of Adagrad; both took turns."""
    one, other = (next(r for r in found if r.name == each.__name__) for each in COMPARED)
    return {
        "name": f"{one.name} / {other.name}",
        "ours": one.ours.median_ms / other.ours.median_ms,
        "limit": one.limit.median_ms / other.limit.median_ms,
        "bytes": one.bytes_per_row / other.bytes_per_row,
    }


def write(
    path: Path,
    header: results.Header,
    measured: Case,
    rounds: int,
    found: Sequence[RuleResult],
    ratio: dict[str, Any],
) -> None:
    """As JSON, after the header that all results have."""
    data = {
        **asdict(header),
        "case": asdict(measured),
        "rounds": rounds,
        "rules": [asdict(each) for each in found],
        "ratios": [ratio],
    }
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def options_of(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, default, help in (
        ("--rows", ROWS, "of the table"),
        ("--lookups", LOOKUPS, "per step"),
    ):
        parser.add_argument(
            name,
            type=int_in_range(1, 1_000_000_000),
            default=default,
            metavar="N",
            help=f"{help} (default: {default:,})",
        )
    add_rounds(parser, ROUNDS)
    parser.add_argument(
        "--json", type=output_path(".json"), metavar="FILE", help="where the results go"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = options_of(arguments)
    measured = case(options.rows, DIM, options.lookups, "uniform")
    header, screen = results.header(), Screen()
    screen.introduce(header)
    found: list[RuleResult] = []
    for variants in races():
        with screen.progress(variants[0].name) as follow:
            try:
                found += measure(measured, variants, options.rounds, follow)
            except Unavailable as error:
                sys.exit(f"{variants[0].name}: {error}")
        gc.collect()  # the tensors of one race go before the next come
    console = Console(highlight=False)
    console.print(f"\n{measured.name}, rounds: {options.rounds}\n")
    console.print(shown(found))
    ratio = compared(found)
    console.print(
        f"\n{ratio['name']}: {ratio['ours']:.2f} of the time; the limits {ratio['limit']:.2f}, "
        f"the bytes {ratio['bytes']:.2f}"
    )
    if options.json:
        write(options.json, header, measured, options.rounds, found, ratio)
        screen.say(f"\nThe results: {options.json}")


if __name__ == "__main__":
    main()
