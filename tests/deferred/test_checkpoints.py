"""Checkpoints and copies under dense semantics: they are current, and training goes on."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.deferred.runs import (
    DECAY,
    OF_TORCH,
    assert_close,
    coo,
    dense_run,
    each_kind,
    each_variant,
    kept,
    on_both_engines,
    standard,
)
from tests.table import Variant, running_on, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


def through_a_file(saved: Any) -> Any:
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_a_checkpoint_is_current_and_is_that_of_torch():
    run = standard()
    param, theirs = run.param(), run.param()
    opt = sparsestep.AdamW([param], semantics="dense")
    dense = torch.optim.AdamW([theirs])
    run.train(opt, param)
    run.train(dense, theirs)
    ours, wanted = opt.state_dict(), dense.state_dict()
    assert ours["state"][0].keys() == wanted["state"][0].keys()
    assert ours["param_groups"][0].keys() == wanted["param_groups"][0].keys()
    assert_close(kept(opt, param), kept(dense, theirs))
    assert_close(
        {k: v for k, v in ours["state"][0].items() if k != "step"},
        {k: v for k, v in wanted["state"][0].items() if k != "step"},
    )
    assert ours["state"][0]["step"] == wanted["state"][0]["step"]


@pytest.mark.parametrize(("name", "options"), OF_TORCH, ids=str)
@pytest.mark.parametrize("torch_first", [False, True], ids=["from ours", "from torch"])
def test_training_goes_on_in_the_other_class(name: str, options: dict[str, Any], torch_first: bool):
    run = standard()
    straight, first = run.param(), run.param()
    dense = getattr(torch.optim, name)([straight], lr=0.1, **options)
    run.train(dense, straight)

    def made(param: Tensor, by_torch: bool) -> torch.optim.Optimizer:
        if by_torch:
            return getattr(torch.optim, name)([param], lr=0.1, **options)
        return getattr(sparsestep, name)([param], lr=0.1, semantics="dense", **options)

    opt = made(first, torch_first)
    run.train(opt, first, range(30))
    saved = through_a_file(opt.state_dict())
    second = torch.nn.Parameter(first.detach().clone())
    again = made(second, not torch_first)
    again.load_state_dict(saved)
    run.train(again, second, range(30, 60))
    again.state_dict()
    assert_close(kept(again, second), kept(dense, straight))


@each_variant
@on_both_engines
def test_a_run_that_was_killed_is_resumed_with_the_same_bits(variant: Variant, engine: str):
    run = standard(20)
    param = run.param(torch.float32)
    with running_on(engine) as name:
        opt = variant([param], lr=0.1, semantics="dense", engine=name)
        run.train(opt, param, range(10))
        saved = through_a_file({"opt": opt.state_dict(), "param": param.detach()})
        run.train(opt, param, range(10, 20))
        resumed = torch.nn.Parameter(saved["param"])
        again = variant([resumed], lr=0.5, semantics="dense", engine=name)
        again.load_state_dict(saved["opt"])
        run.train(again, resumed, range(10, 20))
        again.catch_up()
        opt.catch_up()
    for key, tensor in kept(opt, param).items():
        assert same_bits(tensor, kept(again, resumed)[key])


@each_kind
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies_are_current_and_go_on(variant: Variant, how: Any):
    run = standard(40)
    param = run.param(torch.float32)
    opt = variant([param], lr=0.1, semantics="dense")
    run.train(opt, param, range(20))
    again = how(opt)
    (other,) = again.param_groups[0]["params"]
    assert again.semantics == "dense"
    for key, tensor in kept(opt, param).items():
        assert same_bits(tensor, kept(again, other)[key])
    for one, its in ((opt, param), (again, other)):
        run.train(one, its, range(20, 40))
        one.catch_up()
    for key, tensor in kept(opt, param).items():
        assert same_bits(tensor, kept(again, other)[key])


def test_loading_forgets_what_was_missed_before():
    """The checkpoint is current; nothing of the time after it may be made up for."""
    run = standard(40)
    param = run.param()
    opt = sparsestep.AdamW([param], semantics="dense")
    run.train(opt, param, range(20))
    saved, weight = copy.deepcopy(opt.state_dict()), param.detach().clone()
    run.train(opt, param, range(20, 30))
    with torch.no_grad():
        param.copy_(weight)
    opt.load_state_dict(saved)
    opt.catch_up()
    assert same_bits(param.detach(), weight)
    run.train(opt, param, range(20, 40))
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(Variant(sparsestep.AdamW, {}), run))


def test_a_checkpoint_that_does_not_fit_forgets_nothing():
    run = standard(20)
    param = run.param()
    opt = sparsestep.AdamW([param], semantics="dense")
    run.train(opt, param)
    with pytest.raises(ValueError, match="different number of parameter groups"):
        opt.load_state_dict({"state": {}, "param_groups": []})
    opt.catch_up()
    assert_close(kept(opt, param), dense_run(Variant(sparsestep.AdamW, {}), run))


def test_a_resized_parameter_starts_anew():
    param = torch.nn.Parameter(torch.ones(4, 2))
    opt = sparsestep.SGD([param], lr=0.1, semantics="dense", **DECAY)
    for rows in (4, 6):
        param.grad = None
        param.data = torch.ones(rows, 2)
        for row in (1, 2):
            opt.catch_up(param, torch.tensor([row])) if param.grad is not None else None
            param.grad = coo([row], torch.zeros(1, 2), (rows, 2))
            opt.step()
        opt.catch_up()
        assert torch.allclose(param, torch.full((rows, 2), 0.99**2))
