"""Steps in which an allocation fails: each has happened as a whole, or not at all.

``python -m tests.faults.steps`` (see ``allocations.run``) takes the names of scenarios. For each it
fails one allocation after the other, the n-th in the n-th run, and compares parameters, state and
later steps with those of an optimizer that was never disturbed.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.engines import torch_fused as torch_kernels
from tests.faults.allocations import Allocations, is_out_of_memory

Scenario = Callable[[], tuple[Any, Callable[[int], None]]]


class Own(nn.Module):
    """Some dense parameters, and a table."""

    def __init__(self, size: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(60, 8, sparse=True, dtype=dtype)
        self.layers = nn.ParameterList(torch.randn(size, 8, dtype=dtype) for _ in range(3))


def dense(
    name: str,
    *,
    steps: int,
    size: int = 500,
    dtype: torch.dtype = torch.float32,
    is_replayed: bool = True,
    **options: Any,
) -> Scenario:
    """Dense gradients beside sparse ones.

    Args:
        name: of the optimizer.
        steps: how many are taken before the one that is disturbed.
        size: of dense parameters.
        dtype: of all parameters.
        is_replayed: whether torch's kernel is replayed, or its results are undone.
        options: of the optimizer.
    """

    def make() -> tuple[Any, Callable[[int], None]]:
        torch_kernels._FEW_PARAMS = 0 if is_replayed else 16
        torch_kernels.PIECE = 2048
        model = Own(size, dtype)
        optimizer = getattr(sparsestep, name)(model.parameters(), lr=0.1, **options)

        def gradients(step: int) -> None:
            chance = torch.Generator().manual_seed(step)
            for layer in model.layers:
                layer.grad = torch.randn(layer.shape, generator=chance, dtype=dtype)
            ids = torch.randint(60, (40,), generator=chance)
            values = torch.randn(40, 8, generator=chance, dtype=dtype)
            model.table.weight.grad = torch.sparse_coo_tensor(ids[None], values, (60, 8))

        for step in range(steps):
            gradients(step)
            optimizer.step()
        return optimizer, gradients

    return make


SCENARIOS: dict[str, Scenario] = {
    "Adam, first step": dense("Adam", steps=0),
    "Adam": dense("Adam", steps=2),
    "Adam, amsgrad": dense("Adam", steps=2, amsgrad=True, weight_decay=0.1, maximize=True),
    "Adam, foreach": dense("Adam", steps=2, foreach=True),
    "Adam, fused": dense("Adam", steps=2, fused=True),
    "Adam, complex": dense("Adam", steps=2, dtype=torch.complex64),
    "Adam, undone": dense("Adam", steps=2, is_replayed=False),
    "Adam, undone, first step": dense("Adam", steps=0, is_replayed=False),
    "Adam, foreach, undone": dense("Adam", steps=2, is_replayed=False, foreach=True),
    "Adam, fused, undone": dense("Adam", steps=2, is_replayed=False, fused=True),
    "AdamW": dense("AdamW", steps=2),
    "SGD, first step": dense("SGD", steps=0, momentum=0.9, dampening=0.5),
    "SGD, Nesterov, foreach": dense("SGD", steps=1, momentum=0.9, nesterov=True, foreach=True),
    "SGD, fused, first step": dense("SGD", steps=0, momentum=0.9, fused=True),
    "RAdam": dense("RAdam", steps=7, weight_decay=0.1),
    "Adagrad": dense("Adagrad", steps=2, lr_decay=0.1),
    "RMSprop": dense("RMSprop", steps=2, centered=True, momentum=0.9),
    "Lion": dense("Lion", steps=2),
    "reference": dense("Adam", steps=2, engine="reference"),
    "reference, first step": dense("Adam", steps=0, engine="reference"),
    "reference, bfloat16": dense(
        "Adam", steps=2, engine="reference", dtype=torch.bfloat16, stochastic_rounding=True
    ),
    "dense semantics": dense("AdamW", steps=2, semantics="dense"),
    "dense semantics, first step": dense("AdamW", steps=0, semantics="dense"),
    "dense semantics, history doubles": dense("AdamW", steps=255, size=2, semantics="dense"),
    "dense semantics, reference": dense("Adam", steps=2, semantics="dense", engine="reference"),
}


def snapshot(optimizer: Any) -> list[Any]:
    """Copies of all parameters, state and step counts."""
    found: list[Any] = []
    for group in optimizer.param_groups:
        for param in group["params"]:
            found.append(param.detach().clone())
            record = optimizer.state.get(param) or {}
            found += [
                (key, value.clone() if isinstance(value, Tensor) else value)
                for key, value in sorted(record.items())
            ]
    return found


def is_equal(one: Any, other: Any) -> bool:
    """Whether two snapshots have the same bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(
            one.view(-1).view(torch.uint8), other.view(-1).view(torch.uint8)
        )
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_equal, one, other))
    return bool(one == other)


def is_close(one: Any, other: Any) -> bool:
    """Whether two snapshots agree; rows that catch up in two parts round differently."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.allclose(one, other, rtol=1e-4, atol=1e-5)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(is_close, one, other))
    return bool(one == other)


def outcome(scenario: Scenario, arm: Callable[[], None] | None) -> tuple[str, list[Any]]:
    """How a step went, and what there was after one more."""
    optimizer, gradients = scenario()
    gradients(1000)
    before, how = snapshot(optimizer), "done"
    allocations = Allocations()
    try:
        if arm is not None:
            arm()
        optimizer.step()
        allocations.disarm()
    except Exception as error:
        allocations.disarm()
        if not is_out_of_memory(error):
            raise
        how = "refused"
        if optimizer.semantics != "dense":  # there, rows may have caught up already
            found = snapshot(optimizer)
            assert is_equal(found, before), "the step raised, and something has changed"
        optimizer.step()
    gradients(1001)
    optimizer.step()
    if optimizer.semantics == "dense":
        optimizer.catch_up()
    return how, snapshot(optimizer)


def sweep(name: str, min_bytes: int, most: int, *, persistent: bool) -> dict[str, int]:
    """Fail the first allocation, then the second, and so on; counts by outcome."""
    torch.set_num_threads(1)
    scenario, allocations = SCENARIOS[name], Allocations()
    outcome(scenario, None)  # imports and caches
    _, expected = outcome(scenario, None)
    counts = {"done": 0, "refused": 0}
    for nth in range(1, most + 1):
        arm = partial(allocations.arm, nth, min_bytes, persistent)
        how, found = outcome(scenario, arm)
        if not allocations.failed:
            break
        counts[how] += 1
        same = is_close if "dense semantics" in name else is_equal
        assert same(found, expected), f"allocation {nth}: {how}, but later steps differ"
    return counts


def main() -> None:
    """Print the outcomes of each scenario."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenarios", nargs="*", default=list(SCENARIOS))
    parser.add_argument("--min-bytes", type=int, default=1024)
    parser.add_argument("--most", type=int, default=10_000)
    parser.add_argument("--modes", nargs="+", choices=["once", "persistent"], default=["once"])
    options = parser.parse_args()
    torch.sparse.check_sparse_tensor_invariants.disable()
    warnings.simplefilter("ignore", sparsestep.errors.StaleWarning)
    failures = 0
    for name, mode in itertools.product(options.scenarios, options.modes):
        persistent = mode == "persistent"
        try:
            counts = sweep(name, options.min_bytes, options.most, persistent=persistent)
            print(f"{name}: {counts['done']} done, {counts['refused']} refused", flush=True)
        except AssertionError as error:
            failures += 1
            print(f"{name}: FAILED: {error}", flush=True)
    raise SystemExit(failures)


if __name__ == "__main__":
    main()
