"""Functional optimizers: the numbers of the classes, with gradients passed in."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep
from sparsestep.grads.layouts import Gradient
from sparsestep.optim.functional import FunctionalOptimizer
from tests.optim.functional_cases import (
    Variant,
    assert_same,
    batches,
    dense,
    each_engine,
    each_functional,
    each_stateful,
    each_variant,
    everything,
    sparse,
    start,
    train,
)
from tests.table import same_bits, steps_of


@each_variant
@each_engine
@pytest.mark.parametrize("make", [sparse, dense], ids=["sparse", "dense"])
def test_step_has_the_bits_of_the_class(variant: Variant, engine: str, make: Any):
    params = start()
    opt = variant(params, engine=engine)
    leaves = [torch.nn.Parameter(param) for param in start()]
    theirs = variant.optimizer(leaves, engine=engine)
    for grads in batches(make):
        assert opt.step(grads) is None
    train(theirs, leaves, batches(make))
    assert_same(everything(opt), everything(theirs))
    for param, leaf in zip(params, leaves, strict=True):
        assert steps_of(opt.optimizer, param) == steps_of(theirs, leaf)


@each_variant
@each_engine
@pytest.mark.parametrize("make", [sparse, dense], ids=["sparse", "dense"])
def test_step_param_has_the_bits_of_step(variant: Variant, engine: str, make: Any):
    ours, theirs = start(), start()
    by_param, by_step = variant(ours, engine=engine), variant(theirs, engine=engine)
    for grads in batches(make):
        for param, grad in zip(ours, grads, strict=True):
            assert by_param.step_param(param, grad) is None
        by_step.step(grads)
    assert_same(everything(by_param), everything(by_step))


@each_functional
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_every_layout_is_taken(cls: type[FunctionalOptimizer]):
    """Also those that cannot be a dense param's ``.grad``."""
    values = torch.randn(4, 6, generator=torch.Generator().manual_seed(2))
    where = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.5
    coo = (values * where).to_sparse_coo()
    flat = where.reshape(-1).nonzero().squeeze(1)
    layouts: list[Gradient] = [
        coo,
        coo.to_sparse_csr(),
        coo.to_sparse_csc(),
        torch.masked.masked_tensor(values, where),
        sparsestep.IndexedGrad(flat, values.reshape(-1)[flat], 24, 1),
    ]
    results = []
    for grad in layouts:
        param = torch.ones(4, 6)
        opt = cls([param], 0.1)
        opt.step([grad])
        opt.step_param(param, grad)
        results.append(param)
    for result in results[1:]:
        assert same_bits(result, results[0])
    assert torch.equal(results[0] != 1, where) or cls is sparsestep.FunctionalFtrl


@each_functional
def test_options_may_change_between_steps(cls: type[FunctionalOptimizer]):
    params, leaves = start(), [torch.nn.Parameter(param) for param in start()]
    opt, theirs = cls(params), cls.optimizer_class(leaves)
    for number, grads in enumerate(batches(sparse)):
        opt.param_group["lr"] = theirs.param_groups[0]["lr"] = 0.1 / (number + 1)
        opt.step(grads)
        train(theirs, leaves, [grads])
    assert_same(everything(opt), everything(theirs))
    assert opt.defaults["lr"] != opt.param_group["lr"]


@each_stateful
def test_a_param_that_is_given_twice_gets_both_gradients(variant: Variant):
    twice, once = start()[0], start()[0]
    with pytest.warns(UserWarning, match="duplicate parameters"):
        opt = variant([twice, twice])
    other = variant([once])
    grads = [batch[0] for batch in batches(sparse) if batch[0] is not None]
    opt.step(grads[:2])
    for grad in grads[:2]:
        other.step([grad])
    assert same_bits(twice, once)


def test_masks_and_rounding_are_those_of_the_class():
    mask = torch.arange(7) % 2 == 0
    masks = [mask, None, None]
    for options in ({"mask": masks}, {"stochastic_rounding": True}):
        params = [param.bfloat16() for param in start()]
        leaves = [torch.nn.Parameter(param.bfloat16()) for param in start()]
        opt, theirs = (
            sparsestep.FunctionalAdam(params, **options),
            sparsestep.Adam(leaves, **options),
        )
        for grads in batches(sparse):
            halves = [None if grad is None else grad.bfloat16() for grad in grads]
            for param, half in zip(params, halves, strict=True):
                opt.step_param(param, half)
            train(theirs, leaves, [halves])
        assert_same(everything(opt), everything(theirs))
