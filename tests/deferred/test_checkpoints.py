"""Checkpoints and copies under dense semantics: they are current, and training continues."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import sparsestep
from tests.deferred.runs import (
    KINDS,
    assert_close,
    assert_same_bits,
    dense_run,
    kept,
    on_both_engines,
    standard,
)
from tests.table import running_on, through_a_file

pytestmark = pytest.mark.usefixtures("one_thread")
ADAMW = KINDS[0]


OF_TORCH = [
    ("AdamW", {"amsgrad": True}),
    ("SGD", {"momentum": 0.9, "nesterov": True}),
    ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1}),
]


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
@pytest.mark.parametrize("torch_first", [False, True], ids=["from ours", "from torch"])
def test_training_continues_in_the_other_class(
    name: str, options: dict[str, Any], torch_first: bool
):
    """A checkpoint is current, and is torch's."""
    run = standard()
    theirs, ours = getattr(torch.optim, name), getattr(sparsestep, name)

    def made(param: torch.nn.Parameter, by_torch: bool) -> torch.optim.Optimizer:
        more = {} if by_torch else {"semantics": "dense"}
        return (theirs if by_torch else ours)([param], lr=0.1, **options, **more)

    first = run.param()
    opt = made(first, torch_first)
    run.train(opt, first, range(30))
    saved = through_a_file(opt.state_dict())
    wanted = theirs([run.param()], lr=0.1, **options).state_dict()["param_groups"][0]
    assert saved["param_groups"][0].keys() == wanted.keys()
    second = torch.nn.Parameter(first.detach().clone())
    again = made(second, not torch_first)
    again.load_state_dict(saved)
    run.train(again, second, range(30, 60))
    again.state_dict()
    assert_close(kept(again, second), dense_run(theirs, run, **options))


@on_both_engines
@pytest.mark.parametrize("how", ["a file", "deepcopy", "pickle"])
def test_a_run_is_resumed_with_the_same_bits(engine: str, how: str):
    run = standard(20)
    param = run.param(torch.float32)
    with running_on(engine) as name:
        opt = ADAMW([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        if how == "a file":
            saved = through_a_file({"opt": opt.state_dict(), "param": param.detach()})
            other = torch.nn.Parameter(saved["param"])
            again = ADAMW([other], lr=0.5, semantics="dense", engine=name)
            again.load_state_dict(saved["opt"])
        else:
            again = copy.deepcopy(opt) if how == "deepcopy" else pickle.loads(pickle.dumps(opt))
            (other,) = again.param_groups[0]["params"]
        assert again.semantics == "dense"
        assert_same_bits(kept(again, other), kept(opt, param))
        for one, its in ((opt, param), (again, other)):
            run.train(one, its, range(10, 20))
            one.catch_up()
    assert_same_bits(kept(again, other), kept(opt, param))
