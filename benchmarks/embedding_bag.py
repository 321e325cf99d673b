"""A whole training step of an embedding bag: forward, backward, update.

Against torch, FBGEMM, and the limit: the least that any implementation must do.

A table of 1,000,000 x 64, a batch of 4,096 bags of 16 ids, fresh ids in every step, uniform and
Zipf. The gradient of the output is given, so that nothing but the table is timed. FBGEMM's tables
take part where it is installed (see README.md beside this file); they update during backward, and
on the CPU they have no Adam.

*two lookups*: a table of 400,000 x 128 that is looked up twice in a forward, as in skip-gram, whole
iteration and step alone: fused, plain, and torch's own. ``nn.fuse`` must not lose against the plain
module: each lookup leaves a part of the gradient, and the core reads the parts in place.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

import sparsestep
from benchmarks.harness.cases import case
from benchmarks.harness.contestants import import_peer
from benchmarks.harness.limit import addresses, limit_module, plan
from benchmarks.harness.race import Racer, add_rounds, medians
from benchmarks.harness.workload import SETS, Unavailable, fill
from sparsestep import _native
from sparsestep.cli.options import int_in_range
from sparsestep.optim.optimizer import RuleOptimizer

ROWS, DIM, BAGS, IDS = 1_000_000, 64, 4_096, 16
LR = 1e-3
TWO_LOOKUPS, TWO_LOOKUPS_ROWS = "two lookups", 400_000

# Whose step is compared with whose, and how much faster ours should be: uniform, Zipf.
RULES: dict[str, tuple[type[torch.optim.Optimizer], Any, str | None]] = {
    "Adam": (sparsestep.SparseAdam, torch.optim.SparseAdam, None),
    "row-wise Adagrad": (sparsestep.RowwiseAdagrad, None, "EXACT_ROWWISE_ADAGRAD"),
    "Adagrad": (sparsestep.Adagrad, torch.optim.Adagrad, "EXACT_ADAGRAD"),
    "SGD": (sparsestep.SGD, torch.optim.SGD, "EXACT_SGD"),
}
GOALS = {
    ("Adam", "torch"): (12.0, 10.0),
    ("row-wise Adagrad", "FBGEMM"): (2.2, 2.0),
    ("SGD", "FBGEMM"): (1.0, 1.0),
}


class BagTraining:
    """One contestant: what it looks up, and how it updates."""

    def __init__(
        self, table: Callable[[Tensor, Tensor], Tensor], optimizer: Any, sets: Sequence[Tensor]
    ) -> None:
        self._table, self._optimizer, self._sets = table, optimizer, sets
        self._offsets = torch.arange(0, BAGS * IDS, IDS)
        self._grad = torch.randn(BAGS, DIM)
        self._rounds = 0

    def before(self, number: int, /) -> None:
        """Take the ids of a set; and soon, the huge pages that a long training gets in time."""
        self._ids = self._sets[number]
        self._rounds += 1
        if self._rounds == 3 and isinstance(self._optimizer, RuleOptimizer):
            self._optimizer.store.huge_pages.move_all()

    def step(self) -> None:
        """Forward, backward, update."""
        self._table(self._ids, self._offsets).backward(self._grad)
        if self._optimizer is not None:
            self._optimizer.step()
            self._optimizer.zero_grad()


class BagLimit:
    """The least that any implementation of the whole step must do, all of it known in advance.

    The rows of each bag are summed; then each touched row is updated once, from the rows of the
    output's gradient that belong to it.
    """

    def __init__(self, rule: Any, rows: int, sets: Sequence[Tensor]) -> None:
        if limit_module is None or _native.ext is None:
            raise Unavailable("installed without the C++ core")
        weight = torch.nn.Parameter(fill(torch.empty(rows, DIM)))
        optimizer = rule([weight], lr=LR, engine="native")
        zeros = torch.zeros(BAGS * IDS, DIM)
        weight.grad = torch.sparse_coo_tensor(
            sets[0][None], zeros, (rows, DIM), check_invariants=False
        )
        for _ in range(2):
            optimizer.step()
        optimizer.store.huge_pages.move_all()
        [group] = optimizer.param_groups
        made = optimizer.rule_for(group)
        self._options = made.pack_hyperparams(optimizer.settings(0).hyperparams)
        self._rule = limit_module.rules().index(made.name)
        states = [optimizer.state[weight][spec.name] for spec in made.state]
        written = 1 + sum(not spec.per_row for spec in made.state)
        threads = torch.get_num_threads()
        self._plans = [plan(ids, threads, written) for ids in sets]
        self._bags = [each.entries // IDS for each in self._plans]
        self._sets, self._threads, self._number, self._step = sets, threads, 0, 2
        self._grad, self._sums = torch.randn(BAGS, DIM), torch.empty(BAGS, DIM)
        self._tensors = [weight, *states]
        self._instruction_set = limit_module.instruction_sets().index(
            str(_native.instruction_set())
        )

    def before(self, number: int, /) -> None:
        """Take the ids of a set."""
        self._number = number

    def step(self) -> None:
        """Two calls."""
        self._step += 1
        each, bags = self._plans[self._number], self._bags[self._number]
        looked_up = addresses(self._sets[self._number], self._tensors[0], self._sums)
        limit_module.look_up(looked_up, DIM, IDS, BAGS, self._threads, self._instruction_set)
        order = addresses(each.slots, each.offsets, bags, self._grad)
        limit_module.run(
            *(self._rule, order, addresses(*self._tensors), DIM),
            *(self._options, self._step, each.shares, self._instruction_set),
        )


def module_contender(module: torch.nn.Module, rule: Any, sets: Sequence[Tensor]) -> BagTraining:
    fill(module.weight.data)  # type: ignore[arg-type]
    return BagTraining(module, rule(module.parameters(), lr=LR), sets)


def fbgemm_contender(rule: str, rows: int, sets: Sequence[Tensor]) -> BagTraining:
    training = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_training")
    common = import_peer("fbgemm_gpu.split_table_batched_embeddings_ops_common")
    configs = import_peer("fbgemm_gpu.split_embedding_configs")
    table = training.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, DIM, common.EmbeddingLocation.HOST, training.ComputeDevice.CPU)],
        optimizer=configs.EmbOptimType[rule],
        learning_rate=LR,
        device=torch.device("cpu"),
    )
    fill(table.split_embedding_weights()[0].detach())
    end = torch.arange(0, BAGS * IDS + 1, IDS)
    return BagTraining(lambda ids, _: table(ids, end), None, sets)


def make_contenders(name: str, rows: int, sets: Sequence[Tensor]) -> dict[str, Racer]:
    ours, torchs, fbgemms = RULES[name]
    module = sparsestep.nn.EmbeddingBag(rows, DIM, mode="sum")
    found: dict[str, Racer] = {"sparsestep": module_contender(module, ours, sets)}
    found["limit"] = BagLimit(ours, rows, sets)
    if torchs is not None:
        plain = torch.nn.EmbeddingBag(rows, DIM, mode="sum", sparse=True)
        found["torch"] = module_contender(plain, torchs, sets)
    if fbgemms is not None:
        try:
            found["FBGEMM"] = fbgemm_contender(fbgemms, rows, sets)
        except Unavailable as error:
            print(f"FBGEMM is {error}")
    return found


def compare(name: str, distribution: str, rows: int, rounds: int) -> None:
    drawn = case(rows, DIM, BAGS * IDS, distribution)
    sets = [drawn.positions(number) for number in range(SETS)]
    racers = make_contenders(name, rows, sets)
    times = dict(zip(racers, medians(list(racers.values()), rounds), strict=True))
    ours, limit = times.pop("sparsestep"), times.pop("limit")
    line = f"{name:16} {distribution:8} {ours:6.2f} ms, {limit / ours:.2f} of the limit"
    for other, theirs in times.items():
        goals = GOALS.get((name, other))
        goal = "" if goals is None else f", goal {goals[distribution == 'zipf']:g}"
        line += f"   {theirs / ours:5.1f} x {other} ({theirs:.1f} ms{goal})"
    print(line, flush=True)


class SkipgramTraining:
    """One contestant: a table, its optimizer, and the pairs of words of each set."""

    def __init__(self, table: torch.nn.Embedding, optimizer: type, sets: Sequence[Tensor]) -> None:
        self._table, self._sets = table, sets
        self._optimizer: Optimizer = optimizer(table.parameters(), lr=1e-3)

    def before(self, set_index: int, /) -> None:
        """Take the pairs of a set."""
        self._pairs = self._sets[set_index]

    def step(self) -> None:
        """Look up, differentiate, update."""
        self._optimizer.zero_grad()
        self._loss().backward()
        self._optimizer.step()

    def _loss(self) -> Tensor:
        centre, context = self._table(self._pairs[0]), self._table(self._pairs[1])
        return torch.nn.functional.softplus(-(centre * context).sum(1)).sum()


class StepOnly(SkipgramTraining):
    """The same with everything but the step off the clock."""

    def before(self, set_index: int, /) -> None:
        """Take the pairs of a set, up to the gradient."""
        super().before(set_index)
        self._optimizer.zero_grad()
        self._loss().backward()

    def step(self) -> None:
        """Update."""
        self._optimizer.step()


def compare_two_lookups(rows: int, rounds: int) -> None:
    """A table that is looked up twice in a forward: fused, plain, and torch's own."""
    dim, pairs = 128, 65_536
    sets = [torch.randint(rows, (2, pairs)) for _ in range(SETS)]
    for what, training in (("iteration", SkipgramTraining), ("step alone", StepOnly)):
        racers = [
            training(table, optimizer, sets)
            for table, optimizer in (
                (sparsestep.nn.Embedding(rows, dim), sparsestep.SparseAdam),
                (torch.nn.Embedding(rows, dim, sparse=True), sparsestep.SparseAdam),
                (torch.nn.Embedding(rows, dim, sparse=True), torch.optim.SparseAdam),
            )
        ]
        fused, plain, theirs = medians(racers, rounds)
        print(
            f"two lookups, {what:10}  fused {fused:7.1f} ms   plain / fused {plain / fused:5.2f}   "
            f"torch / fused {theirs / fused:5.2f}",
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    add_rounds(parser, 40)
    kind = int_in_range(1, 100_000_000)
    parser.add_argument("--rows", type=kind, default=ROWS, help=f"(default: {ROWS:,})")
    parser.add_argument(
        "--only", choices=[*RULES, TWO_LOOKUPS], help="one case instead of all of them"
    )
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    print(
        f"{options.rows:,} x {DIM}, {BAGS:,} bags of {IDS} ids, {torch.get_num_threads()} threads"
    )
    if options.only in (None, TWO_LOOKUPS):
        compare_two_lookups(TWO_LOOKUPS_ROWS, options.rounds)
    for name in RULES if options.only is None else {options.only} & RULES.keys():
        for distribution in ("uniform", "zipf"):
            compare(name, distribution, options.rows, options.rounds)


if __name__ == "__main__":
    main()
