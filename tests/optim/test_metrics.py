"""``metrics()``: exact counts for every kind of gradient, from the indices alone."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import sparsestep
from tests.optim.test_explain import rows

SHAPE = (50, 4)


def metrics_of(optimizer: torch.optim.Optimizer, *names: str) -> tuple[int, ...]:
    found = optimizer.metrics()  # type: ignore[attr-defined]
    assert all(type(value) is int for value in found.values())
    return tuple(found[name] for name in names)


COUNTS = ("rows", "entries", "rows_touched", "duplicates")


@pytest.mark.parametrize("engine", ["auto", "reference"])
def test_totals_over_sparse_dense_and_missing_gradients(engine: str):
    table, other = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(9))
    layer, idle = nn.Parameter(torch.zeros(3, 4)), nn.Parameter(torch.zeros(7))
    optimizer = sparsestep.Adam([table, layer, idle, other], engine=engine)
    assert set(optimizer.metrics().values()) - {optimizer.metrics()["param_bytes"]} == {0}
    for index in ([1, 3, 1, 1], [40, 2, 40]):  # the second step is replayed
        table.grad, layer.grad = rows(SHAPE, index), torch.ones(3, 4)
        other.grad = rows((9,), [8, 8])
        optimizer.step()
    assert metrics_of(optimizer, *COUNTS) == (50 + 3 + 9, 3 + 3 + 2, 2 + 3 + 1, 1 + 0 + 1)
    sizes = (4 * (200 + 12 + 7 + 9), 8 * (200 + 12 + 9))
    assert metrics_of(optimizer, "param_bytes", "state_bytes") == sizes
    by_engine = metrics_of(optimizer, "native_params", "torch_params", "reference_params")
    assert by_engine == ((3, 0, 0) if engine == "auto" else (0, 1, 2))
    optimizer.zero_grad()
    assert metrics_of(optimizer, *COUNTS) == (0, 0, 0, 0)


def test_fused_lookups_and_gradients_of_elements():
    table = sparsestep.nn.Embedding(50, 4)
    element = nn.Parameter(torch.zeros(SHAPE))
    optimizer = sparsestep.SGD([table.weight, element], lr=0.1)
    (table(torch.tensor([3, 4, 3])).sum() + table(torch.tensor([4, 5])).sum()).backward()
    element.grad = torch.sparse_coo_tensor([[1, 1, 2], [0, 3, 3]], torch.ones(3), SHAPE)
    optimizer.step()
    assert metrics_of(optimizer, *COUNTS) == (100, 5 + 3, 3 + 2, 2 + 1)
    assert not table.weight.grad.is_materialized


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_a_mask_over_rows_counts_what_it_selects(semantics: str):
    table, layer = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(SHAPE))
    masks = [torch.arange(50) < 20, torch.arange(50) < 5]
    group = {"params": [table, layer], "mask": masks}
    optimizer = sparsestep.AdamW([group], semantics=semantics)
    for _ in range(2):
        table.grad, layer.grad = rows(SHAPE, [1, 30, 19, 19]), torch.ones(SHAPE)
        optimizer.step()
    assert metrics_of(optimizer, *COUNTS) == (100, 3 + 5, 2 + 5, 1)
    deferred = 18 if semantics == "dense" else 0
    assert metrics_of(optimizer, "deferred_rows") == (deferred,)
