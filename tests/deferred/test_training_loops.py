"""Dense semantics in training loops: scalers, steps in backward, parameters given twice."""

from __future__ import annotations

import math

import pytest
import torch

import sparsestep
from tests.deferred.runs import assert_close, coo, kept, standard

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_step_that_a_scaler_skips_is_no_step():
    run = standard(20)
    results = []
    for sparse in (True, False):
        param = run.param(torch.float32)
        opt = sparsestep.AdamW([param], lr=0.1, **({"semantics": "dense"} if sparse else {}))
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
        for t in range(20):
            scaler.scale(torch.ones(()))
            opt.catch_up()
            grad = run.sparse(t, torch.float32) * scaler.get_scale()
            grad = grad if sparse else grad.to_dense()
            if t % 5 == 3:
                grad = (
                    grad * math.inf
                    if not sparse
                    else coo([0], torch.full((1, 3), math.inf), (24, 3))
                )
            param.grad = grad
            scaler.step(opt)
            scaler.update()
        opt.catch_up()
        assert int(opt.state[param]["step"]) == 16
        results.append(kept(opt, param))
    assert_close(*results, 1e-5)


def test_step_in_backward():
    results = []
    for sparse in (True, False):
        torch.manual_seed(0)
        tables = [torch.nn.Embedding(12, 3, sparse=sparse).double() for _ in range(2)]
        params = [table.weight for table in tables]
        opt = sparsestep.AdamW(params, lr=0.1, **({"semantics": "dense"} if sparse else {}))
        handle = opt.step_in_backward()
        for t in range(15):
            ids = torch.randint(0, 10, (3,), generator=torch.Generator().manual_seed(t))
            opt.catch_up()
            (tables[0](ids) * tables[1](ids + 1)).sum().backward()
        handle.remove()
        opt.catch_up()
        results.append([kept(opt, param) for param in params])
    for ours, exact in zip(*results, strict=True):
        assert_close(ours, exact)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_that_is_given_twice_takes_two_steps():
    run = standard(20)
    results = []
    for sparse in (True, False):
        param = run.param()
        opt = sparsestep.AdamW([param, param], **({"semantics": "dense"} if sparse else {}))
        run.train(opt, param)
        opt.catch_up()
        assert int(opt.state[param]["step"]) == 40
        results.append(kept(opt, param))
    assert_close(*results)


def test_a_parameter_in_several_groups_is_refused_as_by_torch():
    param = torch.nn.Parameter(torch.zeros(3, 2))
    groups = [{"params": [param]}, {"params": [param]}]
    with pytest.raises(ValueError, match="appear in more than one parameter group"):
        sparsestep.AdamW(groups, semantics="dense")
