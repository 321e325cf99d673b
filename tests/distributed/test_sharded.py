"""Parameters that are DTensors, as FSDP2 makes them: each process updates the part that it has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep.rules import OPTIMIZERS
from tests.table import same_bits
from tests.torch_versions import SUMS_SHARDED_GRADIENTS, needs_means_over_gloo

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.conftest import RunOnce
from tests.distributed.pair import Results, run_ranks
from tests.distributed.sharded_worker import HYBRID, ROWS, Model, by_hand, options_of, train


@pytest.fixture(scope="module")
def found(run_once: RunOnce) -> list[Results]:
    return run_once("tests.distributed.sharded_worker", 2)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_sharded_training_has_the_bits_of_one_process(
    found: list[Results], optimizer: type[torch.optim.Optimizer]
):
    """Across a checkpoint. Both have the same batch: the mean of their gradients is each one.

    Where torch takes their sum, that is twice the one.
    """
    assert_bits_of_one_process(found, optimizer, [4, 3])


def assert_bits_of_one_process(
    found: list[Results], optimizer: type[torch.optim.Optimizer], rows_of_rank: list[int]
) -> None:
    model = Model()
    opt = optimizer(model.parameters(), **options_of(optimizer))
    train(model, opt, range(6), times=2.0 if SUMS_SHARDED_GRADIENTS else 1.0)
    state = opt.state[model.table.weight]
    for rank, rows in enumerate(rows_of_rank):
        result = found[rank][optimizer.__name__]
        assert all(map(same_bits, result["params"], model.parameters()))
        assert result["state"], "the state is sharded like the parameter"
        assert all(same_bits(value, state[name]) for name, value in result["state"].items())
        assert result["rows"] == rows


@needs_means_over_gloo
def test_a_mesh_of_copies_and_shards(tmp_path: Path):
    """HSDP: two pairs of processes, each of which shares the whole model."""
    found = run_ranks("tests.distributed.sharded_worker", tmp_path, 4)
    for optimizer in HYBRID:
        assert_bits_of_one_process(found, optimizer, [4, 3, 4, 3])
        assert_goes_on(found, optimizer)
    assert_placed(found)


@pytest.mark.parametrize("optimizer", HYBRID)
def test_training_goes_on_from_a_distributed_checkpoint(
    found: list[Results], optimizer: type[torch.optim.Optimizer]
):
    assert_goes_on(found, optimizer)


def assert_goes_on(found: list[Results], optimizer: type[torch.optim.Optimizer]) -> None:
    for each in found:
        ours = each["saved", optimizer.__name__]
        assert all(map(same_bits, ours, each[optimizer.__name__]["params"]))


def test_parameters_divided_by_hand_have_the_bits_of_whole_ones(found: list[Results]):
    assert_placed(found)


def assert_placed(found: list[Results]) -> None:
    """Divided along either dim, or copied, under every optimizer; and as torch's AdamW does it."""
    for place, optimizer in enumerate(OPTIMIZERS):
        param = torch.nn.Parameter(torch.ones(ROWS, 4))
        after(param, optimizer([param], **options_of(optimizer)))
        for each in found:
            assert len(each["placed"]) == 3
            for name, whole in each["placed"].items():
                by_row = optimizer in (sparsestep.RowwiseAdagrad, sparsestep.RowwiseAdam)
                is_refused = by_row and "1" in name  # such a rule would see half a row
                wanted = torch.ones(ROWS, 4) if is_refused else param.detach()
                assert same_bits(whole[place], wanted), (optimizer, name)
    theirs = torch.nn.Parameter(torch.ones(ROWS, 4))
    after(theirs, torch.optim.AdamW([theirs], lr=0.05))
    for whole in found[0]["placed"].values():
        ours = whole[OPTIMIZERS.index(sparsestep.AdamW)]
        torch.testing.assert_close(ours, theirs.detach())


def after(param: torch.nn.Parameter, opt: torch.optim.Optimizer) -> None:
    for step in range(3):
        param.grad = by_hand(step)
        opt.step()


def test_a_sparse_gradient_is_that_of_the_local_rows(found: list[Results]):
    moved = [-2.0, 0.0, -1.0, 0.0, -2.0, 0.0, -1.0]
    assert len(moved) == ROWS
    for rank in (0, 1):
        assert found[rank]["sparse"].tolist() == [[value] * 4 for value in moved]
