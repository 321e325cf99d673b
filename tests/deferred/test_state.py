"""Dense semantics where state is cleared, taken away or made in advance."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.deferred.runs import (
    KINDS,
    assert_close,
    bookkeeping,
    coo,
    dense_run,
    kept,
    on_both_engines,
    standard,
)
from tests.table import Variant, running_on, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")

STATEFUL = [variant for variant in KINDS if variant.rule.state]
CLEARED: dict[str, Callable[[RuleOptimizer, Tensor], None]] = {
    "all": lambda opt, param: opt.state.clear(),
    "the parameter's": lambda opt, param: opt.state[param].clear(),
    "replaced": lambda opt, param: setattr(opt, "state", defaultdict(dict)),
}


@pytest.mark.parametrize("variant", STATEFUL, ids=str)
@pytest.mark.parametrize("how", CLEARED)
@on_both_engines
def test_a_parameter_whose_state_is_cleared_begins_anew(variant: Variant, how: str, engine: str):
    """Nothing was missed any more: it goes on as with a new optimizer."""
    run = standard(20)
    param = run.param(torch.float32)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        CLEARED[how](opt, param)
        weight = param.detach().clone()
        opt.catch_up(param, torch.tensor([0, 3]))
        opt.catch_up()
        opt.state_dict()
        assert same_bits(param.detach(), weight)
        fresh = torch.nn.Parameter(weight.clone())
        new = variant([fresh], lr=0.1, semantics="dense", engine=name)
        for one, its in ((opt, param), (new, fresh)):
            run.train(one, its, range(10, 20))
            one.catch_up()
    ours, wanted = kept(opt, param), kept(new, fresh)
    assert ours.keys() == wanted.keys()
    assert all(same_bits(ours[key], wanted[key]) for key in wanted)


def test_a_buffer_that_is_taken_away_begins_anew_as_with_torch():
    """Torch's SGD takes ``None`` for a first step."""
    param = torch.nn.Parameter(torch.zeros(3, 1))
    opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, semantics="dense")
    param.grad = coo([0], torch.ones(1, 1), (3, 1))
    opt.step()
    opt.state[param]["momentum_buffer"] = None
    opt.catch_up()
    param.grad = coo([1], torch.ones(1, 1), (3, 1))
    opt.step()
    opt.catch_up()
    assert param.flatten().tolist() == [-1.0, -1.0, 0.0]


NO_DECAY = [
    Variant(sparsestep.Adam, {}),
    Variant(sparsestep.RowwiseAdam, {}),
    Variant(sparsestep.Lion, {}),
    Variant(sparsestep.RMSprop, {"momentum": 0.9}),
]


@pytest.mark.parametrize("variant", NO_DECAY, ids=str)
@on_both_engines
def test_state_made_in_advance_is_as_none(variant: Variant, engine: str):
    """Rows without a gradient so far have missed nothing, so nobody is warned (an error here)."""
    results = []
    for in_advance in (True, False):
        param = torch.nn.Parameter(torch.ones(6, 2))
        with running_on(engine) as name:
            opt = variant([param], lr=0.1, semantics="dense", engine=name)
            if in_advance:
                opt.materialize_state()
            for row in range(5):
                param.grad = coo([row], torch.ones(1, 2), (6, 2))
                opt.step()
            books = bookkeeping(opt)
            opt.catch_up()
        results.append((kept(opt, param), books[0][1:]))
    (ours, our_books), (wanted, books) = results
    assert all(same_bits(ours[key], wanted[key]) for key in wanted)
    assert torch.equal(our_books[0], books[0])
    assert our_books[1:] == books[1:]


@on_both_engines
def test_catching_up_in_inference_mode(engine: str):
    """What is remembered of the rows can be written afterwards."""
    run = standard(20)
    param = run.param()
    variant = Variant(sparsestep.AdamW, {})
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        with torch.inference_mode():
            opt.catch_up()
        run.train(opt, param, range(10, 20))
        opt.catch_up()
    assert_close(kept(opt, param), dense_run(variant, run))
