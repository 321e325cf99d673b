"""DistributedOptimizer: tables in another process, trained over RPC."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from sparsestep.optimizer.base import RuleOptimizer
from tests.table import each_optimizer, same_bits

if not torch.distributed.is_available() or not torch.distributed.rpc.is_available():
    pytest.skip("needs RPC", allow_module_level=True)

from tests.distributed.conftest import RunOnce
from tests.distributed.pair import Results
from tests.distributed.rpc_worker import TIMES, Tables, batch, now_and_then


@pytest.fixture(scope="module")
def found(run_once: RunOnce) -> Results:
    return run_once("tests.distributed.rpc_worker", 2)[0]


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


@each_optimizer
def test_training_over_rpc_is_that_of_one_process(found: Results, optimizer: type[RuleOptimizer]):
    """Also of a table that only every other batch uses, and of a layer that is here."""
    alone, over_rpc = found["trained", optimizer.__name__]
    before = Tables().result()
    assert not any(same_bits(*pair) for pair in zip(before, over_rpc, strict=False))
    assert equal(over_rpc, alone)


def test_without_register_torch_steps_through_param_grad(found: Results):
    alone, over_rpc = found["not registered"]
    assert equal(over_rpc, alone)


@pytest.mark.parametrize("engine", ["native", "reference"])
@pytest.mark.parametrize("shared", [True, False], ids=["one optimizer", "two optimizers"])
def test_no_update_of_trainers_at_once_is_lost(found: Results, engine: str, shared: bool):
    assert found["at once", engine, shared].unique().tolist() == [-2 * TIMES]


def test_what_the_other_process_refuses_is_said(found: Results):
    assert "SGD: Invalid learning rate: -1.0" in found["refusal"]
    assert "SGD: param 0 of group 0: differentiable=True" in found["refusal of a step"]


def test_there_are_batches_that_use_one_table_only():
    assert {now_and_then(step) for step in range(2)} == {True, False}
    assert len(batch(0).unique()) < len(batch(0))
