"""DistributedDataParallel: updates while gradients are being reduced, and sparse gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import sparsestep
from tests.table import same_bits

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.conftest import RunOnce
from tests.distributed.ddp_compact import LOOPS, Tables
from tests.distributed.ddp_worker import BATCHES, CLASSES, RANKS, STEPS, Model, full, name_of
from tests.distributed.pair import Results


@pytest.fixture(scope="module")
def found(run_once: RunOnce) -> list[Results]:
    return run_once("tests.distributed.ddp_worker", 2)


def equal(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
@pytest.mark.parametrize("name", [name_of(*each) for each in CLASSES])
def test_overlapped_updates_are_those_of_step(found: list[Results], name: str, sparse: bool):
    plain, overlapped = found[0]["overlap", sparse, name]
    assert not equal(plain, Model(sparse=sparse).result())
    assert equal(overlapped, plain)
    assert equal(found[1]["overlap", sparse, name][1], plain)


def test_torchs_own_optimizers_overlap_as_before(found: list[Results]):
    plain, overlapped = found[0]["torch"]
    assert equal(overlapped, plain)


@pytest.mark.parametrize("batches", BATCHES)
def test_sparse_gradients_are_reduced_and_few_rows_updated(found: list[Results], batches: str):
    """Also where a process has an empty batch; one that leaves the table out, DDP itself refuses.

    The same training in one process has the gradients of both batches, halved.
    """
    model = Model(sparse=True, dtype=torch.float64)
    before = model.result()
    opt = sparsestep.Adam(model.parameters(), lr=0.01)
    touched = set()
    for step in range(STEPS):
        opt.zero_grad()
        for rank in range(RANKS):
            ids = BATCHES[batches](rank, step)
            touched |= set(ids.tolist())
            (model(ids) / RANKS).backward()
        opt.step()
    for view in (False, True):
        trained = found[0]["sparse", batches, view]
        assert equal(found[1]["sparse", batches, view], trained)
        assert equal(found[0]["sparse overlap", batches], trained)
        for ours, theirs in zip(trained, model.result(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
        moved = (trained[0] != before[0]).any(dim=1)
        assert set(moved.nonzero().flatten().tolist()) == touched


@pytest.mark.parametrize("batches", BATCHES)
def test_compact_gradients_are_reduced(found: list[Results], batches: str):
    for rank in range(RANKS):
        assert equal(found[rank]["compact", batches], found[0]["sparse", batches, False])
        assert equal(found[rank]["compact overlap", batches], found[0]["sparse overlap", batches])


@pytest.mark.parametrize("name", LOOPS)
def test_compact_gradients_train_like_torchs_sparse_ones(found: list[Results], name: str):
    """Several tables, one looked up twice, and whatever DDP has for sparse gradients."""
    theirs = found[0]["torch's", name]
    assert not equal(theirs, Tables(torch.nn).result())
    for rank in range(RANKS):
        ours = found[rank]["ours", name]
        assert equal(ours, found[0]["ours", name])
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_a_collection_is_reduced(found: list[Results]):
    theirs, ours = found[0]["collection"]
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-14)


def test_the_ranks_have_different_batches():
    assert not torch.equal(full(0, 0), full(1, 0))


def test_only_the_chosen_parameters_are_updated(found: list[Results]):
    before, after = found[0]["some"]
    same = [same_bits(*each) for each in zip(before, after, strict=True)]
    assert same == [False, False, True]  # table, weight and bias of the layer


def test_overlapped_updates_round_as_those_of_step(found: list[Results]):
    """And all processes alike, though parameters may get their gradients in another order."""
    plain, overlapped = found[0]["rounding"]
    assert equal(overlapped, plain)
    assert equal(found[1]["rounding"][1], plain)


def test_zero_redundancy_optimizer_takes_the_optimizers(found: list[Results]):
    plain, sharded = found[0]["zero"]
    assert equal(sharded, plain)
