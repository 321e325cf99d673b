"""What embeddings refuse: before anything is read or changed, with table, position and value."""

from __future__ import annotations

from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparsestep
from sparsestep.nn import Embedding, EmbeddingBag
from sparsestep.nn.lookup import check_offsets
from tests.nn.cases import Call, bag_calls, row_calls, same


def tensor(*values: Any) -> torch.Tensor:
    return torch.tensor(values)


TABLE = (10, 2)
IDS = {
    "too large": (tensor(1, 10), "ids must be in [0, 10). Got 10 at position 1."),
    "negative": (tensor(-1, 10), "ids must be in [0, 10). Got -1 at position 0."),
    "in a row": (tensor([1, 2], [3, 99]), "Got 99 at position (1, 1)."),
    "int32": (tensor(1, -5).int(), "Got -5 at position 1."),
    "floats": (tensor(1.0), "ids must be an int64 or int32 tensor. Got a torch.float32 tensor"),
    "bytes": (tensor(1).byte(), "Got a torch.uint8 tensor of shape (1,)."),
    "a list": ([1, 2], "ids must be an int64 or int32 tensor. Got a list."),
    "None": (None, "ids must be an int64 or int32 tensor. Got None."),
    "sparse": (tensor(1, 2).to_sparse(), "strided or nested tensor. Got torch.sparse_coo."),
    "elsewhere": (torch.empty(2, device="meta").long(), "the table's device, cpu. Got meta."),
}  # fmt: skip


@pytest.mark.parametrize("case", IDS)
@pytest.mark.parametrize("cls", [Embedding, EmbeddingBag])
@pytest.mark.parametrize("tracked", [False, True])
def test_bad_ids(case: str, cls: Any, tracked: bool):
    ids, message = IDS[case]
    table = cls(*TABLE, max_norm=0.1)
    table.name = "user.country"
    before = table.weight.detach().clone()
    if tracked:
        sparsestep.AdamW(table.parameters(), semantics="dense").track(table)
    more = (torch.zeros(1, dtype=torch.int64),) if cls is EmbeddingBag else ()
    with pytest.raises(sparsestep.InputError) as error:
        table(ids, *more)
    assert str(error.value).startswith(f"{cls.__name__} 'user.country' (10 x 2): ")
    assert message in str(error.value)
    in_range = case not in ("too large", "negative", "in a row", "int32")
    assert isinstance(error.value, IndexError) != in_range  # as with torch's embeddings
    assert same(table.weight, before)  # max_norm would have written to it


FOUR = tensor(1, 2, 3, 4)
NO = torch.zeros(0, dtype=torch.int64)
OFFSETS = {
    "none": (FOUR, None, False, "1-D ids need offsets"),
    "floats": (FOUR, tensor(0.0), False, "Got a torch.float32 tensor of shape (1,)."),
    "2-D": (FOUR, tensor([0]), False, "Got a torch.int64 tensor of shape (1, 1)."),
    "a list": (FOUR, [0, 2], False, "Got a list."),
    "not 0 at first": (FOUR, tensor(1, 2), False, "must begin with 0. Got 1 at position 0."),
    "negative": (FOUR, tensor(-1, 2), False, "must begin with 0. Got -1 at position 0."),
    "falling": (FOUR, tensor(0, 3, 2), False, "not decrease. Got 2 at position 2, after 3."),
    "falling below": (FOUR, tensor(0, -3), False, "not decrease. Got -3 at position 1, after 0."),
    "beyond": (FOUR, tensor(0, 5), False, "at most the number of ids, 4. Got 5 at position 1."),
    "beyond at the end": (FOUR, tensor(0, 5), True, "Got 5 at position 1."),
    "not to the end": (FOUR, tensor(0, 3), True, "be the number of ids, 4. Got 3 at position 1."),
    "empty, with ids": (FOUR, NO, False, "offsets must begin with 0. Got no offsets."),
    "empty, with the last": (NO, NO, True, "offsets must begin with 0. Got no offsets."),
    "for rows": (tensor([1, 2]), tensor(0), False, "offsets must be None. Got offsets."),
    "three dims": (tensor([[1, 2]]), None, False, "ids must be 1-D or 2-D. Got shape (1, 1, 2)."),
    "a single id": (torch.tensor(1), None, False, "ids must be 1-D or 2-D. Got shape ()."),
    "elsewhere": (FOUR, torch.zeros(1, dtype=torch.int64, device="meta"), False, "Got meta."),
}  # fmt: skip


@pytest.mark.parametrize("case", OFFSETS)
@pytest.mark.parametrize("few", [0, 256])
def test_bad_offsets(monkeypatch: Any, case: str, few: int):
    monkeypatch.setattr("sparsestep.nn.lookup._FEW", few)
    ids, offsets, last, message = OFFSETS[case]
    table = EmbeddingBag(*TABLE, max_norm=0.1, include_last_offset=last)
    before = table.weight.detach().clone()
    with pytest.raises(sparsestep.InputError) as error:
        table(ids, offsets)
    assert str(error.value).startswith("EmbeddingBag (10 x 2): ")
    assert message in str(error.value)
    assert same(table.weight, before)


FACTORS = {
    "for means": ("mean", torch.ones(1, 4), "are for mode='sum'. Got mode='mean'."),
    "of another shape": ("sum", torch.ones(4), "the shape of the ids, (1, 4). Got (4,)."),
    "of another dtype": ("sum", torch.ones(1, 4).double(), "torch.float32. Got a torch.float64"),
    "integers": ("sum", torch.ones(1, 4).long(), "Got a torch.int64 tensor of shape (1, 4)."),
    "a number": ("sum", 2.0, "Got a float."),
    "elsewhere": ("sum", torch.ones(1, 4, device="meta"), "on the table's device, cpu. Got meta."),
}  # fmt: skip


@pytest.mark.parametrize("case", FACTORS)
def test_bad_factors(case: str):
    mode, factors, message = FACTORS[case]
    with pytest.raises(sparsestep.InputError) as error:
        EmbeddingBag(*TABLE, mode=mode)(FOUR[None], per_sample_weights=factors)
    assert message in str(error.value)


def test_bad_options_are_refused_as_by_torch():
    with pytest.raises(ValueError, match=r"mode has to be one of sum, mean or max\. Got 'median'"):
        EmbeddingBag(*TABLE, mode="median")(FOUR[None])
    with pytest.raises(ValueError, match="max mode does not support scaling"):
        EmbeddingBag(*TABLE, mode="max", scale_grad_by_freq=True)(FOUR[None])
    for cls in (Embedding, EmbeddingBag):
        with pytest.raises(AssertionError, match="within num_embeddings"):
            cls(*TABLE, padding_idx=10)


@given(
    call=st.one_of(bag_calls(), row_calls()),
    wrong=st.sampled_from([-1, -100, 0, 7]),
    seed=st.integers(0, 99),
)
def test_every_position_is_found(call: Call, wrong: int, seed: int):
    if not call.ids.numel():
        return
    place = seed % call.ids.numel()
    value = wrong if wrong < 0 else call.rows + wrong
    call.ids.view(-1)[place] = value
    bag = "mode" in call.options
    table = call.table(EmbeddingBag if bag else Embedding)
    where = torch.unravel_index(torch.tensor(place), call.ids.shape) if call.ids.dim() else ()
    position = tuple(int(each) for each in where)
    shown = f" at position {position[0] if len(position) == 1 else position}" if position else ""
    with pytest.raises(sparsestep.InputError) as error:
        call.output(table)
    assert f"ids must be in [0, {call.rows}). Got {value}{shown}." in str(error.value)


@given(offsets=st.lists(st.integers(-1, 5), max_size=5), last=st.booleans())
def test_few_and_many_offsets_are_judged_alike(offsets: list[int], last: bool):
    rising = all(a <= b for a, b in pairwise(offsets))
    good = bool(offsets) and offsets[0] == 0 and rising and offsets[-1] <= 4
    good = good and (offsets[-1] == 4 or not last)
    for few in (0, 256):
        with mock.patch("sparsestep.nn.lookup._FEW", few):
            try:
                check_offsets(
                    nn.EmbeddingBag(*TABLE), FOUR, torch.tensor(offsets).long(), with_last=last
                )
            except sparsestep.InputError:
                assert not good
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


def test_nested_ids():
    ids = torch.nested.nested_tensor([tensor(1, 2), NO, tensor(3)], layout=torch.jagged)
    ours, theirs = EmbeddingBag(*TABLE, mode="sum"), nn.EmbeddingBag(*TABLE, mode="sum")
    theirs.load_state_dict(ours.state_dict())
    opt = sparsestep.AdamW(ours.parameters(), semantics="dense")
    opt.track(ours)
    assert same(ours(ids), theirs(ids))
    for table in (ours, theirs):
        table(ids).sin().sum().backward()
    assert same(ours.weight.grad.to_dense(), theirs.weight.grad)
    with pytest.raises(sparsestep.InputError, match="per_sample_weights must be nested"):
        ours(ids, per_sample_weights=torch.ones(3))
