"""``explain()``: engine, reason, state; and the warning of an embedding's dense gradient."""

from __future__ import annotations

import copy
import inspect
import warnings

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.errors import SlowWarning
from sparsestep.optim import step
from sparsestep.optim.explain import DENSE_EMBEDDING, looks_like_embedding
from tests.subject import refused


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


def test_rows_that_wait_are_counted():
    table = torch.nn.Parameter(torch.zeros(50, 4))
    optimizer = sparsestep.Adam([table], semantics="dense")
    for row in range(3):
        table.grad = rows((50, 4), [row])
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


# An embedding with a dense gradient: sparse=True was forgotten


ROWS, DIM = 16_384, 32
TEXT = r"\(table.weight\): dense gradient for an embedding of shape \(16384, 32\): .*sparse=True"


class Model(nn.Module):
    """A table, and an output layer that is as large."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.head = nn.Linear(DIM, ROWS)

    def backward(self) -> None:
        self.head(self.table(torch.tensor([0, 97, 194, 291]))).square().mean().backward()


@pytest.mark.parametrize("cls", [sparsestep.SparseAdam, sparsestep.SGD])
def test_a_forgotten_sparse_is_said_once(cls: type[torch.optim.Optimizer]):
    model = Model()
    opt = cls(model.named_parameters(), lr=0.1)
    model.backward()
    with pytest.warns(SlowWarning, match=TEXT) as said:
        opt.step()
    line = inspect.getsourcelines(test_a_forgotten_sparse_is_said_once)[1] + 6
    assert [(each.filename, each.lineno) for each in said] == [(__file__, line)]
    assert "https://sparsestep.readthedocs.io/" in str(said[0].message)
    opt.step()  # warnings are errors here
    reasons = {each.name: each.reason for each in opt.explain()}
    assert reasons.pop("table.weight") == DENSE_EMBEDDING
    assert DENSE_EMBEDDING not in reasons.values()


def test_a_sparse_or_fused_table_is_fine():
    for model in (Model(sparse=True), sparsestep.nn.fuse(Model())):
        opt = sparsestep.Adam(model.parameters(), lr=0.1)
        model.backward()
        opt.step()
        assert DENSE_EMBEDDING not in {each.reason for each in opt.explain()}


def test_a_mask_has_chosen_the_rows():
    model = Model()
    opt = sparsestep.SparseAdam([{"params": [model.table.weight], "mask": torch.arange(ROWS) < 9}])
    model.backward()
    opt.step()


def test_gradients_are_examined_once(monkeypatch: pytest.MonkeyPatch):
    examined = []

    def look(grad: torch.Tensor) -> bool:
        examined.append(grad)
        return looks_like_embedding(grad)

    monkeypatch.setattr(step, "looks_like_embedding", look)
    model = Model()
    for cls in (sparsestep.SGD, sparsestep.SparseAdam, sparsestep.AdamW):
        examined.clear()
        opt = cls(model.head.parameters(), lr=0.1)
        for _ in range(3):
            model.backward()
            opt.step()
        assert len(examined) == 2, "weight and bias"


@pytest.mark.parametrize("guard", [False, True])
def test_it_is_said_under_dense_semantics(guard: bool):
    model = Model()
    opt = sparsestep.AdamW(model.named_parameters(), lr=0.1, semantics="dense")
    opt.track(model, guard=guard)
    model.backward()
    with pytest.warns(SlowWarning, match=TEXT):
        opt.step()


def test_it_is_said_of_steps_in_backward_and_of_functional_ones():
    model = Model()
    sparsestep.AdamW(model.named_parameters()).step_in_backward()
    with pytest.warns(SlowWarning, match=TEXT):
        model.backward()
    functional = sparsestep.FunctionalSGD([torch.zeros(ROWS, DIM)])
    with pytest.warns(SlowWarning, match="dense gradient for an embedding"):
        functional.step([embedding_grad()])


def test_as_an_error_it_changes_nothing_and_is_raised_again():
    model = Model()
    opt = sparsestep.Adam(model.named_parameters(), semantics="dense")
    model.backward()
    for _ in range(2):
        with refused(opt, error=SlowWarning, match=TEXT):
            opt.step()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowWarning)
        opt.step()
    assert len(opt.state) == 3


def embedding_grad(rows: int = ROWS, dim: int = DIM, used: int = 100) -> torch.Tensor:
    found = torch.zeros(rows, dim)
    found[torch.linspace(0, rows - 1, used).long()] = 1.0
    return found


def test_which_gradients_look_like_an_embeddings():
    grad, looks = embedding_grad(), looks_like_embedding
    assert looks(grad)
    assert looks(embedding_grad(used=1)), "one row of all"
    assert looks(grad.half())
    assert looks(torch.complex(grad, grad))
    assert not looks(embedding_grad(DIM, ROWS, 1).T), "few columns are used, in every row"
    assert not looks(embedding_grad(used=0)), "nothing is known of it"
    assert not looks(embedding_grad(used=ROWS)), "a layer"
    assert not looks(embedding_grad(used=ROWS // 2)), "a table of which the batch uses much"
    assert not looks(embedding_grad(1_000, DIM, 10)), "a small table"
    assert not looks(embedding_grad(ROWS, 1, 10)), "as small"
    assert not looks(grad.view(-1)), "no rows"
    assert not looks(grad.to("meta"))
    assert not looks(grad.to_sparse(1))
    assert not looks(torch.full((ROWS, DIM), float("nan")))
