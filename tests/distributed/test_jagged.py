"""TorchRec's KeyedJaggedTensor, by a class with the same methods: sharded and in lockstep."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsestep
from sparsestep.distributed.lockstep import empty_batch
from sparsestep.nn import EmbeddingBagCollection
from tests.distributed.runs import said
from tests.ranks import Rank, ranks

SIZES = {"user": (11, 4), "item": (13, 4)}


class Keyed:
    """The methods of ``torchrec.KeyedJaggedTensor`` that its own collections call."""

    def __init__(
        self, keys: list[str], values: Tensor, weights: Tensor | None, lengths: Tensor
    ) -> None:
        self._keys, self._values, self._weights, self._lengths = keys, values, weights, lengths

    @staticmethod
    def empty() -> Keyed:
        return Keyed([], torch.empty(0), None, torch.empty(0, dtype=torch.int32))

    def keys(self) -> list[str]:
        return self._keys

    def values(self) -> Tensor:
        return self._values

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def lengths(self) -> Tensor:
        return self._lengths

    def offset_per_key(self) -> list[int]:
        ends = self._lengths.view(len(self._keys), -1).sum(1).cumsum(0)
        return [0, *ends.tolist()]

    def to_dict(self) -> dict[str, Any]:
        found, ends = {}, self.offset_per_key()
        lengths = self._lengths.view(len(self._keys), -1)
        for n, key in enumerate(self._keys):
            part = slice(ends[n], ends[n + 1])
            offsets = torch.zeros(lengths.shape[1] + 1, dtype=self._lengths.dtype)
            offsets[1:] = lengths[n].cumsum(0)
            weights = None if self._weights is None else self._weights[part]
            parts = {"values": self._values[part], "weights_or_none": weights, "offsets": offsets}
            methods = {name: lambda value=value: value for name, value in parts.items()}
            found[key] = SimpleNamespace(**methods)
        return found


def keyed(seed: int, *, weighted: bool = False, keys: tuple[str, ...] = ("item", "user")) -> Keyed:
    """Five bags of each key, with 32-bit lengths as TorchRec has them."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 4, (5 * len(keys),), generator=draw).int()
    values = torch.randint(0, 11, (int(lengths.sum()),), generator=draw)
    weights = torch.rand(len(values), generator=draw) if weighted else None
    return Keyed(list(keys), values, weights, lengths)


def collection(**options: Any) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection(SIZES, mode="sum", **options)


def plain(batch: Keyed) -> tuple[dict[str, Tensor], ...]:
    """Ids, offsets without the last, and weights."""
    parts = {name: batch.to_dict()[name] for name in SIZES}
    ids = {name: part.values() for name, part in parts.items()}
    offsets = {name: part.offsets()[:-1].long() for name, part in parts.items()}
    weights = {name: part.weights_or_none() for name, part in parts.items()}
    return ids, offsets, weights  # type: ignore[return-value]


@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_keyed_jagged_tensor_gives_what_ids_and_offsets_give(
    weighted: bool, include_last_offset: bool
):
    batch = keyed(1, weighted=weighted, keys=("other", "item", "user"))  # one has no table
    found = collection(include_last_offset=include_last_offset)(batch)
    expected = collection()(*plain(batch))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in SIZES)


def test_tables_in_a_list_take_keys_in_their_order():
    batch = keyed(1, keys=("a", "b"))
    torch.manual_seed(0)
    tables = EmbeddingBagCollection(list(SIZES.values()), mode="sum")
    first, second = batch.to_dict().values()
    begins = [part.offsets()[:-1].long() for part in (first, second)]
    expected = tables([first.values(), second.values()], begins)
    assert all(map(torch.equal, tables(batch), expected))


def test_what_does_not_fit_is_refused():
    model, batch = collection(), keyed(1)
    assert "no 'user'" in said(lambda: model(keyed(1, keys=("item",))))
    assert "KeyedJaggedTensor" in said(lambda: model(batch, plain(batch)[1]))


@pytest.mark.parametrize("weighted", [False, True])
def test_an_empty_batch_keeps_the_keys(weighted: bool):
    batch = keyed(1, weighted=weighted)
    label = torch.ones(5)
    for empty in (empty_batch(batch), empty_batch({"ids": batch, "label": label})["ids"]):
        assert empty.keys() == batch.keys()
        assert (empty.weights_or_none() is not None) == weighted
        found = collection()(empty)
        assert all(rows.shape == (0, 4) for rows in found.values())
    assert len(empty_batch({"ids": batch, "label": label})["label"]) == 0


@ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_ranks_train_with_it(rank: Rank, prefetch: int):
    """Ranks have different numbers of batches; the result is that of ids and offsets."""
    loader = [keyed(7 * step + rank.index) for step in range(4 - rank.index)]
    weights = []
    for is_keyed in (True, False):
        prefetch = prefetch if is_keyed else 0  # parts of a batch's tensors are not prefetched
        model = collection()
        sparsestep.distributed.shard(model, plan={"user": "rows", "item": "tables"})
        opt = sparsestep.Adam(model.parameters(), lr=0.1)
        for batch in sparsestep.distributed.lockstep(loader, prefetch=prefetch):
            opt.zero_grad()
            rows = model(batch) if is_keyed else model(*plain(batch))
            sum(each.square().sum() for each in rows.values()).backward()
            opt.step()
        weights.append([param.detach().clone() for param in model.parameters()])
    assert all(map(torch.equal, *weights))
