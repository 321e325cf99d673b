"""The core's lookup: torch's bits, on every instruction set and for any number of threads."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import sparsestep
from sparsestep._native import ext, use_instruction_set
from sparsestep.nn import lookup
from sparsestep.nn.lookup import MODES, ROWS, SUM, Lookup, LookupResult, look_up
from tests.nn.cases import DTYPES, Call, bag_calls, plain, row_calls, same
from tests.table import INSTRUCTION_SETS
from tests.torch_versions import needs_tensors_that_the_core_reads, uses_torchscript

pytestmark = [
    pytest.mark.skipif(ext is None, reason="the core is not installed"),
    pytest.mark.usefixtures("one_thread"),
    needs_tensors_that_the_core_reads,
]


def found(table: Tensor, ids: Tensor, mode: int = SUM, **more: Any) -> LookupResult | None:
    options = {
        "offsets": None,
        "include_last_offset": False,
        "per_sample_weights": None,
        "padding_idx": -1,
        "needs_grad": True,
    }
    results = look_up([Lookup(weight=table, ids=ids, mode=mode, **options | more)])
    return None if results is None else results[0]


@pytest.fixture(params=INSTRUCTION_SETS)
def each_set(request: pytest.FixtureRequest) -> None:
    use_instruction_set(request.param)  # conftest.py restores it


@pytest.mark.usefixtures("each_set")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [1, 16, 32, 64, 100, 192, 1100])
def test_bits_are_torchs(dtype: torch.dtype, dim: int):
    """Of sums, means and maxima of long bags, with padding and with factors."""
    torch.set_num_threads(3 if dim == 100 else 1)
    torch.manual_seed(dim)
    weight = torch.randn(50, dim).to(dtype)
    for mode, padding in itertools.product(["sum", "weighted", "mean", "max"], [None, 3]):
        ids = torch.randint(50, (200, 19))
        factors = torch.randn(200, 19).to(dtype) if mode == "weighted" else None
        mode = mode.replace("weighted", "sum")
        theirs = nn.functional.embedding_bag(
            ids, weight, mode=mode, padding_idx=padding, per_sample_weights=factors
        )
        more = {"per_sample_weights": factors, "padding_idx": -1 if padding is None else padding}
        ours = found(weight, ids, MODES[mode], **more)
        assert ours is not None
        assert same(ours.output, theirs), (mode, padding)
    rows = found(weight, ids.int(), ROWS)
    assert rows is not None
    assert same(rows.output, weight[ids])


def test_rows_are_copied_bit_by_bit():
    """A sum would lose the sign of zero."""
    weight = torch.tensor([[-0.0, float("nan")], [float("inf"), -1.0]])
    rows = found(weight, torch.tensor([1, 0, 0]), ROWS)
    assert rows is not None
    wanted = weight.view(torch.int32)[[1, 0, 0]]
    assert torch.equal(rows.output.view(torch.int32), wanted)


@given(call=st.one_of(bag_calls(), row_calls()))
def test_the_core_gives_what_torchs_operations_give(call: Call):
    """Outputs and gradients; unless rows are renormalized, by a single call of the core."""
    cls = sparsestep.nn.EmbeddingBag if "mode" in call.options else sparsestep.nn.Embedding
    results = []
    spy = mock.Mock(wraps=ext)
    for there in (spy, None):
        table = call.table(cls)
        with mock.patch.object(lookup, "ext", there):
            output = call.backward(table)
        grad = plain(table.weight.grad)
        results.append((output, grad._indices(), grad._values()))
    assert all(same(*pair) for pair in zip(*results, strict=True))
    if "max_norm" not in call.options:
        assert spy.look_up.call_count == 1
        (requests, *_), _ = spy.look_up.call_args
        assert (ext.look_up(requests, 1, 0) is not None) == (output.numel() > 0)


def neg(tensor: Tensor) -> Tensor:
    return torch._neg_view(tensor)


IDS, WEIGHT = torch.tensor([[1, 2]]), torch.randn(4, 3)
# Calls that are no error; messages.txt has those that are.
DECLINED: dict[str, Any] = {
    "ids that are negated lazily": (WEIGHT, neg(-IDS), {}),
    "a weight that is negated lazily": (neg(WEIGHT), IDS, {}),
    "a weight of a subclass": (nn.UninitializedParameter(), IDS, {}),
    "a strided weight": (torch.randn(4, 6)[:, ::2], IDS, {}),
    "a complex weight": (WEIGHT.to(torch.complex64), IDS, {}),
}


def test_what_is_unusual_is_declined():
    for what, (weight, ids, more) in DECLINED.items():
        assert found(weight, ids, **more) is None, what


def test_a_dispatch_mode_sees_the_lookup():
    assert found(WEIGHT, IDS) is not None
    with FlopCounterMode(display=False):
        assert found(WEIGHT, IDS) is None


@uses_torchscript
def test_derivatives_are_carried_forward():
    table = sparsestep.nn.Embedding(4, 3).requires_grad_(False)
    with forward_ad.dual_level():
        assert found(WEIGHT, IDS) is None
        tangent = torch.randn(4, 3)
        table._parameters["weight"] = forward_ad.make_dual(WEIGHT, tangent)
        assert torch.equal(forward_ad.unpack_dual(table(IDS)).tangent, tangent[IDS])


@pytest.mark.parametrize("cls", [sparsestep.nn.Embedding, sparsestep.nn.EmbeddingBag])
def test_ids_that_change_unnoticed_are_those_that_were_read(cls: Any):
    """Code that writes to the memory of a batch behind torch's back does not reach the gradient."""
    ids = torch.tensor([[1, 2], [2, 0]])
    table = cls(5, 2)
    output = table(ids)
    ids.numpy()[:] = 1_000_000
    output.sum().backward()
    assert table.weight.grad.coalesce().indices().tolist() == [[0, 1, 2]]


@pytest.mark.parametrize("threads", [1, 3])
def test_a_collection_is_one_call(threads: int):
    torch.set_num_threads(threads)
    tables = sparsestep.nn.EmbeddingBagCollection([(40, 8), (30, 64), (20, 3)], mode="mean")
    ids = torch.randint(20, (700, 3, 5))
    with mock.patch.object(lookup, "ext", mock.Mock(look_up=mock.Mock(wraps=ext.look_up))) as spy:
        outputs = tables(ids)
    assert spy.look_up.call_count == 1
    for each, output, column in zip(tables.tables, outputs, ids.unbind(1), strict=True):
        assert same(output, nn.functional.embedding_bag(column, each.weight, mode="mean"))
