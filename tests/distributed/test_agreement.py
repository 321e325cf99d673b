"""If one rank fails, or differs from the others, all ranks raise and nothing changes on any."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep._torch import group_timeout
from sparsestep.distributed import collectives
from tests.distributed.runs import each_kind, initial_rows, said, sharded, whole
from tests.faults.snapshot import of_optimizer, snapshot
from tests.ranks import Rank, ranks
from tests.table import all_same_bits

lockstep, shard = sparsestep.distributed.lockstep, sparsestep.distributed.shard

IDS = torch.tensor([[0, 1, 4], [6, 6, 2]])
TIMEOUT, SOON = timedelta(seconds=100), timedelta(seconds=1)


# Errors on one rank


@ranks(2)
@each_kind
def test_bad_ids_on_one_rank_are_an_error_on_all(rank: Rank, kind: str):
    table, opt = sharded(kind)
    before = snapshot(of_optimizer(opt))
    message = said(lambda: table(torch.tensor([1, 99 if rank.is_last else 2])))
    expected = "Embedding (7 x 2): ids must be in [0, 7)" if rank.is_last else "rank 1, which looks"
    assert message.startswith(expected)
    assert before == snapshot(of_optimizer(opt))
    table(torch.tensor([rank.index])).sum().backward()  # the next step works
    opt.step()
    after = initial_rows()
    after[: rank.world] -= 1
    assert torch.equal(whole(rank, table.weight, kind), after)


# Ranks that differ


@ranks(2)
@each_kind
def test_ranks_that_do_different_things(rank: Rank, kind: str):
    def assert_told(work: Callable[[], Any], *parts: str) -> None:
        message = said(work)
        assert all(part in message for part in parts), message

    model = nn.ModuleList([nn.Embedding(7, 2), nn.Embedding(7, 2)])
    shard(model, plan=kind)
    opt = sparsestep.Adam(model.parameters())
    table, ids, order = model[rank.index], torch.tensor([1]), "in the same order"
    assert_told(lambda: table(ids), order, "looks up '0'", "looks up '1'")
    assert_told(lambda: table(ids) if rank.index else opt.step(), order, "looks up", "needs grad")
    for each in model:
        each(torch.tensor([1, 2])).sum().backward()
    clip = partial(sparsestep.clip_grad_norm_, list(model.parameters()), 1.0)
    assert_told(opt.step if rank.index else clip, "clip_grad_norm_ on rank 0, Adam.step() on rank")
    model[0].weight.requires_grad_(rank.index == 0)
    assert_told(opt.step, "frozen tables: none on rank 0, '0' on rank 1")
    model[0].weight.requires_grad_(True)
    opt.step()


@ranks(2)
def test_state_from_before_shard_is_refused(rank: Rank):
    for new in (
        sparsestep.Adam,
        sparsestep.RowwiseAdagrad,
        partial(sparsestep.SGD, lr=0.1, momentum=0.9, semantics="dense"),
    ):
        table = nn.Embedding(7, 2, sparse=True)
        opt = new(table.parameters())
        for _ in range(2):
            opt.zero_grad()
            table(torch.tensor([1, 2])).sum().backward()
            opt.step()
        shard(table, plan="rows")
        table(torch.tensor([1, 3])).sum().backward()
        weight, state = table.weight, dict(opt.state[table.weight])
        before = snapshot({"weight": weight, "state": state})
        assert "shape" in said(opt.step)
        assert before == snapshot({"weight": weight, "state": dict(opt.state[weight])})


class Differs(nn.Module):
    def __init__(self, rows: int = 7, dtype: Any = None, more: int = 0, seed: int = 0) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, 2, dtype=dtype)
        self.item = nn.EmbeddingBag(9, 2, mode="sum")
        self.more = nn.ModuleList([nn.Embedding(5, 2) for _ in range(more)])
        self.grams = sparsestep.nn.NgramEmbedding(7, 2, seed=seed)


# Options of the last rank's model, those of shard(), and what all ranks say.
MODELS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"rows": 8}, {}, "shape of 'user': 7 x 2 on rank 0, 8 x 2 on rank 1"),
    ({"dtype": torch.float64}, {}, "dtype of 'user': torch.float32 on rank 0, torch.float64 on"),
    ({"more": 1}, {}, "'item', 'grams' on rank 0, 'user', 'item', 'more.0', 'grams' on rank 1"),
    ({"seed": 1}, {}, "seed of 'grams': 0 on rank 0, 1 on rank 1"),
    ({}, {"plan": "copy"}, "plan of 'user': 'rows' on rank 0, 'copy' on rank 1"),
    ({}, {"plan": {"user": "rows", "item": "tables"}}, "plan of 'item': 'rows' on rank 0, 'tables"),
    ({}, {"reduce": "sum"}, "reduce of 'user': mean on rank 0, sum on rank 1"),
    ({}, {"wire": "int8"}, "wire: None on rank 0, int8 on rank 1"),
    ({}, {"order": "global"}, "order: fast on rank 0, global on rank 1"),
    ({}, {"plan": "row"}, ""),
]


OPTIMIZERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda p: sparsestep.Adam(p, betas=(0.8, 0.999)), "betas for the group of 'user'"),
    (lambda p: sparsestep.SGD(p), "caller: Adam.step() on rank 0, SGD.step() on rank 1"),
    (lambda p: sparsestep.Adam(p, semantics="dense"), "semantics: masked on rank 0, dense on"),
    (lambda p: sparsestep.Adam([{"params": [each]} for each in p]), "param groups: 'user', 'item'"),
]


@ranks(2)
def test_ranks_with_different_tables_and_optimizers(rank: Rank):
    for model_options, options, expected in MODELS:
        model = Differs(**model_options) if rank.is_last else Differs()
        params = list(model.parameters())
        before = [param.detach().clone() for param in params]
        options = {"plan": "rows", **(options if rank.is_last else {})}
        if not expected:
            expected = "Got 'row'. Use 'rows'." if rank.is_last else "rank 1 rejected its input"
        assert expected in said(partial(shard, model, **options))
        assert all(one is other for one, other in zip(params, model.parameters(), strict=True))
        assert all_same_bits(before, params)
        shard(Differs(), plan="rows")
    for make, expected in OPTIMIZERS:
        model = Differs()
        shard(model, plan="rows")
        params = list(model.parameters())
        opt = make(params) if rank.is_last else sparsestep.Adam(params)
        ids = torch.tensor([1, rank.index])
        (model.user(ids).sum() + model.item(ids[None]).sum()).backward()
        before = [p.detach().clone() for p in params]
        assert expected in said(opt.step)
        assert all_same_bits(before, params)
        assert not opt.state
        sparsestep.Adam(params).step()  # the same on all ranks
        assert any(rank.gather(not all_same_bits(before, params)))


@ranks(2)
def test_a_learning_rate_that_differs_later(rank: Rank):
    """From the second step on; a tensor counts as its value."""
    table, opt = sharded("copy")
    (group,) = opt.param_groups
    if rank.index == 0:
        group["lr"] = torch.tensor(1.0)
    messages = []
    for lr in (group["lr"], 0.25 + rank.index, 0.25):
        opt.zero_grad()
        table(IDS).sum().backward()
        group["lr"] = lr
        messages.append(said(opt.step))
    assert (messages[0], messages[2]) == ("", "")
    assert "lr for the table: 0.25 on rank 0, 1.25 on rank 1" in messages[1]
    ours, theirs = rank.gather(snapshot(of_optimizer(opt)))
    assert ours == theirs


# A rank that stops taking part


def looks_up() -> Callable[[], object]:
    table, _ = sharded("rows")
    table(IDS)
    return lambda: table(IDS)


def steps() -> Callable[[], object]:
    from torch.distributed.device_mesh import DeviceMesh

    table = nn.Embedding(7, 2)
    group = torch.distributed.new_group(timeout=TIMEOUT)
    shard(table, DeviceMesh.from_group(group, "cpu"), plan="rows")
    opt = sparsestep.Adam(table.parameters())
    table(IDS).sum().backward()
    return lambda: (table, opt.step())  # the table knows the other rank


def prefetches() -> Callable[[], object]:
    from sparsestep.distributed.lockstep import _active_prefetchers

    table, _ = sharded("rows")
    batches = [IDS.clone() for _ in range(9)]
    loop = iter(lockstep(batches, prefetch=1))
    for _ in range(2):
        table(next(loop))
    # The loop itself uses the default group; only its thread uses one of ours.
    prefetcher = _active_prefetchers[-1]
    task = prefetcher.submit(batches[0], 2) if torch.distributed.get_rank() == 0 else None

    def wait() -> None:
        assert task is not None
        task.sent.result()

    return wait


def set_timeouts(groups: list[Any], timeout: timedelta) -> None:
    for group in groups:
        torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


@ranks(2, fresh=True, killed=1)  # groups that have timed out cannot be used
def test_groups_wait_as_long_as_the_users_and_a_killed_rank_is_an_error(rank: Rank):
    set_timeouts([torch.distributed.group.WORLD], TIMEOUT)
    collectives.new_group("gloo")
    store = torch.distributed.FileStore(str(rank.folder / "store"), 2)
    for prepare in (looks_up, steps, prefetches):
        action = prepare()
        groups = list(torch.distributed.distributed_c10d._world.pg_map)
        assert {group_timeout(each) for each in groups} == {TIMEOUT}
        if rank.index:  # it is busy with something else
            store.wait([prepare.__name__], TIMEOUT)
        else:
            set_timeouts(groups, SOON)
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                action()
            set_timeouts(groups, TIMEOUT)
            store.set(prepare.__name__, "done")
    table, opt = sharded("rows")
    before = snapshot(of_optimizer(opt))
    table(IDS).sum().backward()
    if rank.index:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError):
        opt.step()
    assert before == snapshot(of_optimizer(opt))
