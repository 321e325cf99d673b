"""Checkpoints have what was written since the one before, and stand whatever happens."""

from __future__ import annotations

import errno
import gc
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.storage import checkpoint as checkpoints
from sparsestep.storage import load, manifest, mapped, save, writing
from tests.storage.training import (
    DIM,
    ROWS,
    Run,
    batches,
    embedding,
    initial,
    same,
    state_of,
    table_in,
    train,
)
from tests.table import WITH_DENSE, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


in_each_layout = pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])


@in_each_layout
@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize("optimizer", WITH_DENSE, ids=lambda o: o.__name__)
def test_a_checkpoint_brings_back_what_was(optimizer, semantics, together, tmp_path: Path):
    run = Run(tmp_path, optimizer, together, semantics=semantics)
    for number in range(3):
        run.train(2)
        run.save(extra={"number": number, "random": torch.get_rng_state()})
    before = run.now
    run.train(3)
    assert not same(before, run.now)
    assert run.load()["number"] == 2
    assert same(before, run.now)
    run.batches = batches(1)
    run.train(2)
    after = run.now
    del run
    gc.collect()
    fresh = Run(tmp_path, optimizer, together, semantics=semantics)  # as another process would
    fresh.load()
    assert same(before, fresh.now)
    fresh.batches = batches(1)
    fresh.train(2)
    assert same(after, fresh.now)
    names = {path.name for path in tmp_path.glob("table*")}
    assert len(names) == 1 if together else "table" in names


@in_each_layout
def test_only_rows_that_were_written_are_saved_again(together, tmp_path: Path):
    run = Run(tmp_path, together=together)
    run.train()
    run.save()
    assert run.journals == []
    seen = set()
    for count in (1, 3):
        rows = next(run.batches)
        run.optimizer.zero_grad()
        run.model(rows).sum().backward()
        run.optimizer.step()
        seen.add(len(rows.unique()))
        run.save()
        assert len(run.journals) == (1 if count == 1 else 2)
        assert run.journals[-1] == len(rows.unique())
    run.save()  # nothing since
    assert len(run.journals) == 2
    before = run.now
    run.train()
    run.load()
    run.train()
    run.save()
    assert len(run.journals) == 3, "a loaded checkpoint is gone on from"
    assert run.journals[-1] < ROWS
    assert not same(before, run.now)


@in_each_layout
def test_rows_written_in_backward_and_by_hand_are_saved(together, tmp_path: Path):
    run = Run(tmp_path, sparsestep.RowwiseAdagrad, together)
    run.train()
    run.save()
    run.optimizer.zero_grad()
    handle = run.optimizer.step_in_backward()
    run.train(1)
    handle.remove()
    run.save()
    assert 0 < run.journals[-1] <= 9
    weight = run.model[0].weight
    rows = torch.tensor([250, 299])
    with writing(weight, rows), torch.no_grad():
        weight[rows] = 7.0
    run.save()
    assert run.journals[-1] == 2
    with torch.no_grad():
        weight[251] = 8.0  # unannounced: who wrote shows, where does not
    run.save()
    assert run.journals[-1] == ROWS
    with torch.no_grad():
        weight[252] = 9.0
    run.train()  # a step after it does not hide it
    run.save()
    assert run.journals[-1] == ROWS
    before = run.now
    with torch.no_grad():
        weight.zero_()
    run.load()
    assert same(before, run.now)


@in_each_layout
@pytest.mark.parametrize("steps", [1, 4])
def test_journals_are_written_into_the_base(tmp_path: Path, monkeypatch, together, steps):
    monkeypatch.setattr(checkpoints, "_LEAST_BYTES", 1)
    monkeypatch.setattr(checkpoints, "_MOST_OF_BASE", 0.03 * steps)
    run = Run(tmp_path, together=together)
    lengths = []
    for _ in range(12):
        run.train()
        run.save()
        lengths.append(len(run.journals))
        before = run.now
        run.train()
        run.load()
        assert same(before, run.now)
    assert 0 in lengths[1:]
    assert max(lengths) >= steps
    named = {each.file for each in manifest.read(tmp_path / "saved").files}
    assert set(os.listdir(tmp_path / "saved")) == {*named, manifest.MANIFEST}, (
        "nothing else is left"
    )


@in_each_layout
def test_files_are_on_the_disk_before_the_manifest_names_them(
    together, tmp_path: Path, monkeypatch
):
    run = Run(tmp_path, sparsestep.Adam, together)
    fsync, replace = os.fsync, os.replace
    flushed: set[int] = set()
    renamed = []

    def note_flushed(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check_flushed(source: Any, target: Any) -> None:
        if Path(target).name == manifest.MANIFEST:
            renamed.append(target)
            assert {path.stat().st_ino for path in Path(target).parent.iterdir()} <= flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_flushed)
    monkeypatch.setattr(os, "replace", check_flushed)
    for _ in range(3):
        run.train(1)
        run.save()
    assert len(renamed) == 3


@in_each_layout
def test_a_new_optimizer_begins_a_new_base(together, tmp_path: Path):
    run = Run(tmp_path, together=together)
    run.train()
    run.save()
    run.optimizer = sparsestep.Adam(run.model.parameters(), lr=0.1)
    run.train()
    run.save()
    assert run.journals == []
    before = run.now
    run.train()
    run.load()
    assert same(before, run.now)


@in_each_layout
def test_a_checkpoint_is_loaded_where_state_lies_elsewhere(together, tmp_path: Path):
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run = Run(here, together=together)
    for _ in range(3):
        run.train()
        run.save()
    before = run.now
    run.train()
    after = run.now
    moved = Run(there, together=not together)
    moved.train(2)
    load(here / "saved", moved.model, moved.optimizer)
    assert same(before, moved.now)
    moved.batches = batches(0)
    for _ in range(3):
        next(moved.batches)
    moved.train()
    assert same(after, moved.now)
    for path in (there / "saved", here / "saved"):  # a new base, whatever lies in the folder
        save(path, moved.model, moved.optimizer)
        assert manifest.read(path).journals == []
        moved.train()
        load(path, moved.model, moved.optimizer)
        assert same(after, moved.now)


def test_a_checkpoint_elsewhere_is_whole_too(tmp_path: Path):
    run = Run(tmp_path)
    run.train()
    run.save()
    save(tmp_path / "other", run.model, run.optimizer)
    before = run.now
    run.train()
    run.save()
    assert run.journals == []
    load(tmp_path / "other", run.model, run.optimizer)
    assert same(before, run.now)


@pytest.mark.parametrize("where", ["rest", "rows", "base"])
def test_a_full_disk_leaves_the_checkpoint_before(where, tmp_path: Path, monkeypatch):
    run = Run(tmp_path)
    run.train()
    if where != "base":
        run.save()
    before = run.now
    run.train()

    def full(*_, **__):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if where == "rest":
            patch.setattr(torch, "save", lambda what, file: full() if what else None)
        else:
            patch.setattr(os, "posix_fallocate", full)
        with pytest.raises((OSError, sparsestep.InputError)):
            run.save()
    left = set(os.listdir(tmp_path / "saved"))
    if where == "base":
        assert not any(name.startswith("base") for name in left)
        return
    after = run.now
    run.load()
    assert same(before, run.now)
    run.save()
    run.load()
    assert same(before, run.now)
    assert not same(after, before)


@pytest.mark.parametrize(
    "rows", [torch.ones(ROWS).bool(), torch.tensor([-1]), torch.tensor([ROWS]), [3]], ids=str
)
def test_what_is_no_row_to_write_is_refused(rows, tmp_path: Path):
    """A mask would be taken for rows 0 and 1, and the next checkpoint would have no others."""
    table = mapped(tmp_path / "table", (ROWS, DIM))
    with pytest.raises(sparsestep.InputError, match=r"^rows "), writing(table, rows):
        table.fill_(1.0)
    assert not table.any()
    with (
        pytest.raises(sparsestep.InputError, match=r"^writing: the table must be a tensor"),
        writing([1]),  # type: ignore[arg-type]
    ):
        pass


def test_what_does_not_fit_is_refused(tmp_path: Path):
    run = Run(tmp_path)
    run.train()
    with pytest.raises(sparsestep.InputError, match="must be a folder with a checkpoint of save"):
        load(tmp_path / "nothing", run.model, run.optimizer)
    run.save()
    now = run.now
    other = nn.Sequential(embedding(mapped(tmp_path / "other", (ROWS, DIM))))
    opt = sparsestep.Adam(other.parameters())
    with pytest.raises(
        sparsestep.InputError, match="must have the checkpoint's parameters, buffers and shapes"
    ):
        load(tmp_path / "saved", other, opt)
    with pytest.raises(sparsestep.InputError, match="must have the same tables in files"):
        load(tmp_path / "saved", run.model, sparsestep.RowwiseAdagrad(run.model.parameters()))
    with pytest.raises(sparsestep.InputError, match="extra must hold only"):
        run.save(extra=run)
    theirs = torch.optim.Adam(run.model.parameters())
    wrong: list[tuple[Any, Any, str]] = [
        (run.model, theirs, "the optimizer must be one of sparsestep. Got torch.optim.adam.Adam."),
        (run.optimizer, run.model, f"the model must be an nn.Module. Got {type(opt).__name__}."),
    ]
    for model, optimizer, message in wrong:
        for call in (save, load):
            with pytest.raises(sparsestep.InputError) as raised:
                call(tmp_path / "saved", model, optimizer)
            assert str(raised.value) == f"{call.__name__}: {message}"
    assert same(now, run.now)
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["number"] == 1


def test_a_table_that_the_model_does_not_have_and_tied_ones(tmp_path: Path):
    table = table_in(tmp_path / "table")
    model = nn.Sequential(embedding(table), nn.Linear(DIM, ROWS, bias=False))
    model[1].weight = model[0].weight
    extra = nn.Parameter(mapped(tmp_path / "extra", (50, 4)))
    opt = sparsestep.Adagrad([*model.parameters(), extra], lr=0.1, initial_accumulator_value=0.5)
    for step in range(3):
        extra.grad = torch.sparse_coo_tensor([[step]], torch.ones(1, 4), extra.shape)
        train(model[0], opt, 1)
        save(tmp_path / "saved", model, opt)
    before = [table.clone(), extra.detach().clone(), *(t.clone() for t in state_of(opt))]
    extra.grad = torch.sparse_coo_tensor([[40]], torch.ones(1, 4), extra.shape)
    train(model[0], opt, 1)
    load(tmp_path / "saved", model, opt)
    assert same(before, [table, extra.detach(), *state_of(opt)])
    assert same_bits(table[299], initial()[299])
