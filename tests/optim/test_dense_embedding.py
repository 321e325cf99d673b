"""An embedding with a dense gradient: a warning, and a line of ``explain()``."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.errors import SlowWarning
from sparsestep.optim import FUNCTIONAL, OPTIMIZERS, step
from sparsestep.optim.explain import DENSE_EMBEDDING, looks_like_embedding
from tests.table import WITH_DENSE, snapshot, unchanged

ROWS, DIM = 16_384, 32
IDS = torch.arange(0, ROWS, 97)
TEXT = r"\(table.weight\): dense gradient for an embedding of shape \(16384, 32\): .*sparse=True"

each_class = pytest.mark.parametrize("cls", OPTIMIZERS, ids=lambda cls: cls.__name__)


class Model(nn.Module):
    """A table, and an output layer that is as large."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(ROWS, DIM, sparse=sparse)
        self.head = nn.Linear(DIM, ROWS)

    def backward(self) -> None:
        self.head(self.table(IDS[:4])).square().mean().backward()


def messages(said: Any) -> list[str]:
    return [str(each.message) for each in said if each.category is SlowWarning]


@each_class
def test_a_forgotten_sparse_is_said_once(cls: Any):
    model = Model()
    opt = cls(model.named_parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            model.backward()
            opt.step()
    assert re.search(TEXT, messages(said)[0])
    assert len(messages(said)) == 1, "once, and not for the layer"
    assert messages(said)[0].startswith(f"sparsestep: {cls.__name__}: param 0 of group 0 ")
    assert "docs/" not in messages(said)[0]
    assert "https://sparsestep.readthedocs.io/" in messages(said)[0]
    reasons = {each.name: each.reason for each in opt.explain()}
    assert reasons.pop("table.weight") == DENSE_EMBEDDING
    assert DENSE_EMBEDDING not in reasons.values()


def test_the_warning_points_at_the_line_that_steps():
    model = Model()
    opt = sparsestep.SparseAdam(model.table.parameters())
    model.backward()
    with pytest.warns(SlowWarning) as said:
        opt.step()
    line = inspect.getsourcelines(test_the_warning_points_at_the_line_that_steps)[1] + 5
    assert (said[0].filename, said[0].lineno) == (__file__, line)


@each_class
def test_a_sparse_or_fused_table_is_fine(cls: Any):
    for model in (Model(sparse=True), sparsestep.nn.fuse(Model())):
        opt = cls(model.parameters(), lr=0.1)
        model.backward()
        opt.step()
        assert DENSE_EMBEDDING not in {each.reason for each in opt.explain()}


def test_it_is_looked_at_once(monkeypatch: pytest.MonkeyPatch):
    looks = []
    real = looks_like_embedding
    monkeypatch.setattr(
        step, "looks_like_embedding", lambda grad: bool(looks.append(1)) or real(grad)
    )
    model = Model()
    for cls in (sparsestep.SGD, sparsestep.SparseAdam, sparsestep.AdamW):
        looks.clear()
        opt = cls(model.head.parameters(), lr=0.1)
        for _ in range(3):
            model.backward()
            opt.step()
        assert len(looks) == 2, "weight and bias"


@pytest.mark.parametrize("cls", WITH_DENSE, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("guard", [False, True])
def test_with_dense_semantics(cls: Any, guard: bool):
    model = Model()
    opt = cls(model.named_parameters(), lr=0.1, semantics="dense")
    opt.track(model, guard=guard)
    model.backward()
    with pytest.warns(SlowWarning, match=TEXT):
        opt.step()


def test_a_mask_has_chosen_the_rows():
    model = Model()
    opt = sparsestep.SparseAdam([{"params": [model.table.weight], "mask": torch.arange(ROWS) < 9}])
    model.backward()
    opt.step()


@pytest.mark.parametrize("how", ["step_in_backward", "functional"])
def test_other_ways_to_step(how: str):
    model = Model()
    if how == "functional":
        opt = FUNCTIONAL[0]([model.table.weight])
        model.backward()
        with pytest.warns(SlowWarning, match="dense gradient for an embedding"):
            opt.step([model.table.weight.grad])
    else:
        sparsestep.AdamW(model.named_parameters()).step_in_backward()
        with pytest.warns(SlowWarning, match=TEXT):
            model.backward()


def test_as_an_error_it_changes_nothing_and_is_raised_again():
    model = Model()
    opt = sparsestep.Adam(model.named_parameters(), semantics="dense")
    model.backward()
    before = snapshot(opt)
    for _ in range(2):  # the suite makes warnings errors
        with pytest.raises(SlowWarning, match=TEXT):
            opt.step()
        assert unchanged(opt, before)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SlowWarning)
        opt.step()
    assert not unchanged(opt, before)


def test_what_is_no_large_embedding():
    def grad(rows: int, dim: int, used: int) -> torch.Tensor:
        found = torch.zeros(rows, dim)
        found[torch.linspace(0, rows - 1, used).long()] = 1.0
        return found

    looks = looks_like_embedding
    assert looks(grad(ROWS, DIM, 100))
    assert looks(grad(ROWS, DIM, 1)), "one row of all"
    assert looks(grad(ROWS, DIM, 100).half())
    assert looks(torch.complex(grad(ROWS, DIM, 100), grad(ROWS, DIM, 100)))
    assert looks(grad(DIM, ROWS, 1).T.clone().T.T) is False, "few columns are used, in every row"
    assert not looks(grad(ROWS, DIM, 0)), "nothing is known of it"
    assert not looks(grad(ROWS, DIM, ROWS)), "a layer"
    assert not looks(grad(ROWS, DIM, ROWS // 2)), "a table of which the batch uses much"
    assert not looks(grad(1_000, DIM, 10)), "a small table"
    assert not looks(grad(ROWS, 1, 10)), "as small"
    assert not looks(grad(ROWS, DIM, 100).view(-1)), "no rows"
    assert not looks(grad(ROWS, DIM, 100).to("meta"))
    assert not looks(grad(ROWS, DIM, 100).to_sparse(1))
    assert not looks(torch.full((ROWS, DIM), float("nan")))


def test_a_copy_of_the_optimizer_warns_of_its_own_table():
    model = Model()
    opt = sparsestep.Adagrad(model.table.parameters(), lr=0.1)
    for each in (opt, copy.deepcopy(opt)):
        param = each.param_groups[0]["params"][0]
        param.grad = torch.zeros(ROWS, DIM)
        param.grad[1] = 1.0
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowWarning)
            each.step()
        assert each.explain().params[0].reason == DENSE_EMBEDDING
