"""A step like the one before is replayed in one call; any change makes a new plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep._native import ext
from sparsestep.optim.step import Step
from tests.torch_versions import needs_tensors_that_the_core_reads

pytestmark = [
    pytest.mark.skipif(ext is None, reason="it is the core that does it"),
    needs_tensors_that_the_core_reads,
]


def coo(*rows: int, size: int = 6) -> Tensor:
    values = torch.arange(2.0 * len(rows)).view(-1, 2) + 1
    return torch.sparse_coo_tensor(
        torch.tensor([rows]), values, (size, 2), check_invariants=False, is_coalesced=False
    )


@sparsestep.rule(state={"exp_avg": 0.0, "exp_avg_sq": 0.0})
def own(param, grad, exp_avg, exp_avg_sq, *, step, lr=0.1):
    """Traced in every step."""
    exp_avg = 0.9 * exp_avg + 0.1 * grad
    exp_avg_sq = 0.5 * exp_avg_sq + 0.5 * grad.square()
    size = lr / (1 - 0.9**step)
    return param - size * exp_avg / (exp_avg_sq.sqrt() + 1e-8), exp_avg, exp_avg_sq


class Pair:
    """Two optimizers of the same kind; one of them never replays a step."""

    def __init__(self, cls: Any) -> None:
        self.params = [[torch.nn.Parameter(torch.ones(6, 2)) for _ in range(2)] for _ in range(2)]
        self.fast, self.slow = (
            cls([{"params": [a]}, {"params": [b]}], lr=0.1) for a, b in self.params
        )
        for _ in range(3):
            self.step(coo(1, 3, 1), coo(0, 2))
        assert self.fast._cached_plan is not None

    def step(self, *grads: Tensor | None) -> None:
        for optimizer, params in zip((self.fast, self.slow), self.params, strict=True):
            for param, grad in zip(params, grads, strict=True):
                param.grad = grad
            if optimizer is self.slow:
                optimizer._cached_plan = None
            optimizer.step()
        self.check()

    def check(self) -> None:
        params = [
            [param for group in optimizer.param_groups for param in group["params"]]
            for optimizer in (self.fast, self.slow)
        ]
        for ours, theirs in zip(*params, strict=True):
            assert torch.equal(ours, theirs)
            for name, value in self.fast.state[ours].items():
                assert torch.equal(value, self.slow.state[theirs][name]), name


@pytest.fixture(params=[sparsestep.Adam, own], ids=lambda cls: cls.__name__)
def pair(request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param)


def parameter() -> torch.nn.Parameter:
    made = torch.nn.Parameter(torch.ones(6, 2))
    made.grad = coo(1)
    return made


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "state": lambda opt, p: opt.state.update({p: {k: v.clone() for k, v in opt.state[p].items()}}),
    "a tensor of the state": lambda opt, p: opt.state[p].update(
        exp_avg=opt.state[p]["exp_avg"] * 2
    ),
    "memory": lambda opt, p: setattr(p, "data", p.data + 1),
    "count": lambda opt, p: opt.state[p].update(step=torch.tensor(40.0)),
    "lr": lambda opt, p: opt.param_groups[1].update(lr=0.5),
    "an equal lr": lambda opt, p: opt.param_groups[1].update(lr=float("0.1")),
    "another option": lambda opt, p: opt.param_groups[1].update(maximize=True),
    "lr in a tensor": lambda opt, p: opt.param_groups[0].update(lr=torch.tensor(0.5)),
    "mask": lambda opt, p: opt.param_groups[0].update(mask=torch.tensor([True, False] * 3)),
    "one group more": lambda opt, p: opt.add_param_group({"params": [parameter()]}),
    "one parameter less": lambda opt, p: opt.param_groups[1]["params"].pop(),
}


@pytest.mark.parametrize("cls", [sparsestep.AdamW, own])
def test_changes_between_steps_count(cls: Any):
    for change in CHANGES.values():
        pair = Pair(cls)
        for optimizer, params in zip((pair.fast, pair.slow), pair.params, strict=True):
            change(optimizer, params[0])
        for _ in range(3):
            pair.step(coo(1, 3, 1), coo(0, 5))


def test_gradients_of_another_kind(pair: Pair):
    for grads in (
        (coo(1, 3), torch.ones(6, 2)),
        (None, coo(4)),
        (None, None),
        (coo(2).coalesce(), torch.ones(6, 2).to_sparse(2)),
    ):
        for _ in range(2):
            pair.step(*grads)
            pair.step(coo(1, 3, 1), coo(0, 2))


@pytest.mark.parametrize(
    ("cls", "semantics"),
    [
        (sparsestep.AdamW, "masked"),
        (sparsestep.AdamW, "dense"),
        (sparsestep.RowwiseAdagrad, "masked"),
        (own, "masked"),
    ],
)
def test_a_model_with_dense_gradients_is_one_call(
    cls: Any, semantics: str, monkeypatch: pytest.MonkeyPatch
):
    """Together with a sparse table; matrices, vectors, and a single number."""
    model = torch.nn.Sequential(
        torch.nn.Embedding(6, 3, sparse=True), torch.nn.Linear(3, 4), torch.nn.PReLU()
    )
    # State per row of a parameter without dims is left to Python.
    shape = (1,) if cls is sparsestep.RowwiseAdagrad else ()
    number = torch.nn.Parameter(torch.ones(shape))
    opt = cls([*model.parameters(), number], lr=0.1, semantics=semantics)

    def step() -> None:
        opt.zero_grad()
        if cls is not own:  # as a scheduler does it; a formula is traced with each rate
            opt.param_groups[0]["lr"] *= 0.5
        (number * model(torch.tensor([1, 4])).square().sum()).sum().backward()
        opt.step()

    for _ in range(3):
        step()
    before = [param.detach().clone() for param in opt.param_groups[0]["params"]]
    monkeypatch.setattr(Step, "add_group", lambda *_: pytest.fail("the step was planned"))
    step()
    assert not any(map(torch.equal, before, opt.param_groups[0]["params"]))
    opt.engine = "reference"
    with pytest.raises(pytest.fail.Exception, match="was planned"):
        step()


def test_a_parameter_that_is_given_twice(pair: Pair):
    for optimizer, params in zip((pair.fast, pair.slow), pair.params, strict=True):
        optimizer.param_groups[1]["params"].append(params[0])
    pair.step(coo(1, 3), coo(2))
    assert float(pair.fast.state[pair.params[0][0]]["step"]) == 5


def test_a_formula_that_cannot_be_traced_any_more_is_called_from_then_on():
    @sparsestep.rule
    def turning(param, grad, *, step, lr=0.125):
        return param - lr * (grad if step < 5 or float(grad.sum()) > 0 else -grad)

    param = torch.nn.Parameter(torch.ones(6, 2))
    optimizer = turning([param])
    param.grad = coo(1, 3)
    for _ in range(4):
        optimizer.step()
    assert optimizer._cached_plan is not None
    with pytest.warns(sparsestep.SlowWarning, match="'turning'"):
        optimizer.step()
    assert optimizer._cached_plan is None
    assert float(optimizer.state[param]["step"]) == 5
    assert param[1].tolist() == [0.375, -0.25]
