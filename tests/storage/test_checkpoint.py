"""Checkpoints have the rows written since the one before; errors and kills leave a whole one."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.errors import InputError
from sparsestep.memory.mapped_file import MappedFile, file_of
from sparsestep.storage import checkpoint, journal, load, mapped, save, writing
from tests.distributed.runs import said
from tests.storage.training import (
    DIM,
    ROWS,
    Run,
    batches,
    coo,
    embedding,
    full,
    in_each_place,
    initial,
    journals_in,
    needs_holes,
    now,
    raising,
    saved_run,
    table_in,
    train,
)
from tests.table import all_same_bits, same_bits

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize(
    ("optimizer", "semantics", "in_rows"),
    [
        (sparsestep.Adam, "masked", False),
        (sparsestep.Adam, "dense", True),
        (sparsestep.Adagrad, "masked", True),
        (sparsestep.Adagrad, "dense", False),
        (sparsestep.SGD, "masked", False),
        (sparsestep.SGD, "dense", True),
    ],
)
def test_a_checkpoint_restores_everything(optimizer, semantics, in_rows, tmp_path: Path):
    run = Run(tmp_path, optimizer, in_rows, semantics=semantics)
    for number in range(3):
        run.train(2)
        run.save(extra={"number": number, "random": torch.get_rng_state()})
    before = run.now
    run.train(3)
    assert not all_same_bits(before, run.now)
    assert run.load()["number"] == 2
    assert all_same_bits(before, run.now)
    run.batches = batches(1)
    run.train(2)
    after = run.now
    del run
    gc.collect()
    fresh = Run(tmp_path, optimizer, in_rows, semantics=semantics)  # as another process would
    fresh.load()
    assert all_same_bits(before, fresh.now)
    fresh.batches = batches(1)
    fresh.train(2)
    assert all_same_bits(after, fresh.now)
    names = {path.name for path in tmp_path.glob("table*")}
    assert len(names) == 1 if in_rows else "table" in names


@in_each_place
def test_only_rows_that_were_written_are_saved_again(in_rows, tmp_path: Path):
    run = Run(tmp_path, in_rows=in_rows)
    run.train()
    run.save()
    assert run.journals == []
    counts = []
    for _ in range(2):
        rows = next(run.batches)
        run.optimizer.zero_grad()
        run.model(rows).sum().backward()
        run.optimizer.step()
        counts.append(len(rows.unique()))
        run.save()
        assert run.journals == counts
    run.save()  # nothing since
    assert run.journals == counts
    run.train()
    run.load()
    run.train()
    run.save()
    assert len(run.journals) == 3, "a loaded checkpoint is gone on from"
    assert run.journals[-1] <= 9


@in_each_place
def test_rows_written_in_backward_and_by_hand_are_saved(in_rows, tmp_path: Path):
    run = Run(tmp_path, sparsestep.RowwiseAdagrad, in_rows)
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
    for steps in (0, 1):  # a step afterwards does not hide it
        with torch.no_grad():
            weight[251 + steps] = 8.0  # not announced: that it was written shows, where does not
        run.train(steps)
        run.save()
        assert run.journals[-1] == ROWS
    before = run.now
    with torch.no_grad():
        weight.zero_()
    run.load()
    assert all_same_bits(before, run.now)


@pytest.mark.parametrize("how", ["replayed", "planned", "functional"])
def test_a_step_without_a_gradient_does_not_hide_writes(how, tmp_path: Path):
    run = Run(tmp_path)
    run.train()
    table, linear = run.model[0].weight, run.model[1].weight
    functional = sparsestep.FunctionalAdam([table, linear])
    run.optimizer.zero_grad()
    if how == "planned":
        run.optimizer.engine = "reference"

    def step() -> None:
        linear.grad = torch.ones_like(linear)
        if how == "functional":
            functional.step([None, linear.grad])
        else:
            run.optimizer.step()

    step()
    step()
    run.save()
    with torch.no_grad():
        table[3] = 5.0  # not announced
    step()
    before = run.now
    run.save()
    with torch.no_grad():
        table.zero_()
    run.load()
    assert all_same_bits(before, run.now)


@in_each_place
def test_journals_that_grow_long_are_replaced_by_a_base(in_rows, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_COMPACT_MIN_BYTES", 1)
    monkeypatch.setattr(checkpoint, "_COMPACT_RATIO", 0.06)
    run = Run(tmp_path, in_rows=in_rows)
    (folder := tmp_path / "saved").mkdir()
    foreign = {"base-1.txt", "rows-of-mine", "rest-000001.bak", "notes"}
    for name in foreign:
        (folder / name).write_text("mine")
    (folder / "base-000099.0").symlink_to(tmp_path / "table")  # removed, but not what it names
    lengths = []
    for _ in range(8):
        run.train()
        run.save()
        lengths.append(len(run.journals))
        before = run.now
        run.train()
        run.load()
        assert all_same_bits(before, run.now)
    assert 0 in lengths[1:]
    assert max(lengths) >= 2
    manifest = journal.read_manifest(folder)
    named = {each.file for each in manifest.files}
    assert set(os.listdir(folder)) == {*named, *foreign, journal.MANIFEST}, "nothing else is left"
    assert (tmp_path / "table").stat().st_size > 10_000


@in_each_place
def test_files_are_on_the_disk_before_the_manifest_names_them(in_rows, tmp_path, monkeypatch):
    run = Run(tmp_path, in_rows=in_rows)
    fsync, replace = os.fsync, os.replace
    flushed: set[int] = set()
    renamed = []

    def note_flushed(descriptor: int) -> None:
        fsync(descriptor)
        flushed.add(os.fstat(descriptor).st_ino)

    def check_flushed(source: Any, target: Any) -> None:
        if Path(target).name == journal.MANIFEST:
            renamed.append(target)
            assert {path.stat().st_ino for path in Path(target).parent.iterdir()} <= flushed
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_flushed)
    monkeypatch.setattr(os, "replace", check_flushed)
    for _ in range(3):
        run.train(1)
        run.save()
    assert len(renamed) == 3


def _new_optimizer(run: Run) -> None:
    run.optimizer = sparsestep.Adam(run.model.parameters(), lr=0.1)


def _other_folder(run: Run) -> None:
    run.save(run.folder / "other")


def _lost_file(run: Run) -> None:
    next((run.folder / "saved").glob("base-*.0")).unlink()


def _other_lineage(run: Run) -> None:
    """Two runs go on from the same checkpoint; one's folder takes the other's place."""
    older = run.folder / "older"
    shutil.copytree(run.folder / "saved", older)
    run.train()
    run.save()
    other = Run(run.folder / "2", in_rows=run.in_rows)
    other.load(older)
    other.batches = batches(3)
    other.train(2)
    other.save(older)
    assert len(journals_in(older)) == len(run.journals)
    shutil.rmtree(run.folder / "saved")
    older.rename(run.folder / "saved")


@pytest.mark.parametrize(
    ("change", "in_rows"),
    [
        (_new_optimizer, False),
        (_other_folder, False),
        (_lost_file, True),
        (_other_lineage, True),
    ],
)
def test_a_folder_without_the_rest_of_the_rows_gets_a_new_base(change, in_rows, tmp_path: Path):
    run = Run(tmp_path, in_rows=in_rows)
    run.train()
    run.save()
    change(run)
    run.train()
    before = run.now
    run.save()
    assert run.journals == []
    run.train()
    run.load()
    assert all_same_bits(before, run.now)


@in_each_place
def test_a_checkpoint_is_loaded_where_state_lies_elsewhere(in_rows, tmp_path: Path):
    run, before = saved_run(tmp_path / "here", in_rows)
    moved = Run(tmp_path / "there", in_rows=not in_rows)
    moved.train(2)
    moved.load(run.folder / "saved")
    assert all_same_bits(before, moved.now)
    moved.batches = batches(0)
    for _ in range(3):
        next(moved.batches)
    moved.train(2)
    after = moved.now
    assert all_same_bits(after, run.now)
    for path in (tmp_path / "there" / "saved", tmp_path / "here" / "saved"):
        moved.save(path)
        assert journals_in(path) == [], "a new base, in any folder"
        moved.train()
        moved.load(path)
        assert all_same_bits(after, moved.now)


def test_wrong_arguments_change_nothing(tmp_path: Path):
    """A mask would be taken for rows 0 and 1, and the next checkpoint would have no others."""
    run = Run(tmp_path)
    run.train()
    run.save()
    before = run.now
    table = mapped(tmp_path / "other", (ROWS, DIM))
    for rows in (torch.ones(ROWS).bool(), torch.tensor([-1]), torch.tensor([ROWS]), [3]):
        with pytest.raises(InputError, match=r"^rows "), writing(table, rows):
            table.fill_(1.0)
    assert not table.any()
    other = nn.Sequential(embedding(table))
    for model, opt in (
        (other, sparsestep.Adam(other.parameters())),
        (run.model, sparsestep.RowwiseAdagrad(run.model.parameters())),
    ):
        with pytest.raises(InputError):
            load(tmp_path / "saved", model, opt)
    with pytest.raises(InputError):
        run.save(extra=run)
    assert all_same_bits(before, run.now)
    assert json.loads((tmp_path / "saved" / "manifest.json").read_text())["number"] == 1


def test_a_table_that_the_model_does_not_have_and_tied_ones(tmp_path: Path):
    table = table_in(tmp_path / "table")
    model = nn.Sequential(embedding(table), nn.Linear(DIM, ROWS, bias=False))
    model[1].weight = model[0].weight
    extra = nn.Parameter(mapped(tmp_path / "extra", (50, 4)))
    opt = sparsestep.Adagrad([*model.parameters(), extra], lr=0.1, initial_accumulator_value=0.5)
    for step in range(3):
        extra.grad = coo([step], (50, 4))
        train(model[0], opt, 1)
        save(tmp_path / "saved", model, opt)
    before = [extra.detach().clone(), *now(model, opt)]
    extra.grad = coo([40], (50, 4))
    train(model[0], opt, 1)
    load(tmp_path / "saved", model, opt)
    assert all_same_bits(before, [extra.detach(), *now(model, opt)])
    assert same_bits(table[299], initial()[299])


@needs_holes
def test_a_large_sparse_table_is_verified_in_no_time(tmp_path: Path):
    """16 GB of holes, whose checksum covers only the pages with data."""
    table = mapped(tmp_path / "table", (1 << 26, 64))
    model = embedding(table)
    rows = torch.tensor([3, 1 << 20, (1 << 26) - 1])
    opt = sparsestep.SGD(model.parameters(), lr=0.1)
    for value in (1.5, 2.5):
        with writing(model.weight, rows), torch.no_grad():
            model.weight[rows] = value
        if value == 1.5:
            save(tmp_path / "saved", model, opt)
    load(tmp_path / "saved", model, opt)
    assert table[rows].eq(1.5).all()
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*")) * 512 < 1 << 20
    (base,) = (tmp_path / "saved").glob("base-*")
    with open(base, "r+b") as file:
        file.seek(1 << 33)
        file.write(b"!")
    with pytest.raises(InputError, match="different bytes"):
        load(tmp_path / "saved", model, opt)


def test_a_checkpoint_copied_without_holes_is_the_same(tmp_path: Path):
    run = Run(tmp_path)
    with writing(run.model[0].weight), torch.no_grad():
        run.model[0].weight[50:250] = 0.0
    run.save()
    before = run.now
    for base in (tmp_path / "saved").glob("base-*"):
        data = base.read_bytes()
        base.unlink()
        base.write_bytes(data)
    run.train()
    run.load()
    assert all_same_bits(before, run.now)


# Loading is complete or has changed nothing, and may be repeated


def fail_at(function: Callable[..., Any], nth: int, fail: Callable[[], Any]) -> Callable[..., Any]:
    """The function, which fails in its n-th call, before it does anything."""
    calls = itertools.count(1)

    def failing(*args: Any, **kwargs: Any) -> Any:
        return fail() if next(calls) == nth else function(*args, **kwargs)

    return failing


DISK_CALLS = ("posix_fallocate", "pwrite", "write", "fsync", "link", "dup2", "replace")


@in_each_place
@pytest.mark.parametrize("checkpoints", [0, 2])
@pytest.mark.parametrize("name", DISK_CALLS)
def test_a_save_on_a_full_disk_leaves_the_checkpoint_before(
    name, checkpoints, in_rows, tmp_path: Path, monkeypatch
):
    """Or, if the last call fails, which only flushes a name, the new one."""
    run, saved = Run(tmp_path, in_rows=in_rows), None
    for _ in range(checkpoints):
        run.train()
        run.save()
        saved = run.now
    for nth in itertools.count(1, 9 if name == "write" else 1):
        run.train()
        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail_at(getattr(os, name), nth, full))
            is_saved = said(partial(run.save, extra=nth), OSError) == ""
        if is_saved:
            break
        names = set(os.listdir(tmp_path / "saved"))
        if saved is None and journal.MANIFEST not in names:
            assert not names - {f".{journal.MANIFEST}"}
        else:
            new, extra = run.now, run.load()
            saved = new if extra == nth else saved
            assert all_same_bits(saved, run.now)
    assert nth > 1 or name in ("posix_fallocate", "pwrite", "link", "dup2")
    before = run.now
    run.train()
    assert run.load() == nth
    assert all_same_bits(before, run.now)


out_of_memory = raising(
    RuntimeError, "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
)
FAULTS: list[tuple[Any, str, Callable[[], None], type[BaseException]]] = [
    *((os, name, full, OSError) for name in DISK_CALLS if name != "write"),
    (MappedFile, "switch_to", raising(MemoryError, "none"), MemoryError),
    (torch, "load", out_of_memory, MemoryError),
    (torch, "empty", out_of_memory, MemoryError),
    (torch.optim.Optimizer, "load_state_dict", out_of_memory, MemoryError),
    (nn.Linear, "_load_from_state_dict", raising(RuntimeError, "no"), InputError),
    (nn.Linear, "_load_from_state_dict", raising(KeyboardInterrupt, "stop"), KeyboardInterrupt),
]


@in_each_place
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[1]}-{fault[3].__name__}")
def test_an_error_at_any_call_of_a_load_undoes_everything(fault, in_rows, tmp_path, monkeypatch):
    where, name, fail, expected = fault
    run, before = saved_run(tmp_path, in_rows)
    now, options = run.now, copy.deepcopy(run.optimizer.state_dict()["param_groups"])
    run.optimizer.param_groups[0]["lr"] = options[0]["lr"] = 0.5
    files = run.files()
    for nth in itertools.count(1):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail_at(getattr(where, name), nth, fail))
            if not said(run.load, expected):
                break
        assert all_same_bits(now, run.now)
        assert run.optimizer.state_dict()["param_groups"] == options
        assert run.files() == files
        assert {path.name for path in tmp_path.iterdir()} == {*files, "saved"}, "nothing is left"
        run.train()
        if not in_rows:  # the tensors still belong to these files
            assert run.files()["table"].endswith(run.model[0].weight.detach().numpy().tobytes())
        now, files = run.now, run.files()
    assert nth > 1
    assert all_same_bits(before, run.now)
    assert run.optimizer.param_groups[0]["lr"] == 0.1


@in_each_place
def test_tensors_follow_the_file_and_the_old_one_is_gone(in_rows, tmp_path: Path):
    run, before = saved_run(tmp_path, in_rows)
    weight = run.model[0].weight
    address, file = weight.data_ptr(), file_of(weight)
    old = os.stat(tmp_path / "table").st_ino
    os.chmod(tmp_path / "table", 0o600)
    run.load()
    assert (weight.data_ptr(), file_of(weight)) == (address, file)
    about = os.stat(tmp_path / "table")
    assert about.st_ino != old
    assert about.st_mode & 0o777 == 0o600
    assert os.path.samestat(os.fstat(file.descriptor), about)
    if sys.platform == "linux":  # no descriptor keeps the space of the old file
        gc.collect()
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        assert not [link for link in links if "deleted" in link and str(tmp_path) in link]
    run.train()
    run.save()
    assert mapped(tmp_path / "table", (ROWS, DIM)).data_ptr() == address
    if not in_rows:
        assert run.files()["table"].endswith(weight.detach().numpy().tobytes())
    assert not all_same_bits(before, run.now)


def test_a_table_behind_a_link_and_one_without_a_name(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    real = tmp_path / "disk" / "real"
    mapped(real, (ROWS, DIM))
    gc.collect()
    (tmp_path / "table").symlink_to(real)
    run, before = saved_run(tmp_path)
    run.load()
    assert all_same_bits(before, run.now)
    assert (tmp_path / "table").is_symlink()
    run.train()
    assert real.read_bytes().endswith(run.model[0].weight.detach().numpy().tobytes())
    real.unlink()
    real.write_bytes(b"another file")
    run.load()
    assert all_same_bits(before, run.now)
    assert real.read_bytes() == b"another file"
    assert os.listdir(tmp_path / "disk") == ["real"]


def test_errors_that_torch_hides_are_raised_even_while_another_is_handled(tmp_path, monkeypatch):
    run, _ = saved_run(tmp_path)

    def save_while_handling(**more: Any) -> None:
        try:
            raise MemoryError("of the caller")
        except MemoryError:
            run.save(**more)

    def hiding(*_: Any, **__: Any) -> None:
        try:
            full()
        finally:
            raise RuntimeError("unexpected pos")

    with pytest.raises(InputError, match="extra must hold only"):
        save_while_handling(extra=run)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", fail_at(torch.save, 2, hiding))
        with pytest.raises(OSError, match="space"):
            save_while_handling()


# Saves and loads at the same time


def test_a_folder_is_written_by_one_save_at_a_time(tmp_path: Path, monkeypatch):
    """A signal handler that saves in the middle of a save, another thread or process."""
    run, _ = saved_run(tmp_path)
    before = run.now
    write_rest = journal.write_rest

    def interrupted(*args):
        made = write_rest(*args)
        with pytest.raises(InputError, match="one call at a time"):
            run.save(extra="inner")
        return made

    monkeypatch.setattr(journal, "write_rest", interrupted)
    run.save(extra="outer")
    run.train()
    assert run.load() == "outer"
    assert all_same_bits(before, run.now)


@in_each_place
@pytest.mark.parametrize("semantics", ["masked", "dense"])
@pytest.mark.parametrize("is_first", [False, True])
def test_a_signal_handler_may_save_in_the_middle_of_a_step(
    is_first, semantics, in_rows, tmp_path: Path
):
    """The rows that the step goes on to write are in the next checkpoint."""
    run = Run(tmp_path, in_rows=in_rows, semantics=semantics)
    run.train()
    if not is_first:
        run.save()
        run.train()
    steps = []

    def handler(*_: Any) -> None:
        run.save(extra="handler")

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if "sparsestep/optim" not in frame.f_code.co_filename:
            return None
        if frame.f_code.co_name in ("replay_step", "commit", "_commit") and not steps:
            steps.append(frame.f_code.co_name)
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return trace

    was = signal.signal(signal.SIGUSR1, handler)
    try:
        sys.settrace(trace)
        run.train()
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, was)
    assert steps
    run.save(extra="after")
    before = run.now
    run.train()
    assert run.load() == "after"
    assert all_same_bits(before, run.now)


def test_a_checkpoint_is_replaced_while_it_is_loaded(tmp_path: Path, monkeypatch):
    """Its files are gone: the new one is loaded."""
    run, _ = saved_run(tmp_path)
    now = run.now
    check_sizes, saves = journal.check_sizes, []

    def late(folder, manifest):
        if not saves:
            saves.append(run.save)
            monkeypatch.setattr(checkpoint, "_is_base_due", lambda *_: True)
            run.save(extra="new")
        check_sizes(folder, manifest)

    monkeypatch.setattr(journal, "check_sizes", late)
    assert run.load() == "new"
    assert all_same_bits(now, run.now)
