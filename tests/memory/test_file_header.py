"""A file says what it was made for, and is refused for anything else."""

from __future__ import annotations

import functools
import gc
import os
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep.storage import mapped

ROWS, DIM = 300, 24
adam = functools.partial(sparsestep.Adam, lr=0.1)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (torch.optim.Adam, "a function that makes one of these. Got one that makes a Adam"),
        (sparsestep.Adam([torch.zeros(1)]), "a function that makes one of these. Got Adam"),
        ("Adam", "a function that makes one of these. Got str"),
        (sparsestep.SGD, "room for exp_avg (float32), exp_avg_sq (float32)"),
    ],
    ids=["torch", "instance", "name", "other"],
)
def test_other_optimizers_are_refused(optimizer, message, tmp_path: Path):
    mapped(tmp_path / "table", (ROWS, DIM), optimizer=adam)
    with pytest.raises(sparsestep.InputError) as raised:
        mapped(tmp_path / "table", (ROWS, DIM), optimizer=optimizer)
    assert message in str(raised.value)
    with pytest.raises(sparsestep.InputError, match="must be real or complex"):
        mapped(tmp_path / "ids", (ROWS,), torch.int64, optimizer=adam)
    assert os.listdir(tmp_path) == ["table"]


def test_a_table_without_room_is_told_from_one_with(tmp_path: Path):
    mapped(tmp_path / "table", (ROWS, DIM))
    with pytest.raises(sparsestep.InputError, match="where a row has room for none"):
        mapped(tmp_path / "table", (ROWS, DIM), optimizer=adam)


def test_a_header_that_says_something_else_is_refused(tmp_path: Path):
    mapped(tmp_path / "table", (ROWS, DIM), optimizer=adam)
    gc.collect()
    page = (tmp_path / "table").read_bytes()
    (tmp_path / "table").write_bytes(page.replace(b'"exp_avg": 96', b'"exp_avg": 97'))
    with pytest.raises(sparsestep.InputError, match=r"must be as mapped\(\) has created it"):
        mapped(tmp_path / "table", (ROWS, DIM))


@pytest.mark.parametrize("bytes_more", [-4096, 4096])
def test_a_file_that_was_truncated_or_extended_is_refused(bytes_more: int, tmp_path: Path):
    mapped(tmp_path / "table", (ROWS, DIM))
    gc.collect()
    os.truncate(tmp_path / "table", os.path.getsize(tmp_path / "table") + bytes_more)
    with pytest.raises(sparsestep.InputError, match=r"the file must have [0-9,]+ bytes"):
        mapped(tmp_path / "table", (ROWS, DIM))
