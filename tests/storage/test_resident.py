"""Random access maps, caches and writes the pages in use, not the file around them."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest
import torch
from torch import nn

from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import mapped
from tests.storage.training import adam, coo, needs_holes

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="needs /proc/self/smaps"),
]

ROWS, DIM, PAGE = 60_000, 256, 4096  # 60 MB: four rows per page
AROUND = 16  # pages that a fault maps if they are cached: 64 KiB
SPREAD = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))[:200]
MOST = 1.5 * len(SPREAD) + AROUND  # pages of these rows


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


@pytest.mark.parametrize("is_written", [False, True], ids=["sparse", "written"])
def test_lookups_and_steps_map_the_pages_that_they_use(is_written, tmp_path: Path):
    path = tmp_path / "table"
    if is_written:
        write_all(path)
    table = mapped(path, (ROWS, DIM))
    assert resident_pages(path) <= AROUND
    assert table[SPREAD].ne(0).any() == is_written
    assert resident_pages(path) <= MOST
    param = nn.Parameter(table)
    opt = adam([param])
    for _ in range(3):
        param.grad = coo(SPREAD.tolist(), (ROWS, DIM))
        opt.step()
    for each in (path, *(tmp_path / f"table.{name}" for name in ("exp_avg", "exp_avg_sq"))):
        assert resident_pages(each) <= MOST
        if not is_written or each != path:
            assert os.stat(each).st_blocks * 512 <= MOST * PAGE


@needs_holes
def test_clearing_old_state_leaves_holes(tmp_path: Path):
    """Rows of 768 bytes: many begin on a page that has data and end on one that has none."""
    path, shape = tmp_path / "table", (ROWS, 64)
    param = nn.Parameter(mapped(path, shape, optimizer=adam))
    opt = adam([param])
    param.grad = coo(SPREAD.tolist(), shape)
    opt.step()
    file_of(param).flush_to_disk()  # type: ignore[union-attr]
    before = os.stat(path).st_blocks
    del param, opt
    gc.collect()
    param = nn.Parameter(mapped(path, shape))
    opt = adam([param])
    opt.materialize_state()
    assert not any(opt.state[param][name].any() for name in ("exp_avg", "exp_avg_sq"))
    assert param.detach().any(1).count_nonzero() == len(SPREAD)
    os.fsync(file_of(param).descriptor)  # type: ignore[union-attr]
    assert os.stat(path).st_blocks == before
