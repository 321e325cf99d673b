"""NgramEmbedding: against its hash in plain integers, and a table that is looked up by hand."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsestep
from sparsestep import storage
from sparsestep.nn import NgramEmbedding, ngram
from tests.nn.cases import plain, same, splitmix64


def row_of(tokens: list[int], seed: int, head: int, rows: int) -> int:
    """As the docstring says."""
    h = splitmix64(splitmix64(splitmix64(seed) ^ len(tokens)) ^ head)
    for token in tokens:
        h = splitmix64((h ^ token) + 0x9E3779B97F4A7C15)
    return (h >> 1) % rows


def rows_by_hand(module: NgramEmbedding, tokens: Tensor, documents: Tensor | None) -> list[Any]:
    """For each position, a row or None for each order and head."""
    found = []
    for number, sequence in enumerate(tokens.tolist()):
        ids = [0] * len(sequence) if documents is None else documents[number].tolist()
        for t in range(len(sequence)):
            of_position: list[int | None] = []
            for n in module.orders:
                fits = t + 1 >= n and len(set(ids[t - n + 1 : t + 1])) == 1
                last = sequence[t - n + 1 : t + 1]
                for head in range(module.heads):
                    row = row_of(last, module.seed, head, module.num_embeddings)
                    of_position.append(row if fits else None)
            found.append(of_position)
    return found


def by_hand(module: NgramEmbedding, weight: Tensor, rows: list[Any], shape: Any) -> Tensor:
    """The output, of a weight that torch differentiates."""
    nothing = torch.zeros_like(weight[0])
    vectors = [[nothing if row is None else weight[row] for row in each] for each in rows]
    join: Any = sum if module.combine == "sum" else torch.cat
    if not vectors:
        features = len(nothing) * (len(rows) if module.combine == "cat" else 1)
        return weight.new_zeros(*shape, features)
    return torch.stack([join(each) for each in vectors]).view(*shape, -1)


@st.composite
def cases(draw: st.DrawFn) -> tuple[NgramEmbedding, Tensor, Tensor | None]:
    orders = draw(st.lists(st.integers(1, 5), min_size=1, max_size=3, unique=True))
    module = NgramEmbedding(
        draw(st.sampled_from([1, 2, 13, 64])),
        draw(st.sampled_from([1, 3, 16])),
        orders=orders,
        heads=draw(st.integers(1, 3)),
        combine=draw(st.sampled_from(["sum", "cat"])),
        seed=draw(st.sampled_from([0, 1, 2**63 - 1])),
    )
    with torch.no_grad():  # so that sums are exact
        module.weight.random_(-50, 50)
    batch, time = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    numbers = st.integers(0, 3) | st.sampled_from([2**31 - 1])
    tokens = draw(st.lists(numbers, min_size=batch * time, max_size=batch * time))
    documents = None
    if draw(st.booleans()):
        ids = draw(st.lists(st.integers(-1, 1), min_size=batch * time, max_size=batch * time))
        dtype = draw(st.sampled_from([torch.int64, torch.int32]))
        documents = torch.tensor(ids, dtype=dtype).view(batch, time)
    dtype = draw(st.sampled_from([torch.int64, torch.int32]))
    return module, torch.tensor(tokens, dtype=dtype).view(batch, time), documents


@pytest.mark.parametrize("native", [True, False])
@given(case=cases())
def test_it_gives_rows_looked_up_by_hand(case: Any, native: bool):
    module, tokens, documents = case
    rows = rows_by_hand(module, tokens, documents)
    theirs = module.weight.detach().clone().requires_grad_()
    expected = by_hand(module, theirs, rows, tokens.shape)
    with pytest.MonkeyPatch.context() as patch:
        if not native:
            patch.setattr(ngram, "ext", None)
        output = module(tokens, documents)
        present = [row for each in rows for row in each if row is not None]
        assert module.rows(tokens, documents).tolist() == present
    assert same(output, expected)
    pushed = torch.randint(-50, 50, output.shape).float()
    output.backward(pushed)
    if expected.requires_grad:
        expected.backward(pushed)
    grad = plain(module.weight.grad)
    assert sorted(grad._indices()[0].tolist()) == sorted(present)  # and no others
    assert theirs.grad is None or same(grad.to_dense(), theirs.grad)
    without_shapes = module._embed_with_torch(tokens, documents)
    assert same(without_shapes, expected)


def test_vectors():
    """Rows that no version may change; docs/embeddings.md has them, too."""
    tokens = torch.tensor([[5, 7, 7, 2**31 - 1]])
    found = NgramEmbedding(10**12, 1, weight=torch.empty(1, 1).expand(10**12, 1))
    expected = [632375827109, 322768033239, 519455073401, 581584094129, 471304881494]
    assert found.rows(tokens).tolist() == expected
    found = NgramEmbedding(
        2**40, 1, orders=[1, 4], heads=2, seed=2**63 - 1, weight=torch.empty(1, 1).expand(2**40, 1)
    )
    expected = [334154363559, 52961700806, 35164222803, 340753832021, 35164222803, 340753832021]
    expected += [434329144365, 707301228809, 703919142814, 950077088632]
    assert found.rows(tokens).tolist() == expected


@pytest.mark.parametrize("combine", ["sum", "cat"])
@pytest.mark.parametrize("time", [1, 4097, 20_000])
def test_threads_and_devices_agree(combine: Any, time: int, monkeypatch: pytest.MonkeyPatch):
    """Sequences of several pieces, which begin inside of documents and n-grams."""
    torch.manual_seed(0)
    module = NgramEmbedding(1_000_003, 2, orders=(3, 1, 7), heads=2, combine=combine)
    tokens = torch.randint(50_000, (20_000 // time, time))
    documents = (torch.rand(tokens.shape) < 0.1).cumsum(1)
    found = {}
    for threads in (1, 3):
        torch.set_num_threads(threads)
        found[threads] = module.bags(tokens, documents)
    torch.set_num_threads(1)
    monkeypatch.setattr(ngram, "ext", None)
    found[0] = module.bags(tokens, documents)
    for rows, offsets in found.values():
        assert torch.equal(rows, found[0][0])
        assert torch.equal(offsets, found[0][1])


def test_weights_of_every_kind(tmp_path: Path):
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    given = nn.Parameter(torch.randn(30, 4))
    assert NgramEmbedding(30, 4, weight=given).weight is given
    half = NgramEmbedding(30, 4, weight=given.detach().bfloat16())
    assert half(tokens).dtype is torch.bfloat16
    shared = NgramEmbedding(30, 4).share_memory()
    assert shared.weight.is_shared()
    mapped = storage.mapped(tmp_path / "table", (30, 4), optimizer=sparsestep.RowwiseAdam)
    with torch.no_grad():
        mapped.copy_(given)
    table = NgramEmbedding(30, 4, weight=mapped)
    assert table.weight.data_ptr() == mapped.data_ptr()
    optimizer = sparsestep.RowwiseAdam([given, half.weight, shared.weight, table.weight])
    storage.prefetch(table.weight, table.rows(tokens))
    plain_one = NgramEmbedding(30, 4, weight=given)
    for module in (plain_one, half, shared, table):
        module(tokens).sum().backward()
    optimizer.step()
    assert torch.equal(mapped, given)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by the compiler itself
def test_it_is_a_module_as_others_are():
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    module = NgramEmbedding(30, 4, orders=[2], heads=2, combine="cat", seed=3)
    assert str(module) == ("NgramEmbedding(30, 4, orders=(2,), heads=2, combine='cat', seed=3)")
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(other(tokens), module(tokens))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(sparsestep.nn.fuse(nn.Sequential(module))[0]) is NgramEmbedding
    with torch.device("meta"):
        assert NgramEmbedding(30, 4)(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 4)
    compiled = torch.compile(lambda given: module(given).relu(), backend="eager")
    assert same(compiled(tokens), module(tokens).relu())
    exported = torch.export.export(module, (tokens,)).module()
    assert same(exported(tokens), module(tokens))
    jacobian = torch.func.jacrev(
        lambda weight: torch.func.functional_call(module, {"weight": weight}, (tokens,))
    )(module.weight)
    assert int(jacobian.count_nonzero()) == 4 * 2 * 4  # four bigrams


def test_weights_of_other_ngrams_are_not_loaded(tmp_path: Path):
    """Of another seed, or other heads or orders: their rows would belong to other n-grams."""

    def made(**options: Any) -> tuple[nn.Module, sparsestep.RowwiseAdam]:
        model = nn.Sequential(NgramEmbedding(30, 4, **{"heads": 2, **options}))
        return model, sparsestep.RowwiseAdam(model.parameters())

    saved = made()
    state = saved[0].state_dict()
    storage.save(tmp_path / "storage", *saved)
    sparsestep.distributed.save(tmp_path / "distributed", *saved)
    for options in ({"seed": 1}, {"heads": 1}, {"orders": [2]}, {"orders": [3, 4]}):
        other = made(**options)
        before = other[0][0].weight.detach().clone()
        with pytest.raises(RuntimeError, match="must have been saved with seed="):
            other[0].load_state_dict(state)
        for kind in (storage, sparsestep.distributed):
            with pytest.raises(sparsestep.InputError):
                kind.load(tmp_path / kind.__name__.split(".")[-1], *other)
        assert same(other[0][0].weight, before)
    same_rows = made(combine="cat", orders=[3, 2])
    for kind in (storage, sparsestep.distributed):
        kind.load(tmp_path / kind.__name__.split(".")[-1], *same_rows)
    del state["0._extra_state"]  # as earlier versions saved it
    made()[0].load_state_dict(state)


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (2, 1)])
@pytest.mark.parametrize("combine", ["sum", "cat"])
def test_batches_without_ngrams(shape: Any, combine: Any):
    module = NgramEmbedding(30, 4, combine=combine)
    tokens = torch.ones(shape, dtype=torch.int64)
    output = module(tokens, torch.zeros_like(tokens))
    assert output.shape == (*shape, 4 if combine == "sum" else 8)
    assert not output.any()
    output.sum().backward()
    before = module.weight.detach().clone()
    sparsestep.Adam(module.parameters()).step()
    assert same(module.weight, before)
    assert module.collisions(tokens) == {"ngrams": 0, "rows": 0, "collision_rate": 0.0}


def test_collisions():
    torch.manual_seed(0)
    module = NgramEmbedding(40, 1, orders=(1, 2), heads=2)
    tokens = torch.randint(6, (2, 12))
    documents = torch.arange(12).div(5, rounding_mode="floor").repeat(2, 1)
    pairs: dict[Any, int] = {}
    for sequence, ids in zip(tokens.tolist(), documents.tolist(), strict=True):
        for n in module.orders:
            for t in range(n - 1, 12):
                if ids[t - n + 1] == ids[t]:
                    last = tuple(sequence[t - n + 1 : t + 1])
                    for head in range(2):
                        pairs[last, head] = row_of(list(last), 0, head, 40)
    rows = list(pairs.values())
    shared = sum(rows.count(row) > 1 for row in rows)
    assert 0 < shared < len(rows)
    assert module.collisions(tokens, documents) == {
        "ngrams": len(rows) // 2,
        "rows": len(set(rows)),
        "collision_rate": shared / len(rows),
    }
