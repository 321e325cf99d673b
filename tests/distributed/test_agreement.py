"""Ranks that share tables agree: on errors, on steps, on what is left out, on ids sent ahead."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.distributed.runs import PLAN, Net, each_kind, net_batch, said, whole
from tests.ranks import Rank, ranks
from tests.table import same_bits

lockstep, shard = sparsestep.distributed.lockstep, sparsestep.distributed.shard


def begin(rows: int = 7) -> Tensor:
    torch.manual_seed(0)
    return nn.Embedding(rows, 2).weight.detach()


def sharded(kind: str, **options: Any) -> tuple[nn.Embedding, RuleOptimizer]:
    torch.manual_seed(0)
    table = nn.Embedding(7, 2)
    shard(table, plan=kind, reduce="sum", **options)
    return table, sparsestep.SGD(table.parameters(), lr=1.0)


def assert_next_step_works(rank: Rank, table: nn.Embedding, opt: Any, kind: str = "rows") -> None:
    """It subtracts one from the row of each rank's number."""
    table(torch.tensor([rank.index])).sum().backward()
    opt.step()
    after = begin()
    after[: rank.world] -= 1
    assert torch.equal(whole(rank, table.weight, kind), after)


@ranks(3)
@each_kind
def test_a_rank_with_bad_ids_says_so_and_the_others_name_it(rank: Rank, kind: str):
    table, opt = sharded(kind)
    before = table.weight.detach().clone()
    message = said(lambda: table(torch.tensor([1, 99 if rank.is_last else 2])))
    if rank.is_last:
        expected = "Embedding (7 x 2): ids must be in [0, 7). Got 99 at position 1."
    else:
        expected = f"rank {rank.world - 1}, which looks up the table, rejected"
    assert message.startswith(expected)
    assert torch.equal(before, table.weight)
    assert_next_step_works(rank, table, opt, kind)


@ranks(3)
def test_ranks_at_different_places_are_told(rank: Rank):
    table, opt = sharded("rows")
    message = said(lambda: table(torch.tensor([1])) if rank.index else opt.step())
    for part in ("must call sharded tables in the same order", "looks up", "needs gradients"):
        assert part in message
    assert f"rank {rank.index}, which" in message
    assert_next_step_works(rank, table, opt)


@ranks(2)
@each_kind
def test_ranks_that_look_up_different_tables_are_told(rank: Rank, kind: str):
    model = nn.ModuleList([nn.Embedding(7, 2), nn.Embedding(7, 2)])
    shard(model, plan=kind)
    message = said(lambda: model[rank.index](torch.tensor([1])))
    for part in ("must call sharded tables in the same order", "looks up '0'", "looks up '1'"):
        assert part in message
    for table in model:
        assert table(torch.tensor([1, 2])).shape == (2, 2)


@ranks(2)
@each_kind
def test_ranks_with_different_options_are_told(rank: Rank, kind: str):
    table, opt = sharded(kind)
    opt.param_groups[0]["lr"] = 1.0 + rank.index
    table(torch.tensor([1])).sum().backward()
    before = table.weight.detach().clone()
    message = said(opt.step)
    for part in ("with the same optimizer and options", "1.0 on rank 0, 2.0 on rank 1"):
        assert part in message
    assert torch.equal(before, table.weight)
    opt.param_groups[0]["lr"] = 1.0
    opt.zero_grad()
    assert_next_step_works(rank, table, opt, kind)


@ranks(2, 3)
@each_kind
def test_a_loss_may_leave_a_table_out(rank: Rank, kind: str):
    """Only the first rank's loss has the table; then no rank's has."""
    torch.manual_seed(0)
    table = nn.EmbeddingBag(7, 2, mode="sum")
    shard(table, plan=kind, reduce="sum")
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
    moved = whole(rank, (once != before).any(1), kind)
    assert moved.nonzero().flatten().tolist() == [0, 3, 4]
    steps = [int(state["step"]) for state in opt.state.values()]
    assert steps == [1] or (kind == "tables" and steps == [])  # without rows, nothing is counted


@ranks(3)
@pytest.mark.parametrize("kind", ["tables", "rows", "copy", "rows in chunks"])
def test_gradients_add_up_however_they_come(rank: Rank, kind: str):
    """Several lookups, several backward calls, a discarded gradient, a graph before the step."""
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
    opt.step()
    opt.zero_grad()
    second.backward(ones)
    opt.step()
    del first, second
    with torch.no_grad():
        table(torch.tensor([0]))
    assert not table.sharding.served, "no lookup is kept for ever"
    after = begin()
    for index in range(rank.world):
        for row in (0, index, 1, 0, 2, 2, 1, 0):  # the last two from the graph before the step
            after[row] -= 1
    torch.testing.assert_close(whole(rank, table.weight, kind), after)


@ranks(3)
def test_what_is_refused_says_why(rank: Rank):
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


@ranks(2, 3)
def test_a_model_trains_in_ddp_as_in_one_process(rank: Rank):
    model, plain = Net(), Net()
    shard(model, plan=PLAN)
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
        kind = PLAN.get(name.split(".")[-2], "copy")
        found = whole(rank, ours, kind, len(theirs))
        torch.testing.assert_close(found, theirs.detach(), rtol=1e-4, atol=1e-5)


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
    after = begin()
    for index in range(rank.world):
        after[0] -= index
        after[index] -= index
    torch.testing.assert_close(whole(rank, table.weight), after)


@ranks(3)
@each_kind
def test_a_mask_keeps_its_rows(rank: Rank, kind: str):
    table = nn.Embedding(7, 2)
    plan = shard(table, plan=kind, reduce="sum")
    keep = [True, False] * 3 + [True]
    mask = plan.local("", torch.tensor(keep))
    opt = sparsestep.SGD([{"params": [table.weight], "mask": mask}], lr=1.0)
    before = table.weight.detach().clone()
    table(torch.arange(7)).sum().backward()
    opt.step()
    assert whole(rank, (before != table.weight).any(1), kind).tolist() == keep


@ranks(3)
@each_kind
def test_all_ranks_skip_the_step_that_one_of_them_cannot_take(rank: Rank, kind: str):
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
    after = begin()
    after[2] -= 2 * rank.world
    torch.testing.assert_close(whole(rank, table.weight, kind), after)


# Ids that are sent ahead

STEPS = 6


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many lookups send ids when they are done."""
    from sparsestep.distributed import lookup

    calls: list[int] = []
    real = lookup.exchange_ids

    def exchange_ids(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lookup, "exchange_ids", exchange_ids)
        yield calls


@ranks(2, 3)
@each_kind
def test_ids_sent_ahead_give_the_same_bits(rank: Rank, kind: str):
    """Ranks end at different times; one of them is given other tensors for a while."""
    found = []
    for prefetch in (0, 1):
        table, opt = sharded(kind, order="global")
        batches = [
            {"ids": net_batch(step, rank.index)[:, 0, 0]} for step in range(STEPS - rank.index)
        ]
        with counted() as sent:
            for step, batch in enumerate(lockstep(batches, prefetch)):
                opt.zero_grad()
                ids = batch["ids"]
                if step == 3 and rank.index == 0:
                    ids = ids.clone()  # no tensor of the batch: all ranks send theirs now
                table(ids).square().sum().backward()
                opt.step()
        found.append(table.weight.detach())
        # Ahead: all but the first two, and the one where a rank had other tensors.
        assert len(sent) == (3 if prefetch else STEPS)
    assert same_bits(*found)


@ranks(3)
def test_all_look_ups_of_a_model_are_sent_ahead(rank: Rank):
    """Several tables of all kinds, looked up at once, and one of them once more."""
    found = []
    for prefetch in (0, 1):
        model = Net()
        shard(model, plan=PLAN, reduce="sum", order="global")
        params = list(model.tables.parameters())
        before = torch.cat([p.detach().flatten() for p in params])
        batches = [
            list(net_batch(step, rank.index).movedim(1, 0).contiguous()) for step in range(STEPS)
        ]
        user: Any = model.tables.tables["user"]
        with counted() as sent:
            for ids in lockstep(batches, prefetch):
                rows = sum(model.tables(ids).values()) + user(ids[0])
                rows.square().sum().backward()
                with torch.no_grad():
                    for param in params:
                        if param.grad is not None and len(param):
                            param -= 0.01 * param.grad.coalesce().to_dense()
                        param.grad = None
        found.append(torch.cat([p.detach().flatten() for p in params]))
        assert not torch.equal(before, found[-1])
        assert len(sent) == (4 if prefetch else 2 * STEPS)
    assert same_bits(*found)


@ranks(3)
def test_bad_ids_that_were_to_be_sent_ahead(rank: Rank):
    """The last rank's fourth batch has an id out of range, as every loop goes on."""
    table, opt = sharded("rows")
    ids = [torch.tensor([1, rank.index]) for _ in range(STEPS)]
    if rank.is_last:
        ids[3] = torch.tensor([1, 99])
    for step, batch in enumerate(lockstep(ids, prefetch=1)):
        opt.zero_grad()
        message = said(lambda batch=batch: table(batch).sum().backward())
        if step != 3:
            assert message == ""
            opt.step()
        elif rank.is_last:
            assert message.startswith("Embedding (7 x 2): ids must be in [0, 7)")
        else:
            assert message.startswith(f"rank {rank.world - 1}, which looks up")
    after = begin()
    after[1] -= (STEPS - 1) * rank.world
    after[: rank.world] -= STEPS - 1
    torch.testing.assert_close(whole(rank, table.weight), after)


@ranks(3)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_where_a_loader_raises_all_ranks_do(rank: Rank, prefetch: int):
    """The loader of the last rank raises where it should give the third batch."""

    def loader() -> Iterator[Tensor]:
        yield torch.tensor([0])
        yield torch.tensor([1])
        if rank.is_last:
            raise ValueError("the disk is gone")
        yield torch.tensor([2])

    seen: list[int] = []
    message = said(lambda: seen.extend(map(int, lockstep(loader(), prefetch))), Exception)
    failed = f"rank {rank.world - 1} has no next batch"
    assert ("the disk is gone" if rank.is_last else failed) in message
    assert seen == ([0] if prefetch else [0, 1])


@ranks(2)
def test_a_loader_that_writes_to_the_batch_it_gave_is_refused(rank: Rank):
    buffer = torch.zeros(2, dtype=torch.int64)
    batches = (buffer.fill_(step) for step in range(3))
    message = said(lambda: list(lockstep(batches, prefetch=1)))
    assert "must not modify a batch after yielding it" in message


def test_one_process_has_no_rank_to_send_to():
    table = nn.Embedding(5, 2)
    shard(table, plan="rows")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for ids in lockstep([torch.tensor([1])] * 3, prefetch=1):
            table(ids[:1])


# One process


def test_without_a_process_group_it_is_one_rank():
    model = Net()
    plain = copy.deepcopy(model)
    plan = shard(model, plan=PLAN)
    assert "rank 0" in str(plan)
    assert "sharded='rows'" in repr(model)
    for each in (model, plain):
        opt = sparsestep.Adam(each.parameters(), lr=0.1)
        for step in range(3):
            opt.zero_grad()
            each(net_batch(step, 0)).square().mean().backward()
            opt.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "columns"}, "plan must be 'auto', one of tables, rows, copy"),
        ({"plan": {"other": "rows"}}, "a table's name must be one of 'tables.tables.user'"),
        ({"reduce": "max"}, "reduce must be mean or sum"),
        ({"reduce": {"user": "max"}}, "reduce must be mean or sum"),
        ({"order": "any"}, "order must be one of fast, global"),
        ({"mesh": 2}, "mesh must be a torch.distributed.device_mesh.DeviceMesh. Got a int."),
    ],
    ids=["kind", "name", "reduce", "reduce of one", "order", "mesh"],
)
def test_what_shard_refuses(change: dict[str, Any], message: str):
    model = Net()
    before = list(model.parameters())
    with pytest.raises(sparsestep.InputError) as raised:
        shard(model, **change)
    assert message in str(raised.value)
    assert all(ours is theirs for ours, theirs in zip(before, model.parameters(), strict=True))


def test_shard_refuses_what_it_cannot_divide():
    refuse = pytest.raises(sparsestep.InputError)
    tied = nn.ModuleDict({"table": nn.Embedding(5, 2), "out": nn.Linear(2, 5, bias=False)})
    tied["out"].weight = tied["table"].weight
    with refuse as raised:
        shard(tied)
    assert "only tables may use the weight of 'table'" in str(raised.value)
    with refuse as raised:
        shard(nn.Linear(2, 2))
    assert "must contain an nn.Embedding" in str(raised.value)
    with refuse as raised:
        shard([nn.Embedding(5, 2)])  # type: ignore[arg-type]
    assert "the first argument must be a model, an nn.Module. Got a list." in str(raised.value)
    with refuse as raised:
        shard(nn.EmbeddingBag(5, 2, mode="max"), plan="rows")
    assert "Choose 'tables' or 'copy'" in str(raised.value)
    table = nn.Embedding(5, 2)
    shard(table)
    for again in (shard, copy.deepcopy):
        with refuse as raised:
            again(table)
        assert "sharded" in str(raised.value)


def test_tables_without_memory_get_the_rows_of_their_rank():
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
    moved = (weight != before).any(1).nonzero().flatten().tolist()
    assert moved == [1, 2, 3]  # 3 is padding of the one alone


def test_a_frozen_table_is_looked_up_and_stays():
    table = nn.Embedding(5, 2)
    table.weight.requires_grad_(False)
    shard(table, plan="rows")
    assert not table(torch.tensor([1, 4])).requires_grad


def test_torchs_own_optimizer_has_the_gradient_exchanged():
    tables = [nn.Embedding(5, 2), nn.Embedding(5, 2)]
    tables[1].load_state_dict(tables[0].state_dict())
    shard(tables[0], plan="rows")
    sparsestep.nn.fuse(tables[1])
    for table in tables:
        opt = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        table(torch.tensor([1, 4, 1])).sum().backward()
        opt.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


def test_a_weight_that_is_read_otherwise_is_refused():
    table = nn.Embedding(5, 2)
    shard(table, plan="rows")
    loss = table(torch.tensor([1])).sum() + table.weight.square().sum()
    with pytest.raises(sparsestep.InputError) as raised:
        loss.backward()
    assert "must only be used in lookups" in str(raised.value)
