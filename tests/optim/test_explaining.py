"""``explain()``: which engine, why, how much state, which rows wait."""

from __future__ import annotations

import copy

import pytest
import torch

import sparsestep


def rows(shape, index):
    values = torch.ones(len(index), *shape[1:])
    return torch.sparse_coo_tensor([index], values, shape, check_invariants=True)


def test_each_parameter_names_its_engine_and_the_reason():
    table = torch.nn.Parameter(torch.zeros(50, 4))
    layer = torch.nn.Parameter(torch.zeros(4, 4))
    unusual = torch.nn.Parameter(torch.zeros(3, 4, 5).permute(2, 1, 0))
    idle = torch.nn.Parameter(torch.zeros(2))
    named = [("table", table), ("layer", layer), ("unusual", unusual), ("idle", idle)]
    optimizer = sparsestep.Adam(named)
    assert {each.engine for each in optimizer.explain()} == {None}
    for _ in range(3):
        table.grad, layer.grad = rows((50, 4), [1, 3]), torch.ones(4, 4)
        optimizer.step()
    unusual.grad = rows((5, 4, 3), [1])
    with pytest.warns(sparsestep.SlowWarning):
        optimizer.step()
    found = {each.name: each for each in optimizer.explain()}
    assert {name: each.engine for name, each in found.items()} == {
        "table": "native",
        "layer": "torch",
        "unusual": "reference",
        "idle": None,
    }
    assert "dense" in found["layer"].reason
    assert "contiguous" in found["unusual"].reason
    assert found["table"].reason == ""
    assert found["table"].state_bytes == 2 * 50 * 4 * 4


def test_a_step_that_is_done_again_is_still_the_cores():
    table = torch.nn.Parameter(torch.zeros(50, 4))
    optimizer = sparsestep.SparseAdam([table])
    for _ in range(4):
        table.grad = rows((50, 4), [1, 3])
        optimizer.step()
    (only,) = optimizer.explain()
    assert (only.engine, only.name) == ("native", "param 0 of group 0")


def test_rows_that_wait_are_counted():
    table = torch.nn.Parameter(torch.zeros(50, 4))
    optimizer = sparsestep.Adam([table], semantics="dense")
    for step in range(3):
        table.grad = rows((50, 4), [step])
        optimizer.step()
    (only,) = optimizer.explain()
    assert only.rows_behind == 49
    optimizer.catch_up()
    (only,) = optimizer.explain()
    assert only.rows_behind == 0


def test_it_prints_as_a_table_with_reasons_below():
    layer = torch.nn.Linear(3, 2)
    optimizer = sparsestep.SGD(layer.named_parameters(), lr=0.1)
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    lines = str(optimizer.explain()).splitlines()
    assert lines[0].split() == ["parameter", "shape", "engine", "state", "rows", "behind"]
    assert lines[1].split()[:5] == ["weight", "2", "x", "3", "torch"]
    assert lines[3:] == ["weight, bias: dense gradient: updated by torch's kernel."]


def test_equal_reasons_are_one_line():
    params = [torch.nn.Parameter(torch.zeros(2)) for _ in range(30)]
    table = torch.nn.Parameter(torch.zeros(50, 4))
    optimizer = sparsestep.SGD([{"params": params}, {"params": [table]}], engine="reference")
    for param in params:
        param.grad = torch.ones(2)
    table.grad = rows((50, 4), [1])
    optimizer.step()
    lines = str(optimizer.explain()).splitlines()
    assert len(lines) == 1 + 31 + 2
    first, second = lines[-2:]
    assert first.startswith("param 0 of group 0, param 1 of group 0, ")
    assert first.endswith(" and 22 more: dense gradient: updated by torch's kernel.")
    assert second == "param 0 of group 1: you set engine='reference'."


def test_copies_and_pickles_begin_without_a_past():
    table = torch.nn.Parameter(torch.zeros(5, 4))
    optimizer = sparsestep.SparseAdam([table])
    table.grad = rows((5, 4), [1, 3])
    optimizer.step()
    assert [each.engine for each in copy.deepcopy(optimizer).explain()] == [None]


def test_a_profiler_sees_the_parts_of_a_planned_step():
    table = torch.nn.Parameter(torch.zeros(5, 4))
    optimizer = sparsestep.Adam([table], semantics="dense")
    table.grad = rows((5, 4), [1])
    with torch.profiler.profile() as trace:
        optimizer.step()
    found = {event.key for event in trace.key_averages()}
    parts = ("plan", "prepare", "catch up", "commit")
    assert {f"sparsestep: {part}" for part in parts} <= found
