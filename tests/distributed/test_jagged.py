"""TorchRec's KeyedJaggedTensor, by a class with the same methods: sharded and in lockstep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

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

    def offsets(self) -> Tensor:
        return nn.functional.pad(self._lengths.cumsum(0), (1, 0)).to(self._lengths.dtype)

    def offset_per_key(self) -> list[int]:
        size = len(self._lengths) // len(self._keys)
        return [int(self.offsets()[n * size]) for n in range(len(self._keys) + 1)]

    def to_dict(self) -> dict[str, Keyed]:
        """Each key by itself; TorchRec has another class for it."""
        found, ends = {}, self.offset_per_key()
        lengths = self._lengths.view(len(self._keys), -1)
        for n, key in enumerate(self._keys):
            part = slice(ends[n], ends[n + 1])
            weights = None if self._weights is None else self._weights[part]
            found[key] = Keyed([key], self._values[part], weights, lengths[n])
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


def plain(batch: Keyed) -> list[dict[str, Any]]:
    """Ids, offsets without the last, and weights."""
    parts = {name: batch.to_dict()[name] for name in SIZES}
    found = {
        n: (p.values(), p.offsets()[:-1].long(), p.weights_or_none()) for n, p in parts.items()
    }
    return [{name: each[n] for name, each in found.items()} for n in range(3)]


@pytest.mark.parametrize("include_last_offset", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_keyed_jagged_tensor_gives_what_ids_and_offsets_give(
    weighted: bool, include_last_offset: bool
):
    """Tables in a list take keys in their order."""
    batch = keyed(1, weighted=weighted, keys=("other", "item", "user"))  # one has no table
    found = collection(include_last_offset=include_last_offset)(batch)
    expected = collection()(*plain(batch))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in SIZES)
    batch, tables = keyed(1, weighted=weighted), list(collection().tables.values())
    expected = collection()(*plain(batch))
    found = EmbeddingBagCollection([tables[1], tables[0]])(batch)
    assert all(map(torch.equal, found, [expected["item"], expected["user"]]))


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
