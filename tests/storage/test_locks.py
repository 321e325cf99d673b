"""A table in a file belongs to one process; and errors name the path that the user named."""

from __future__ import annotations

import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep.memory import disk
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import mapped, writing
from tests.storage.training import (
    DIM,
    ROWS,
    adam,
    embedding,
    in_each_place,
    initial,
    raising,
    table_in,
    train,
)
from tests.table import same_bits

pytest.importorskip("fcntl")

pytestmark = pytest.mark.usefixtures("one_thread")


@contextmanager
def held_elsewhere(path: Path) -> Iterator[None]:
    """Another open file description holds the lock of a file, as in another process."""
    with open(path, "r+b") as file:
        assert disk.lock(file.fileno())
        yield


def is_locked(path: Path) -> bool:
    """Whether another open file description could not lock a file, as in another process."""
    with open(path, "r+b") as file:
        return not disk.lock(file.fileno())


@in_each_place
def test_a_file_that_another_process_writes_can_only_be_read(in_rows, tmp_path: Path):
    optimizer = adam if in_rows else None
    table_in(tmp_path / "table", optimizer=optimizer)
    gc.collect()
    (path := tmp_path / "link").hardlink_to(tmp_path / "table")
    before = (tmp_path / "table").read_bytes()
    model = embedding(mapped(path, (ROWS, DIM), optimizer=optimizer))
    opt = adam(model.parameters())
    with held_elsewhere(tmp_path / "table"):
        assert same_bits(model.weight.detach(), initial())
        for write in (lambda: train(model, opt, 1), opt.materialize_state):
            with pytest.raises(sparsestep.InputError) as raised:
                write()
            assert str(path) in str(raised.value)
            if os.path.exists("/proc/locks"):
                assert f"process {os.getpid()} writes" in str(raised.value)
        with pytest.raises(sparsestep.InputError), writing(model.weight):
            pass
        assert (tmp_path / "table").read_bytes() == before
        assert not opt.state
    train(model, opt, 1)
    assert not same_bits(model.weight.detach(), initial())


def test_a_state_file_is_not_taken_from_another_process(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table"))
    adam(model.parameters()).materialize_state()
    gc.collect()
    state = tmp_path / "table.exp_avg_sq"
    before = state.read_bytes(), state.stat().st_ino
    opt = adam(model.parameters())
    with held_elsewhere(state):
        with pytest.raises(sparsestep.InputError, match=r"table\.exp_avg_sq can be written by one"):
            train(model, opt, 1)
        assert (state.read_bytes(), state.stat().st_ino) == before
        assert same_bits(model.weight.detach(), initial())
        assert not opt.state_dict()["state"]
    train(model, opt, 1)
    assert not same_bits(model.weight.detach(), initial())


def test_a_lock_lasts_as_long_as_the_mapping(tmp_path: Path):
    model = embedding(table_in(tmp_path / "table"))
    opt = adam(model.parameters())
    train(model, opt, 1)
    files = [tmp_path / name for name in ("table", "table.exp_avg", "table.exp_avg_sq")]
    row = model.weight.detach()[3]
    assert all(map(is_locked, files))
    del model, opt
    gc.collect()
    assert [is_locked(path) for path in files] == [True, False, False]
    assert row.ne(0).all()
    del row
    gc.collect()
    assert not is_locked(files[0])


def test_one_process_opens_a_file_as_often_as_it_likes(tmp_path: Path):
    (tmp_path / "link").symlink_to(tmp_path / "table")
    paths = [tmp_path / "table", str(tmp_path / "table"), tmp_path / "link"]
    tables: list[torch.Tensor] = []
    barrier = threading.Barrier(6)

    def open_it(number: int) -> None:
        barrier.wait()
        tables.append(mapped(paths[number % 3], (ROWS, DIM)))

    threads = [threading.Thread(target=open_it, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({table.data_ptr() for table in tables}) == 1
    assert len(tables) == 6
    tables.clear()
    gc.collect()
    assert not is_locked(tmp_path / "table")


def test_a_lock_is_inherited_but_not_by_programs(tmp_path: Path):
    """Forked workers share it, and it outlives the parent's own; started programs do not."""
    table = table_in(tmp_path / "table")
    with subprocess.Popen([sys.executable, "-Ic", "input()"], stdin=subprocess.PIPE) as process:
        duplicate = os.dup(file_of(table).descriptor)  # as fork makes one
        del table
        gc.collect()
        assert is_locked(tmp_path / "table")
        os.close(duplicate)
        assert not is_locked(tmp_path / "table")
        process.communicate(b"\n")


def fails(error: int):
    return raising(OSError, error, os.strerror(error))


@pytest.mark.parametrize("error", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("is_late", [False, True])
def test_file_systems_without_locks_and_links(error, is_late, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(disk.fcntl, "flock", fails(error))
    if error == errno.EOPNOTSUPP:
        monkeypatch.setattr(os, "link", fails(errno.EPERM))
    create, path = disk.create, tmp_path / "table"
    others = []

    def slow(*args, **options):
        if is_late and not others:
            others.append(None)
            others.append(mapped(path, (ROWS, DIM)).fill_(5))  # another process was faster
        return create(*args, **options)

    monkeypatch.setattr(disk, "create", slow)
    model = embedding(mapped(path, (ROWS, DIM)))
    assert model.weight.eq(5 * is_late).all(), "opened, and not replaced"
    assert os.listdir(tmp_path) == ["table"]
    train(model, adam(model.parameters()), 1)


def test_symbolic_links_are_followed(tmp_path: Path):
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
    link = tmp_path / "here" / "table"
    link.symlink_to("../there/target")
    (tmp_path / "here" / "table.exp_avg").symlink_to(tmp_path / "there" / "average")
    model = embedding(mapped(link, (ROWS, DIM)))
    opt = adam(model.parameters())
    train(model, opt, 1)
    assert link.is_symlink()
    assert (tmp_path / "here" / "table.exp_avg").is_symlink()
    assert set(os.listdir(tmp_path / "there")) == {"target", "average"}
    del model, opt
    gc.collect()
    mapped(tmp_path / "there" / "target", (ROWS, DIM))[7] = 5.0
    gc.collect()
    assert mapped(link, (ROWS, DIM))[7].eq(5).all()


@pytest.mark.parametrize("problem", ["target", "loop", "directory", "full"])
def test_errors_name_the_path_of_the_user(problem, tmp_path: Path, monkeypatch):
    path = tmp_path / "table"
    if problem == "target":
        path.symlink_to(tmp_path / "missing" / "table")
    elif problem == "loop":
        path.symlink_to(path)
    elif problem == "directory":
        path.mkdir()
    else:
        monkeypatch.setattr(os, "pwrite", fails(errno.ENOSPC))
    before = sorted(os.listdir(tmp_path))
    with pytest.raises(OSError, match="Errno") as raised:
        mapped(path, (ROWS, DIM))
    assert raised.value.filename == str(path)
    assert sorted(os.listdir(tmp_path)) == before


def test_workers_that_are_forked_read_the_table(tmp_path: Path):
    table = table_in(tmp_path / "table")
    rows = torch.utils.data.TensorDataset(table)
    loader = torch.utils.data.DataLoader(
        rows, batch_size=100, num_workers=1, multiprocessing_context="fork"
    )
    assert same_bits(torch.cat([batch for (batch,) in loader]), initial())
    del loader, table, rows
    gc.collect()
    assert not is_locked(tmp_path / "table")
    assert mapped(tmp_path / "table", (ROWS, DIM)).shape == (ROWS, DIM)
