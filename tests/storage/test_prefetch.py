"""Rows are read before they are needed."""

from __future__ import annotations

import importlib
import os
import threading
from pathlib import Path

import pytest
import torch

from sparsestep.memory.formats import HEADER_BYTES
from sparsestep.memory.mapped_file import file_of
from sparsestep.storage import mapped, prefetch, prefetching
from tests.processes import run_python
from tests.storage.training import adam, embedding, in_each_place, raising, table_in, train

pytestmark = pytest.mark.usefixtures("one_thread")
MODULE = importlib.import_module("sparsestep.storage.mapped")  # the name is the function's


@pytest.fixture
def requests(monkeypatch) -> list[tuple[str, list[int]]]:
    """Files and rows that were requested; nothing is read."""
    found: list[tuple[str, list[int]]] = []

    def submit(file, rows):
        found.append((os.path.basename(file.path), rows.tolist()))

    monkeypatch.setattr(MODULE._thread, "submit", submit)
    return found


def test_rows_are_requested(tmp_path: Path, requests):
    table = mapped(tmp_path / "table", (100, 4))
    table.prefetch(torch.tensor([[3, 99], [3, 0]], dtype=torch.int32))
    prefetch(torch.nn.Parameter(table), torch.tensor([7]))
    prefetch(torch.zeros(9, 4), torch.tensor([7]))  # in memory
    assert requests == [("table", [3, 99, 3, 0]), ("table", [7])]


@in_each_place
def test_pages_of_table_and_state_are_read_once(in_rows, tmp_path: Path):
    table = table_in(tmp_path / "table", optimizer=adam if in_rows else None)
    model = embedding(table)
    opt = adam(model.parameters())
    train(model, opt, 1)
    files = {file_of(tensor) for tensor in (table, opt.state[model.weight]["exp_avg"])}
    rows = torch.tensor([0, 1, 12, 42, 200])  # one of them lies on two pages
    for _ in range(2):
        file_of(table).prefetch(rows)
    row_bytes = 320 if in_rows else 96  # three tensors of 96 bytes, in whole cache lines
    begins = [HEADER_BYTES + row * row_bytes for row in rows.tolist()]
    pages = {at // 4096 for begin in begins for at in (begin, begin + row_bytes - 1)}
    assert len(files) == (1 if in_rows else 2)
    for file in files:
        assert file.layout.row_bytes == row_bytes
        assert set(file.prefetched.nonzero().flatten().tolist()) == pages
        assert file.num_prefetched == len(pages)


def test_a_step_may_add_state_files_while_they_are_read(tmp_path: Path):
    file = file_of(mapped(tmp_path / "table", (100, 4)))
    state = [file_of(mapped(tmp_path / name, (100, 4))) for name in ("exp_avg", "exp_avg_sq")]
    first, second = state

    def add_state_file(rows):
        file.state_files["exp_avg_sq"] = second

    first.prefetch = add_state_file
    file.state_files["exp_avg"] = first
    file.prefetch(torch.tensor([3]))
    assert set(file.state_files) == {"exp_avg", "exp_avg_sq"}


def finish_requests() -> None:
    """Wait until the thread has handled all requests: it takes them in order."""
    handled = threading.Event()

    class Last:
        def prefetch(self, rows):
            handled.set()

    MODULE._thread.submit(Last(), torch.tensor([0]))
    assert handled.wait(60)


def test_a_request_that_raises_is_reported_and_the_next_ones_are_served(tmp_path, monkeypatch):
    reported = []
    monkeypatch.setattr(threading, "excepthook", lambda args: reported.append(args.exc_value))
    table, other = (mapped(tmp_path / name, (100, 4)) for name in ("table", "other"))
    monkeypatch.setattr(file_of(table), "prefetch", raising(MemoryError), raising=False)
    table.prefetch(torch.tensor([1]))
    other.prefetch(torch.tensor([2]))
    finish_requests()
    assert [type(each) for each in reported] == [MemoryError]
    assert file_of(other).num_prefetched == file_of(other).prefetched.sum() == 1


def test_a_thread_that_has_died_or_never_started_is_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda args: None)
    table = mapped(tmp_path / "table", (100, 4))
    with monkeypatch.context() as broken:
        broken.setattr(file_of(table), "prefetch", raising(SystemExit), raising=False)
        table.prefetch(torch.tensor([1]))
        MODULE._thread._thread.join(60)
    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", raising(RuntimeError, "can't start new thread"))
        with pytest.raises(RuntimeError, match="can't start"):
            table.prefetch(torch.tensor([1]))
    table.prefetch(torch.tensor([1]))
    finish_requests()
    assert file_of(table).num_prefetched == 1


def test_a_process_may_end_while_rows_are_read_and_an_exit_handler_may_prefetch(tmp_path: Path):
    """This one runs after those of the package, when Python 3.12 starts no thread any more."""
    code = """if True:
        import atexit, sys
        atexit.register(lambda: table.prefetch(torch.tensor([3])) or print("ok"))
        import torch, sparsestep
        table = sparsestep.storage.mapped(sys.argv[1], (100_000, 64))
        for _ in range(int(sys.argv[2])):
            table.prefetch(torch.randint(100_000, (10_000,)))
    """
    for requests in ("1", "10"):
        assert run_python("-c", code, str(tmp_path / "table"), requests) == "ok\n"


@pytest.mark.parametrize("window", [1, 2, 5])
def test_batches_come_in_order_and_their_rows_are_requested_ahead(tmp_path, requests, window):
    table = mapped(tmp_path / "table", (100, 4))
    batches = [torch.tensor([i]) for i in range(4)]
    loop = prefetching(batches, {table: lambda batch: batch + 1}, ahead=window)
    assert len(loop) == 4
    for index, batch in enumerate(loop):
        assert batch is batches[index]
        assert len(requests) == min(4, index + 1 + window)
    assert [rows for _, rows in requests] == [[1], [2], [3], [4]]
