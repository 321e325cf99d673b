"""Memory is moved into huge pages once that has paid off, a page at a time."""

from __future__ import annotations

import gc
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.memory import huge_pages
from sparsestep.memory.huge_pages import HugePages

PAGE = 2 << 20


@pytest.fixture(autouse=True)
def _a_system_that_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_system_has_huge_pages", lambda: True)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pages that the C library was to move; it moves none."""
    pages: list[int] = []

    def madvise(page: int, size: int, advice: int) -> int:
        assert size == PAGE
        assert page % PAGE == 0
        pages.append(page)
        return 0

    monkeypatch.setattr(huge_pages, "libc", lambda: SimpleNamespace(madvise=madvise))
    return pages


def table(mebibytes: int) -> Tensor:
    return torch.zeros(mebibytes << 18)


def test_pages_are_moved_one_by_one_when_they_are_due(moved: list[int]):
    tensor, pages = table(9), HugePages()
    pages.add(tensor, touches=tensor.nbytes // 40, round=5)
    assert pages.due == 15
    pages.move(14)
    assert moved == []
    for _ in range(10):
        pages.move(15)
    first = -(-tensor.data_ptr() // PAGE) * PAGE
    whole = (tensor.data_ptr() + tensor.nbytes - first) // PAGE
    assert moved == [first + k * PAGE for k in range(whole)]
    assert pages.due == math.inf


def test_what_is_small_or_elsewhere_or_rarely_touched_or_gone_is_left_alone(moved: list[int]):
    pages, tensor = HugePages(), table(9)
    pages.add(table(3), touches=1_000, round=0)
    pages.add(table(9).to("meta"), touches=1_000, round=0)
    pages.add(table(9).view(2, -1).t(), touches=1_000, round=0)
    pages.add(table(9), touches=0, round=0)
    pages.add(table(9), touches=1, round=0)
    assert pages.due == math.inf
    pages.add(tensor, touches=1_000_000, round=0)
    assert pages.due < math.inf
    del tensor
    gc.collect()
    pages.move(1 << 30)
    assert moved == []
    assert pages.due == math.inf


def test_contents_and_addresses_stay():
    for tensor in (torch.randn(1_000_003, 5), torch.randn(1_000_000, 4).share_memory_()):
        before, address = tensor.clone(), tensor.data_ptr()
        pages = HugePages()
        pages.add(tensor, touches=1_000, round=0)
        pages.move_all()
        assert torch.equal(tensor, before)
        assert tensor.data_ptr() == address


@pytest.mark.parametrize("by_hand", [False, True], ids=["", "functional"])
def test_an_optimizer_moves_a_table_and_its_state(moved: list[int], by_hand: bool):
    weight = torch.nn.Parameter(torch.zeros(1 << 18, 8))
    make: Any = sparsestep.FunctionalAdagrad if by_hand else sparsestep.Adagrad
    optimizer = make([weight], lr=0.1)
    ids = torch.arange(1 << 16)[None]
    weight.grad = torch.sparse_coo_tensor(ids, torch.ones(1 << 16, 8), weight.shape)
    for step in range(80):
        optimizer.step(*([[weight.grad]] if by_hand else []))
        if step + 1 < weight.nbytes // (4 << 16):
            assert moved == []
    for tensor in (weight, optimizer.state[weight]["sum"]):
        inside = {p for p in moved if 0 <= p - tensor.data_ptr() < tensor.nbytes}
        assert len(inside) >= tensor.nbytes // PAGE - 1
