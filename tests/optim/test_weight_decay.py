"""Weight decay, coupled and decoupled, is of what was touched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sparsestep.optim.optimizer import RuleOptimizer
from tests.table import WITH_COUPLED_DECAY, WITH_DECAY, each_engine, running_on, same_bits

TOUCHED, RESTING = [1, 4], [0, 2, 3, 5]


def decayed(
    optimizer: type[RuleOptimizer], values: torch.Tensor, engine: str, **options: Any
) -> torch.Tensor:
    param = torch.nn.Parameter(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)))
    with running_on(engine) as name:
        opt = optimizer([param], lr=0.5, engine=name, **options)
        param.grad = torch.sparse_coo_tensor(torch.tensor([TOUCHED]), values, param.shape)
        opt.step()
    return param.detach()


BEGIN = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
VALUES = torch.tensor([[1.0, -2.0, 0.5], [0.25, 4.0, -1.0]])


@each_engine
@pytest.mark.parametrize("optimizer", WITH_COUPLED_DECAY, ids=lambda o: o.__name__)
def test_coupled_decay_is_a_part_of_the_gradient_of_what_was_touched(
    optimizer: type[RuleOptimizer], engine: str
):
    with_decay = decayed(optimizer, VALUES, engine, weight_decay=0.125)
    by_hand = decayed(optimizer, VALUES + 0.125 * BEGIN[TOUCHED], engine)
    assert same_bits(with_decay, by_hand)
    assert same_bits(with_decay[RESTING], BEGIN[RESTING])


@each_engine
@pytest.mark.parametrize("optimizer", WITH_DECAY, ids=lambda o: o.__name__)
def test_decoupled_decay_shrinks_what_was_touched_and_nothing_else(
    optimizer: type[RuleOptimizer], engine: str
):
    """A gradient of zeros moves nothing by itself, so that the decay alone is seen."""
    options = {"weight_decay": 0.25}
    if optimizer in WITH_COUPLED_DECAY:
        options["decoupled_weight_decay"] = True
    after = decayed(optimizer, torch.zeros(2, 3), engine, **options)
    assert same_bits(after[TOUCHED], 0.875 * BEGIN[TOUCHED])
    assert same_bits(after[RESTING], BEGIN[RESTING])
