"""Layouts at their edges, by hand: one number, no elements, parts of rows."""

from __future__ import annotations

import pytest
import torch
from torch.masked import masked_tensor

from sparsestep import IndexedGrad, functional
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.properties.test_layouts import each_of_a_few
from tests.subject import by_hand
from tests.table import Variant, each_engine, running_on

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
