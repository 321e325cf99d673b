"""What is looked at before rows are brought up to date in a step."""

from __future__ import annotations

import pytest
import torch

import sparsestep


@pytest.mark.parametrize("count", [torch.tensor(float("nan")), torch.tensor(-1.0)])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_count_that_counts_nothing_is_refused(count: torch.Tensor, sparse: bool):
    param = torch.nn.Parameter(torch.ones(4, 2))
    optimizer = sparsestep.Adagrad([param], lr=0.1, semantics="dense")
    optimizer.materialize_state()
    optimizer.state[param]["step"] = count
    param.grad = torch.ones(4, 2).to_sparse(1) if sparse else torch.ones(4, 2)
    with pytest.raises(
        sparsestep.InputError, match=r"Adagrad: param 0 of group 0: .*the number of steps taken"
    ):
        optimizer.step()
    assert bool((param == 1).all())
