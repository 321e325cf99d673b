"""Dense semantics under a mask: rows outside of it miss nothing."""

from __future__ import annotations

import pytest
import torch

from tests.deferred.runs import (
    KINDS,
    assert_close,
    each_kind,
    kept,
    on_both_engines,
    room_for,
    standard,
)
from tests.table import Variant, running_on, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@each_kind
@on_both_engines
def test_rows_outside_a_mask_keep_their_bits(variant: Variant, engine: str):
    run = standard(30)
    mask = torch.rand(24, generator=torch.Generator().manual_seed(3)) < 0.5
    results = []
    for sparse in (True, False):
        param = run.param()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([{"params": [param], "mask": mask}], lr=0.1, **more)
            run.train(opt, param)
            opt.catch_up(param, torch.arange(24))
            assert same_bits(param.detach()[~mask], run.weight[~mask])
            opt.catch_up()
        assert same_bits(param.detach()[~mask], run.weight[~mask])
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


@each_kind
@on_both_engines
@pytest.mark.parametrize("how", ["in place", "another", "none in between"])
def test_a_mask_that_changes_on_the_way(variant: Variant, engine: str, how: str):
    """A row misses only the steps in which it might have moved."""
    run = standard(30)
    generator = torch.Generator().manual_seed(3)
    masks = [torch.rand(24, generator=generator) < 0.5 for _ in range(3)]
    results = []
    for sparse in (True, False):
        param, mask = run.param(), masks[0].clone()
        with running_on(engine) as name:
            more = {"semantics": "dense", "engine": name} if sparse else {}
            opt = variant([{"params": [param], "mask": mask}], lr=0.1, **more)
            group = opt.param_groups[0]
            for part in range(3):
                if how == "in place":
                    mask.copy_(masks[part])
                elif how == "another" or part != 1:
                    group["mask"] = masks[part]
                else:
                    group["mask"] = None
                run.train(opt, param, range(10 * part, 10 * part + 10))
            opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results, room_for(variant))


def test_dense_gradients_under_a_mask():
    run = standard(30)
    mask = torch.arange(24) % 3 > 0
    results = []
    for sparse in (True, False):
        param = run.param()
        more = {"semantics": "dense"} if sparse else {}
        opt = KINDS[0]([{"params": [param], "mask": mask}], lr=0.1, **more)
        for t in range(30):
            opt.catch_up()
            param.grad = run.sparse(t, torch.float64)
            if t % 3 == 0 or not sparse:
                param.grad = param.grad.to_dense()
            opt.step()
        opt.catch_up()
        results.append(kept(opt, param))
    assert_close(*results)
    assert same_bits(results[0]["param"][~mask], run.weight[~mask])
