"""Errors while checkpoints are saved and loaded; what fails on one rank fails on all."""

from __future__ import annotations

import copy
import errno
import gc
import io
import itertools
import os
import shutil
import threading
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from tests.distributed.runs import said
from tests.faults.snapshot import Snapshot, snapshot
from tests.ranks import Rank, ranks

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed", allow_module_level=True)

from sparsestep.distributed.checkpoint import _files, ignore_dcp_warnings
from sparsestep.distributed.checkpoint import _manifest as manifest
from sparsestep.distributed.checkpoint._state import TensorLayouts

MANIFEST, METADATA, PART = "sparsestep.json", ".metadata", "__0_0.distcp"


def of_both(model: nn.Module, optimizer: torch.optim.Optimizer) -> Snapshot:
    return snapshot({"model": model.state_dict(), "optimizer": optimizer.state_dict()})


class Training:
    """A sharded table with a vocabulary, a layer, and their optimizer."""

    def __init__(self, seed: int, steps: int = 2) -> None:
        torch.manual_seed(seed)
        table, head = nn.Embedding(8, 3), nn.Linear(3, 2)
        sparsestep.distributed.shard(table, plan="rows")
        self.optimizer = sparsestep.Adam(
            [
                {"params": list(table.parameters()), "lr": 0.1 * (1 + seed)},
                {"params": list(head.parameters()), "betas": (0.8, 0.9)},
            ]
        )
        ids = sparsestep.distributed.Vocabulary(table, self.optimizer, admit=2, evict="lru")
        self.model = nn.ModuleDict({"ids": ids, "table": table, "head": head})
        for step in range(steps):
            self.step(seed, step)

    def step(self, seed: int, step: int) -> None:
        rows = self.model["ids"](torch.tensor([seed, 100 + step, seed]))
        self.model["head"](self.model["table"](rows)).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def snapshot(self) -> Snapshot:
        """Everything that a load may change."""
        return of_both(self.model, self.optimizer)

    def save(self, folder: Path) -> None:
        sparsestep.distributed.save(folder, self.model, self.optimizer)

    def async_save(self, folder: Path) -> None:
        sparsestep.distributed.async_save(folder, self.model, self.optimizer).result()

    def load(self, folder: Path) -> None:
        sparsestep.distributed.load(folder, self.model, self.optimizer)


def loaded(folder: Path) -> Snapshot:
    """What a new training has after it has loaded a checkpoint."""
    training = Training(3)
    training.load(folder)
    return training.snapshot()


def names_in(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    Training(1).save(folder)
    assert names_in(folder) == [METADATA, PART, MANIFEST]
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def test_torch_reads_the_tensors(folder: Path):
    weight = torch.empty(8, 3)
    with ignore_dcp_warnings():
        torch.distributed.checkpoint.load({"model.table.weight": weight}, checkpoint_id=folder)
    assert torch.equal(weight, sparsestep.distributed.consolidate(folder)["model"]["table.weight"])
    assert str(folder.parent).encode() not in (folder / METADATA).read_bytes()


def test_options_of_any_kind_come_back(tmp_path: Path):
    weight = nn.Parameter(torch.zeros(2))
    model = nn.ParameterList([weight])
    kinds = {"name": "é", "levels": [1, (2.5, None)], "by": {3: True}, "dtype": torch.bfloat16}
    group = {"params": [weight], "lr": torch.tensor(0.1), "at": torch.arange(4).view(2, 2), **kinds}
    optimizer = sparsestep.Adam([group], betas=(0.5, 0.25))
    sparsestep.distributed.save(tmp_path / "saved", model, optimizer)
    (found,) = sparsestep.distributed.consolidate(tmp_path / "saved")["optimizer"]["param_groups"]
    assert {key: found[key] for key in kinds} == kinds
    assert found["betas"] == (0.5, 0.25)
    assert torch.equal(found["lr"], group["lr"])
    assert torch.equal(found["at"], group["at"])
    optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(sparsestep.InputError, match="options of param groups must be"):
        sparsestep.distributed.save(tmp_path / "odd", model, optimizer)
    assert not (tmp_path / "odd").exists()


# Faults while saving and loading


FULL = OSError(errno.ENOSPC, "No space left on device")


def test_a_disk_that_is_full_at_any_call_leaves_a_checkpoint(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The earlier one, if ``save`` raises; the last calls put the later one in place."""
    later, expected, calls, failing = Training(4), loaded(saved), [0], [0]
    for name in ("fsync", "replace", "stat", "open"):
        function = getattr(os, name)

        def call(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            calls[0] += 1
            if calls[0] == failing[0]:
                raise OSError(*FULL.args)
            return function(*args, **kwargs)

        monkeypatch.setattr(os, name, call)
    outcomes: list[bool] = []
    for n in itertools.count(1):
        folder = Path(shutil.copytree(saved, tmp_path / str(n)))
        calls[0], failing[0] = 0, n
        is_saved = said(lambda folder=folder: later.save(folder), OSError) == ""
        num_calls, failing[0] = calls[0], 0
        assert loaded(folder) == (later.snapshot() if is_saved else expected)
        assert is_saved or names_in(folder) == [METADATA, PART, MANIFEST]
        if num_calls < n:
            break
        outcomes.append(is_saved)
    assert is_saved
    # Two calls lock. The next is for the earlier manifest, without which nothing is continued.
    assert outcomes.pop(2)
    assert outcomes == sorted(outcomes)  # it fails, then it does not
    assert set(outcomes) == {False, True}


def test_a_save_that_failed_lets_go_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    class Full(io.BytesIO):
        def write(self, data: Any) -> int:
            raise OSError(*FULL.args)

    start = _files._Summed.__init__
    monkeypatch.setattr(_files._Summed, "__init__", lambda self, stream: start(self, Full()))
    training = Training(1)
    model = weakref.ref(training.model)
    assert said(partial(training.save, tmp_path / "saved"), OSError)
    del training
    gc.collect()
    assert model() is None


def test_a_process_that_ends_while_it_saves_leaves_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    """Between the two files that change their names, it is the later one."""
    later, replace = Training(4), os.replace

    def killed(source: Any, target: Any) -> None:
        if Path(target).name == METADATA:
            raise SystemExit
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", killed)
        with pytest.raises(SystemExit):
            later.save(folder)
    assert loaded(folder) == later.snapshot()
    (pending,) = folder.glob(f".*-*{METADATA}")
    pending.write_bytes(pending.read_bytes()[:-1])
    assert pending.name in said(lambda: loaded(folder))
    last = Training(5)
    last.save(folder)
    assert len(names_in(folder)) == 3  # what was left is gone
    assert loaded(folder) == last.snapshot()


# Faults on one rank


def assert_all_raise(rank: Rank, where: int, patch: tuple[Any, str], error: Any, work: Any) -> None:
    """One rank has the error, the others raise one of its kind that names the rank."""

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise error

    if rank.index == where:
        with pytest.MonkeyPatch.context() as patches:
            patches.setattr(*patch, fail)
            with pytest.raises(type(error)) as raised:
                work()
        assert raised.type is type(error)
    else:
        kind = sparsestep.InputError if isinstance(error, KeyboardInterrupt) else type(error)
        with pytest.raises(kind, match=f"rank {where}: ") as raised:
            work()
        assert raised.type is kind
    rank.barrier()


@ranks(2)
def test_ranks_that_do_not_share_a_disk(rank: Rank):
    training, own = Training(1), rank.folder / f"disk{rank.index}"
    for save in (training.save, training.async_save):
        message = said(lambda save=save: save(own))
        assert "must be on a disk that all ranks share" in message
        assert list(own.glob("*")) == []
    training.save(rank.folder / "shared")
    message = said(lambda: training.load(own if rank.index else rank.folder / "shared"))
    assert "no file sparsestep.json" in message
    assert rank.index or message.startswith("rank 1: ")


@ranks(2)
def test_arguments_that_one_rank_refuses_are_refused_by_all(rank: Rank):
    training, other = Training(1), Training(2)
    folder = rank.folder / "checkpoint"
    for work in (
        sparsestep.distributed.save,
        sparsestep.distributed.async_save,
        sparsestep.distributed.load,
    ):
        optimizer = other.optimizer if rank.index else training.optimizer
        message = said(partial(work, folder, training.model, optimizer))
        assert "the parameters of the optimizer must be those of the model" in message
        path: Any = folder if rank.index else 3
        message = said(partial(work, path, training.model, training.optimizer))
        assert "path must be a str or os.PathLike. Got 3" in message
    assert not folder.exists()


@ranks(2)
def test_a_save_waits_for_the_one_before_it_in_the_same_folder(rank: Rank, monkeypatch):
    """Otherwise the end of one removes the files of the next."""
    training, folder = Training(1), rank.folder / "checkpoint"
    may_publish, publish = threading.Event(), _files.Writer.publish

    def publish_later(*arguments: Any) -> None:
        may_publish.wait(10)
        publish(*arguments)

    monkeypatch.setattr(_files.Writer, "publish", publish_later)
    saves = []
    for number in range(3):
        training.step(1, number)
        path = folder / ".." / folder.name if number == 1 else folder
        save = sparsestep.distributed.async_save
        saves.append(save(path, training.model, training.optimizer))
    threading.Timer(0.2, may_publish.set).start()
    training.step(1, 3)
    training.save(folder)
    assert all(saving.done() and saving.exception() is None for saving in saves)
    last = training.snapshot()
    training.step(1, 4)
    training.load(folder)
    assert training.snapshot() == last


@ranks(2)
def test_a_sharded_table_keeps_its_weight(rank: Rank):
    """Lookups and the optimizer would use different weights."""
    model = nn.Sequential(nn.Embedding(4, 2))
    sparsestep.distributed.shard(model, plan="rows")
    weight, before = model[0].weight, model[0].weight.detach().clone()
    found = {"0.weight": torch.zeros(2, 2)}
    for state_dict in (found, model.state_dict()):
        refused = said(partial(model.load_state_dict, state_dict, assign=True), RuntimeError)
        assert "a sharded table must keep its weight, '0.weight'. Got assign=True" in refused
        assert model[0].weight is weight
        assert torch.equal(weight, before)
    model.load_state_dict(found)
    assert model[0].weight is weight
    assert not weight.any()


@ranks(2)
def test_torch_cannot_take_the_shard_of_one_rank_for_all(rank: Rank):
    """A state dict is otherwise an ordinary one, of this rank's rows."""
    checkpoint = torch.distributed.checkpoint
    table = nn.Embedding(4, 2)
    sparsestep.distributed.shard(table, plan="rows")
    whole = {"weight": torch.zeros(2, 2)}
    checkpoint.save(whole, checkpoint_id=rank.folder / "whole")
    before = table.weight.detach().clone()
    for work in (checkpoint.save, checkpoint.load):
        path = rank.folder / ("whole" if work is checkpoint.load else "shards")
        save_or_load = partial(work, table.state_dict(), checkpoint_id=path)
        message = said(save_or_load, BaseException)
        assert "tensors that are the same on all ranks" in message
    assert torch.equal(table.weight, before)
    rank.barrier()
    found = table.state_dict()
    file = io.BytesIO()
    torch.save(found, file)
    file.seek(0)
    for copied in (torch.load(file), copy.deepcopy(found)):
        assert type(copied["weight"]) is torch.Tensor
        assert torch.equal(copied["weight"], table.weight)
    table.load_state_dict(found)
    assert type(found["weight"] + 1) is torch.Tensor


# Failed allocations and Ctrl-C are in tests/faults.
SAVES: list[tuple[int, tuple[Any, str], BaseException]] = [
    (1, (_files._Summed, "write"), FULL),
    (0, (_files._Summed, "write"), FULL),
    (0, (manifest.ShardManifest, "encode"), FULL),
    (1, (_files._Files, "create_stream"), KeyboardInterrupt()),
    (1, (TensorLayouts, "pack"), MemoryError("none")),
]


@ranks(2)
def test_a_save_that_fails_on_one_rank_fails_on_all(rank: Rank):
    earlier, later, path = Training(1), Training(2), rank.folder / "checkpoint"
    earlier.save(path)
    before = names_in(path)
    for save in (later.save, later.async_save):
        for where, patch, error in SAVES:
            assert_all_raise(rank, where, patch, error, partial(save, path))
    assert names_in(path) == before
    assert loaded(path) == earlier.snapshot()
    # A later checkpoint in the same folder
    later.async_save(path)
    assert loaded(path) == later.snapshot()
    assert len(names_in(path)) == 4  # two parts and two files that say what they are


@ranks(2)
def test_a_load_that_fails_on_one_rank_changes_nothing_on_any(rank: Rank):
    earlier, later, path = Training(1), Training(2), rank.folder / "checkpoint"
    earlier.save(path)
    expected = later.snapshot()
    error = OSError(errno.EIO, "Input/output error")
    assert_all_raise(rank, 1, (torch, "load"), error, partial(later.load, path))
    assert later.snapshot() == expected
    damaged = path / "__1_0.distcp"
    raw = damaged.read_bytes()
    for content in (raw[:-100] + bytes([raw[-100] ^ 1]) + raw[-99:], None):
        rank.barrier()
        if rank.index == 0:
            damaged.unlink()
            if content is not None:
                damaged.write_bytes(content)
        rank.barrier()
        assert damaged.name in said(lambda: later.load(path))
        assert later.snapshot() == expected


@ranks(2)
def test_a_crafted_shape_is_refused_by_all_ranks(rank: Rank):
    """Also if one of them alone reads the tensor."""
    path = rank.folder / "checkpoint"

    def trained(kind: str) -> tuple[nn.Module, Any]:
        model = nn.Embedding(7, 2)
        sparsestep.distributed.shard(model, plan=kind)
        optimizer = sparsestep.Adam(model.parameters())
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        return model, optimizer

    sparsestep.distributed.save(path, *trained("rows"))
    if rank.index == 0:
        found = manifest.read(path)
        chunk = found.entries["state.weight.exp_avg"].chunks[0]._replace(offsets=[0], sizes=[1])
        crafted = manifest.Entry(torch.Size([1]), torch.float32, [chunk])
        entries = {**found.entries, "state.weight.exp_avg": crafted}
        (path / MANIFEST).write_bytes(found._replace(entries=entries).encode())
    rank.barrier()
    model, optimizer = trained("tables")
    before = of_both(model, optimizer)
    load = partial(sparsestep.distributed.load, path, model, optimizer)
    assert "a tensor of shape (1,) in a table of 7 rows" in said(load)
    assert of_both(model, optimizer) == before
