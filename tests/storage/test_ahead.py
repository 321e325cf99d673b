"""Rows are asked for before they are needed."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparsestep
from sparsestep.memory.mapped_file import HEADER_BYTES, file_of
from sparsestep.storage import mapped, prefetch, prefetching
from tests.storage.training import embedding, table_in, train

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def asked(monkeypatch) -> list[tuple[str, list[int]]]:
    """What was asked for, instead of asking for it."""
    found: list[tuple[str, list[int]]] = []

    def ask(file, rows):
        found.append((os.path.basename(file.path), rows.tolist()))

    module = importlib.import_module("sparsestep.storage.prefetch")  # the name is the function's
    monkeypatch.setattr(module._reader, "ask", ask)
    return found


def test_rows_are_asked_for(tmp_path: Path, asked):
    table = mapped(tmp_path / "table", (100, 4))
    table.prefetch(torch.tensor([[3, 99], [3, 0]], dtype=torch.int32))
    prefetch(torch.nn.Parameter(table), torch.tensor([7]))
    prefetch(torch.zeros(9, 4), torch.tensor([7]))  # in memory
    assert asked == [("table", [3, 99, 3, 0]), ("table", [7])]


@pytest.mark.parametrize(
    "rows", [[1], torch.tensor([0.5]), torch.tensor([100]), torch.tensor([-1])], ids=repr
)
def test_what_is_no_row_is_refused(rows, tmp_path: Path, asked):
    with pytest.raises(sparsestep.InputError, match="rows to prefetch must be"):
        mapped(tmp_path / "table", (100, 4)).prefetch(rows)
    with pytest.raises(sparsestep.InputError, match="prefetch: the table must be a tensor with"):
        sparsestep.storage.prefetch(3, rows)  # type: ignore[arg-type]
    assert asked == []


@pytest.mark.parametrize("with_core", [True, False])
def test_pages_of_table_and_state_are_asked_for_once(tmp_path: Path, with_core, monkeypatch):
    if not with_core:
        monkeypatch.setattr(sparsestep.memory.file_pages, "ext", None)
    table = table_in(tmp_path / "table")
    model = embedding(table)
    opt = sparsestep.RowwiseAdagrad(model.parameters(), lr=0.1)
    train(model, opt, 1)
    file, state = file_of(table), file_of(opt.state[model.weight]["sum"])
    rows = torch.tensor([0, 1, 200])
    file.prefetch(rows)
    file.prefetch(rows)
    row_bytes = table.shape[1] * 4
    wanted = {
        (HEADER_BYTES + row * row_bytes + at) // 4096 for row in (0, 1, 200) for at in (0, 95)
    }
    assert set(file.asked.nonzero().flatten().tolist()) == wanted
    assert file.pages_asked == len(wanted)
    assert state.pages_asked == 1


def test_the_reader_reads_in_the_background(tmp_path: Path):
    table = mapped(tmp_path / "table", (1000, 64))
    done = torch.zeros(1)
    table.prefetch(torch.arange(1000))
    # The thread takes requests in order: when the second is done, so is the first.
    file = file_of(table)
    table.prefetch(torch.tensor([0]))
    while file.pages_asked < 63:
        done += 1
    assert file.asked[1:].all()


ENDS_EARLY = """
import sys, torch, sparsestep
table = sparsestep.storage.mapped(sys.argv[1], (1_000_000, 64))
for _ in range(30):
    table.prefetch(torch.randint(1_000_000, (20_000,)))
print("ok")
"""


def test_a_process_may_end_while_rows_are_read(tmp_path: Path):
    command = [sys.executable, "-c", ENDS_EARLY, str(tmp_path / "table")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


@pytest.mark.parametrize("window", [1, 2, 5])
def test_batches_come_in_order_and_are_asked_for_ahead(tmp_path: Path, asked, window):
    table = mapped(tmp_path / "table", (100, 4))
    batches = [torch.tensor([i]) for i in range(4)]
    loop = prefetching(batches, {table: lambda batch: batch + 1}, ahead=window)
    assert len(loop) == 4
    for index, batch in enumerate(loop):
        assert batch is batches[index]
        assert len(asked) == min(4, index + 1 + window)
    assert [rows for _, rows in asked] == [[1], [2], [3], [4]]


def test_generators_have_no_length(tmp_path: Path):
    with pytest.raises(TypeError, match="has no len"):
        len(prefetching(iter([]), {}))
    with pytest.raises(sparsestep.InputError, match="ahead must be"):
        prefetching([], {}, ahead=0)
