"""Tracked modules that hold or compute a table themselves, and compiled models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sparsestep
from tests.deferred.tied_model import close, ids_of, made, train
from tests.torch_versions import compiles_generators

pytestmark = pytest.mark.usefixtures("one_thread")


class Direct(nn.Module):
    """Holds a table and looks rows up by itself."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 3))
        self.sparse = sparse

    def forward(self, t: int) -> Tensor:
        return functional.embedding(ids_of(t), self.weight, sparse=self.sparse).sin().sum()


class Saying(Direct):
    """And says which."""

    def rows_read(self, t: int) -> Any:
        yield self.weight, ids_of(t)


@pytest.mark.parametrize("cls", [Direct, Saying], ids=lambda c: c.__name__)
def test_a_module_that_holds_a_table_itself(cls: Any):
    """Right in any case; where it does not say which rows it reads, all of them, and said so."""
    losses = []
    for sparse in (True, False):
        torch.manual_seed(0)
        model = cls(sparse).double()
        if not sparse:
            losses.append(train(model, torch.optim.AdamW(model.parameters(), lr=0.05), range(12)))
            continue
        opt = sparsestep.AdamW(model.parameters(), lr=0.05, semantics="dense")
        opt.track(model)
        if cls is Saying:
            losses.append(train(model, opt, range(12)))
            assert opt.deferred[id(model.weight)].has_deferred
        else:
            with pytest.warns(sparsestep.SlowWarning, match="Direct .*20 rows.*method rows_read"):
                losses.append(train(model, opt, range(12)))
    assert close(*losses)


def test_a_weight_that_is_computed_from_another():
    losses = []
    for sparse in (True, False):
        torch.manual_seed(0)
        table = nn.Embedding(20, 3).double()
        nn.utils.parametrizations.weight_norm(table)
        opt = (
            sparsestep.AdamW(table.parameters(), lr=0.05, semantics="dense")
            if sparse
            else torch.optim.AdamW(table.parameters(), lr=0.05)
        )
        if sparse:
            opt.track(table)
        losses.append(train(lambda t, table=table: table(ids_of(t)).sin().sum(), opt, range(5)))
    assert close(*losses)


# Compiled models


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
@compiles_generators
@pytest.mark.parametrize("guard", [False, True], ids=["tracked", "guarded"])
def test_a_model_that_was_compiled_and_called_before_it_is_tracked(guard: bool):
    losses = []
    for sparse in (True, False):
        model, opt = made(sparse)
        run = torch.compile(model, backend="eager") if sparse else model
        run(0)
        if sparse:
            opt.track(model, guard=guard)
        losses.append(train(run, opt, range(10)))
    torch.compiler.reset()
    assert close(*losses)
