"""EmbeddingBagCollection: what separate tables give, in one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparsestep
from sparsestep.nn import EmbeddingBag, EmbeddingBagCollection
from tests.nn.cases import Call, bag_calls, plain, same, same_run

pytestmark = pytest.mark.usefixtures("one_thread")


def built(calls: list[Call], named: bool) -> tuple[EmbeddingBagCollection, list[nn.Module]]:
    """A collection and the same tables alone."""
    together: Any = [call.table(EmbeddingBag) for call in calls]
    if named:
        together = {f"table_{number}": table for number, table in enumerate(together)}
    return EmbeddingBagCollection(together), [call.table(EmbeddingBag) for call in calls]


def asked(calls: list[Call], named: bool) -> tuple[Any, Any, Any]:
    each: Any = tuple(
        [getattr(call, name) for call in calls] for name in ("ids", "offsets", "factors")
    )
    if named:
        each = tuple({f"table_{n}": given for n, given in enumerate(some)} for some in each)
    return each


@given(calls=st.lists(bag_calls(), min_size=1, max_size=4), named=st.booleans())
def test_one_call_gives_what_separate_tables_give(calls: list[Call], named: bool):
    collection, tables = built(calls, named)
    found = collection(*asked(calls, named))
    assert isinstance(found, dict if named else list)
    outputs = list(found.values()) if named else found
    for call, output, table in zip(calls, outputs, tables, strict=True):
        assert same(output, call.backward(table))
    torch.autograd.backward(
        outputs, [call.pushed(o) for call, o in zip(calls, outputs, strict=True)]
    )
    ours = sparsestep.Adam(collection.parameters(), lr=0.1)
    theirs = sparsestep.Adam([table.weight for table in tables], lr=0.1)
    ours.step()
    theirs.step()
    assert same_run(ours, theirs)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 2)])
def test_ids_or_offsets_in_one_tensor(shape: tuple[int, ...]):
    ids = torch.randint(20, shape, generator=torch.Generator().manual_seed(0))
    factors = torch.rand(ids.shape)
    collection = EmbeddingBagCollection([(20, 4), (30, 2), (25, 4)], mode="sum")
    found = collection(ids, per_sample_weights=factors)
    for number, (output, table) in enumerate(zip(found, collection.tables, strict=True)):
        column = ids[:, number].reshape(6, -1)
        weights = factors[:, number].reshape(6, -1)
        assert same(output, table(column, per_sample_weights=weights))
    flat, offsets = [torch.arange(7)] * 3, torch.tensor([[0, 1, 1], [0, 3, 7], [0, 0, 2]])
    for number, output in enumerate(collection(flat, offsets)):
        assert same(output, collection.tables[number](flat[number], offsets[number]))


def test_a_table_for_several_features():
    """It gets the gradients of all, in one step."""
    torch.manual_seed(0)
    shared = nn.EmbeddingBag(20, 4, mode="sum", dtype=torch.float64)
    weight = shared.weight.detach().clone().requires_grad_()
    collection = EmbeddingBagCollection({"seen": shared, "bought": shared})
    assert collection.tables["seen"] is shared
    ids = torch.randint(20, (5, 2, 3))
    found = collection(ids)
    (found["seen"].sin().sum() + found["bought"].cos().sum()).backward()
    (weight[ids[:, 0]].sum(1).sin().sum() + weight[ids[:, 1]].sum(1).cos().sum()).backward()
    assert torch.allclose(plain(shared.weight.grad).to_dense(), weight.grad)
    assert len(list(collection.parameters())) == 1


def test_tables_without_a_compact_gradient():
    """Frozen, with a weight that is computed, or not used; those of its neighbors stay compact."""
    frozen = EmbeddingBag.from_pretrained(torch.randn(5, 2))
    collection = EmbeddingBagCollection([frozen, (5, 2), (5, 2), (5, 2)])
    nn.utils.parametrizations.weight_norm(collection.tables[1])
    ids = torch.tensor([[1, 2, 3, 4]])
    sum(output.sum() for output in collection(ids)[:3]).backward()
    assert frozen.weight.grad is None
    assert all(p.grad is not None for p in collection.tables[1].parameters())
    assert plain(collection.tables[2].weight.grad)._indices().tolist() == [[3]]
    assert collection.tables[3].weight.grad is None
    with torch.no_grad():
        assert all(not output.requires_grad for output in collection(ids))
    assert EmbeddingBagCollection([])([]) == []


IDS = torch.tensor([[1, 2]])
WRONG: list[tuple[Any, ...]] = [
    (torch.tensor([[4, 8], [0, 9]]),),
    ([IDS, torch.tensor([1, -1])], [None, torch.tensor([0])]),
    ([IDS],),
    (IDS, [IDS, IDS]),
    ({"a": IDS},),
    ({"a": IDS, "b": IDS}, {"c": IDS}),
    ({"a": IDS, "b": None},),
    (5,),
]


def test_what_is_refused_changes_nothing():
    collection = EmbeddingBagCollection({"a": (5, 2), "b": (9, 2)}, max_norm=0.1)
    before = [param.detach().clone() for param in collection.parameters()]
    for arguments in WRONG:
        with pytest.raises(sparsestep.InputError):
            collection(*arguments)
        for param, old in zip(collection.parameters(), before, strict=True):
            assert same(param, old)  # though max_norm would have written to the first table


def test_the_state_dict_and_the_options():
    given = nn.EmbeddingBag(5, 2, mode="max", padding_idx=1)
    options = {"mode": "sum", "include_last_offset": True, "dtype": torch.float64}
    collection = EmbeddingBagCollection([(7, 3), given], padding_idx=2, **options)
    assert list(collection.state_dict()) == ["tables.0.weight", "tables.1.weight"]
    first, second = collection.tables
    assert (first.mode, first.weight.dtype, first.name) == ("sum", torch.float64, "0")
    assert (first.padding_idx, first.include_last_offset) == (2, True)
    assert second is given
    assert (second.mode, second.padding_idx, type(second)) == ("max", 1, EmbeddingBag)
    named = EmbeddingBagCollection({"a": (7, 3), "b": (5, 2)}, dtype=torch.float64)
    assert list(named.state_dict()) == ["tables.a.weight", "tables.b.weight"]


def test_a_collection_looks_up_ids_in_its_vocabularies():
    """As calls of the vocabularies before it; tables may share one."""
    known = [sparsestep.nn.Vocabulary(9, evict="lru") for _ in range(4)]
    torch.manual_seed(0)
    sizes = {"a": (9, 2), "b": (9, 3), "c": (5, 2), "d": (9, 2)}
    vocabularies = {"a": known[0], "b": known[0], "d": known[1]}
    ours = EmbeddingBagCollection(sizes, vocabularies=vocabularies)
    theirs = EmbeddingBagCollection(sizes)
    theirs.load_state_dict(ours.state_dict(), strict=False)
    _, _, first, second = known
    models = [(e, sparsestep.Adam(e.parameters(), semantics="dense")) for e in (ours, theirs)]
    ours.attach(models[0][1], init=nn.init.zeros_)
    for name in "ab":
        first.attach(theirs.tables[name], models[1][1], init=nn.init.zeros_)
    second.attach(theirs.tables["d"], models[1][1], init=nn.init.zeros_)
    for model, optimizer in models:
        optimizer.track(model)
    for step in range(6):
        ids = torch.randint(4 * step, 4 * step + 9, (3, 4, 2)) * 10**15
        ids[:, 2] %= 5
        rows = ids.clone()
        rows[:, 0], rows[:, 1] = first(torch.stack([ids[:, 0], ids[:, 1]]))
        rows[:, 3] = second(ids[:, 3])
        for (model, optimizer), inputs in zip(models, (ids, rows), strict=True):
            optimizer.zero_grad()
            sum(each.square().sum() for each in model(inputs).values()).backward()
            optimizer.step()
            optimizer.catch_up()
        assert known[0].as_dict() == first.as_dict()
        assert all(map(same, ours.parameters(), theirs.parameters()))
    before = copy.deepcopy(ours.state_dict())
    wrong = {"a": ids[:, 0], "b": ids[:, 1] + 99, "c": ids[:, 2], "d": ids[:, 3] * 1.0}
    with pytest.raises(sparsestep.InputError):
        ours(wrong)
    assert all(map(torch.equal, ours.state_dict().values(), before.values()))
    assert known[0].taken_over.numel()
