"""Dense semantics with gradients of other layouts, and with gradients that hold nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.deferred.runs import (
    DECAY,
    assert_close,
    coo,
    each_kind,
    kept,
    on_both_engines,
    room_for,
    standard,
)
from tests.table import Variant, running_on

pytestmark = pytest.mark.usefixtures("one_thread")


def csr(grad: Tensor) -> Tensor:
    return grad.to_sparse_csr()


def every_dim(grad: Tensor) -> Tensor:
    return grad.to_sparse_coo()


def blocks(grad: Tensor) -> Tensor:
    return grad.to_sparse_bsr((2, 1))


def masked(grad: Tensor) -> Tensor:
    """What the mask excludes is zero here, whatever it is."""
    return torch.masked.masked_tensor(torch.where(grad == 0, 77.0, grad), grad != 0)


FUNCTIONAL = [
    (sparsestep.FunctionalAdamW, {"weight_decay": 0.1}),
    (sparsestep.FunctionalSGD, {"momentum": 0.9}),
    (sparsestep.FunctionalRowwiseAdam, DECAY),
    (sparsestep.FunctionalLion, {}),
    (sparsestep.FunctionalFtrl, {"l1": 0.01}),
]


@pytest.mark.parametrize("layout", [csr, every_dim, blocks, masked], ids=lambda f: f.__name__)
@pytest.mark.parametrize(
    ("cls", "options"), FUNCTIONAL, ids=[cls.__name__ for cls, _ in FUNCTIONAL]
)
@on_both_engines
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors")
@pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR) tensor support is in beta")
def test_what_a_layout_does_not_hold_of_a_row_is_zero(
    layout: Any, cls: Any, options: dict[str, Any], engine: str
):
    generator = torch.Generator().manual_seed(0)
    ours = torch.randn(8, 3, generator=generator, dtype=torch.float64)
    theirs = torch.nn.Parameter(ours.clone())
    with running_on(engine) as name:
        opt = cls([ours], lr=0.1, semantics="dense", engine=name, **options)
        dense = cls.optimizer_class([theirs], lr=0.1, **options)
        for _ in range(10):
            grad = torch.randn(8, 3, generator=generator, dtype=torch.float64)
            grad *= torch.rand(8, 3, generator=generator) < 0.15
            opt.catch_up(ours)  # blocks hold more rows than those that are not zero
            opt.step([layout(grad)])
            theirs.grad = grad
            dense.step()
        opt.catch_up()
    assert_close(kept(opt, ours), kept(dense, theirs))


@each_kind
@on_both_engines
def test_a_gradient_that_holds_nothing_is_a_step_in_which_all_are_idle(
    variant: Variant, engine: str
):
    results = []
    for sparse in (True, False):
        run = standard(20)
        param = run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([param], lr=0.1, **more)
            for t in range(20):
                run.train(opt, param, range(t, t + 1))
                nothing = coo(
                    torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3).double(), (24, 3)
                )
                param.grad = nothing if sparse else torch.zeros_like(param)
                opt.step()
                if t % 2:  # dense gradients in between are just gradients, from reading all rows
                    opt.catch_up()
                    param.grad = run.dense(t, torch.float64)
                    opt.step()
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


def test_the_first_gradient_may_hold_nothing():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.AdamW([param], lr=0.1, weight_decay=0.5, semantics="dense")
    param.grad = coo(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 2), (4, 2))
    opt.step()
    opt.catch_up()
    assert torch.allclose(param, torch.full((4, 2), 0.95))


@each_kind
@on_both_engines
def test_steps_without_a_gradient_are_no_steps(variant: Variant, engine: str):
    """As with torch: a parameter without a gradient is left out, decay and all."""
    run = standard(20)
    results = []
    for sparse in (True, False):
        param, other = run.param(), run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([other, param], lr=0.1, **more)
            for t in range(20):
                opt.param_groups[0]["lr"] = run.rates[t]
                opt.catch_up()
                for each, has in ((param, t % 3), (other, t % 2)):
                    grad = run.sparse(t, torch.float64)
                    each.grad = (grad if sparse else grad.to_dense()) if has else None
                opt.step()
            opt.catch_up()
        results.append([kept(opt, param), kept(opt, other)])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact, room_for(variant))
