"""Random access maps, caches and writes the pages in use, not the file around them."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import sparsestep
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import mapped

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps"),
]

ROWS, DIM, PAGE = 60_000, 256, 4096  # 60 MB: four rows per page
AROUND = 16  # pages that a fault maps if they are cached: 64 KiB
MOST = 1.5


def resident_pages(path: Path) -> int:
    """How many pages of a file are mapped, by all mappings of this process."""
    total, counts = 0, False
    with open("/proc/self/smaps") as maps:
        for line in maps:
            name = line.split()[0]
            if not name.endswith(":"):
                counts = line.rstrip().endswith(str(path))
            elif counts and name == "Rss:":
                total += int(line.split()[1]) * 1024 // PAGE
    return total


def write_all(path: Path) -> None:
    """Create a table whose rows are all on the disk and in the page cache, in large folios."""
    mapped(path, (ROWS, DIM))
    gc.collect()
    with open(path, "r+b", buffering=0) as file:
        file.seek(PAGE)
        for _ in range(ROWS * DIM * 4 >> 20):
            file.write(b"\1" * (1 << 20))
        os.fsync(file.fileno())
        file.seek(0)
        while file.read(1 << 20):
            pass


def spread(count: int) -> torch.Tensor:
    return torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:count]


@pytest.mark.parametrize("is_written", [False, True], ids=["sparse", "written"])
def test_lookups_map_the_pages_that_they_read(is_written, tmp_path: Path):
    if is_written:
        write_all(tmp_path / "table")
    table, rows = mapped(tmp_path / "table", (ROWS, DIM)), spread(200)
    assert resident_pages(tmp_path / "table") <= AROUND
    assert table[rows].ne(0).any() == is_written
    assert resident_pages(tmp_path / "table") <= MOST * len(rows) + AROUND


@pytest.mark.parametrize("is_written", [False, True], ids=["sparse", "written"])
def test_steps_map_and_reserve_the_pages_that_they_write(is_written, tmp_path: Path):
    path = tmp_path / "table"
    if is_written:
        write_all(path)
    param, rows = nn.Parameter(mapped(path, (ROWS, DIM))), spread(200)
    opt = sparsestep.Adam([param], lr=0.1)
    for _ in range(3):
        param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(len(rows), DIM), param.shape)
        opt.step()
    for each in (path, *(tmp_path / f"table.{name}" for name in ("exp_avg", "exp_avg_sq"))):
        assert resident_pages(each) <= MOST * len(rows) + AROUND
        if not is_written or each != path:
            assert os.stat(each).st_blocks * 512 <= (MOST * len(rows) + AROUND) * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems may not have holes")
def test_clearing_old_state_leaves_holes(tmp_path: Path):
    """Rows of 768 bytes: many begin on a page that has data and end on one that has none."""
    path, shape = tmp_path / "table", (ROWS, 64)
    param = nn.Parameter(mapped(path, shape, optimizer=sparsestep.Adam))
    opt, rows = sparsestep.Adam([param], lr=0.1), spread(200)
    param.grad = torch.sparse_coo_tensor(rows[None], torch.ones(len(rows), 64), shape)
    opt.step()
    file_of(param).flush_to_disk()  # type: ignore[union-attr]
    before = os.stat(path).st_blocks
    del param, opt
    gc.collect()
    param = nn.Parameter(mapped(path, shape))
    opt = sparsestep.Adam([param], lr=0.1)
    opt.materialize_state()
    assert not any(opt.state[param][name].any() for name in ("exp_avg", "exp_avg_sq"))
    assert param.detach().any(1).count_nonzero() == len(rows)
    file = file_of(param)
    assert file is not None
    os.fsync(file.descriptor)
    assert os.stat(path).st_blocks == before
