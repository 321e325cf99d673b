"""Sharded tables, trained by several ranks, are those of one process with all batches."""

from __future__ import annotations

import os
import resource
import signal

import pytest
import torch
from torch import nn

import sparsestep
from tests.distributed.runs import (
    LOW_PRECISION,
    PLAN,
    QUICK,
    SWEEP,
    Case,
    Net,
    Results,
    in_one_process,
    put_together,
    trained,
)
from tests.ranks import Rank, ranks
from tests.table import same_bits

SOAK = int(os.environ.get("SPARSESTEP_SOAK", "2000"))  # steps


def assert_alike(case: Case, ours: Results, theirs: Results) -> None:
    assert ours.keys() == theirs.keys()
    for key, value in theirs.items():
        if key == "norms":
            wanted = [float(norm) for norm in value if norm is not None]
            got = [float(norm) for norm in ours[key] if norm is not None]
            assert got == pytest.approx(wanted, rel=1e-5)
        elif not isinstance(value, torch.Tensor) or not value.dim():
            assert ours[key] == value, key
        elif case.order == "global" and case.clip is None:
            assert same_bits(ours[key], value), key
        else:
            tolerance = 2e-2 if case.dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(ours[key], value, rtol=tolerance, atol=tolerance)


def assert_trains_alike(rank: Rank, case: Case) -> None:
    parts = rank.gather(trained(case, rank.index, rank.world))
    if rank.is_last:
        assert_alike(case, put_together(parts, case.kind), in_one_process(case, rank.world))


@ranks(2, 3)
@pytest.mark.parametrize("name", list(QUICK))
def test_ranks_train_as_one_process_does(rank: Rank, name: str):
    assert_trains_alike(rank, QUICK[name])


@ranks(3)
@pytest.mark.parametrize("name", list(LOW_PRECISION))
def test_ranks_round_as_one_process_does(rank: Rank, name: str):
    """Random bits are those of the elements of the whole table."""
    assert_trains_alike(rank, LOW_PRECISION[name])


@pytest.mark.slow
@ranks(1, 2, 3, 4, timeout=120.0)
@pytest.mark.parametrize("name", list(SWEEP))
def test_every_rule_trains_as_in_one_process(rank: Rank, name: str):
    assert_trains_alike(rank, SWEEP[name])


@ranks(2, timeout=20.0, killed=1)
def test_the_others_raise_when_a_rank_is_killed(rank: Rank):
    table = nn.Embedding(7, 2)
    sparsestep.distributed.shard(table, plan="rows")
    optimizer = sparsestep.SGD(table.parameters(), lr=1.0)
    before = table.weight.detach().clone()
    table(torch.tensor([rank.index])).sum().backward()
    if rank.is_last:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        optimizer.step()
    assert torch.equal(before, table.weight)


@pytest.mark.slow
@ranks(4, timeout=180 + SOAK / 5)
def test_many_steps_neither_hang_nor_grow(rank: Rank):
    """Uneven batches, tables left out, rows that one rank alone has."""
    model = Net()
    sparsestep.distributed.shard(model, plan=PLAN)
    optimizer = sparsestep.Adam(model.parameters(), lr=0.01)
    draw = torch.Generator().manual_seed(rank.index)
    for step in range(SOAK):
        optimizer.zero_grad()
        size, skips = torch.randint(0, 4, (2,), generator=draw).tolist()
        found = model.tables(torch.randint(0, 3, (size, 3, 2), generator=draw))
        used = [rows for number, rows in enumerate(found.values()) if number != skips]
        if skips != 3 or step % 7:
            sum(used).square().sum().backward()
        optimizer.step()
        kept = len(model.tables.sharding.served)
        assert kept <= 6, "lookups of the step before, and of this one"
        if step == SOAK // 2:
            early = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - early < 20_000, "kilobytes"
    steps = rank.gather([int(s["step"]) for s in optimizer.state.values() if "step" in s])
    assert set(steps[rank.index]) <= set(steps[0])
