"""An optimizer is told that another one tracks its parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import sparsestep


def tracked() -> tuple[nn.Module, Any, Any]:
    model = nn.Sequential(nn.Embedding(10, 2, sparse=True), nn.Linear(2, 1))
    optimizer = sparsestep.AdamW(model.parameters(), semantics="dense")
    return model, optimizer, optimizer.track(model)


def made_anew(optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """As PyKEEN does it."""
    options = optimizer.state_dict()["param_groups"][0]
    del options["params"]
    return type(optimizer)(model.parameters(), **options)


def test_an_optimizer_that_was_made_anew_says_that_it_lost_its_semantics():
    model, optimizer, _ = tracked()
    with pytest.warns(sparsestep.StaleWarning, match=r"AdamW has semantics='masked'.*track\(model"):
        made_anew(optimizer, model)


def test_where_the_warning_is_an_error_a_group_is_not_added():
    model, _, _ = tracked()
    other = sparsestep.SGD([torch.zeros(1)])
    with pytest.raises(sparsestep.StaleWarning):
        other.add_param_group({"params": model.parameters()})
    assert len(other.param_groups) == 1


def test_after_remove_nobody_is_told():
    model, optimizer, handle = tracked()
    handle.remove()
    made_anew(optimizer, model)


def test_one_for_other_parameters_and_one_with_dense_semantics_are_not_told():
    model, _, _ = tracked()
    sparsestep.AdamW([torch.zeros(1)])
    sparsestep.AdamW(model[1].parameters())  # the layer is not read by rows
    sparsestep.AdamW(model.parameters(), semantics="dense")
