"""Threads of TorchRec, FBGEMM, Keras, OpenNMT-py, PEFT, diffusers and gsplat."""

from __future__ import annotations

import importlib.metadata
import re
import runpy
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from tests.asked.test_pytorch import operations, step
from tests.ranks import Rank, on_ranks, ranks

EXAMPLES = Path(__file__).parents[2] / "examples"
SIZES = {"user": (20, 4), "item": (30, 4)}


def collection(
    device: str = "cpu", mode: Literal["mean", "sum"] = "mean"
) -> sparsestep.nn.EmbeddingBagCollection:
    torch.manual_seed(0)
    with torch.device(device):
        return sparsestep.nn.EmbeddingBagCollection(SIZES, mode=mode)


def loss(model: nn.Module, user: list[int], item: list[int]) -> Tensor:
    ids = {"user": torch.tensor(user).view(-1, 1), "item": torch.tensor(item).view(-1, 1)}
    found: Tensor = torch.stack(list(model(ids).values())).sin().sum()
    return found


def whole(model: nn.Module, name: str) -> Tensor:
    """All rows of a table that may be sharded."""
    everything = torch.arange(SIZES[name][0]).view(-1, 1)
    found: Tensor = model(dict.fromkeys(SIZES, everything % 20) | {name: everything})[name]
    return found.detach()


@ranks(2)
def test_torchrec_2821_adamw_for_sharded_tables(rank: Rank):
    sharded, plain = collection(), collection()
    sparsestep.distributed.shard(sharded, plan={"user": "rows", "item": "tables"}, reduce="sum")
    batches = [([3, 1], [7, 7]), ([3, 12], [0, 29])]
    for model, mine in ((sharded, [rank.index]), (plain, [0, 1])):
        optimizer = sparsestep.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
        for _ in range(3):
            step(optimizer, sum(loss(model, *batches[each]) for each in mine))
    for name in SIZES:
        torch.testing.assert_close(whole(sharded, name), whole(plain, name))


@ranks(2)
def test_torchrec_1275_adam_for_tables_defined_on_the_meta_device(rank: Rank):
    """The optimizer is chosen with the tables; the plan comes later, and then each rank's rows."""
    model, plain = collection("meta"), collection()
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1)
    sparsestep.distributed.shard(model, plan={"user": "rows", "item": "tables"}, reduce="sum")
    shapes = {len(each.weight) for each in model.tables.values()}
    assert all(each.device.type == "cpu" for each in model.parameters())
    assert shapes == ({10, 30} if rank.index == 0 else {10, 0})
    with torch.no_grad():
        for name, table in plain.tables.items():
            table.weight.copy_(whole(model, name))
    batches = [([3, 1], [7, 7]), ([3, 12], [0, 29])]
    loss(model, *batches[rank.index]).backward()
    optimizer.step()
    sum(loss(plain, *each) for each in batches).backward()
    for table in plain.parameters():
        table.grad = table.grad.to_dense()
    torch.optim.Adam(plain.parameters(), lr=0.1).step()
    for name in SIZES:
        torch.testing.assert_close(whole(model, name), whole(plain, name))


@ranks(1, 2)
def test_torchrec_2332_gradient_accumulation(rank: Rank):
    """Of fused, sharded tables: two backward calls and a step are one batch of both."""
    parts, both = collection(), collection()
    for model, batches in (
        (parts, [([3, 1], [7, 7]), ([3, 12], [0, 29])]),
        (both, [([3, 1, 3, 12], [7, 7, 0, 29])]),
    ):
        sparsestep.distributed.shard(model, plan="rows")
        optimizer = sparsestep.Adam(model.parameters(), lr=0.1)
        for batch in batches:
            loss(model, *batch).backward()
        optimizer.step()
    torch.testing.assert_close(whole(parts, "user"), whole(both, "user"))


def test_torchrec_2735_new_ids_get_rows_and_tables_grow():
    vocabulary = sparsestep.nn.Vocabulary(4, evict="lru")
    table = sparsestep.nn.Embedding(4, 8)
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    vocabulary.attach(table, optimizer)
    for ids in ([2**62, -5], [2**62, 17], [10**18]):  # the last takes over the row of -5
        step(optimizer, table(vocabulary(torch.tensor(ids))).sum())
    assert set(vocabulary.as_dict()) == {2**62, 17, 10**18}
    optimizer.zero_grad()
    vocabulary.grow(8)
    assert table.weight.shape == (8, 8)
    assert vocabulary(torch.tensor([-5])).item() == 4


def save(index: int, world: int, folder: Path, plan: str) -> Tensor:
    """Train and save on some ranks; all rows of a table."""
    model = collection()
    sparsestep.distributed.shard(model, plan=plan)
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1)
    step(optimizer, loss(model, [3, 1, 5], [7, 7, 2]))
    sparsestep.distributed.save(folder, model, optimizer)
    return whole(model, "item")


def load(index: int, world: int, folder: Path, plan: str) -> Tensor:
    model = collection()
    sparsestep.distributed.shard(model, plan=plan)
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1)
    sparsestep.distributed.load(folder, model, optimizer)
    return whole(model, "item")


def test_torchrec_2534_checkpoints_for_another_number_of_ranks(tmp_path: Path):
    saved, _ = on_ranks(2, save, tmp_path, "rows")
    assert not torch.equal(saved, whole(collection(), "item"))
    for found in [*on_ranks(3, load, tmp_path, "tables"), load(0, 1, tmp_path, "rows")]:
        assert torch.equal(found, saved)
    plain = collection()
    plain.load_state_dict(sparsestep.distributed.consolidate(tmp_path)["model"])
    assert torch.equal(whole(plain, "item"), saved)


def test_torchrec_2394_state_has_the_same_names_in_every_plan(tmp_path: Path):
    found = {}
    for plan in ("rows", "tables", "copy"):
        save(0, 1, tmp_path / plan, plan)
        state = sparsestep.distributed.consolidate(tmp_path / plan)["optimizer"]["state"]
        found[plan] = {key: sorted(each) for key, each in state.items()}
    assert found["rows"] == found["tables"] == found["copy"]
    assert found["copy"][0] == ["exp_avg", "exp_avg_sq", "step"]  # torch's


def test_torchrec_1483_torch_is_the_only_requirement():
    needed = importlib.metadata.requires("sparsestep") or []
    needed = [each for each in needed if "extra" not in each]
    assert [re.split(r"\W", each)[0] for each in needed] == ["torch"]
    model = collection()
    loss(model, [3], [7]).backward()
    sparsestep.Adam(model.parameters()).step()


def bag() -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = sparsestep.nn.EmbeddingBag(1_000, 4, mode="sum")
    return module, sparsestep.AdamW(module.parameters(), lr=0.1, weight_decay=0.5)


BAGS = torch.tensor([[3, 1], [3, 7]])


def test_fbgemm_2969_adamw_within_backward():
    fused, apart = bag(), bag()
    fused[1].step_in_backward()
    for module, optimizer in (fused, apart):
        step(optimizer, module(BAGS).sin().sum())
    assert fused[0].weight.grad is None
    assert torch.equal(fused[0].weight, apart[0].weight)
    start = bag()[0].weight
    rows = nn.Parameter(start[[1, 3, 7]].detach())
    theirs = torch.optim.AdamW([rows], lr=0.1, weight_decay=0.5)
    step(theirs, (rows[1] + rows[[0, 2]]).sin().sum())
    torch.testing.assert_close(fused[0].weight[[1, 3, 7]], rows)


@pytest.mark.parametrize("make", [sparsestep.Adam, sparsestep.RowwiseAdam])
def test_fbgemm_1771_adam_on_the_cpu(make: Any):
    """What FBGEMM removed: weighted bags over several tables, updated within backward.

    A row that occurs several times is updated once, with the sum of its gradients.
    """
    tables, rows = collection(mode="sum"), collection(mode="sum")
    ours = make(tables.parameters(), lr=0.1)
    ours.step_in_backward()
    theirs = make(rows.parameters(), lr=0.1, engine="reference")
    weights = {name: torch.tensor([[0.5, 2.0], [1.0, -1.0]]) for name in SIZES}
    for first in range(3):
        ids = dict.fromkeys(SIZES, first + torch.tensor([[3, 1], [3, 7]]))
        for model in (tables, rows):
            found = model(ids, per_sample_weights=weights)
            torch.stack(list(found.values())).sin().sum().backward()
        theirs.step()
        theirs.zero_grad()
        assert all(each.grad is None for each in tables.parameters())
    torch.testing.assert_close(*(list(model.parameters()) for model in (tables, rows)))
    assert {each.engine for each in ours.explain()} == {"native"}


@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_keras_19992_sparse_gradients_stay_sparse(semantics: Any):
    """No operation of a step is as large as the table."""
    module, _ = bag()
    optimizer = sparsestep.Adam(module.parameters(), semantics=semantics)
    for _ in range(2):
        step(optimizer, module(BAGS).sum())
    found = operations(optimizer.step)
    assert found.largest < 100
    assert optimizer.metrics()["rows_touched"] == 3


def test_opennmt_py_1015_an_embedding_shared_with_the_output_layer():
    """Their sum is dense: SparseAdam takes it, with its own formula for every row."""
    weights = []
    for make in (sparsestep.SparseAdam, torch.optim.SparseAdam):
        torch.manual_seed(0)
        tokens = nn.Embedding(50, 8, sparse=True)
        head = nn.Linear(8, 50, bias=False)
        head.weight = tokens.weight
        optimizer = make(tokens.parameters(), lr=0.1)
        nn.functional.cross_entropy(head(tokens(BAGS[:, 0])), BAGS[:, 1]).backward()
        assert not tokens.weight.grad.is_sparse
        if make is torch.optim.SparseAdam:
            tokens.weight.grad = tokens.weight.grad.to_sparse(1)
        optimizer.step()
        weights.append(tokens.weight)
    torch.testing.assert_close(*weights)


def test_peft_3371_state_of_an_ngram_table_is_a_number_per_row():
    table = sparsestep.nn.NgramEmbedding(10_000, 64)
    before = table.weight.detach().clone()
    optimizer = sparsestep.RowwiseAdam(table.parameters(), lr=0.1, betas=(0.0, 0.99))
    step(optimizer, table(torch.arange(40).view(2, 20)).sum())
    assert optimizer.metrics()["state_bytes"] == 10_000 * 4  # Adam's: 128 times as much
    touched = optimizer.metrics()["rows_touched"]
    assert (table.weight != before).any(dim=1).sum() == touched < 100


def test_diffusers_507_textual_inversion_changes_one_row():
    tokens = nn.Embedding(49_409, 8)
    placeholder = 49_408
    before = tokens.weight.detach().clone()
    groups = sparsestep.nn.train_rows(tokens, [placeholder])
    optimizer = sparsestep.AdamW(groups, lr=0.1, weight_decay=0.5)
    for _ in range(3):
        step(optimizer, tokens(torch.tensor([320, 1125, placeholder])).square().sum())
    changed = (tokens.weight != before).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [placeholder]


def test_gsplat_432_visible_splats_are_updated(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / "gaussian_splats.py"), run_name="__main__")
    assert not end.value.code
    assert "invisible splats kept their bits: True" in capsys.readouterr().out


def test_gsplat_432_splats_that_stay_keep_their_state():
    """A step after rows were removed and added is the step of those that stayed."""
    replace_rows = runpy.run_path(str(EXAMPLES / "gaussian_splats.py"))["replace_rows"]
    kept = torch.tensor([True, False, True])
    found = []
    for is_replaced in (False, True):
        splats = nn.Parameter(torch.ones(3, 2))
        optimizer = sparsestep.Adam([{"params": [splats], "name": "color"}], lr=0.1)
        splats.grad = torch.arange(6.0).view(3, 2)
        optimizer.step()
        if is_replaced:
            splats = replace_rows(optimizer, kept, {"color": torch.zeros(2, 2)})["color"]
        splats.grad = torch.ones(len(splats), 2).to_sparse(1)
        optimizer.step()
        found.append(splats[:2] if is_replaced else splats[kept])
    assert torch.equal(*found)
