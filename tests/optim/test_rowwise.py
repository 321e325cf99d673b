"""Rules that keep state per row, and gradients that hold a part of a row."""

from __future__ import annotations

import pytest
import torch

import sparsestep


@pytest.mark.parametrize("engine", ["native", "reference"])
def test_coupled_decay_of_what_is_not_held_does_not_feed_the_rows_number(engine: str):
    """One element of four is held; the others would add (0.5 * 100)^2 each."""
    param, total = torch.full((2, 4), 100.0), torch.zeros(2)
    param[0, 1] = 1.0
    grad = sparsestep.IndexedGrad(torch.tensor([1]), torch.tensor([[1.5]]), 8, 1)
    sparsestep.functional.rowwise_adagrad_(
        param, grad, total, step=1, lr=0.1, weight_decay=0.5, engine=engine
    )
    assert total.tolist() == [(1.5 + 0.5) ** 2 / 4, 0.0]
    assert param.ne(100.0).nonzero().tolist() == [[0, 1]]
