"""The core divides ids among ranks as torch's sorting does."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sparsestep._native import ext
from sparsestep.distributed._packing import _split_by_owner_torch, split_by_owner, unique_ids

pytestmark = pytest.mark.skipif(ext is None, reason="without the core, torch's sorting is all")

LARGE = 1 << 40


@given(
    lengths=st.lists(st.integers(0, 5), max_size=40),
    world=st.sampled_from([1, 2, 3, 4, 7, 1000]),
    rows=st.sampled_from([1, 3, 100, LARGE]),
    seed=st.integers(0, 99),
)
def test_bags_are_split_as_by_sorting(lengths: list[int], world: int, rows: int, seed: int):
    chance = torch.Generator().manual_seed(seed)
    ids = torch.randint(rows, (sum(lengths),), generator=chance)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    for dtype in (torch.int32, torch.int64) if rows < LARGE else (torch.int64,):
        for to_all in (False, True):
            of = (ids, starts, world, dtype)
            ours = split_by_owner(*of, to_all_ranks=to_all)
            theirs = _split_by_owner_torch(*of, to_all_ranks=to_all)
            for name, mine, its in zip(ours._fields, ours, theirs, strict=True):
                same = mine == its if isinstance(mine, list) else torch.equal(mine, its)
                assert same, name


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
