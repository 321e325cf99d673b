"""``differentiable=True``: gradients flow through a step, as with torch."""

from __future__ import annotations

import pytest
import torch

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.properties.counterparts import each_counterpart
from tests.table import same_bits


@each_counterpart
def test_gradients_flow_through_a_differentiable_step(
    ours: type[RuleOptimizer], theirs: type[torch.optim.Optimizer]
):
    """Learning to learn: the derivative of what two steps give by start and gradients."""
    derivatives = []
    for cls in (ours, theirs):
        start, *grads = (
            torch.randn(3, 2, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            for seed in range(3)
        )
        param = start.clone()
        opt = cls([param], lr=0.1, weight_decay=0.1, differentiable=True)
        for grad in grads:
            param.grad = grad
            opt.step()
        param.square().sum().backward()
        derivatives.append([param.detach(), *(leaf.grad for leaf in (start, *grads))])
    for our, their in zip(*derivatives, strict=True):
        assert bool((their != 0).all())
        assert same_bits(our, their)


@each_counterpart
def test_a_differentiable_step_refuses_a_sparse_gradient(
    ours: type[RuleOptimizer], theirs: type[torch.optim.Optimizer]
):
    param = torch.nn.Parameter(torch.ones(3, 2))
    opt = ours([param], differentiable=True)
    param.grad = torch.ones(3, 2).to_sparse(1)
    with pytest.raises(sparsestep.InputError, match="differentiable=True needs dense gradients"):
        opt.step()
