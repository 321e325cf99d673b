"""Layouts at their edges; ``tests/properties/test_layouts.py`` compares all of them."""

from __future__ import annotations

import pytest
import torch
from torch.masked import masked_tensor

from sparsestep import IndexedGrad, functional
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.properties.test_layouts import each_of_a_few
from tests.subject import by_hand
from tests.table import (
    FEW,
    Variant,
    each_engine,
    on_each_engine,
    randn,
    running_on,
    same_bits,
    state_tensors,
)

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


def test_one_number_is_a_parameter_too():
    for grad in (
        torch.tensor(2.0),
        IndexedGrad(torch.tensor([0]), torch.tensor([2.0])),
        IndexedGrad(torch.tensor([0, 0]), torch.tensor([1.5, 0.5]), 1, 1),
        masked_tensor(torch.tensor(2.0), torch.tensor(True)),
        torch.sparse_coo_tensor(torch.zeros(0, 2), torch.tensor([1.5, 0.5]), ()),
    ):
        param = torch.tensor(1.0)
        functional.sgd_(param, grad, lr=0.25, engine="native")
        assert param.item() == 0.5


@each_of_a_few
@each_engine
@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)], ids=str)
def test_a_parameter_without_elements(variant: Variant, engine: str, shape: tuple[int, int]):
    nothing = torch.zeros(0, dtype=torch.int64)
    zeros = torch.zeros(shape)
    with running_on(engine) as name:
        for grad in (
            zeros.to_sparse_csr(),
            zeros.to_sparse_csc(),
            zeros.to_sparse_bsr((2, 2)),
            zeros.to_sparse_bsc((1, 4)),
            masked_tensor(zeros.to_sparse_coo(), (zeros > 0).to_sparse_coo()),
            IndexedGrad(nothing, torch.zeros(0), 0, 1),
            IndexedGrad(nothing, torch.zeros(0, 3), 3, 0, nothing),
        ):
            run = by_hand(variant, name, zeros).take(grad)
            assert run.tensors[0].shape == shape


def test_batches_of_compressed_matrices():
    dense = torch.zeros(3, 2, 4)
    dense[[0, 1, 1, 2, 0, 2], [1, 0, 1, 1, 0, 1], [2, 0, 3, 1, 1, 3]] = torch.arange(1.0, 7.0)
    for grad in (dense.to_sparse_csr(), dense.to_sparse_csc(), dense.to_sparse_bsc((2, 1))):
        param = torch.zeros(dense.shape)
        functional.sgd_(param, grad, lr=1.0)
        assert torch.equal(param, -dense), grad.layout


@each_engine
def test_of_a_row_only_what_is_held_moves_and_all_of_it_counts(engine: str):
    """The mean is over the whole row; what is not held adds nothing to it."""
    held = torch.tensor([[False, True, False, True], [False] * 4, [True, False, False, False]])
    values = torch.tensor([[9.0, 3.0, 9.0, 4.0], [9.0] * 4, [2.0, 9.0, 9.0, 9.0]])
    mean_square = torch.tensor([25 / 4, 0.0, 4 / 4])
    with running_on(engine) as name:
        for layout, (grad, _) in Entries(values, held).stored(torch.float32, by_row=True).items():
            param, sums = torch.ones(3, 4), torch.full((3,), 0.5)
            functional.rowwise_adagrad_(param, grad, sums, lr=0.1, engine=name)
            assert torch.equal(sums, 0.5 + mean_square), layout
            expected = 1 - 0.1 * values / sums[:, None].sqrt()
            assert torch.allclose(param[held], expected[held], rtol=1e-6), layout
            assert torch.equal(param[~held], torch.ones(9)), layout


@on_each_engine(FEW)
def test_masked_tensors_as_grad(variant: Variant, engine: str):
    """The optimizer classes take from .grad what their functional twins are handed."""
    steps = [Entries.random((6, 8), (1, 1), 0.4, seed).stored(torch.float32) for seed in range(3)]
    with running_on(engine) as name:
        for layout in ("masked", "masked strides", "masked coo", "masked coo rows", "coo"):
            run = by_hand(variant, name, randn((6, 8)))
            param = torch.nn.Parameter(randn((6, 8)))
            opt = variant([param], engine=name)
            for stored in steps:
                param.grad, _ = stored[layout]
                run.take(param.grad)
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
