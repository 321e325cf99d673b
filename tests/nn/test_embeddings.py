"""Embeddings: torch's outputs, torch's gradients, and updates equal to the bit."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import sparsestep
from sparsestep.nn import Embedding, EmbeddingBag
from tests.nn.cases import DTYPES, Call, bag_calls, plain, row_calls, same, same_run
from tests.torch_versions import needs_gradients_that_autograd_lets_go

pytestmark = pytest.mark.usefixtures("one_thread")


def pair(call: Call, **more: Any) -> tuple[Any, Any]:
    """Our table and torch's."""
    if "mode" not in call.options:
        return call.table(sparsestep.nn.Embedding), call.table(nn.Embedding, **more)
    return call.table(sparsestep.nn.EmbeddingBag), call.table(nn.EmbeddingBag, **more)


tolerances = {
    torch.float64: {"rtol": 1e-12, "atol": 1e-13},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 4e-2, "atol": 4e-2},
    torch.float16: {"rtol": 4e-3, "atol": 4e-3},
}


@given(call=st.one_of(bag_calls(), row_calls()))
def test_outputs_are_torchs(call: Call):
    ours, theirs = pair(call)
    for mode in (contextlib.nullcontext, torch.no_grad, torch.inference_mode):
        assert same(ours.weight, theirs.weight)  # max_norm writes to it
        with mode():
            assert same(call.output(ours), call.output(theirs))


@given(call=st.one_of(bag_calls(freq=False), row_calls()))
def test_the_gradient_is_torchs(call: Call):
    """To the bit that of sparse=True, where torch has it; the dense one sums halves in halves."""
    # Nor is torch right for a single id that may be padding.
    has_sparse = call.options.get("mode") != "max" and call.ids.dim() > 0
    has_sparse = has_sparse and not call.options.get("scale_grad_by_freq")
    for is_sparse in (False, True) if has_sparse else (False,):
        ours, theirs = pair(call, sparse=is_sparse)
        call.backward(ours)
        call.backward(theirs)
        grad, wanted = plain(ours.weight.grad), theirs.weight.grad
        if is_sparse:
            assert torch.equal(grad._indices(), wanted._indices())
            assert torch.equal(grad._values(), wanted._values())
            assert grad.shape == wanted.shape
        else:
            assert torch.allclose(grad.to_dense(), wanted, **tolerances[call.dtype])


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("equal", [True, False])
def test_means_of_many(dtype: torch.dtype, equal: bool):
    """Halves do not hold the number of ids exactly."""
    size = 999
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
    calls = [
        Call(9, 2, torch.float32, 1, ids.to(integers), {"mode": "sum"}, offsets, factors)
        for ids, offsets in cases
        for factors in (torch.tensor([0.3]).expand(ids.shape),)
    ]
    for call in (*calls, Call(9, 2, torch.float32, 1, one.expand(bags, 4).to(integers))):
        results = []
        for table in pair(call, sparse=True):
            optimizer = sparsestep.Adam(table.parameters())
            for pushed in (torch.randn, lambda *shape: torch.ones(1).expand(shape)):
                torch.manual_seed(1)
                optimizer.zero_grad()
                output = call.output(table)
                output.backward(pushed(*output.shape[::-1]).permute(*range(output.dim())[::-1]))
                optimizer.step()
            results.append(optimizer)
        assert same_run(*results)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("viewed", [True, False])
def test_memory_that_autograd_shares(kind: str, first: bool, viewed: bool):
    """A parameter is added to the output: its gradient may get the memory of the output's.

    The second backward adds to it in place. Torch's own sparse gradients are wrong here.
    """
    results = []
    for kinds in (sparsestep.nn, nn):
        torch.manual_seed(0)
        table = getattr(kinds, kind)(5, 2, dtype=torch.float64)
        other = nn.Parameter(torch.randn(6 if viewed else (3, 2), dtype=torch.float64))
        ids = torch.tensor([1, 2, 1])
        if kind == "EmbeddingBag":
            table.mode, ids = "sum", ids[:, None]
        factors = torch.arange(6.0, dtype=torch.float64).view(3, 2)
        for _ in range(2):
            total = table(ids) + other.view(3, 2) if first else other.view(3, 2) + table(ids)
            (total * factors).sum().backward()
        results.append((table.weight.grad.to_dense(), other.grad))
    for ours, theirs in zip(*results, strict=True):
        assert same(ours, theirs)


@needs_gradients_that_autograd_lets_go
def test_the_gradient_of_an_output_that_is_not_shared_is_not_copied():
    table = sparsestep.nn.EmbeddingBag(5, 2, mode="sum")
    output = table(torch.tensor([[1, 2], [1, 3]]))
    seen = []
    output.register_hook(lambda grad: seen.append(grad.data_ptr()))
    (output * torch.randn(2, 2)).sum().backward()
    assert [table.weight.grad.indexed().values.data_ptr()] == seen


def test_ids_that_are_changed_before_backward_are_refused():
    for cls, ids in (
        (sparsestep.nn.Embedding, torch.tensor([1, 2])),
        (sparsestep.nn.EmbeddingBag, torch.tensor([[1, 2]])),
    ):
        output = cls(5, 2)(ids)
        ids.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_a_second_derivative_is_refused():
    table = sparsestep.nn.EmbeddingBag(5, 2)
    loss = table(torch.tensor([[1, 2]])).square().sum()
    (grad,) = torch.autograd.grad(loss, table.weight, create_graph=True)
    norms = (torch.linalg.vector_norm, lambda grad: torch._foreach_norm([grad]))
    for function in (Tensor.to_dense, *norms):
        with pytest.raises(sparsestep.InputError):
            function(grad)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        (grad * 2).backward(torch.ones(5, 2))
    with torch.no_grad():
        assert torch.linalg.vector_norm(grad) > 0
    assert grad.detach().to_dense().shape == (5, 2)


# Memory: a row for each id is never written out


class Largest(TorchDispatchMode):
    """Remembers the size of the largest tensor of numbers that torch has made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in tree_leaves(result):
            if type(made) is Tensor and made.is_floating_point():
                stored = made._values() if made.is_sparse else made
                elements = stored.untyped_storage().nbytes() // stored.element_size()
                self.elements = max(self.elements, elements)
        return result


ROWS, DIM, BAGS, PER_BAG = 2000, 64, 40, 800  # 80 times as many ids as bags, and 2M elements


def ids(seed: int) -> Tensor:
    return torch.randint(ROWS, (BAGS, PER_BAG), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("mode", "padding_idx"), [("sum", None), ("mean", 3), ("max", 3)])
def test_nothing_is_larger_than_the_table_or_a_chunk(mode: str, padding_idx: int | None):
    table = EmbeddingBag(ROWS, DIM, mode=mode, padding_idx=padding_idx)
    optimizer = sparsestep.Adam(table.parameters())
    factors = torch.rand(BAGS, PER_BAG, requires_grad=True) if mode == "sum" else None
    for step in range(3):
        optimizer.zero_grad(set_to_none=step == 0)
        with Largest() as largest:
            for part in range(2):
                table(ids(2 * step + part), None, factors).sin().sum().backward()
            if step == 1:
                sparsestep.clip_grad_norm_([table.weight], 1.0)
            if step == 2:
                table.weight.grad.mul_(0.5)
            optimizer.step()
        assert 0 < largest.elements <= max(ROWS * DIM, 1 << 20)
        assert largest.elements < BAGS * PER_BAG * DIM


def test_an_ordinary_gradient_would_be_noticed():
    """So that the tests above can fail."""
    table = torch.nn.EmbeddingBag(ROWS, DIM, mode="sum", sparse=True)
    with Largest() as largest:
        table(ids(0)).sin().sum().backward()
    assert largest.elements == BAGS * PER_BAG * DIM


# Checks: before anything is read or changed. messages.txt has what they say.


TABLE = (10, 2)
FOUR, NO = torch.tensor([1, 2, 3, 4]), torch.zeros(0, dtype=torch.int64)
OUT_OF_RANGE = [FOUR + 6, FOUR - 2, FOUR.view(2, 2) * 9, FOUR.int() - 2]
INVALID: list[Any] = [FOUR.float(), FOUR.byte(), [1, 2], None, FOUR.to_sparse(), FOUR.to("meta")]


@pytest.mark.parametrize("cls", [Embedding, EmbeddingBag])
def test_bad_ids_change_nothing(cls: Any):
    table = cls(*TABLE, max_norm=0.1)
    before = table.weight.detach().clone()
    sparsestep.AdamW(table.parameters(), semantics="dense").track(table)
    more = (torch.zeros(1, dtype=torch.int64),) if cls is EmbeddingBag else ()
    for ids in (*OUT_OF_RANGE, *INVALID):
        is_range_error = any(ids is each for each in OUT_OF_RANGE)
        with pytest.raises(sparsestep.InputError) as error:
            table(ids, *more)
        assert isinstance(error.value, IndexError) == is_range_error  # as with torch's embeddings
        assert same(table.weight, before)  # max_norm would have written to it


rising = st.lists(st.integers(0, 5), max_size=4).map(lambda ends: [0, *sorted(ends)])


@given(
    offsets=st.one_of(rising, st.lists(st.integers(-1, 5), max_size=5)),
    last=st.booleans(),
    max_norm=st.sampled_from([None, 0.1]),
)
def test_offsets_must_cut_the_ids_into_bags(offsets: list[int], last: bool, max_norm: Any):
    good = bool(offsets) and offsets[0] == 0 and offsets[-1] <= 4
    good = good and all(a <= b for a, b in pairwise(offsets))
    good = good and (offsets[-1] == 4 or not last)
    table = EmbeddingBag(*TABLE, max_norm=max_norm, include_last_offset=last)
    before = table.weight.detach().clone()
    try:
        table(FOUR, torch.tensor(offsets).long())
    except sparsestep.InputError:
        assert not good
        assert same(table.weight, before)
    else:
        assert good


@pytest.mark.parametrize("rows", [0, 3])
def test_tables_and_bags_of_nothing(rows: int):
    """What torch has no answer for, or the same answer."""
    bag = EmbeddingBag(rows, 2, mode="sum")
    assert bag(torch.zeros(3, 0, dtype=torch.int64)).tolist() == [[0.0, 0.0]] * 3
    output = bag(NO, torch.zeros(2, dtype=torch.int64))
    assert output.tolist() == [[0.0, 0.0]] * 2
    output.sum().backward()
    assert bag.weight.grad.to_dense().tolist() == [[0.0, 0.0]] * rows
    assert bag(NO, NO).shape == (0, 2)
    assert Embedding(rows, 2)(NO).shape == (0, 2)


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_nested_ids(kind: str):
    ids = torch.nested.nested_tensor([FOUR[:2], NO, FOUR[2:3]], layout=torch.jagged)
    options = {"mode": "sum"} if kind == "EmbeddingBag" else {}
    ours, theirs = (getattr(each, kind)(*TABLE, **options) for each in (sparsestep.nn, nn))
    theirs.load_state_dict(ours.state_dict())
    sparsestep.AdamW(ours.parameters(), semantics="dense").track(ours)
    outputs = [table(ids) for table in (ours, theirs)]
    for n, output in enumerate(outputs):
        assert output.is_nested == (kind == "Embedding")
        outputs[n] = output.values() if output.is_nested else output
        outputs[n].sin().sum().backward()
    assert same(*outputs)
    assert ours.weight.grad.is_sparse
    assert same(ours.weight.grad.to_dense(), theirs.weight.grad)
    if options:
        with pytest.raises(sparsestep.InputError, match="per_sample_weights must be nested"):
            ours(ids, per_sample_weights=torch.ones(3))


def test_nested_ids_with_gaps_are_refused():
    """Their values include numbers that are not ids."""
    lengths = torch.tensor([1, 2])
    ids = torch.nested.narrow(FOUR.view(2, 2), 1, 0 * lengths, lengths, layout=torch.jagged)
    for table in (Embedding(*TABLE), EmbeddingBag(*TABLE)):
        with pytest.raises(sparsestep.InputError, match="must be contiguous"):
            table(ids)
