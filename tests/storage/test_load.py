"""A load is complete or has changed nothing, and may be repeated after a kill at any moment."""

from __future__ import annotations

import copy
import errno
import functools
import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.errors import InputError
from sparsestep.memory import replace_file as replacing
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import load, manifest, mapped, save, writing
from tests.storage.training import DIM, ROWS, Run, batches, embedding, same

pytestmark = pytest.mark.usefixtures("one_thread")

in_each_layout = pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])


def saved_run(folder: Path, together: bool) -> tuple[Run, list[torch.Tensor]]:
    """A run that has gone on since its second checkpoint, and what it was then."""
    run = Run(folder, together=together)
    for _ in range(2):
        run.train()
        run.save()
    before = run.now
    run.train(2)
    return run, before


def fail_at(function: Callable[..., Any], nth: int, fail: Callable[[], Any]) -> Callable[..., Any]:
    """The function, which fails in its n-th call, before it does anything."""
    calls = 0

    def failing(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return fail() if calls == nth else function(*args, **kwargs)

    return failing


def raising(kind: type[BaseException], *args: Any) -> Callable[[], None]:
    def fail() -> None:
        raise kind(*args)

    return fail


full = raising(OSError, errno.ENOSPC, os.strerror(errno.ENOSPC))
NO_MEMORY = "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"
FAULTS: list[tuple[Any, str, int, Callable[[], None], type[BaseException]]] = [
    (os, "posix_fallocate", 1, full, OSError),
    (os, "pwrite", 1, full, OSError),
    (os, "fsync", 1, full, OSError),
    (os, "link", 1, full, OSError),
    (os, "dup2", 1, full, OSError),
    (os, "replace", 1, full, OSError),
    (replacing._Swap, "switch", 1, raising(MemoryError), MemoryError),
    (torch, "load", 1, raising(RuntimeError, NO_MEMORY), MemoryError),
    (torch.optim.Optimizer, "load_state_dict", 1, raising(RuntimeError, NO_MEMORY), MemoryError),
    (nn.Linear, "_load_from_state_dict", 1, raising(RuntimeError, "no"), InputError),
    (nn.Linear, "_load_from_state_dict", 1, raising(KeyboardInterrupt), KeyboardInterrupt),
]


@in_each_layout
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault[1]}-{fault[2]}")
def test_an_error_at_any_point_undoes_everything(fault, together, tmp_path: Path, monkeypatch):
    where, name, nth, fail, expected = fault
    run, before = saved_run(tmp_path, together)
    now, options = run.now, copy.deepcopy(run.optimizer.state_dict()["param_groups"])
    run.optimizer.param_groups[0]["lr"] = options[0]["lr"] = 0.5
    files = {path.name: path.read_bytes() for path in tmp_path.glob("*table*")}
    with monkeypatch.context() as patch:
        patch.setattr(where, name, fail_at(getattr(where, name), nth, fail))
        with pytest.raises(expected):
            run.load()
    assert same(now, run.now)
    assert run.optimizer.state_dict()["param_groups"] == options
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*table*")} == files
    assert {path.name for path in tmp_path.iterdir()} == {*files, "saved"}, "nothing is left over"
    run.train()
    run.load()
    assert same(before, run.now)
    assert run.optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_tables_that_were_renamed_get_their_names_back(nth: int, tmp_path: Path, monkeypatch):
    run, before = saved_run(tmp_path, together=False)
    files = {path.name: path.read_bytes() for path in tmp_path.glob("*table*")}
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail_at(os.replace, nth, full))
        with pytest.raises(OSError, match="space"):
            run.load()
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*table*")} == files
    run.train()  # the tensors still belong to these files
    files = {path.name: path.read_bytes() for path in tmp_path.glob("*table*")}
    assert files["table"].endswith(run.model[0].weight.detach().numpy().tobytes())
    run.load()
    assert same(before, run.now)


@in_each_layout
def test_tensors_follow_the_file_and_the_old_one_is_gone(together, tmp_path: Path):
    run, before = saved_run(tmp_path, together)
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
    data = (tmp_path / "table").read_bytes()
    assert mapped(tmp_path / "table", (ROWS, DIM)).data_ptr() == address
    if not together:
        assert data.endswith(weight.detach().numpy().tobytes())
    assert not same(before, run.now)


def test_a_table_behind_a_link_and_one_without_a_name(tmp_path: Path):
    (tmp_path / "disk").mkdir()
    mapped(tmp_path / "disk" / "real", (ROWS, DIM))
    gc.collect()
    (tmp_path / "table").symlink_to(tmp_path / "disk" / "real")
    run, before = saved_run(tmp_path, together=False)
    run.load()
    assert same(before, run.now)
    assert (tmp_path / "table").is_symlink()
    run.train()
    data = (tmp_path / "disk" / "real").read_bytes()
    assert data.endswith(run.model[0].weight.detach().numpy().tobytes())
    (tmp_path / "disk" / "real").unlink()
    (tmp_path / "disk" / "real").write_bytes(b"another file")
    run.load()
    assert same(before, run.now)
    assert (tmp_path / "disk" / "real").read_bytes() == b"another file"
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["real"]


KILLED_AT = [
    (replacing.Replacements, "create", 1),
    (replacing.Replacements, "create", 2),
    (replacing.Replacements, "prepare", 1),
    (replacing._Swap, "switch", 2),
    (replacing._Swap, "rename", 1),
    (replacing._Swap, "rename", 2),
    (replacing.Replacements, "__exit__", 1),
]


@pytest.mark.skipif(sys.platform != "linux", reason="forks a process that has torch")
@pytest.mark.parametrize("where", KILLED_AT, ids=lambda at: f"{at[1]}-{at[2]}")
def test_a_process_killed_in_load(where, tmp_path: Path):
    """Files are as they were or as they are to be, and a load in another process completes it."""
    owner, name, nth = where
    run, before = saved_run(tmp_path, together=False)
    now = run.now
    pid = os.fork()
    if not pid:
        kill = functools.partial(os.kill, os.getpid(), signal.SIGKILL)
        setattr(owner, name, fail_at(getattr(owner, name), nth, kill))
        try:
            run.load()
        finally:
            os._exit(1)
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    del run
    gc.collect()
    table = mapped(tmp_path / "table", (ROWS, DIM))
    assert any(same([table], [each]) for each in (now[0], before[0]))
    del table
    gc.collect()
    fresh = Run(tmp_path)
    fresh.load()
    assert same(before, fresh.now)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"table", "table.exp_avg", "table.exp_avg_sq", "saved"}


@in_each_layout
def test_checkpoints_of_two_models_are_not_mixed(together, tmp_path: Path):
    """The folder was deleted, and another model has saved as many checkpoints there."""
    first, second = (
        Run(folder, together=together)
        for folder in (tmp_path / "1", tmp_path / "2")
        if not folder.mkdir()
    )
    folder = tmp_path / "saved"
    first.train()
    save(folder, first.model, first.optimizer)
    shutil.rmtree(folder)
    second.batches = batches(7)
    second.train(3)
    save(folder, second.model, second.optimizer)
    first.train()
    expected = first.now
    save(folder, first.model, first.optimizer)
    assert manifest.read(folder).journals == []
    first.train()
    load(folder, first.model, first.optimizer)
    assert same(expected, first.now)


def test_an_older_copy_of_the_folder_is_another_lineage(tmp_path: Path):
    """Two runs go on from the same checkpoint; the folder of one is put in the other's place."""
    run = Run(tmp_path)
    run.train()
    run.save()
    shutil.copytree(tmp_path / "saved", tmp_path / "older")
    run.train()
    run.save()
    now = run.now
    (tmp_path / "2").mkdir()
    other = Run(tmp_path / "2")
    load(tmp_path / "older", other.model, other.optimizer)
    other.batches = batches(3)
    other.train(2)
    save(tmp_path / "older", other.model, other.optimizer)
    assert manifest.read(tmp_path / "older").number == manifest.read(tmp_path / "saved").number
    shutil.rmtree(tmp_path / "saved")
    (tmp_path / "older").rename(tmp_path / "saved")
    run.save()
    run.train()
    run.load()
    assert same(now, run.now)


def test_a_folder_that_lost_a_file_gets_a_new_base(tmp_path: Path):
    run, _ = saved_run(tmp_path, together=False)
    next((tmp_path / "saved").glob("base-*.1")).unlink()
    now = run.now
    run.save()
    assert run.journals == []
    run.train()
    run.load()
    assert same(now, run.now)


def test_files_that_are_not_ours_stay(tmp_path: Path):
    run, _ = saved_run(tmp_path, together=False)
    names = {"base-1.txt", "rows-of-mine", "rest-000001.bak", "notes"}
    for name in names:
        (tmp_path / "saved" / name).write_text("mine")
    (tmp_path / "saved" / "base-000099.0").symlink_to(tmp_path / "table")
    run.save()
    assert names <= set(os.listdir(tmp_path / "saved"))
    assert (tmp_path / "table").stat().st_size > 10_000


def test_memory_that_runs_out_is_a_memory_error(tmp_path: Path, monkeypatch):
    run, before = saved_run(tmp_path, together=False)
    out_of_memory = raising(RuntimeError, NO_MEMORY)
    for call, where, name in (
        (run.save, torch, "save"),
        (run.save, torch, "load"),
        (run.save, torch.Tensor, "nonzero"),
        (run.load, torch, "load"),
        (run.load, torch, "empty"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, fail_at(getattr(where, name), 1, out_of_memory))
            with pytest.raises(MemoryError):
                call()
    run.load()
    assert same(before, run.now)


def test_errors_that_torch_hides_are_told(tmp_path: Path, monkeypatch):
    """Also where the caller is handling another one."""
    run, _ = saved_run(tmp_path, together=False)

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


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems may not have holes")
def test_a_large_sparse_table_is_verified_in_no_time(tmp_path: Path):
    """16 GB of holes, whose checksum covers only what is there."""
    table = mapped(tmp_path / "table", (1 << 26, 64))
    model = embedding(table)
    rows = torch.tensor([3, 1 << 20, (1 << 26) - 1])
    with writing(model.weight, rows), torch.no_grad():
        model.weight[rows] = 1.5
    opt = sparsestep.SGD(model.parameters(), lr=0.1)
    save(tmp_path / "saved", model, opt)
    with writing(model.weight, rows), torch.no_grad():
        model.weight[rows] = 2.5
    load(tmp_path / "saved", model, opt)
    assert table[rows].eq(1.5).all()
    assert sum(path.stat().st_blocks for path in tmp_path.rglob("*")) * 512 < 1 << 20
    (base,) = (tmp_path / "saved").glob("base-*")
    with open(base, "r+b") as file:
        file.seek(1 << 33)
        file.write(b"!")
    with pytest.raises(sparsestep.InputError, match="different bytes"):
        load(tmp_path / "saved", model, opt)


def test_a_checkpoint_copied_without_holes_is_the_same(tmp_path: Path):
    run = Run(tmp_path)
    with writing(run.model[0].weight), torch.no_grad():
        run.model[0].weight[50:250] = 0.0
    run.save()
    now = run.now
    for base in (tmp_path / "saved").glob("base-*"):
        data = base.read_bytes()
        base.unlink()
        base.write_bytes(data)
    run.train()
    run.load()
    assert same(now, run.now)
