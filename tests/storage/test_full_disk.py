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
from sparsestep.memory import file_pages
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import mapped
from tests.storage.training import embedding, table_in, train

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reserves blocks there")


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


def test_a_table_in_memory_has_all_its_pages(tmp_path: Path, monkeypatch):
    """On tmpfs, to read a page that is not there may end the process."""
    monkeypatch.setattr(file_pages, "_file_system", lambda _: "tmpfs")
    mapped(tmp_path / "table", (1000, 16))
    found = os.stat(tmp_path / "table")
    assert found.st_blocks * 512 >= found.st_size


def test_file_systems_that_cannot_reserve_blocks(tmp_path: Path, monkeypatch):
    """Pages are made writable instead, which fails where a write would end the process."""
    model = embedding(table_in(tmp_path / "table"))
    opt = sparsestep.SGD(model.parameters(), lr=0.1)
    file = file_of(model.weight)
    assert file is not None
    monkeypatch.setattr(file_pages, "reserve", lambda *_: errno.EOPNOTSUPP)
    train(model, opt, 1)
    assert file.reserved.any()
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
    rows, disk = torch.tensor([5, 99_000]), os.fstatvfs(file.descriptor)
    assert not file_pages.is_short_of_space(file.rows, None, file.descriptor)
    for blocks, is_short in ((1 << 40, False), (0, True), ((4 << 20) // disk.f_frsize, True)):
        fields = [*disk[:4], blocks, *disk[5:]]
        monkeypatch.setattr(os, "fstatvfs", lambda _, found=fields: os.statvfs_result(found))
        assert file_pages.is_short_of_space(file.rows, rows, file.descriptor) is is_short
    file.reserve(rows)
    asked = []
    monkeypatch.setattr(file_pages, "populate", lambda _, rows, *__: asked.append(rows) or 28)
    monkeypatch.setattr(file_pages, "is_short_of_space", lambda *_: True)
    with pytest.raises(OSError, match="Errno 28"):
        file.reserve(rows)
    assert len(asked) == 2  # and once more after the page cache was dropped
    assert table.eq(0).all()
