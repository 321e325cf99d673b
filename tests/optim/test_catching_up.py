"""``optimizer.catch_up``: all rows, or some of them, are brought up to date."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from tests.table import each_engine, running_on, same_bits


def momentum(engine: str = "auto") -> tuple[torch.nn.Parameter, sparsestep.SGD]:
    """Rows 0 to 3 of five have had a gradient, one in each step."""
    param = torch.nn.Parameter(torch.zeros(5, 1))
    opt = sparsestep.SGD([param], lr=1.0, momentum=0.5, semantics="dense", engine=engine)
    for row in range(4):
        param.grad = torch.sparse_coo_tensor([[row]], torch.ones(1, 1), (5, 1))
        opt.step()
    return param, opt


CURRENT = [-1.875, -1.75, -1.5, -1.0, 0.0]


@each_engine
@pytest.mark.parametrize(
    "rows",
    [
        torch.tensor([0, 2]),
        torch.tensor([2, 0, 2, 2, 0]),
        torch.tensor([[0, 2], [2, 4]]),
        torch.tensor([2, 0], dtype=torch.int32),
        torch.tensor([2, 0], dtype=torch.int16),
        torch.tensor([2, 0], dtype=torch.uint8),
        torch.tensor([0, 9, 2, 9])[::2],
    ],
    ids=lambda rows: f"{rows.dtype}-{tuple(rows.shape)}",
)
def test_catch_up_of_some_rows(engine: str, rows: Tensor):
    with running_on(engine) as name:
        param, opt = momentum(name)
        opt.catch_up(param, rows)
        assert param.flatten().tolist() == [-1.875, -1.0, -1.5, -1.0, 0.0]
        opt.catch_up(param, rows)
        opt.catch_up(param)
    assert param.flatten().tolist() == CURRENT
    assert opt.state[param]["momentum_buffer"].flatten().tolist() == [0.125, 0.25, 0.5, 1.0, 0.0]


@each_engine
def test_catch_up_of_one_row(engine: str):
    with running_on(engine) as name:
        param, opt = momentum(name)
        opt.catch_up(param, torch.tensor(1))
        opt.catch_up(param, torch.tensor([], dtype=torch.int64))
    assert param.flatten().tolist() == [-1.0, -1.75, -1.0, -1.0, 0.0]


@pytest.mark.parametrize("semantics", ["dense", "masked"])
def test_catch_up_of_an_unknown_parameter_is_refused(semantics: str):
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param], semantics=semantics)
    for other in (torch.nn.Parameter(torch.ones(5, 1)), param.detach(), param.data):
        for rows in (None, torch.tensor([0])):
            with pytest.raises(InputError, match=r"^AdamW: .*Got another, of shape \(5, 1\)\.$"):
                opt.catch_up(other, rows)
    with pytest.raises(InputError, match=r"needs a parameter of this optimizer\. Got str"):
        opt.catch_up("weight")  # type: ignore[arg-type]


def test_under_masked_semantics_there_is_nothing_to_catch_up():
    """Code that does not know which semantics it has may call it."""
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param])
    param.grad = torch.ones(5, 1).to_sparse_coo()
    opt.step()
    before = param.detach().clone()
    opt.catch_up()
    opt.catch_up(param, torch.tensor([3]))
    assert same_bits(param.detach(), before)


def test_how_many_rows_were_behind_is_what_bringing_all_of_them_says():
    """So a step with a dense gradient knows whether it was taken at old values."""
    param, opt = momentum()
    clock, state = opt.deferred[id(param)], [opt.state[param]["momentum_buffer"]]
    assert clock.has_deferred
    assert clock.catch_up_all(param.detach(), state) == 3
    assert not clock.has_deferred
    assert clock.catch_up_all(param.detach(), state) == 0


def test_catch_up_before_the_first_step_does_nothing():
    param = torch.nn.Parameter(torch.ones(5, 1))
    opt = sparsestep.AdamW([param], semantics="dense")
    opt.catch_up()
    opt.catch_up(param, torch.tensor([1]))
    for bad in ([1], torch.tensor([5]), torch.tensor([True])):
        with pytest.raises(sparsestep.InputError, match=r"^AdamW: rows "):
            opt.catch_up(param, bad)  # type: ignore[arg-type]
    assert torch.equal(param, torch.ones(5, 1))
    masked = sparsestep.AdamW([param])
    masked.catch_up()
    masked.catch_up(param, torch.tensor([1]))


@pytest.mark.parametrize("bad", [-1, 5, 2**40])
def test_rows_that_do_not_exist_are_refused(bad: int):
    param, opt = momentum()
    with pytest.raises(sparsestep.InputError, match=rf"SGD: .*in \[0, 5\). Got {bad}"):
        opt.catch_up(param, torch.tensor([0, bad, 1]))
    assert param.flatten().tolist() == [-1.0, -1.0, -1.0, -1.0, 0.0]
    opt.catch_up()
    assert param.flatten().tolist() == CURRENT


@pytest.mark.parametrize("rows", [torch.tensor([True] * 5), torch.tensor([1.5]), [1]], ids=str)
def test_rows_that_are_no_integers_are_refused(rows: Any):
    """A mask least of all: it would be taken for rows 0 and 1."""
    param, opt = momentum()
    with pytest.raises(sparsestep.InputError, match="rows must be an integer tensor"):
        opt.catch_up(param, rows)


@each_engine
@pytest.mark.parametrize("shape", [(5, 40), (50, 1), (2, 1)], ids=str)
def test_a_parameter_that_was_replaced_is_refused(engine: str, shape: tuple[int, ...]):
    """Its state has another shape: nothing outside of it may be written."""
    with running_on(engine) as name:
        param, opt = momentum(name)
        param.grad = None
        param.data = torch.zeros(shape)
        for rows in (None, torch.tensor([1])):
            with pytest.raises(sparsestep.InputError, match="must keep its shape, 5 rows"):
                opt.catch_up(param, rows)
    assert not param.any()
