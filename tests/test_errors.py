"""Messages of refusals; warnings: once for each reason, and at the user's line."""

import re
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep.errors import message, warn_once
from tests import messages
from tests.fuzz.findings import INNER_WORDS


def odd_param(*sizes: int) -> torch.Tensor:
    """One for which the native engine has no way."""
    param = torch.ones(sizes or (2, 3, 4)).permute(2, 1, 0).requires_grad_()
    param.grad = torch.ones(param.shape).to_sparse(2)
    return param


def wrapped(param: torch.Tensor) -> torch.optim.Optimizer:
    opt = sparsestep.SGD([param])
    torch.optim.lr_scheduler.ConstantLR(opt)  # wraps step()
    opt.register_step_pre_hook(lambda *_: None)  # and so does torch, for a hook
    return opt


class _SparseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, param):
        ctx.shape = param.shape
        return param.sum()

    @staticmethod
    def backward(ctx, _):
        return torch.ones(ctx.shape).to_sparse(2)


def stepping_in_backward(param: torch.Tensor) -> torch.Tensor:
    param.grad = None
    sparsestep.SGD([param]).step_in_backward()
    return _SparseGradient.apply(param)


FUNCTIONAL = sparsestep.FunctionalSGD([], _allow_empty_param_list=True)
CALLERS: dict[str, Callable[[torch.Tensor], object]] = {
    "step": lambda param: sparsestep.SGD([param]).step(),
    "a wrapped step": lambda param: (opt := wrapped(param)).step() or opt,
    "a step with a closure": lambda param: sparsestep.SGD([param]).step(lambda: 1.0),
    "a step in backward": lambda param: stepping_in_backward(param).backward(),
    "a function": lambda param: sparsestep.functional.sgd_(param, param.grad),
    "a functional class": lambda param: sparsestep.FunctionalSGD([param]).step([param.grad]),
    "one param of it": lambda param: FUNCTIONAL.step_param(param, param.grad),
}


@pytest.mark.parametrize("name", CALLERS)
def test_a_warning_points_at_the_line_that_calls(name: str):
    call = CALLERS[name]
    with pytest.warns(sparsestep.SlowWarning) as said:
        call(odd_param())
    line = call.__code__.co_firstlineno
    assert [(each.filename, each.lineno) for each in said] == [(__file__, line)]


def test_each_reason_is_said_once():
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for sizes in [(2, 3, 4), (2, 3, 4), (5, 3, 4)]:
            for _ in range(2):
                sparsestep.SGD([odd_param(*sizes)]).step()
        warn_once(sparsestep.StaleWarning, "another kind")
        warn_once(sparsestep.SlowWarning, "another kind")
    shapes = [str(warning.message).partition("shape ")[2][:9] for warning in said]
    assert shapes == ["(4, 3, 2)", "(4, 3, 5)", "", ""]


def test_a_warning_that_is_an_error_is_not_said_to_be_over():
    for _ in range(2):
        param = odd_param()
        opt = sparsestep.SGD([param], lr=1.0)
        with pytest.raises(sparsestep.SlowWarning):  # the suite makes warnings errors
            opt.step()
        assert (param == 1).all()


def test_refusals_say_what_they_said():
    """``make messages`` accepts new messages."""
    found = messages.updated()
    assert found.splitlines() == messages.FILE.read_text().splitlines()
    for words in (messages.ACCEPTED, *INNER_WORDS):
        assert words not in found


def test_what_cannot_be_printed_is_named():
    class Shy:
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert message("it must be loud", Shy()) == "it must be loud. Got a Shy."


def test_every_message_of_the_reference_is_one_that_the_library_has():
    package = Path(sparsestep.__file__).parent
    sources = "\n".join(path.read_text() for path in package.rglob("*.py"))
    sources = re.sub(r"[\"']\n\s*f?[\"']", "", sources)  # strings that go on in the next line
    sources = re.sub(r"\{[^{}\n]*\}", "", sources)
    page = (Path(__file__).parents[1] / "docs" / "reference" / "errors.md").read_text()
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert len(rows) > 20
    for row in rows:
        for phrase in re.findall(r"`([^`]+)`", row):
            assert phrase in sources, phrase
