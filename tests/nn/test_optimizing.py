"""optimizer_for: fuse, dense semantics and tracking in one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep import InputError
from sparsestep.nn import optimizer_for
from tests.deferred.runs import VARIANTS
from tests.table import Variant


def model_of() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.EmbeddingBag(50, 4), nn.Linear(4, 1)).double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 12) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        ids = torch.randint(0, 50, (3, 2), generator=generator)
        (model(ids) - 1).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_it_trains_as_the_dense_model_does(variant: Variant):
    """The oracle is the same class on the dense gradients of torch's modules."""
    dense, model = model_of(), model_of()
    train(dense, variant(dense.parameters()))
    optimizer = optimizer_for(model, variant.cls, **variant.options)
    train(model, optimizer)
    assert isinstance(model[0], sparsestep.nn.EmbeddingBag)
    torch.testing.assert_close(model.state_dict(), dense.state_dict(), rtol=1e-8, atol=1e-8)


def test_positions_are_those_of_the_class():
    optimizer = optimizer_for(model_of(), sparsestep.SGD, 0.5, 0.9)
    assert (optimizer.defaults["lr"], optimizer.defaults["momentum"]) == (0.5, 0.9)


def test_masked_semantics_can_be_asked_for():
    model = model_of()
    optimizer = optimizer_for(model, sparsestep.AdamW, semantics="masked")
    table = model[0].weight
    before = table.detach().clone()
    train(model, optimizer, steps=1)
    assert int((table != before).any(dim=1).sum()) <= 6


def rounded(param: Any, grad: Any, *, lr: float) -> Any:
    return (param - lr * grad).round()


@pytest.mark.parametrize(
    ("optimizer", "options", "complaint"),
    [
        (torch.optim.AdamW, {}, "must be an optimizer class of sparsestep. Got <class 'torch.opt"),
        (sparsestep.AdamW([torch.zeros(1)]), {}, "must be an optimizer class of sparsestep. Got A"),
        (sparsestep.AdamW, {"lr": -1.0}, "Invalid learning rate: -1.0"),
        (sparsestep.AdamW, {"semantics": "sparse"}, "semantics must be one of masked, dense"),
        (sparsestep.rule()(rounded), {"lr": 0.1}, "semantics"),
    ],
)
def test_what_is_refused_leaves_the_model_alone(
    optimizer: Any, options: dict[str, Any], complaint: str
):
    model = model_of()
    before = copy.deepcopy(model)
    with pytest.raises(InputError, match=complaint):
        optimizer_for(model, optimizer, **options)
    assert list(map(type, model.modules())) == list(map(type, before.modules()))
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_what_is_no_model_is_refused():
    with pytest.raises(InputError, match=r"must be a model, an nn\.Module\. Got list"):
        optimizer_for([torch.zeros(1)], sparsestep.AdamW)  # type: ignore[arg-type]
