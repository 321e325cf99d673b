"""A full disk is an ``OSError`` before anything is written, on every file system at hand."""

from __future__ import annotations

import errno
import functools
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.memory import disk
from sparsestep.memory.mapped_file import MappedFile, file_of, mapped_files
from sparsestep.storage import mapped
from tests.storage.training import adam, embedding, fork, now, state_of, table_in, train
from tests.table import all_same_bits

LEVELS = (0, 4096, 20_000, 150_000, 600_000)  # bytes left

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(sys.platform != "linux", reason="reserves blocks there"),
]


@contextmanager
def small_file_system(kind: str, folder: Path) -> Iterator[Path]:
    """Mount a small file system, which takes root."""
    (target := folder / "mounted").mkdir()
    if kind == "tmpfs":
        mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(target)]
    else:
        with open(folder / "image", "wb") as image:
            image.truncate(12 << 20)
        name, *options = kind.split()
        make = [f"mkfs.{name}", "-q", "-m", "0", *options, str(folder / "image")]
        try:
            subprocess.run(make, check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            pytest.skip(f"cannot make {kind}")
        mount = ["mount", "-o", "loop", str(folder / "image"), str(target)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount file systems here")
    try:
        yield target
    finally:
        subprocess.run(["umount", str(target)], check=True)


def check_full(error: OSError, path: Path | None = None) -> None:
    """An error must say that the disk is full, and name a file of the user."""
    assert error.errno == errno.ENOSPC, error
    assert path is None or str(error.filename).startswith(str(path)), error


def fill(folder: Path, leave: int) -> None:
    """Leave only so many bytes."""
    with open(folder / "filler", "ab") as file:
        for piece in (1 << 20, 1 << 16, 4096, 1024, 1):
            while True:
                about = os.statvfs(folder)
                if about.f_bavail * about.f_frsize < leave + piece:
                    break
                try:
                    os.write(file.fileno(), bytes(piece))
                except OSError as error:
                    check_full(error)
                    break
        os.fsync(file.fileno())


def read_in_order(folder: Path) -> None:
    """Read files as a backup does: the page cache then holds large folios, also over holes.

    First, nothing is cached, as after other programs have needed the memory.
    """
    for found in list(mapped_files.values()):
        file = found()
        if file is not None:
            os.fsync(file.descriptor)
            file.evict()
    for path in sorted(folder.glob("table*")):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


OPTIMIZERS: list[Any] = [
    sparsestep.Adam,
    functools.partial(sparsestep.Adam, semantics="dense"),
    sparsestep.RowwiseAdagrad,
    sparsestep.SGD,
    functools.partial(sparsestep.Adagrad, initial_accumulator_value=0.5),
]


def train_until_full(folder: Path, chance: random.Random, writer: int) -> None:
    """Fill the disk, check that steps that fail change nothing, free space, and go on."""
    rows, make, failures = chance.choice([300, 4000, 40_000]), chance.choice(OPTIMIZERS), 0
    draw = torch.Generator().manual_seed(chance.randrange(1 << 30))
    in_rows, is_dense = chance.choice([None, make]), chance.random() < 0.2
    if chance.random() < 0.15:
        fill(folder, chance.choice(LEVELS))
    try:
        param = nn.Parameter(mapped(folder / "table", (rows, 24), optimizer=in_rows))
        opt = make([param], lr=0.1)
    except OSError as error:
        check_full(error, folder / "table")
        return

    def step() -> None:
        ids = torch.randint(0, rows, (32,), generator=draw)
        opt.catch_up(param, ids)
        looked_up = nn.functional.embedding(ids, param, sparse=True)
        opt.zero_grad()
        looked_up.add(1).square().sum().backward()
        if is_dense:
            param.grad = torch.ones(rows, 24)
        opt.step()

    def values() -> list[torch.Tensor]:
        return [param.detach().clone(), *(tensor.clone() for tensor in state_of(opt))]

    try:
        for _ in range(chance.choice([0, 12])):
            step()
        if chance.random() < 0.5:
            read_in_order(folder)
        fill(folder, chance.choice(LEVELS))
        if chance.random() < 0.3:
            read_in_order(folder)
        for _ in range(60):
            before = values() if failures < 2 else None
            try:
                step()
            except OSError as error:
                check_full(error, folder / "table")
                failures += 1
                if before is not None and opt.semantics == "masked":  # else rows catch up
                    # State may have been created, but holds what it would hold at the start.
                    assert all(map(torch.equal, before, values()))
        os.unlink(folder / "filler")
        os.fsync(file_of(param).descriptor)
        step()
    except OSError as error:  # it never fitted
        check_full(error)
    os.write(writer, b"full" if failures else b"fits")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext4 -b 4096", "ext2"])
def test_training_until_the_disk_is_full(kind, tmp_path: Path):
    """In forked processes: a write that the disk has no room for would be SIGBUS."""
    words = set()
    with small_file_system(kind, tmp_path) as folder:
        for seed in range(60):
            for path in folder.iterdir():
                if path.is_file():
                    path.unlink()
            pid, reader = fork(functools.partial(train_until_full, folder, random.Random(seed)))
            with open(reader) as pipe:
                words.add(pipe.read())
            assert os.waitpid(pid, 0)[1] == 0, f"seed {seed}"
    assert "full" in words


def test_a_step_for_which_state_has_no_room_changes_nothing(tmp_path: Path, monkeypatch):
    """The call fails for the state alone, when the blocks of the table are reserved."""
    model = embedding(table_in(tmp_path / "table"))
    opt = adam(model.parameters())
    train(model, opt, 1)
    before = now(model, opt)
    state, reserve = file_of(opt.state[model.weight]["exp_avg_sq"]), MappedFile._reserve

    def full(file, rows):
        return errno.ENOSPC if file is state else reserve(file, rows)

    with monkeypatch.context() as patch:
        patch.setattr(MappedFile, "_reserve", full)
        with pytest.raises(OSError, match=r"Errno 28. the disk must .* Nothing has changed"):
            train(model, opt, 1)
    assert all_same_bits(before, now(model, opt))
    train(model, opt, 1)
    assert not all_same_bits(before, now(model, opt))


def test_a_table_in_memory_has_all_its_pages(tmp_path: Path, monkeypatch):
    """On tmpfs, to read a page that is not there may end the process."""
    monkeypatch.setattr(disk, "_file_system", lambda _: "tmpfs")
    mapped(tmp_path / "table", (1000, 16))
    found = os.stat(tmp_path / "table")
    assert found.st_blocks * 512 >= found.st_size


def test_file_systems_that_cannot_reserve_blocks(tmp_path: Path, monkeypatch):
    """Pages are made writable instead, which fails where a write would end the process."""
    model = embedding(table_in(tmp_path / "table"))
    opt = sparsestep.SGD(model.parameters(), lr=0.1)
    file = file_of(model.weight)
    monkeypatch.setattr(MappedFile, "_reserve", lambda *_: errno.EOPNOTSUPP)
    train(model, opt, 1)
    assert file.reserved.any()
    assert not file.reserved.all()
    file.reserve(None)
    assert file.reserved.all()
    before = model.weight.detach()[:5].clone()
    file.reserved.zero_()
    os.ftruncate(file.descriptor, 4096)
    try:
        with pytest.raises(OSError, match=r"the disk must have room .* Nothing has changed"):
            file.reserve(torch.tensor([7]))
    finally:
        os.ftruncate(file.descriptor, file.header.file_bytes)
    assert model.weight.detach()[:5].eq(0).all()  # truncated
    assert before.ne(0).any()


def test_pages_are_made_writable_where_space_is_short(tmp_path: Path, monkeypatch):
    table = mapped(tmp_path / "table", (100_000, 64))
    file = file_of(table)
    rows, free = torch.tensor([5, 99_000]), os.fstatvfs(file.descriptor)
    assert not file._is_short_of_space(None)
    for blocks, is_short in ((1 << 40, False), (0, True), ((4 << 20) // free.f_frsize, True)):
        fields = [*free[:4], blocks, *free[5:]]
        monkeypatch.setattr(os, "fstatvfs", lambda _, found=fields: os.statvfs_result(found))
        assert file._is_short_of_space(rows) is is_short
    file.reserve(rows)
    calls = []
    monkeypatch.setattr(MappedFile, "_populate", lambda _, rows: calls.append(rows) or 28)
    with pytest.raises(OSError, match="Errno 28"):
        file.reserve(rows)
    assert len(calls) == 2  # and once more after the page cache was dropped
    assert table.eq(0).all()
