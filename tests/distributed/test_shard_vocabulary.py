"""A vocabulary that ranks share gives the rows, and trains the table, of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import sparsestep
from sparsestep.errors import InputError
from sparsestep.nn.ids import public_hash

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from sparsestep.distributed.owners import owner_of
from tests.distributed.pair import Results
from tests.distributed.shard_vocabulary import OPTIONS, ROWS, Alone, alone, batch_of
from tests.table import same_bits


@pytest.mark.parametrize("name", OPTIONS)
def test_ranks_find_what_one_process_finds(found: list[Results], name: str):
    """Rows, ids, weights and state to the bit; also from a vocabulary that was loaded half-way."""
    expected = alone(len(found), OPTIONS[name])
    assert bool(expected["taken"]) == ("evict" in OPTIONS[name])
    ranks: list[Any] = [each["vocabulary", name] for each in found]
    for rank, each in enumerate(ranks):
        for step, rows in enumerate(each["rows"]):
            assert torch.equal(rows, expected["rows"][step][rank]), (rank, step)
        assert torch.equal(each["known"], expected["known"][rank])
        assert each["ids"] == expected["ids"][rank]
    whole = torch.stack([each["after"] for each in ranks], 1).flatten(0, 1)[:ROWS]
    assert same_bits(whole, expected["after"])


def test_no_id_has_two_rows_and_no_row_two_ids(found: list[Results]):
    for name in OPTIONS:
        known = [each["vocabulary", name]["ids"] for each in found]
        everybody = {key: row for each in known for key, row in each.items()}
        assert len(everybody) == sum(map(len, known)) == len(set(everybody.values()))
        for rank, each in enumerate(known):
            assert each
            assert {row % len(found) for row in each.values()} == {rank}
            owners = owner_of(torch.tensor(list(each)), len(found)).tolist()
            assert set(owners) == {rank}


def test_a_rank_that_refuses_is_named_and_nothing_was_changed(found: list[Results]):
    *others, last = (each["vocabulary refusals"] for each in found)
    assert last["no ids"].startswith("Vocabulary: ids must be integers, in a tensor. Got")
    assert "the state 'exp_avg' must have shape" in last["no reset"]
    for each in others:
        for what in ("no ids", "no reset"):
            message = f"rank {len(found) - 1}, which looks up ids of the table, rejected"
            assert each[what].startswith(message)
    for each in (*others, last):
        assert "must call sharded tables in the same order" in each["elsewhere"]
        assert each["unchanged"]
        assert "cannot be copied or pickled" in each["copied"]
    once = Alone(len(found), {"evict": "lru"})
    expected, _ = once.look_up([torch.arange(3) + rank for rank in range(len(found))])
    assert [each["next"] for each in (*others, last)] == [rows.tolist() for rows in expected]


@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1)), world=st.integers(1, 5000))
def test_the_owner_is_a_hash_of_the_id(ids: list[int], world: int):
    found = owner_of(torch.tensor(ids, dtype=torch.int64), world).tolist()
    assert found == [(public_hash(each) >> 32) % world for each in ids]


def sharded(plan: str = "rows", rows: int = ROWS, **options: Any) -> nn.Embedding:
    table = nn.Embedding(rows, 3, **options)
    sparsestep.distributed.shard(table, plan=plan)
    return table


def test_one_process_alone_has_the_rows_of_an_ordinary_vocabulary():
    table = sharded()
    ours = sparsestep.distributed.Vocabulary(table, evict="lru")
    plain = sparsestep.nn.Vocabulary(ROWS, evict="lru")
    for step in range(8):
        ids = batch_of(step, 1)
        assert torch.equal(ours(ids), plain(ids))
    assert torch.equal(ours.taken_over, plain.taken_over)
    assert (ours.as_dict(), ours.used, ours.rows) == (plain.as_dict(), plain.used, ROWS)


def test_what_is_no_table_of_rows_is_refused():
    new = sparsestep.distributed.Vocabulary
    for table in (nn.Embedding(5, 3), sharded("tables"), nn.Linear(2, 2)):
        with pytest.raises(InputError, match=r"its table must be sharded by rows\. Got"):
            new(table)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"at most the rows of a rank, 41\. Got 42"):
        new(sharded(), shared=42)
    with pytest.raises(InputError, match=r"padding_idx must be one of 1 shared rows\. Got 3"):
        new(sharded(padding_idx=3))
    other = sharded()
    with pytest.raises(InputError, match="an optimizer must have the weight"):
        new(sharded(), sparsestep.Adam(other.parameters()))
    with pytest.raises(InputError, match=r"must be sharded with the first, 41 rows\. Got another"):
        new(sharded()).attach(other)
