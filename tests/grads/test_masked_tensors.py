"""MaskedTensors as ``.grad``, and other layouts that torch does or does not let one assign."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsestep import functional
from sparsestep.optim.optimizer import RuleOptimizer
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.subject import by_hand
from tests.table import (
    Variant,
    each_engine,
    each_optimizer,
    randn,
    running_on,
    same_bits,
    state_tensors,
)

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


@each_optimizer
@each_engine
def test_masked_tensors_as_grad(optimizer: type[RuleOptimizer], engine: str):
    """The optimizer classes take from .grad what their functional twins are handed."""
    steps = [Entries.random((6, 8), (1, 1), 0.4, seed).stored(torch.float32) for seed in range(3)]
    with running_on(engine) as name:
        for layout in ("masked", "masked strides", "masked coo", "masked coo rows", "coo"):
            run = by_hand(Variant(optimizer, {}), name, randn((6, 8)))
            param = torch.nn.Parameter(randn((6, 8)))
            opt = optimizer([param], engine=name)
            for stored in steps:
                grad, _ = stored[layout]
                assert isinstance(grad, Tensor)
                run.take(grad)
                param.grad = grad
                opt.step()
                opt.zero_grad()
                assert param.grad is None
            ours = [param.detach(), *state_tensors(opt)]
            assert all(map(same_bits, ours, run.tensors)), layout


@pytest.mark.parametrize("name", ["csr", "csc", "torch.sparse_bsr (2, 2)", "masked csr"])
def test_what_torch_does_not_let_one_assign(name: str):
    """If this fails, torch has become more generous, and the documentation should say so."""
    stored = Entries.random((6, 8), (2, 2), 0.4, seed=0).stored(torch.float32)
    param = torch.nn.Parameter(torch.zeros(6, 8))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient"):
        param.grad = stored[name][0]


def test_two_of_four_is_for_other_devices():
    with pytest.raises(RuntimeError, match="Only CUDA tensors are currently supported"):
        torch.sparse.to_sparse_semi_structured(torch.ones(64, 64, dtype=torch.float16))


# The example of the MaskedTensor notebook (torch's issue 1369)


def notebook() -> tuple[Tensor, Entries, Tensor]:
    """Its parameter, gradient and sum of squares; the step size is 0.1, eps 1e-10."""
    values = torch.zeros(2, 4)
    values[[0, 1, 1], [2, 0, 2]] = torch.tensor([3.0, 4.0, 5.0])
    return torch.arange(8.0).reshape(2, 4), Entries(values, values != 0), torch.full((2, 4), 0.5)


@each_engine
def test_the_example_of_the_notebook(engine: str):
    start, entries, _ = notebook()
    theirs = torch.nn.Parameter(start.clone())
    opt = torch.optim.Adagrad([theirs], lr=0.1, eps=1e-10, initial_accumulator_value=0.5)
    theirs.grad = entries.coo(torch.float32)
    opt.step()
    sums = torch.tensor([[0.5, 0.5, 9.5, 0.5], [16.5, 0.5, 25.5, 0.5]])
    assert torch.equal(opt.state[theirs]["sum"], sums)
    expected = start - 0.1 * entries.values / (sums.sqrt() + 1e-10)
    assert torch.allclose(theirs, expected, rtol=1e-7)

    stored = entries.stored(torch.float32)
    for block in ((1, 2), (2, 1), (2, 2), (1, 4), (2, 4)):
        # Blocks hold zeros too, by which Adagrad moves nothing.
        stored[f"bsr {block}"] = (entries.values.to_sparse_bsr(block), None)
        stored[f"bsc {block}"] = (entries.values.to_sparse_bsc(block), None)
    with running_on(engine) as name:
        for layout, (grad, mask) in stored.items():
            param, _, state_sum = notebook()
            functional.adagrad_(
                param, grad, state_sum, step=1, lr=0.1, eps=1e-10, mask=mask, engine=name
            )
            assert torch.equal(state_sum, sums), layout
            assert torch.allclose(param, theirs, rtol=1e-7), layout
            assert same_bits(param[~entries.held], start[~entries.held]), layout
