"""``torch.compile``: the step stays outside of graphs, and nothing odd is said about it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep

TABLES: dict[str, Callable[[], nn.Module]] = {
    "torch's": lambda: nn.Embedding(20, 4, sparse=True),
    "torch's bags": lambda: nn.EmbeddingBag(20, 4, sparse=True, mode="sum"),
    "ours": lambda: sparsestep.nn.Embedding(20, 4),
    "our bags": lambda: sparsestep.nn.EmbeddingBag(20, 4, mode="sum"),
}


class Model(nn.Module):
    def __init__(self, table: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = TABLES[table]()
        self.layer = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.layer(self.table(ids)).sum()


@sparsestep.rule(state={"mean": 0.0})
def own(param, grad, mean, *, lr):
    mean = 0.5 * mean + grad
    return param - lr * mean, mean


def trained(table: str, optimizer: Any, compiled: str, **options: Any) -> list[Tensor]:
    """What a model learns in four steps; ``compiled`` says which part of them is."""
    model = Model(table)
    opt = optimizer(model.parameters(), lr=0.1, **options)
    if options:
        opt.track(model)
    run = torch.compile(model, backend="eager") if compiled == "the model" else model

    def train(ids: Tensor) -> Tensor:
        opt.zero_grad()
        loss: Tensor = run(ids)
        loss.backward()
        opt.step()
        return loss

    if compiled == "the whole step":
        train = torch.compile(train, backend="eager")
    for number in range(4):
        train(torch.tensor([[number, number + 3], [number, 2 * number]]))
    opt.catch_up()
    return [param.detach() for param in model.parameters()]


DENSE = {"semantics": "dense"}
CASES: list[tuple[str, Any, str, dict[str, Any]]] = [
    ("torch's", own, "the whole step", DENSE),
    ("torch's bags", sparsestep.AdamW, "the model", DENSE),
    ("ours", sparsestep.AdamW, "the whole step", {}),
    ("our bags", sparsestep.AdamW, "the model", {}),
]


@pytest.mark.parametrize(("table", "optimizer", "compiled", "options"), CASES)
def test_it_learns_the_same_and_says_nothing(
    table: str,
    optimizer: Any,
    compiled: str,
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
):
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")  # torch takes back some of its own
        ours = trained(table, optimizer, compiled, **options)
    printed = capfd.readouterr()
    assert ([str(each.message) for each in said], printed.out, printed.err) == ([], "", "")
    assert all(map(torch.equal, ours, trained(table, optimizer, "nothing", **options)))


@pytest.mark.parametrize("optimizer", [sparsestep.Adagrad, sparsestep.Lion, own])
def test_an_optimizer_made_in_a_compiled_function(optimizer: Any):
    """As torch's suite makes one of its own."""

    def made(param: Tensor) -> tuple[Any, Tensor]:
        opt = optimizer([param], lr=0.1)
        return opt, param.square().sum()

    torch._dynamo.reset()
    results = []
    for make in (torch.compile(made, backend="eager"), made):
        param = nn.Parameter(torch.ones(3, 2))
        opt, loss = make(param)
        loss.backward()
        opt.step()
        results.append((param.detach(), opt.defaults, vars(opt).keys()))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]
