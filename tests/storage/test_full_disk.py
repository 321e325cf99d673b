"""A full disk is an ``OSError`` before anything is written, on every file system at hand."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep.memory import disk
from sparsestep.memory.mapped_file import MappedFile, file_of
from sparsestep.storage import mapped
from tests.storage.training import adam, embedding, now, same, table_in, train

ROOT = Path(__file__).parents[2]

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


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["tmpfs", "ext4", "ext4 -b 4096", "ext2"])
def test_training_until_the_disk_is_full(kind, tmp_path: Path):
    with small_file_system(kind, tmp_path) as folder:
        command = [sys.executable, "-m", "tests.storage.full_disk", f"--folder={folder}"]
        command += ["--trials=60"]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "'full'" in done.stdout


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
    assert same(before, now(model, opt))
    train(model, opt, 1)
    assert not same(before, now(model, opt))


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
    assert file is not None
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
    assert file is not None
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
