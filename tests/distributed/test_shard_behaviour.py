"""Ranks that share tables agree: on errors, on steps, on what is left out."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.pair import Results
from tests.distributed.shard_behaviour import PLAN, Net, net_batch
from tests.distributed.shard_cases import KINDS

each_kind = pytest.mark.parametrize("kind", KINDS)


def whole(found: list[Results], key: Any, kind: str = "rows", rows: int = 7) -> Tensor:
    parts = [each[key]["after"] for each in found]
    if kind == "rows":
        return torch.stack(parts, 1).flatten(0, 1)[:rows]
    return next(part for part in parts if len(part))


def begin(rows: int = 7) -> Tensor:
    torch.manual_seed(0)
    return nn.Embedding(rows, 2).weight.detach()


@each_kind
def test_a_rank_with_bad_ids_says_so_and_the_others_name_it(found: list[Results], kind: str):
    *others, last = found
    assert last["bad ids", kind]["said"].startswith(
        "Embedding (7 x 2): ids must be in [0, 7). Got 99 at position 1."
    )
    for each in others:
        message = each["bad ids", kind]["said"]
        assert message.startswith(f"rank {len(found) - 1}, which looks up the table, rejected")
    assert all(each["bad ids", kind]["unchanged"] for each in found)
    after = begin()
    after[: len(found)] -= 1  # the next step works
    assert torch.equal(whole(found, ("bad ids", kind), kind), after)


def test_ranks_at_different_places_are_told(found: list[Results]):
    for rank, each in enumerate(found):
        message = each["different_places"]["said"]
        assert "must call sharded tables in the same order" in message
        assert f"rank {rank}, which" in message
        assert "looks up" in message
        assert "needs gradients" in message
    after = begin()
    after[: len(found)] -= 1
    assert torch.equal(whole(found, "different_places"), after)


@each_kind
def test_a_loss_may_leave_a_table_out(found: list[Results], kind: str):
    parts = [torch.tensor(each["left out", kind]["moved"]) for each in found]
    if kind == "rows":
        moved = torch.stack(parts, 1).flatten()[:7]
    else:
        moved = next(part for part in parts if len(part))
    assert moved.nonzero().flatten().tolist() == [0, 3, 4]
    for each in found:
        assert not each["left out", kind]["again"]
        assert each["left out", kind]["steps"] in ([1], [])  # who has no row counts nothing
    if kind != "tables":
        assert all(each["left out", kind]["steps"] == [1] for each in found)


@each_kind
@pytest.mark.parametrize("chunked", [False, True], ids=["at once", "in chunks"])
def test_gradients_add_up_however_they_come(found: list[Results], kind: str, chunked: bool):
    if chunked and kind != "rows":
        pytest.skip("one kind is enough")
    after, world = begin(), len(found)
    for rank in range(world):
        for row in (0, rank, 1, 0, 2, 2, 1, 0):  # the last two from the graph before the step
            after[row] -= 1
    key: Any = "in_chunks" if chunked else ("loops", kind)
    torch.testing.assert_close(whole(found, key, kind), after)
    assert all(each[key]["kept"] == 0 for each in found), "no lookup is kept for ever"


def test_what_is_refused_says_why(found: list[Results]):
    for each in found:
        said = each["refusals"]
        assert "still to be exchanged" in said["shown"]
        assert "must be exchanged before you read it" in said["copy"]
        assert "Leave it to step()" in said["in backward"]
        assert "norm_type must be greater than 0" in said["order"]
        assert "Use sparsestep.clip_grad_norm_" in said["torch's norm"]
    read = sum(float(each["refusals"]["read"]) for each in found)
    assert read == 2 * 2 * len(found)  # whoever reads a gradient, on all ranks, has it exchanged


def test_a_model_trains_in_ddp_as_in_one_process(found: list[Results]):
    world, model = len(found), Net()
    opt = sparsestep.AdamW(model.parameters(), lr=0.1)
    norms = []
    for step in range(4):
        opt.zero_grad()
        ids = torch.cat([net_batch(step, rank) for rank in range(world)])
        model(ids).square().mean().backward()
        norms.append(float(sparsestep.clip_grad_norm_(model.parameters(), 0.5)))
        opt.step()
    for each in found:
        assert each["with_ddp"]["norms"] == pytest.approx(norms, rel=1e-4)
        assert each["with_ddp"]["norms"] == found[0]["with_ddp"]["norms"]
        assert set(each["with_ddp"]["gradients"]) <= {"Compact", "NoneType"}
    for name, param in model.named_parameters():
        parts = [each["with_ddp"][name] for each in found]
        kind = PLAN.get(name.split(".")[-2], "copy")
        ours = next(part for part in parts if len(part))
        if kind == "rows":
            ours = torch.stack(parts, 1).flatten(0, 1)[: len(param)]
        torch.testing.assert_close(ours, param.detach(), rtol=1e-4, atol=1e-5)


def test_ranks_may_run_out_of_data_at_different_times(found: list[Results]):
    world = len(found)
    for rank, each in enumerate(found):
        assert each["ends"]["sizes"] == [2] * rank + [0] * (world - 1 - rank)
    after = begin()
    for rank in range(world):
        after[0] -= rank
        after[rank] -= rank
    torch.testing.assert_close(whole(found, "ends"), after)


@each_kind
def test_a_mask_keeps_its_rows(found: list[Results], kind: str):
    parts = [torch.tensor(each["masked", kind]["moved"]) for each in found]
    moved = next(part for part in parts if len(part))
    if kind == "rows":
        moved = torch.stack(parts, 1).flatten()
    assert moved[:7].tolist() == [True, False] * 3 + [True]


@each_kind
def test_all_ranks_skip_the_step_that_one_of_them_cannot_take(found: list[Results], kind: str):
    for rank, each in enumerate(found):
        moved, scales = zip(*each["scaled", kind]["taken"], strict=True)
        assert list(scales) == [4.0, 2.0, 2.0]
        has = {"rows": rank == 2 % len(found), "tables": rank == 0, "copy": True}[kind]
        assert list(moved) == ([True, False, True] if has else [False] * 3)
    after = begin()
    after[2] -= 2 * len(found)
    torch.testing.assert_close(whole(found, ("scaled", kind), kind), after)


# One process


def test_without_a_process_group_it_is_one_rank():
    model = Net()
    plain = copy.deepcopy(model)
    plan = sparsestep.distributed.shard(model, plan=PLAN)
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
        ({"plan": {"nobody": "rows"}}, "a table's name must be one of 'tables.tables.user'"),
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
        sparsestep.distributed.shard(model, **change)
    assert message in str(raised.value)
    assert all(ours is theirs for ours, theirs in zip(before, model.parameters(), strict=True))


def test_shard_refuses_what_it_cannot_divide():
    refuse = pytest.raises(sparsestep.InputError)
    tied = nn.ModuleDict({"table": nn.Embedding(5, 2), "out": nn.Linear(2, 5, bias=False)})
    tied["out"].weight = tied["table"].weight
    with refuse as raised:
        sparsestep.distributed.shard(tied)
    assert "only tables may use the weight of 'table'" in str(raised.value)
    with refuse as raised:
        sparsestep.distributed.shard(nn.Linear(2, 2))
    assert "must contain an nn.Embedding" in str(raised.value)
    with refuse as raised:
        sparsestep.distributed.shard([nn.Embedding(5, 2)])  # type: ignore[arg-type]
    assert "the first argument must be a model, an nn.Module. Got a list." in str(raised.value)
    with refuse as raised:
        sparsestep.distributed.shard(nn.EmbeddingBag(5, 2, mode="max"), plan="rows")
    assert "Choose 'tables' or 'copy'" in str(raised.value)
    table = nn.Embedding(5, 2)
    sparsestep.distributed.shard(table)
    for again in (sparsestep.distributed.shard, copy.deepcopy):
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
    sparsestep.distributed.shard(model, plan="rows")
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
    sparsestep.distributed.shard(table, plan="rows")
    assert not table(torch.tensor([1, 4])).requires_grad


def test_torchs_own_optimizer_has_the_gradient_exchanged():
    tables = [nn.Embedding(5, 2), nn.Embedding(5, 2)]
    tables[1].load_state_dict(tables[0].state_dict())
    sparsestep.distributed.shard(tables[0], plan="rows")
    sparsestep.nn.fuse(tables[1])
    for table in tables:
        opt = torch.optim.SparseAdam(list(table.parameters()), lr=0.1)
        table(torch.tensor([1, 4, 1])).sum().backward()
        opt.step()
    assert torch.equal(tables[0].weight, tables[1].weight)


def test_a_weight_that_is_read_otherwise_is_refused():
    table = nn.Embedding(5, 2)
    sparsestep.distributed.shard(table, plan="rows")
    loss = table(torch.tensor([1])).sum() + table.weight.square().sum()
    with pytest.raises(sparsestep.InputError) as raised:
        loss.backward()
    assert "must only be used in lookups" in str(raised.value)
