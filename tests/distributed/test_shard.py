"""Sharded tables, trained by several ranks, are those of one process with all batches."""

from __future__ import annotations

import os
import resource
import sys

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
    each_kind,
    in_one_process,
    initial_rows,
    net_batch,
    put_together,
    said,
    sharded,
    trained,
    whole,
)
from tests.ranks import Rank, ranks
from tests.table import same_bits

shard = sparsestep.distributed.shard

SOAK = int(os.environ.get("SPARSESTEP_SOAK", "2000"))  # steps


def assert_alike(case: Case, ours: Results, theirs: Results, world: int) -> None:
    is_rounded = case.wire is not None and case.kind != "copy" and world > 1
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
            tolerance = 2e-2 if is_rounded or case.dtype is torch.bfloat16 else 2e-5
            torch.testing.assert_close(ours[key], value, rtol=tolerance, atol=tolerance)


def assert_trains_alike(rank: Rank, case: Case) -> None:
    parts = rank.gather(trained(case, rank.index, rank.world))
    if rank.is_last:
        ours, theirs = put_together(parts, case.kind), in_one_process(case, rank.world)
        assert_alike(case, ours, theirs, rank.world)


@ranks(1, 3)
@pytest.mark.parametrize("name", [*QUICK, *LOW_PRECISION])
def test_ranks_train_as_one_process_does(rank: Rank, name: str):
    """Random bits are those of the elements of the whole table."""
    assert_trains_alike(rank, {**QUICK, **LOW_PRECISION}[name])


@pytest.mark.slow
@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", list(SWEEP))
def test_every_rule_trains_as_in_one_process(rank: Rank, name: str):
    assert_trains_alike(rank, SWEEP[name])


@ranks(3)
def test_a_model_trains_in_ddp_as_in_one_process(rank: Rank):
    model, plain = Net(), Net()
    assert "rank 0" in str(shard(model, plan=PLAN))
    assert "sharded='tables', owner=0" in repr(model)
    ddp = nn.parallel.DistributedDataParallel(model)
    opt = sparsestep.AdamW(model.parameters(), lr=0.1)
    reference = sparsestep.AdamW(plain.parameters(), lr=0.1)
    for step in range(4):
        opt.zero_grad()
        ddp(net_batch(step, rank.index)).square().mean().backward()
        norm = float(sparsestep.clip_grad_norm_(model.parameters(), 0.5))
        opt.step()
        reference.zero_grad()
        ids = torch.cat([net_batch(step, index) for index in range(rank.world)])
        plain(ids).square().mean().backward()
        expected = float(sparsestep.clip_grad_norm_(plain.parameters(), 0.5))
        reference.step()
        assert norm == pytest.approx(expected, rel=1e-4)
        assert set(rank.gather(norm)) == {norm}
    kinds = {type(table.weight.grad).__name__ for table in model.tables.tables.values()}
    assert kinds <= {"CompactGrad", "NoneType"}
    for (name, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
        found = whole(rank, ours, PLAN.get(name.split(".")[-2], "copy"), len(theirs))
        torch.testing.assert_close(found, theirs.detach(), rtol=1e-4, atol=1e-5)


@ranks(2)
def test_a_rank_that_only_evaluates_serves_those_that_train(rank: Rank):
    """Its lookups are in inference mode, those of others have a gradient."""
    whole_table, _ = sharded("tables", order="global")
    # All rows come from the first rank as they are; the next transfer uses the same buffers.
    found = [whole_table(torch.tensor([row])).detach() for row in range(3)]
    assert torch.equal(torch.cat(found), initial_rows()[:3])
    torch.manual_seed(0)
    table = nn.EmbeddingBag(8, 2, mode="sum", padding_idx=0)
    before = table.weight.detach().clone()
    shard(table, plan="rows", reduce="sum")
    opt = sparsestep.SGD(table.parameters(), lr=1.0)
    ids, factors = torch.tensor([[1, 2], [0, 5]]), torch.tensor([[2.0, 1.0], [1.0, 3.0]])
    with torch.inference_mode(rank.index == 0):
        rows = table(ids, per_sample_weights=factors)
    if rank.index == 1:
        rows.sum().backward()
    opt.step()
    before[[1, 2, 5]] -= torch.tensor([[2.0], [1.0], [3.0]])
    torch.testing.assert_close(whole(rank, table.weight, "rows", 8), before)


@ranks(3)
@each_kind
def test_a_loss_may_leave_a_table_out_and_a_mask_rows(rank: Rank, kind: str):
    """Only the first rank's loss has the table; then no rank's has."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(7, 2, mode="sum")
    plan = shard(table, plan=kind, reduce="sum")
    opt = sparsestep.Adam(table.parameters(), lr=0.5)
    before = table.weight.detach().clone()
    rows = table(torch.tensor([[0, 3], [4, 0]]))
    if rank.index == 0:
        rows.sum().backward()
    opt.step()
    opt.zero_grad()
    once = table.weight.detach().clone()
    table(torch.tensor([[1, 2]]))
    opt.step()
    assert torch.equal(once, table.weight)
    changed = whole(rank, (once != before).any(1), kind)
    assert changed.nonzero().flatten().tolist() == [0, 3, 4]
    steps = [int(state["step"]) for state in opt.state.values()]
    assert steps == [1] or (kind == "tables" and steps == [])  # without rows, nothing is counted
    keep = [True, False] * 3 + [True]
    mask = plan.local("", torch.tensor(keep))
    masked = sparsestep.SGD([{"params": [table.weight], "mask": mask}], lr=1.0)
    table(torch.arange(7)[:, None]).sum().backward()
    masked.step()
    assert whole(rank, (once != table.weight).any(1), kind).tolist() == keep


@ranks(3)
@pytest.mark.parametrize("kind", ["tables", "rows", "copy", "rows in chunks"])
def test_gradients_add_up_however_they_come(rank: Rank, kind: str):
    """Several lookups and backward calls, also after clipping or a step; one is discarded."""
    if kind == "rows in chunks":
        kind = "rows"
        rank.monkeypatch.setattr("sparsestep.distributed.collectives.MAX_MESSAGE_BYTES", 24)
    table, opt = sharded(kind, order="global")
    ones = torch.ones(2, 2)
    table(torch.tensor([5, 6])).backward(ones)
    opt.zero_grad()
    first, second = table(torch.tensor([0, rank.index])), table(torch.tensor([1, 0]))
    (first + second).backward(ones, retain_graph=True)
    table(torch.tensor([2, 2])).backward(ones)
    sparsestep.clip_grad_norm_(table.parameters(), 1e9)
    if rank.is_last:  # the others have none that is still to be exchanged
        second.backward(ones, retain_graph=True)
    opt.step()
    opt.zero_grad()
    second.backward(ones)
    opt.step()
    del first, second
    with torch.no_grad():
        table(torch.tensor([0]))
    assert not table.sharding.served, "no lookup is kept for ever"
    after = initial_rows()
    for index in range(rank.world):
        for row in (0, index, 1, 0, 2, 2, 1, 0):  # the last two from the graph before the step
            after[row] -= 1
    after[:2] -= 1  # of the last rank, after clipping
    torch.testing.assert_close(whole(rank, table.weight, kind), after)


@ranks(3)
def test_gradients_that_are_still_to_be_exchanged(rank: Rank):
    table, opt = sharded("rows")
    table(torch.tensor([rank.index, 1])).sum().backward()
    weight = table.weight
    assert "still to be exchanged" in repr(weight.grad)
    copied = said(lambda: weight.grad.clone().coalesce())
    assert "must be exchanged before you read it" in copied
    # Reading a gradient on all ranks exchanges it.
    read = rank.gather(float(weight.grad.coalesce().values().sum()))
    assert sum(read) == 2 * 2 * rank.world
    assert "Leave it to step()" in said(lambda: opt.step_in_backward([weight]))
    norm = said(lambda: sparsestep.clip_grad_norm_([weight], 1.0, norm_type=-1.0))
    assert "norm_type must be greater than 0" in norm
    torchs = said(lambda: nn.utils.clip_grad_norm_([weight], 1.0))
    assert "Use sparsestep.clip_grad_norm_" in torchs
    opt.step_in_backward().remove()
    opt.step()
    opt.zero_grad()
    table(torch.tensor([rank.index, 1])).sum().backward()
    assert said(lambda: nn.utils.clip_grad_norm_([weight], 1.0)) == torchs
    opt.step()


@ranks(3)
@each_kind
def test_all_ranks_skip_a_step_with_an_infinite_gradient(rank: Rank, kind: str):
    """The last rank's gradient is infinite in the second step."""
    table, opt = sharded(kind)
    other, _ = sharded("tables")
    opt.add_param_group({"params": [other.weight]})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    has_row = {"rows": rank.index == 2 % rank.world, "tables": rank.index == 0, "copy": True}[kind]
    for step, scale in enumerate((4.0, 2.0, 2.0)):
        opt.zero_grad()
        factor = float("inf") if step == 1 and rank.is_last else 1.0
        rows, unused = table(torch.tensor([2])), other(torch.tensor([1]))
        loss = (rows * factor).sum() if rank.index else rows.sum() * factor + unused.sum()
        scaler.scale(loss).backward()
        before = table.weight.detach().clone()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        assert torch.equal(before, table.weight) != (has_row and step != 1)
        assert scaler.get_scale() == scale
    after = initial_rows()
    after[2] -= 2 * rank.world
    torch.testing.assert_close(whole(rank, table.weight, kind), after)


@pytest.mark.slow
@ranks(4, timeout=180 + SOAK / 5)
def test_many_steps_neither_hang_nor_grow(rank: Rank):
    """Uneven batches, tables left out, rows that one rank alone has."""
    model = Net()
    shard(model, plan=PLAN)
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


@ranks(2)
def test_several_ranks_need_the_extension(rank: Rank):
    rank.monkeypatch.setattr(sys.modules[shard.__module__], "ext", None)
    assert "extension" in said(lambda: sharded("rows"))


# One process


def test_tables_on_meta_get_the_rows_of_their_rank():
    with torch.device("meta"):
        model = nn.ModuleDict(
            {"one": nn.Embedding(50, 4, padding_idx=3), "two": nn.Embedding(50, 4)}
        )
    model["two"].weight = model["one"].weight
    torch.manual_seed(0)
    shard(model, plan="rows")
    weight = model["one"].weight
    assert weight is model["two"].weight
    assert weight.is_leaf
    assert 0.5 < float(weight.detach().std()) < 1.5
    assert not weight[3].any()
    opt = sparsestep.SGD(model.parameters(), lr=1.0)
    before = weight.detach().clone()
    (model["one"](torch.tensor([1, 3])) + model["two"](torch.tensor([2, 3]))).sum().backward()
    opt.step()
    changed = (weight != before).any(1).nonzero().flatten().tolist()
    assert changed == [1, 2, 3]  # 3 is padding of the one alone


def test_an_optimizer_that_was_made_with_tables_on_meta_trains_them():
    with torch.device("meta"):
        tables = nn.ModuleList([nn.Embedding(5, 2), nn.Embedding(5, 2)])
    tables[1].weight = tables[0].weight
    weight = tables[0].weight
    optimizer = sparsestep.Adam(tables.parameters(), lr=0.1)
    shard(tables, plan="rows")
    assert all(each.weight is weight for each in tables)
    before = weight.detach().clone()
    (tables[0](torch.tensor([1])) + tables[1](torch.tensor([4]))).sum().backward()
    optimizer.step()
    assert (weight != before).any(1).nonzero().flatten().tolist() == [1, 4]


def test_a_tracked_table_on_meta_is_refused():
    with torch.device("meta"):
        table = sparsestep.nn.Embedding(5, 2)
    sparsestep.Adam(table.parameters(), semantics="dense").track(table)
    with pytest.raises(sparsestep.InputError, match="must not be tracked yet"):
        shard(table, plan="rows")
    assert table.weight.is_meta


def test_torchs_optimizers_exchange_gradients_and_only_lookups_have_them():
    tables = [nn.Embedding(5, 2), nn.Embedding(5, 2)]
    tables[1].load_state_dict(tables[0].state_dict())
    shard(tables[0], plan="rows")
    sparsestep.nn.fuse(tables[1])
    for table in tables:
        opt = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        table(torch.tensor([1, 4, 1])).sum().backward()
        opt.step()
    assert torch.equal(tables[0].weight, tables[1].weight)
    loss = tables[0](torch.tensor([1])).sum() + tables[0].weight.square().sum()
    with pytest.raises(sparsestep.InputError, match="must only be used in lookups"):
        loss.backward()
    tables[0].weight.requires_grad_(False)
    assert not tables[0](torch.tensor([1, 4])).requires_grad
