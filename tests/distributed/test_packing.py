"""The core divides ids among ranks."""

from __future__ import annotations

import collections
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsestep._native import ext
from sparsestep.distributed._packing import split_by_owner, unique_ids

pytestmark = pytest.mark.skipif(ext is None, reason="the core is not installed")

LARGE = 1 << 40


@given(
    lengths=st.lists(st.integers(0, 5), max_size=40),
    world=st.sampled_from([1, 2, 3, 4, 7, 1000]),
    rows=st.sampled_from([1, 3, 100, LARGE]),
    seed=st.integers(0, 99),
)
def test_each_rank_gets_its_ids_of_each_bag(lengths: list[int], world: int, rows: int, seed: int):
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(rows, (sum(lengths),), generator=chance)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    bags = [bag for bag, length in enumerate(lengths) for _ in range(length)]
    entries = list(zip((ids % world).tolist(), bags, range(len(ids)), strict=True))
    order = [index for _, _, index in sorted(entries)]
    parts = collections.Counter((owner, bag) for owner, bag, _ in entries)
    for dtype in (torch.int32, torch.int64) if rows < LARGE else (torch.int64,):
        for to_all in (False, True):
            found = split_by_owner(ids, starts, world, dtype, to_all_ranks=to_all)
            assert found.rows.dtype == dtype
            assert torch.equal(found.rows, (ids[order] // world).to(dtype))
            assert found.order.tolist() == order
            assert found.ids_per_rank == (ids % world).bincount(minlength=world).tolist()
            everything = itertools.product(range(world), range(len(lengths)))
            expected = list(everything) if to_all else sorted(parts)
            assert found.bags.tolist() == ([] if to_all else [bag for _, bag in expected])
            assert found.lengths.tolist() == [parts[each] for each in expected]
            per_rank = collections.Counter(owner for owner, _ in expected)
            assert found.parts_per_rank == [per_rank[owner] for owner in range(world)]


@given(
    count=st.sampled_from([0, 1, 50, 3_000, 20_000]),
    rows=st.sampled_from([1, 7, 5_000, LARGE]),
    seed=st.integers(0, 99),
)
def test_distinct_ids_are_those_that_there_are(count: int, rows: int, seed: int):
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(rows, (count,), generator=chance)
    found, which = unique_ids(ids, rows)
    assert torch.equal(found[which], ids)
    assert torch.equal(found.sort().values, ids.unique())
    assert torch.equal(which.unique(), torch.arange(len(found)))
    ascending = ids.unique()
    assert torch.equal(unique_ids(ascending, rows)[0], ascending)
    back = split_by_owner(found, None, 3, torch.int64)
    assert torch.equal(found[back.order].div(3, rounding_mode="floor"), back.rows)


def test_what_does_not_fit_together_is_refused():
    assert ext is not None
    ids, room = torch.arange(4), torch.empty(4, dtype=torch.int64)
    for starts, world, rows in (
        (torch.tensor([0, 5]), 2, room),
        (torch.tensor([1, 4]), 2, room),
        (torch.tensor([0, 3, 2, 4]), 2, room),
        (torch.tensor([], dtype=torch.int64), 2, room),
        (torch.tensor([0, 4]), 0, room),
        (torch.tensor([0, 4]), 2, room[:3]),
        (torch.tensor([0, 4]), 2, room.to(torch.int16)),
    ):
        with pytest.raises(ValueError, match="no such bags"):
            ext.split_by_owner(ids, starts, world, rows, None, None, None)
    assert ext.unique(ids, 3, room, room.clone()) == -1
