"""Five formulas of ``sparsestep.rule`` beside the rules of the library and the classes of torch.

A table of 1,000,000 x 64 with 65,536 lookups, uniform and Zipf, one thread. What is measured is CPU
time, so other work on the machine disturbs little; contestants take turns on the same gradients,
after steps that touch every row, so that all memory is there. "of the native rule" is the formula's
time divided by that of the rule in C++; "ahead" is the time of torch's own class for sparse
gradients, or of a class as one writes it by hand (gather, compute, scatter on the coalesced
gradient), divided by the formula's. The formulas and the classes by hand are in
``harness/formulas.py``; ``python -m benchmarks --suite rules`` measures the same in
wall time, with the limit.

``docs/pictures.py`` draws what ``--json`` has kept.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import results
from benchmarks.harness.cases import DISTRIBUTIONS
from benchmarks.harness.formulas import FORMULAS
from benchmarks.harness.turns import add_rounds
from sparsestep.cli.options import int_in_range, output_path
from sparsestep.optim.optimizer import RuleOptimizer

ROWS, DIM, LOOKUPS, ROUNDS = 1_000_000, 64, 65_536, 21
LR = 1e-3


def touch_all(optimizer: torch.optim.Optimizer, table: torch.nn.Parameter, values: Tensor) -> None:
    """Take steps until every row has been updated, and the memory is as a long training has it."""
    for first in range(0, len(table), len(values)):
        rows = torch.arange(first, min(first + len(values), len(table)))
        table.grad = gradient(table, rows, values[: len(rows)])
        optimizer.step()
    if isinstance(optimizer, RuleOptimizer):
        optimizer._huge_pages.move_all()


def gradient(table: Tensor, rows: Tensor, values: Tensor) -> Tensor:
    """As an embedding makes it."""
    return torch.sparse_coo_tensor(rows[None], values, table.shape, check_invariants=False)


def measure(name: str, kind: str, table_rows: int, lookups: int, rounds: int) -> dict[str, Any]:
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
            tables[which].grad = gradient(tables[which], rows, values)
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
            found.append(measure(name, kind, options.rows, options.lookups, options.rounds))
            print(shown(found[-1]), flush=True)
            gc.collect()
    if options.json:
        shape = {"rows": options.rows, "dim": DIM, "lookups": options.lookups}
        data = {**asdict(results.header()), **shape, "rounds": options.rounds, "rules": found}
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
