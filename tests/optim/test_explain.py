"""``explain()`` and ``metrics()``; the warning of an embedding's dense gradient."""

from __future__ import annotations

import inspect
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.errors import SlowWarning
from sparsestep.optim import step
from sparsestep.optim.explain import (
    DENSE_EMBEDDING,
    PENALIZED_EMBEDDING,
    explain_dense_gradient,
    looks_like_embedding,
    looks_penalized,
)
from tests.subject import refused


def rows(shape, index):
    values = torch.ones(len(index), *shape[1:])
    return torch.sparse_coo_tensor([index], values, shape, check_invariants=True)


def test_each_parameter_names_its_engine_and_the_reason():
    table, layer = nn.Parameter(torch.zeros(50, 4)), nn.Parameter(torch.zeros(4, 4))
    unusual, idle = nn.Parameter(torch.zeros(3, 4, 5).permute(2, 1, 0)), nn.Parameter(torch.ones(2))
    named = {"table": table, "layer": layer, "unusual": unusual, "idle": idle}
    optimizer = sparsestep.Adam(named.items())
    assert {each.engine for each in optimizer.explain()} == {None}
    for _ in range(3):
        table.grad, layer.grad = rows((50, 4), [1, 3]), torch.ones(4, 4)
        optimizer.step()
    unusual.grad = rows((5, 4, 3), [1])
    with pytest.warns(sparsestep.SlowWarning):
        optimizer.step()
    found = {each.name: each for each in optimizer.explain()}
    engines = {"table": "native", "layer": "native", "unusual": "reference", "idle": None}
    assert {name: each.engine for name, each in found.items()} == engines
    assert found["layer"].reason == "dense gradient: every element is updated."
    assert "contiguous" in found["unusual"].reason
    assert found["table"].reason == ""
    assert found["table"].state_bytes == 2 * 50 * 4 * 4
    model = nn.ParameterDict({"b": table, "a": layer})
    names = [each.name for each in optimizer.explain(model)]
    assert names[:2] == ["b", "a"]


def test_rows_that_wait_are_counted():
    table = nn.Parameter(torch.zeros(50, 4))
    optimizer = sparsestep.Adam([table], semantics="dense")
    for row in range(3):
        table.grad = rows((50, 4), [row])
        optimizer.step()
    assert [each.deferred_rows for each in optimizer.explain()] == [49]
    optimizer.catch_up()
    assert [each.deferred_rows for each in optimizer.explain()] == [0]


@pytest.mark.parametrize("kinds", [nn, sparsestep.nn])
@pytest.mark.parametrize(("semantics", "most"), [("masked", 50), ("dense", 25)])
def test_it_says_when_a_dense_gradient_would_be_faster(kinds, semantics, most):
    table = kinds.Embedding(100, 4, sparse=True)
    optimizer = sparsestep.Adam(table.parameters(), semantics=semantics)
    for touched in (most, most + 1):
        optimizer.zero_grad()
        ids = torch.arange(touched)
        table(torch.cat([ids, ids])).sum().backward()
        optimizer.step()
        (only,) = optimizer.explain()
        assert ("sparse=False" in only.reason) == (touched > most)
    optimizer.zero_grad()
    (only,) = optimizer.explain()
    assert only.reason == ""


def test_equal_reasons_are_one_line():
    params = [nn.Parameter(torch.zeros(2)) for _ in range(30)]
    table = nn.Parameter(torch.zeros(50, 4))
    optimizer = sparsestep.SGD([{"params": params}, {"params": [table]}], engine="reference")
    for param in params:
        param.grad = torch.ones(2)
    table.grad = rows((50, 4), [1])
    optimizer.step()
    lines = str(optimizer.explain()).splitlines()
    assert len(lines) == 1 + 31 + 2
    assert lines[-2].startswith("param 0 of group 0, param 1 of group 0, ")
    assert " and 22 more: " in lines[-2]
    assert lines[-1].startswith("param 0 of group 1: ")


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
    opt.step()  # warnings are errors here
    reasons = {each.name: each.reason for each in opt.explain()}
    assert reasons.pop("table.weight") == DENSE_EMBEDDING
    assert DENSE_EMBEDDING not in reasons.values()


def test_a_sparse_fused_or_masked_table_is_fine():
    for model, mask in (
        (Model(sparse=True), None),
        (sparsestep.nn.fuse(Model()), None),
        (Model(), torch.arange(ROWS) < 9),
    ):
        table = {"params": [model.table.weight], "mask": mask}
        opt = sparsestep.Adam([table, {"params": model.head.parameters()}], lr=0.1)
        model.backward()
        opt.step()
        assert DENSE_EMBEDDING not in {each.reason for each in opt.explain()}


def test_gradients_are_examined_once(monkeypatch: pytest.MonkeyPatch):
    examined = []

    def look(param: torch.Tensor, grad: torch.Tensor) -> str:
        examined.append(grad)
        return explain_dense_gradient(param, grad)

    monkeypatch.setattr(step, "explain_dense_gradient", look)
    model = Model()
    opt = sparsestep.SparseAdam(model.head.parameters(), lr=0.1)
    for _ in range(3):
        model.backward()
        opt.step()
    assert len(examined) == 2, "weight and bias"


def test_as_an_error_it_changes_nothing_and_is_raised_again():
    model = Model()
    opt = sparsestep.Adam(model.named_parameters(), semantics="dense")
    model.backward()
    for _ in range(2):
        with refused(opt, error=SlowWarning):
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
    grad = embedding_grad()
    for few in (grad, embedding_grad(used=1), grad.half(), torch.complex(grad, grad)):
        assert looks_like_embedding(few)
    for reason, other in {
        "few columns are used, in every row": embedding_grad(DIM, ROWS, 1).T,
        "nothing is known of it": embedding_grad(used=0),
        "a layer": embedding_grad(used=ROWS),
        "a table of which the batch uses much": embedding_grad(used=ROWS // 2),
        "a small table": embedding_grad(1_000, DIM, 10),
        "as small": embedding_grad(ROWS, 1, 10),
        "no rows": grad.view(-1),
        "elsewhere": grad.to("meta"),
        "sparse": grad.to_sparse(1),
        "no numbers": torch.full((ROWS, DIM), float("nan")),
    }.items():
        assert not looks_like_embedding(other), reason


@pytest.mark.parametrize("fused", [False, True])
def test_a_penalty_in_the_loss_is_said_once(fused: bool):
    """Whatever the gradient of the lookup is: added to a dense one, it is dense."""
    model = Model(sparse=True)
    if fused:
        sparsestep.nn.fuse(model)
    opt = sparsestep.AdamW(model.named_parameters(), lr=0.1)
    for _ in range(2):
        model.backward()
        opt.step()  # without a penalty there is nothing to say
        opt.zero_grad()
    opt = sparsestep.AdamW(model.named_parameters(), lr=0.1)  # a replayed step is not examined
    for expected in (pytest.warns(SlowWarning, match=r"\(table.weight\).*L2"), nullcontext()):
        model.backward()
        sum(
            1e-4 * p.square().sum() + 1e-3 * p.square().mean() for p in model.parameters()
        ).backward()
        with expected:  # warnings are errors here
            opt.step()
    reasons = {each.name: each.reason for each in opt.explain()}
    assert reasons.pop("table.weight") == PENALIZED_EMBEDDING
    assert PENALIZED_EMBEDDING not in reasons.values()
    opt.zero_grad()
    ids = torch.tensor([0, 97, 194, 291])
    (model.table(ids).sum() + sparsestep.nn.functional.embedding_l2(model.table, ids)).backward()
    assert model.table.weight.grad is not None
    assert model.table.weight.grad.is_sparse


def test_which_gradients_look_penalized():
    torch.manual_seed(0)
    param = torch.randn(ROWS, DIM)
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64):
        values = param.to(dtype)
        grad = values * 0.037 + values * 0.01
        assert looks_penalized(values, grad), dtype
        grad[:: ROWS // 100] += 1
        assert looks_penalized(values, grad), "the rows of a batch have another gradient, too"
        grad[: ROWS // 2] += 1
        assert not looks_penalized(values, grad), "the batch uses much of the table"
        assert not looks_penalized(values, torch.randn(ROWS, DIM).to(dtype)), "a layer"
    assert not looks_penalized(param, torch.zeros(ROWS, DIM))
    assert not looks_penalized(torch.zeros(ROWS, DIM), param)
    assert not looks_penalized(param, param * torch.rand(ROWS, 1)), "another factor in each row"
    assert not looks_penalized(param, torch.full((ROWS, DIM), float("nan")))
    assert not looks_penalized(param[:1000], param[:1000]), "a small table"


# Metrics: exact counts for every kind of gradient, from the indices alone


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
