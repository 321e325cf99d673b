"""Tables in files: each rank has a file with its rows, and trains as one in memory does."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.storage import journal, mapped
from tests.distributed.runs import said, whole
from tests.ranks import Rank, ranks
from tests.table import same_bits

shard = sparsestep.distributed.shard
ROWS, DIM = 11, 4
each_kind = pytest.mark.parametrize("kind", ["rows", "tables"])


def initial() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(0))


def in_file(path: Path, *, filled: bool = True, **options: Any) -> nn.Embedding:
    tensor = mapped(path, (ROWS, DIM), **options)
    if filled:
        with sparsestep.storage.writing(tensor):
            tensor.copy_(initial())
    return nn.Embedding.from_pretrained(tensor, freeze=False)


def in_memory() -> nn.Embedding:
    return nn.Embedding.from_pretrained(initial(), freeze=False)


def trained(rank: Rank, table: nn.Embedding, kind: str, steps: int = 3) -> sparsestep.Adam:
    shard(table, plan=kind, order="global", reduce="sum")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    train(rank, table, optimizer, range(steps))
    return optimizer


def train(rank: Rank, table: nn.Embedding, optimizer: sparsestep.Adam, steps: range) -> None:
    for step in steps:
        draw = torch.Generator().manual_seed(10 * step + rank.index)
        optimizer.zero_grad()
        table(torch.randint(0, ROWS, (5,), generator=draw)).square().sum().backward()
        optimizer.step()


def whole_file(rank: Rank) -> Path:
    """The same table, made on each rank's own disk."""
    folder = rank.folder / str(rank.index)
    folder.mkdir(exist_ok=True)
    return folder / "items"


@ranks(1, 3)
@each_kind
@pytest.mark.parametrize("in_rows", [False, True])
def test_ranks_train_files_as_tables_in_memory(rank: Rank, kind: str, in_rows: bool):
    options = {"optimizer": sparsestep.Adam} if in_rows else {}
    path = whole_file(rank)
    ours, theirs = in_file(path, **options), in_memory()
    optimizers = [trained(rank, table, kind) for table in (ours, theirs)]
    assert same_bits(ours.weight.detach().clone(), theirs.weight.detach())
    if len(ours.weight):
        assert isinstance(ours.weight, sparsestep.storage.Mapped)
        for name, value in optimizers[1].state[theirs.weight].items():
            found = optimizers[0].state[ours.weight][name]
            assert same_bits(found.clone(), value), name
            assert found.dim() == 0 or isinstance(found, sparsestep.storage.Mapped)
    if kind == "rows" and rank.world > 1:
        name = f"items.{rank.index}-of-{rank.world}"
        files = {"items", name}
        if not in_rows:
            files |= {f"{name}.exp_avg", f"{name}.exp_avg_sq"}
        assert {each.name for each in path.parent.iterdir()} == files


@ranks(2)
def test_a_new_table_takes_no_disk_space(rank: Rank):
    path = rank.folder / "items"  # of both ranks
    table = nn.Embedding.from_pretrained(mapped(path, (1_000_000, 64)), freeze=False)
    shard(table, plan="rows")
    optimizer = sparsestep.SGD(table.parameters(), lr=1.0)
    table(torch.tensor([0, 999_999])).sum().backward()
    optimizer.step()
    mine = Path(f"{path}.{rank.index}-of-2")
    assert mine.stat().st_size > 100_000_000
    assert mine.stat().st_blocks * 512 < 1_000_000
    assert float(table.weight[-1 if rank.index else 0].detach().sum()) == -64.0


@ranks(3)
@each_kind
@pytest.mark.parametrize("in_rows", [False, True])
def test_a_restarted_program_loads_the_checkpoint(rank: Rank, kind: str, in_rows: bool):
    """Into the same files, into files and memory of any placement, and into one process."""
    options = {"optimizer": sparsestep.Adam} if in_rows else {}
    path, folder = whole_file(rank), rank.folder / "checkpoint"
    table = in_file(path, **options)
    optimizer = trained(rank, table, "rows")
    saved = whole(rank, table.weight.clone(), "rows", ROWS)
    sparsestep.distributed.save(folder, table, optimizer)
    train(rank, table, optimizer, range(3, 6))
    expected = whole(rank, table.weight.clone(), "rows", ROWS)
    train(rank, table, optimizer, range(7, 9))  # after the checkpoint
    del table, optimizer
    for where, again in (
        ("rows", in_file(path, filled=False, **options)),
        (kind, in_file(path.with_name("other"), filled=False)),
        (kind, in_memory()),
    ):
        shard(again, plan=where, order="global", reduce="sum")
        other = sparsestep.Adam(again.parameters(), lr=0.1)
        sparsestep.distributed.load(folder, again, other)
        assert same_bits(whole(rank, again.weight.clone(), where, ROWS), saved)
        train(rank, again, other, range(3, 6))
        assert same_bits(whole(rank, again.weight.clone(), where, ROWS), expected)
    assert same_bits(sparsestep.distributed.consolidate(folder)["model"]["weight"], saved)


@ranks(2)
def test_what_cannot_be_sharded_is_refused_and_leaves_no_file(rank: Rank):
    path = whole_file(rank)

    def refused(table: nn.Module, **options: Any) -> str:
        before = table.weight.detach().clone()
        text = said(lambda: shard(table, **options))
        assert same_bits(table.weight.detach().clone(), before)
        assert not list(path.parent.glob("*-of-*"))
        return text

    table = in_file(path)
    assert "'copy'" in refused(table, plan="copy")
    part = nn.Embedding.from_pretrained(table.weight.detach()[:5], freeze=False)
    assert "a part of it" in refused(part, plan="rows")
    assert "reduce" in refused(table, plan="rows", reduce="mean" if rank.is_last else "sum")
    alone = sparsestep.Adam(table.parameters())
    table(torch.arange(3)).sum().backward()
    alone.step()
    assert "has trained" in refused(table, plan="rows")


@ranks(2)
def test_files_of_some_ranks_only_are_refused(rank: Rank):
    path = whole_file(rank)
    table = in_file(path)
    trained(rank, table, "rows")
    del table
    mine = Path(f"{path}.{rank.index}-of-2")
    if rank.is_last:  # its disk was replaced
        mine.unlink()
    text = said(lambda: shard(in_file(path, filled=False), plan="rows"))
    assert "one that exists on rank 0, new on rank 1" in text
    assert mine.exists() == (not rank.is_last)


class Users(nn.Module):
    """Ids of any value in a table in a file."""

    def __init__(self, path: Path, rows: int) -> None:
        super().__init__()
        tensor = mapped(path, (rows, DIM), optimizer=sparsestep.Adagrad)
        table = nn.EmbeddingBag.from_pretrained(tensor, freeze=False, mode="sum")
        ids = sparsestep.nn.Vocabulary(rows, evict="lru")
        self.tables = sparsestep.nn.EmbeddingBagCollection(
            {"user": table}, vocabularies={"user": ids}
        )
        shard(self, order="global", reduce="sum")
        self.optimizer = sparsestep.Adagrad(self.parameters(), lr=0.1)
        self.tables.attach(self.optimizer, init=nn.init.zeros_)

    def step(self, number: int, rank: Rank, size: int = 8) -> None:
        draw = torch.Generator().manual_seed(10 * number + rank.index)
        ids = torch.randint(number, number + size, (size, 1), generator=draw) * 0x9E3779B97F4A7C1
        self.optimizer.zero_grad()
        (self.tables({"user": ids})["user"] - number - 1).square().sum().backward()
        self.optimizer.step()

    def rows_of_ids(self) -> dict[int, list[float]]:
        """The rows of this rank's ids."""
        weight, ids = self.tables.tables["user"].weight.detach(), self.tables.vocabularies["user"]
        world = ids.collectives.world_size
        return {key: weight[row // world].tolist() for key, row in ids.as_dict().items()}


@ranks(2)
def test_saves_write_the_rows_that_changed_and_load_on_other_ranks(rank: Rank):
    rows, folder = 40_000, rank.folder / "checkpoint"
    model = Users(whole_file(rank), rows)
    model.step(0, rank, size=6_000)
    save = partial(sparsestep.distributed.save, folder, model, model.optimizer)

    def of_all_ranks() -> dict[int, list[float]]:
        return {k: v for each in rank.gather(model.rows_of_ids()) for k, v in each.items()}

    save()
    mine = folder / f"rows-of-{rank.index}-of-2"
    base = (mine / "base-000001.0").stat().st_size
    for number in range(1, 4):
        model.step(number, rank)
        save()
        assert (mine / f"rows-{number + 1:06}").stat().st_size < base // 100
    everything = of_all_ranks()
    # A save that fails on a rank
    model.step(4, rank)
    with rank.monkeypatch.context() as patch:
        if rank.is_last:
            patch.setattr(journal, "write_journal", disk_full)
        assert "disk" in said(save, OSError)
    assert not (mine / "rows-000005").exists()
    # Into the same files, and into those of one process
    sparsestep.distributed.load(folder, model, model.optimizer)
    assert of_all_ranks() == everything
    model.step(4, rank)
    save()
    assert (mine / "rows-000005").stat().st_size < base // 100
    found = sparsestep.distributed.consolidate(folder)["model"]
    used = int(found["tables.vocabularies.user.numbers"][0])
    ids = found["tables.vocabularies.user.ids"][1:used].tolist()
    weight = found["tables.tables.user.weight"]
    everything = of_all_ranks()
    assert {key: weight[row].tolist() for row, key in enumerate(ids, 1)} == everything
    # A damaged file of any rank
    rank.barrier()
    if rank.is_last:
        with (mine / "rows-000003").open("r+b") as file:
            file.seek(-1, 2)
            file.write(b"?")
    rank.barrier()
    before = model.rows_of_ids()
    text = said(lambda: sparsestep.distributed.load(folder, model, model.optimizer))
    assert "rows-000003" in text
    assert model.rows_of_ids() == before


def disk_full(*arguments: Any) -> None:
    raise OSError(28, "no space left on the disk")
