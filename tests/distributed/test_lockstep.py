"""Ranks that run out of data at different times, and ids that are sent in advance."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sparsestep
from sparsestep.distributed import _requests, lookup
from sparsestep.distributed._table import ShardedTable
from tests.distributed.runs import (
    BATCH,
    ROWS,
    Case,
    Tables,
    batch_of,
    collected,
    each_kind,
    initial_rows,
    said,
    sharded,
    whole,
)
from tests.faults.snapshot import snapshot
from tests.ranks import Rank, ranks

lockstep, shard = sparsestep.distributed.lockstep, sparsestep.distributed.shard

STEPS = 6


@ranks(3)
def test_ranks_may_run_out_of_data_at_different_times(rank: Rank):
    """The first rank has no data at all, the others as many batches as their number."""
    table, opt = sharded("rows")
    sizes = []
    for ids in lockstep([torch.tensor([0, rank.index])] * rank.index):
        opt.zero_grad()
        table(ids).sum().backward()
        opt.step()
        sizes.append(len(ids))
    assert sizes == [2] * rank.index + [0] * (rank.world - 1 - rank.index)
    after = initial_rows()
    for index in range(rank.world):
        after[0] -= index
        after[index] -= index
    torch.testing.assert_close(whole(rank, table.weight), after)


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many lookups send ids when they are done."""
    calls: list[int] = []
    real = lookup.read_ids

    def read_ids(*arguments: Any) -> Any:
        calls.extend([1] * (threading.current_thread() is threading.main_thread()))
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for module in (lookup, _requests):
            patch.setattr(module, "read_ids", read_ids)
        yield calls


@ranks(3)
@each_kind
def test_prefetched_ids_give_the_same_bits(rank: Rank, kind: str):
    """Ranks end at different times; tensors are replaced in one step, and modified in another."""
    found, num_tables, case = [], len(ROWS), Case(kind)
    real, begun = ShardedTable.prefetch, []

    def prefetch_rows(table: ShardedTable, rows: Tensor) -> None:
        begun.extend([1] * (threading.current_thread() is not threading.main_thread()))
        real(table, rows)

    rank.monkeypatch.setattr(ShardedTable, "prefetch", prefetch_rows)
    for prefetch in (0, 1):
        model = Tables()
        shard(model, plan=kind, reduce="sum", order="global")
        opt = case.optimizer(model)
        batches = [batch_of(step, rank.index, BATCH) for step in range(STEPS - rank.index)]
        with counted() as sent:
            for step, batch in enumerate(lockstep(batches, prefetch)):
                if step == 3 and rank.index == 0:  # all ranks send theirs
                    batch = copy.deepcopy(batch)
                if step == 4 and rank.index == 0:  # all ranks send those of this table
                    batch.user.clamp_(max=2)
                case.step(model, opt, batch)
        found.append(snapshot(collected(model, opt, [])))
        # Prefetched: all but the first two, and the one where a rank had other tensors.
        assert len(sent) == (num_tables * 3 + 1 if prefetch else num_tables * STEPS)
        # Of tables in files, owners begin to read the rows.
        assert len(begun) == num_tables * (STEPS - 2) * (prefetch and kind != "copy")
    assert found[0] == found[1]


@ranks(2)
def test_ids_are_prefetched_if_ranks_have_sharded_different_models(rank: Rank):
    alone = dist.new_group([0])
    if rank.index == 0:
        shard(nn.Embedding(5, 2), DeviceMesh.from_group(alone, "cpu"))
    table, _ = sharded("rows")
    with counted() as sent:
        for ids in lockstep([torch.tensor([1, step]) for step in range(5)], prefetch=1):
            table(ids)
    assert len(sent) == 2  # those of the first two batches


@ranks(3)
@pytest.mark.parametrize(
    ("function", "in_thread", "nth"),
    [
        ("bad ids", True, 0),
        ("read_ids", True, 1),
        ("serve_lookups", False, 3),
        ("_row_sections", False, 5),
    ],
)
def test_a_rank_that_fails_while_ids_are_prefetched(
    rank: Rank, function: str, in_thread: bool, nth: int
):
    """The lookup says so on every rank, before and after it knows the rows to send."""
    table, opt = sharded("rows")
    module, calls = _requests if in_thread else lookup, []
    batches = [torch.tensor([0, 1]) for _ in range(STEPS)]

    def fail(*arguments: Any, **options: Any) -> Any:
        if (threading.current_thread().name == "sparsestep-ids") == in_thread:
            calls.append(1)
            if len(calls) == nth:
                raise MemoryError("no memory, says the test")
        return real(*arguments, **options)

    if rank.is_last and function == "bad ids":
        batches[3] = torch.tensor([0, 99])
    elif rank.is_last:
        real = getattr(module, function)
        rank.monkeypatch.setattr(module, function, fail)
    messages = []
    for batch in lockstep(batches, prefetch=1):
        opt.zero_grad()
        messages.append(said(lambda batch=batch: table(batch).sum().backward(), Exception))
        opt.step()
    (failed,) = filter(None, messages)
    own = "Embedding (7 x 2): ids must be in [0, 7)" if not nth else "no memory, says the test"
    assert failed.startswith(own if rank.is_last else "rank 2, which looks up the table, ")
    assert len({tuple(map(bool, each)) for each in rank.gather(messages)}) == 1
    after = initial_rows()
    after[:2] -= (STEPS - 1) * rank.world
    torch.testing.assert_close(whole(rank, table.weight), after)


@ranks(3)
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_if_a_loader_fails_all_ranks_raise(rank: Rank, error: type[BaseException]):
    """The loader of the last rank raises in place of its third batch; all reuse a batch."""

    def loader() -> Iterator[Tensor]:
        yield torch.tensor([0])
        yield torch.tensor([1])
        if rank.is_last:
            raise error("the disk is gone")
        yield torch.tensor([2])

    for prefetch in (0, 1):
        seen: list[int] = []
        loop = lockstep(loader(), prefetch)
        message = said(lambda loop=loop, seen=seen: seen.extend(map(int, loop)), BaseException)
        failed = f"rank {rank.world - 1} has no next batch"
        assert ("the disk is gone" if rank.is_last else failed) in message
        assert seen == ([] if prefetch else [0, 1])
    buffer = torch.zeros(2, dtype=torch.int64)
    batches = (buffer.fill_(step) for step in range(3))
    message = said(lambda: list(lockstep(batches, prefetch=1)))
    assert "must not modify a batch after yielding it" in message


def test_one_process_prefetches_nothing():
    """And warns of nothing."""
    table = nn.Embedding(5, 2)
    shard(table, plan="rows")
    for ids in lockstep([torch.tensor([1])] * 3, prefetch=1):
        table(ids[:1])
