"""Vocabularies that are saved, copied, merged and exported, and what they refuse."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.errors import InputError
from sparsestep.nn import Vocabulary

pytestmark = pytest.mark.usefixtures("needs_extension")


def batch(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
@pytest.mark.parametrize("evict", [None, "lru", "lfu"])
def test_a_vocabulary_goes_on_from_a_checkpoint(evict: Any, how: str):
    generator = torch.Generator().manual_seed(5)
    calls = [torch.randint(0, 40, (11,), generator=generator) for _ in range(60)]
    vocabulary = Vocabulary(16, admit=2, evict=evict)
    for each in calls[:30]:
        vocabulary(each)
    if how == "state_dict":
        other = Vocabulary(16, admit=2, evict=evict)
        other.load_state_dict(vocabulary.state_dict())
    else:
        other = copy.deepcopy(vocabulary)
        if how == "pickle":
            other = pickle.loads(pickle.dumps(vocabulary))
    assert type(other) is Vocabulary
    for each in calls[30:]:
        assert torch.equal(other(each), vocabulary(each))
    assert other.as_dict() == vocabulary.as_dict()


def test_a_checkpoint_is_refused_that_does_not_fit():
    vocabulary = Vocabulary(4, admit=2)
    vocabulary(batch(1, 1, 2))
    saved = vocabulary.state_dict()
    for other in (Vocabulary(5, admit=2), Vocabulary(4)):
        with pytest.raises(RuntimeError, match=r"must be torch\.int64 of shape"):
            other.load_state_dict(saved)
    broken = [
        {**saved, "numbers": torch.tensor([9, 0, 0, 0, 0])},
        {**saved, "candidate_ids": saved["ids"][1:]},
        {**saved, "counts": saved["counts"] - 9},
        {**saved, "seen": saved["seen"].float()},
        {k: v for k, v in saved.items() if k != "ids"},
    ]
    for each in broken:
        with pytest.raises(RuntimeError):
            vocabulary.load_state_dict(each)
        assert vocabulary.as_dict() == {1: 1}
    vocabulary.load_state_dict(saved)


def test_a_model_with_a_vocabulary_is_saved_and_copied_with_it():
    model = torch.nn.ModuleDict({"ids": Vocabulary(4), "table": torch.nn.Embedding(4, 2)})
    optimizer = sparsestep.Adam(model["table"].parameters())
    model["ids"].attach(model["table"], optimizer)
    model["ids"](batch(7, 8))
    assert [name for name, _ in model.named_parameters()] == ["table.weight"]
    copied = copy.deepcopy(model)
    assert copied["ids"].as_dict() == {7: 1, 8: 2}
    assert copied["ids"].attached == []
    copied.load_state_dict(model.state_dict())
    assert copied["ids"](batch(9)).tolist() == [3]
    assert model["ids"](batch(7, 9)).tolist() == [1, 3]


def test_merge_and_export():
    first, second = Vocabulary(6, admit=2), Vocabulary(9)
    first(batch(1, 1, 2, 2, 3))
    second(batch(3, 2, 5))
    rows = first.merge(second)
    assert rows.tolist() == [0, 3, 2, 4]
    assert first.as_dict() == {1: 1, 2: 2, 3: 3, 5: 4}
    assert second.as_dict() == {3: 1, 2: 2, 5: 3}
    table = sparsestep.nn.Embedding(6, 2)
    plain, known = first.export(table)
    assert type(plain) is torch.nn.Embedding
    assert plain.weight.requires_grad
    assert known == first.as_dict()
    assert torch.equal(plain.weight, table.weight[:5])
    second(torch.arange(100, 106))
    before = first.state_dict()
    with pytest.raises(InputError, match=r"there must be 5 free rows\. Got 1\. Call grow\(\)"):
        first.merge(second)
    assert all(torch.equal(v, before[k]) for k, v in first.state_dict().items())


def test_strings_have_the_same_id_everywhere():
    assert sparsestep.nn.hash_strings(["", "ß"]).tolist() == [
        -5426141060434712860,
        sparsestep.nn.hash_strings(iter(["ß"])).item(),
    ]
    for wrong in ("one", ["a", 1], [b"x"]):
        with pytest.raises(InputError, match=r"^hash_strings: strings must be a list"):
            sparsestep.nn.hash_strings(wrong)  # type: ignore[arg-type, list-item]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rows": 0}, r"rows must be a whole number in \[1, 2147483647\]\. Got 0\.$"),
        ({"rows": 2.0}, r"rows must be a whole number in .* Got 2\.0\.$"),
        ({"rows": 4, "admit": 0}, r"admit must be a whole number in \[1, 65535\]\. Got 0\.$"),
        ({"rows": 4, "admit": True}, r"admit must be .* Got True\.$"),
        ({"rows": 4, "shared": 5}, r"shared must be a whole number in \[1, 4\]\. Got 5\.$"),
        ({"rows": 4, "evict": "age"}, r"evict must be None, lru or lfu\. Got 'age'\.$"),
    ],
)
def test_options_that_are_refused(options: dict[str, Any], message: str):
    with pytest.raises(InputError, match="^Vocabulary: " + message):
        Vocabulary(**options)


@pytest.mark.parametrize(
    "wrong", [[1], "one", torch.tensor([1.0]), torch.eye(2).long().to_sparse(), None]
)
def test_what_is_no_id_is_refused(wrong: Any):
    with pytest.raises(InputError, match=r"^Vocabulary: ids must be"):
        Vocabulary(3)(wrong)


def test_tables_that_cannot_be_attached():
    vocabulary, table = Vocabulary(4), torch.nn.Embedding(4, 2)
    optimizer = sparsestep.SGD(table.parameters(), lr=0.1)
    small, padded = torch.nn.Embedding(3, 2), torch.nn.Embedding(4, 2, padding_idx=1)
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
        ((torch.nn.Linear(4, 2),), {}, "it must be an nn.Embedding"),
        ((small,), {}, r"a row for each of 4\. Got 3 rows"),
        ((padded,), {}, r"padding_idx must be one of the 1 shared rows\. Got 1"),
        ((table, torch.optim.SGD(table.parameters())), {}, r"must be sparsestep's\. Got torch"),
        ((padded, optimizer), {}, r"must have the weight .* Got SGD without it"),
        ((table, optimizer), {"init": 3}, "init must fill a tensor of rows"),
    ]
    for args, options, message in cases:
        with pytest.raises(InputError, match=f"^Vocabulary.attach: .*{message}"):
            vocabulary.attach(*args, **options)
    vocabulary.attach(torch.nn.EmbeddingBag(5, 2, padding_idx=0))


@pytest.mark.parametrize("wrong", [None, 7, [None], [b"bytes"], ["right", "\ud800"], ["\udc80"]])
def test_hash_strings_names_its_argument(wrong: Any):
    with pytest.raises(InputError, match=r"^hash_strings: strings must .* Got .*\."):
        sparsestep.nn.hash_strings(wrong)
