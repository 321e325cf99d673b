"""Embeddings: torch's outputs, torch's gradients, and updates equal to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparsestep
from sparsestep.grads.compact import CompactGrad
from tests.nn.cases import DTYPES, OPTIMIZERS, Call, bag_calls, plain, row_calls, same, same_run
from tests.table import each_engine, running_on


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)  # the tensors are small


def pair(call: Call, **more: Any) -> tuple[Any, Any]:
    """Our table and torch's."""
    if call.factors is None and "mode" not in call.options:
        return call.table(sparsestep.nn.Embedding), call.table(nn.Embedding, **more)
    return call.table(sparsestep.nn.EmbeddingBag), call.table(nn.EmbeddingBag, **more)


tolerances = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 4e-2, "atol": 4e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}
calls = st.one_of(bag_calls(), row_calls())
# What torch has a sparse gradient for; not for a single id that may be padding.
sparse_calls = st.one_of(
    bag_calls(modes=["sum", "mean"], freq=False), row_calls(freq=False, single=False)
)


@given(call=calls)
def test_outputs_are_torchs(call: Call):
    ours, theirs = pair(call)
    assert same(ours.weight, theirs.weight)
    assert same(call.output(ours), call.output(theirs))
    assert same(ours.weight, theirs.weight)  # max_norm writes to it
    with torch.no_grad():
        assert same(call.output(ours), call.output(theirs))
    with torch.inference_mode():
        assert same(call.output(ours), call.output(theirs))


@given(call=sparse_calls)
def test_the_gradient_is_torchs_sparse_one_to_the_bit(call: Call):
    ours, theirs = pair(call, sparse=True)
    call.backward(ours)
    call.backward(theirs)
    grad = plain(ours.weight.grad)
    assert torch.equal(grad._indices(), theirs.weight.grad._indices())
    assert torch.equal(grad._values(), theirs.weight.grad._values())
    assert grad.shape == theirs.weight.grad.shape


@given(call=st.one_of(bag_calls(freq=False), row_calls()))
def test_the_gradient_is_torchs_dense_one(call: Call):
    """Which torch has for every option; it sums halves in halves."""
    ours, theirs = pair(call)
    call.backward(ours)
    call.backward(theirs)
    dense = plain(ours.weight.grad).to_dense()
    assert torch.allclose(dense, theirs.weight.grad, **tolerances[call.dtype])


def bag_numbers(call: Call) -> list[int]:
    """The bag of each id."""
    if call.offsets is None:
        return [bag for bag, ids in enumerate(call.ids.tolist()) for _ in ids]
    starts = call.offsets.tolist()
    bags = range(len(call.ids))
    if call.options["include_last_offset"]:
        starts = starts[:-1]
    return [sum(start <= place for start in starts) - 1 for place in bags]


@given(call=bag_calls(modes=["sum", "mean"]))
def test_the_gradient_divided_by_frequency(call: Call):
    """In plain loops: torch's own is wrong where some ids come more often than others."""
    call.options["scale_grad_by_freq"] = True
    ours, _ = pair(call)
    pushed = call.pushed(call.backward(ours)).double()
    ids, bags = call.ids.flatten().tolist(), bag_numbers(call)
    factors = [1.0] * len(ids) if call.factors is None else call.factors.flatten().tolist()
    padding = ours.padding_idx
    entries = [(i, b, f) for i, b, f in zip(ids, bags, factors, strict=True) if i != padding]
    wanted = torch.zeros(call.rows, call.dim, dtype=torch.float64)
    for row, bag, factor in entries:
        alike = sum(other == row for other, _, _ in entries)
        size = sum(other == bag for _, other, _ in entries) if ours.mode == "mean" else 1
        wanted[row] += pushed[bag] * factor / alike / size
    dense = plain(ours.weight.grad).double().to_dense()
    assert torch.allclose(dense, wanted, **tolerances[call.dtype])


@given(call=bag_calls(modes=["sum"]))
def test_the_gradient_of_the_factors_is_torchs(call: Call):
    results = []
    for table in pair(call):
        factors = torch.ones(call.ids.shape) if call.factors is None else call.factors
        call.factors = factors.detach().to(call.dtype).requires_grad_()
        table.weight.requires_grad_(call.seed % 2 == 0)
        call.backward(table)
        results.append(call.factors.grad)
        assert (table.weight.grad is not None) == table.weight.requires_grad
    assert same(*results)


@given(call=bag_calls())
def test_no_part_has_more_rows_than_there_are_bags(call: Call):
    ours, _ = pair(call)
    bags = len(call.backward(ours))
    touched = ours.weight.grad.indexed()
    elements = 1 if touched.slot_size == call.dim else call.dim
    assert touched.values.numel() // touched.slot_size <= bags * elements


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(call=sparse_calls)
def test_updates_are_those_of_torchs_module_to_the_bit(name: str, call: Call):
    tables = pair(call, sparse=True)
    ours, theirs = (OPTIMIZERS[name](table.parameters()) for table in tables)
    for table, optimizer in zip(tables, (ours, theirs), strict=True):
        if optimizer.semantics == "dense":
            optimizer.track(table)
        for _ in range(3):
            optimizer.zero_grad()
            call.backward(table)
            optimizer.step()
        assert isinstance(tables[0].weight.grad, CompactGrad)
    assert not tables[0].weight.grad.is_materialized
    assert same_run(ours, theirs)


@pytest.mark.parametrize("name", OPTIMIZERS)
@given(call=calls)
def test_updates_are_those_of_what_is_written_out(name: str, call: Call):
    """Also where torch has no sparse gradient: max, and scale_grad_by_freq."""
    tables = pair(call)[0], pair(call)[0]
    ours, theirs = (OPTIMIZERS[name](table.parameters()) for table in tables)
    for table, optimizer in zip(tables, (ours, theirs), strict=True):
        if optimizer.semantics == "dense":
            optimizer.track(table)
        for _ in range(3):
            optimizer.zero_grad()
            call.backward(table)
            if optimizer is theirs:
                table.weight.grad = plain(table.weight.grad)
            optimizer.step()
    assert same_run(ours, theirs)


@each_engine
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_every_engine(engine: str, mode: str):
    results = []
    for written_out in (False, True):
        torch.manual_seed(0)
        table = sparsestep.nn.EmbeddingBag(20, 6, mode=mode, padding_idx=2)
        with running_on(engine) as name:
            optimizer = sparsestep.Adam(table.parameters(), engine=name)
            for _ in range(3):
                optimizer.zero_grad()
                table(torch.randint(20, (5, 4))).sin().sum().backward()
                if written_out:
                    table.weight.grad = plain(table.weight.grad)
                optimizer.step()
        results.append(optimizer)
    assert same_run(*results)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", [257, 999])
@pytest.mark.parametrize("equal", [True, False])
def test_means_of_many(dtype: torch.dtype, size: int, equal: bool):
    """Halves do not hold the number of ids exactly."""
    ids, offsets = torch.zeros(2 * size, dtype=torch.int64), torch.tensor([0, size])
    call = Call(1, 40, dtype, 0, ids.view(2, size) if equal else ids, {"mode": "mean"})
    call.offsets = None if equal else offsets
    ours, theirs = pair(call, sparse=True)
    for table in (ours, theirs):
        call.backward(table)
    assert same(plain(ours.weight.grad)._values(), theirs.weight.grad._values())


@pytest.mark.parametrize("bags", [1, 3])
@pytest.mark.parametrize("integers", [torch.int64, torch.int32])
def test_tensors_that_are_not_contiguous(bags: int, integers: torch.dtype):
    """Ids, offsets, factors and the gradient may be views of any kind."""
    torch.manual_seed(0)
    one = torch.tensor([[3, 1, 1, 4]])
    cases = [
        (one.expand(bags, 4), None),
        (torch.randint(9, (4, bags)).t(), None),
        (torch.tensor([5]).expand(6), torch.arange(0, 2 * bags, 2)[::2] // 2),
        (torch.randint(9, (12,))[::2], torch.tensor([0]).expand(bags)),
    ]
    for ids, offsets in cases:
        ids, factors = ids.to(integers), torch.tensor([0.3]).expand(ids.shape)
        results = []
        for cls in (sparsestep.nn.EmbeddingBag, nn.EmbeddingBag):
            torch.manual_seed(1)
            table = cls(9, 2, mode="sum", sparse=True)
            optimizer = sparsestep.Adam(table.parameters())
            output = table(ids, offsets, factors)
            output.backward(torch.randn(2, len(output)).t())
            optimizer.step()
            optimizer.zero_grad()
            table(ids, offsets, factors).sum().backward()  # whose gradient is one number
            optimizer.step()
            results.append(optimizer)
        assert same_run(*results)
    results = []
    for cls in (sparsestep.nn.Embedding, nn.Embedding):
        torch.manual_seed(1)
        table = cls(9, 2, sparse=True)
        output = table(one.expand(bags, 4).to(integers))
        output.backward(torch.randn(2, 4, bags).permute(2, 1, 0))
        optimizer = sparsestep.Adam(table.parameters())
        optimizer.step()
        results.append(optimizer)
    assert same_run(*results)
