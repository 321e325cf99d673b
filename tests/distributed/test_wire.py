"""Rows and gradients in fewer bytes: error bounds, random rounding, and the bytes that are sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed.wire import Codec
from tests.distributed.runs import each_kind, said
from tests.ranks import Rank, ranks
from tests.table import same_bits

shard = sparsestep.distributed.shard
FORMATS = ("bf16", "int8")
each_format = pytest.mark.parametrize("wire", FORMATS)
floats = st.floats(width=32, allow_nan=False, allow_infinity=False)
matrices = st.integers(1, 9).flatmap(
    lambda dim: st.lists(st.lists(floats, min_size=dim, max_size=dim), min_size=1, max_size=4)
)
TINY, LARGEST_BF16 = 2.0**-126, 3.3895313892515355e38


def coded(wire: Any, rows: Tensor, *, is_grad: bool, seed: int = 0) -> Tensor:
    codec = Codec(wire, rows.shape[1], rows.dtype, seed)
    return codec.decode(codec.encode(rows, is_grad=is_grad)).view(rows.shape)


def bounds(wire: str, rows: Tensor, *, is_grad: bool) -> Tensor:
    """The largest error of each element that the documentation allows."""
    rows = rows.double()
    if wire == "int8":
        step = (rows.abs().amax(1, keepdim=True) / 127).clamp(min=TINY)
        bound = step if is_grad else step / 2
        return (bound * (1 + 1e-5)).expand_as(rows)
    beyond = (rows.abs() - LARGEST_BF16).clamp(min=0)
    step = (rows.abs() * 2.0**-7).clamp(min=2.0**-133)
    return torch.maximum(step if is_grad else step / 2, beyond)


@each_format
@pytest.mark.parametrize("is_grad", [False, True])
@given(values=matrices)
def test_errors_are_bounded(values: list[list[float]], is_grad: bool, wire: str):
    rows = torch.tensor(values)
    found = coded(wire, rows, is_grad=is_grad)
    error = (found.double() - rows.double()).abs()
    assert bool((error <= bounds(wire, rows, is_grad=is_grad)).all()), error
    assert found.isfinite().all()
    assert bool((found[rows == 0] == 0).all())


@given(values=matrices)
def test_rows_in_bf16_are_torchs(values: list[list[float]]):
    rows = torch.tensor(values).clamp(-LARGEST_BF16, LARGEST_BF16)
    assert same_bits(coded("bf16", rows, is_grad=False), rows.bfloat16().float())


@each_format
def test_gradients_are_right_on_average(wire: str):
    torch.manual_seed(0)
    rows = torch.randn(20_000, 8)
    error = coded(wire, rows, is_grad=True).double() - rows.double()
    relative = error / bounds(wire, rows, is_grad=True)
    # A step's rounding error has a variance of at most a quarter of its square.
    assert abs(float(relative.mean())) < 4 * 0.5 / relative.numel() ** 0.5
    assert float(relative.abs().mean()) > 0.1, "not rounded to the nearest"


@each_format
def test_random_bits_depend_on_values_and_seed_alone(wire: str):
    rows = torch.randn(100, 7, generator=torch.Generator().manual_seed(0))
    first = coded(wire, rows, is_grad=True)
    assert same_bits(coded(wire, rows.flip(0), is_grad=True).flip(0), first)
    assert not torch.equal(coded(wire, rows, is_grad=True, seed=1), first)
    already = coded(wire, rows, is_grad=False)
    if wire == "bf16":  # a value that has a code keeps it
        assert same_bits(coded(wire, already, is_grad=True), already)


@each_format
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_seen_by_the_owner(wire: str, bad: float):
    rows = torch.ones(3, 5)
    rows[1, 2] = bad
    for is_grad in (False, True):
        found = coded(wire, rows, is_grad=is_grad)
        assert torch.equal(found[[0, 2]], torch.ones(2, 5))
        assert not found[1, 2].isfinite()
        if wire == "bf16":
            assert same_bits(found[1].nan_to_num(7.0), rows[1].nan_to_num(7.0))


class Counted:
    """The bytes that this rank sends to others, without status and counts."""

    def __init__(self, rank: Rank) -> None:
        self.sent, self._torchs, self._rank = 0, dist.all_to_all_single, rank
        rank.monkeypatch.setattr(dist, "all_to_all_single", self)

    def __call__(self, output: Tensor, given: Tensor, *sizes: Any, group: Any = None) -> None:
        if sizes[0] is not None:  # each message ends with one byte of status
            self.sent += sum(sizes[1]) - self._rank.world
        self._torchs(output, given, *sizes, group=group)


@ranks(3)
@each_kind
@pytest.mark.parametrize("wire", [None, *FORMATS])
def test_the_bytes_of_a_step_are_those_of_the_plan(rank: Rank, kind: str, wire: str | None):
    """Of rows on average; here every owner has as many ids as the others."""
    counted = Counted(rank)
    for length in (1, 3, 12):
        table = nn.EmbeddingBag(36, 32, mode="sum")
        plan = shard(table, plan=kind, wire=wire).for_batch(12, length)
        optimizer = sparsestep.SGD(table.parameters(), lr=1.0)
        counted.sent = 0
        begin = torch.arange(12).reshape(-1, 1) + rank.index
        table((begin + 12 * torch.arange(length)) % 36).sum().backward()
        optimizer.step()
        sent = sum(rank.gather(counted.sent))
        said = sum(plan.bytes_sent_by(each) for each in range(3))
        if kind == "rows" and length == 3:  # all ids of a bag have one owner here: fewer parts
            assert sent < said
        else:
            assert sent == said
        if length == 1 and kind != "copy":
            row = {None: 128, "bf16": 64, "int8": 36}[wire]
            assert sent == round(3 * 2 / 3 * 12 * (4 + 2 * row))


@ranks(2)
def test_half_precision_rows_are_sent_as_they_are_and_doubles_refused(rank: Rank):
    table = nn.Embedding(6, 2, dtype=torch.bfloat16)
    values = table.weight.detach().clone()
    shard(table, plan="rows", wire="bf16")
    assert same_bits(table(torch.arange(6)).detach(), values)
    doubles = nn.Embedding(6, 2, dtype=torch.float64)
    assert "must be float32" in said(lambda: shard(doubles, plan="rows", wire="bf16"))
