"""The functions are no part of a graph, whatever requires a gradient."""

from __future__ import annotations

import pytest
import torch

from tests.functional.cases import (
    SHAPE,
    F,
    Function,
    each_function,
    gradients,
    of_two_engines,
    start,
)
from tests.table import same_bits


@each_function
@of_two_engines
@pytest.mark.parametrize("grad_enabled", [True, False], ids=["grad", "no_grad"])
@pytest.mark.parametrize("layout", ["sparse", "dense"])
def test_a_leaf_that_requires_grad(
    function: Function, engine: str, grad_enabled: bool, layout: str
):
    plain, leaf = start(), start(requires_grad=True)
    kept = [function.state(plain), function.state(plain)]
    grad = gradients()[0] if layout == "sparse" else torch.ones(SHAPE)
    versions = [leaf._version, *(tensor._version for tensor in kept[1].values())]
    function(plain, grad, kept[0], engine=engine)
    with torch.set_grad_enabled(grad_enabled):
        assert function(leaf, grad, kept[1], engine=engine) is None
    assert same_bits(plain, leaf.detach())
    assert leaf.is_leaf
    assert leaf.grad_fn is None
    assert leaf.grad is None
    written = [leaf, *kept[1].values()]
    assert not any(tensor.requires_grad for tensor in written[1:])
    for tensor, before in zip(written, versions, strict=True):
        assert tensor._version > before


@each_function
def test_a_gradient_that_has_a_graph_of_its_own(function: Function):
    """As ``torch.autograd.grad(..., create_graph=True)`` gives it."""
    params = [start(requires_grad=True), start()]
    grad = params[0].square()
    assert grad.requires_grad
    for param, given in zip(params, (grad, grad.detach()), strict=True):
        state = function.state(param)
        function(param, given, state)
        assert not any(tensor.requires_grad for tensor in state.values())
    assert same_bits(params[0].detach(), params[1])
    assert params[0].is_leaf


@of_two_engines
def test_autograd_notices_that_a_saved_param_was_written(engine: str):
    leaf = start(requires_grad=True)
    loss = leaf.square().sum()
    F.sgd_(leaf, gradients()[0], engine=engine)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@each_function
def test_the_gradient_is_not_written(function: Function):
    grads = [gradients()[0], torch.randn(SHAPE)]
    for grad in grads:
        before = grad.clone()
        param = start()
        function(param, grad, function.state(param), maximize=True)
        assert torch.equal(grad.to_dense(), before.to_dense())


@of_two_engines
def test_parameters_and_state_with_strides(engine: str):
    plain, strided = start(), start().t().contiguous().t()
    sums = [torch.zeros(SHAPE), torch.zeros(5, 7).t()]
    by_rows = [grad for grad in gradients() if grad.sparse_dim() == 1]
    for step, grad in enumerate(by_rows, 1):
        F.adagrad_(plain, grad, sums[0], step=step, engine=engine)
        F.adagrad_(strided, grad, sums[1], step=step, engine=engine)
    assert same_bits(plain, strided)
    assert same_bits(*sums)
