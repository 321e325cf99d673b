"""Layouts at their edges; ``tests/properties/test_layouts.py`` compares all of them."""

from __future__ import annotations

import pytest
import torch
from torch.masked import masked_tensor

from sparsestep import IndexedGrad
from tests.generate.layouts import Entries
from tests.properties.marks import QUIET
from tests.properties.test_layouts import each_of_a_few
from tests.subject import by_hand
from tests.table import (
    Variant,
    each_engine,
    running_on,
)

pytestmark = [*QUIET, pytest.mark.usefixtures("one_thread")]


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


@pytest.mark.parametrize("name", ["csr", "csc", "torch.sparse_bsr (2, 2)", "masked csr"])
def test_what_torch_does_not_let_one_assign(name: str):
    """If this fails, torch has become more generous, and the documentation should say so."""
    stored = Entries.random((6, 8), (2, 2), 0.4, seed=0).stored(torch.float32)
    param = torch.nn.Parameter(torch.zeros(6, 8))
    with pytest.raises(RuntimeError, match="attempting to assign a gradient"):
        param.grad = stored[name][0]
