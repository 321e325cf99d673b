"""A vocabulary that ranks share grows, is merged and exported as that of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import sparsestep

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from sparsestep.distributed.owners import owner_of
from tests.distributed.pair import Results
from tests.distributed.shard_vocabulary import Alone, batch_of
from tests.distributed.shard_vocabulary_changes import (
    GROWING,
    MERGED,
    SIZES,
    counts_of,
    grown_alone,
)
from tests.table import same_bits


def whole(parts: list[Any], rows: int) -> Any:
    """Of rows that are dealt, all in order."""
    return torch.stack(parts, 1).flatten(0, 1)[:rows]


@pytest.mark.parametrize("name", GROWING)
def test_ranks_grow_as_one_process_does(found: list[Results], name: str):
    """Rows, ids, weights and state to the bit, also where growth fills what was spare of a rank."""
    expected = grown_alone(len(found), name)
    ranks: list[Any] = [each["grown", name] for each in found]
    for rank, each in enumerate(ranks):
        for step, rows in enumerate(each["rows"]):
            assert torch.equal(rows, expected["rows"][step][rank]), (rank, step)
        assert each["ids"] == expected["ids"][rank]
        assert each["same"]
        assert each["sizes"] == [SIZES[-1]] * 3
    for what in ("after", "state"):
        for place, theirs in enumerate(expected[what]):
            ours = whole([each[what][place] for each in ranks], SIZES[-1])
            assert same_bits(ours, theirs), (what, place)


def test_growth_that_a_rank_refuses(found: list[Results]):
    *others, last = (each["growth refused"] for each in found)
    assert "grow: a table that grows must have no gradient" in last["gradient"]
    assert "rows must be a whole number, at least 41. Got 30." in last["fewer"]
    for each in others:
        for what in ("gradient", "fewer"):
            message = f"rank {len(found) - 1}, which grows the table, rejected"
            assert each[what].startswith(message)
    for each in (*others, last):
        assert "all ranks must name the same number of rows. Got [50, 51" in each["numbers"]
        assert each["unchanged"]
        assert each["next"] == ""
    assert not torch.equal(last["new rows"][0], others[0]["new rows"][0])


def test_merging_is_that_of_each_rank(found: list[Results]):
    world = len(found)
    ours, theirs = Alone(world, {}, MERGED), Alone(world, {}, MERGED // 2)
    ours.look_up([batch_of(0, rank) for rank in range(world)])
    for step in (1, 2):
        theirs.look_up([batch_of(step, rank) for rank in range(world)])
    plain, owners = torch.arange(9), owner_of(torch.arange(9), world)
    rows_of_plain = torch.empty(9, dtype=torch.int64)
    for rank, (mine, other) in enumerate(zip(ours.parts, theirs.parts, strict=True)):
        merged: Any = found[rank]["merged"]
        assert torch.equal(merged["shared"], mine.merge(other) * world + rank)
        there = sorted(merged["there"], key=merged["there"].get)
        rows = [merged["ids"][each] for each in there]
        assert merged["shared"].tolist() == [rank, *rows]
        owned = sparsestep.nn.Vocabulary(60)
        owned(plain[owners == rank])
        rows_of_plain[owners == rank] = mine.merge(owned)[1:] * world + rank
        expected = {each: row * world + rank for each, row in mine.as_dict().items()}
        assert merged["ids"] == expected
        assert merged["counts"] == counts_of(mine)
    for each in found:
        assert each["merged"]["plain"].tolist() == [0, *rows_of_plain.tolist()]


def test_merging_that_a_rank_refuses(found: list[Results]):
    *others, last = (each["merged"] for each in found)
    assert "there must be" in last["too many"]
    assert "free rows. Got" in last["too many"]
    assert "it must be another Vocabulary with as many shared rows. Got {}" in last["none"]
    for each in others:
        for what in ("too many", "none"):
            message = f"rank {len(found) - 1}, which merges ids of the table with others, rejected"
            assert each[what].startswith(message)
    for each in (*others, last):
        for what in ("different", "mixed"):
            assert each[what].startswith("Vocabulary.merge: all ranks must pass the same")
        assert each["unchanged"]


def test_what_is_exported(found: list[Results]):
    world = len(found)
    first, *others = (each["exported"] for each in found)
    assert all(each["exported"] is None for each in others)
    weight, row_of = first["exported"]
    table = whole([each["weight"] for each in (first, *others)], 41)
    rows = {i: row for each in (first, *others) for i, row in each["ids"].items()}
    assert row_of.keys() == rows.keys()
    assert torch.equal(weight[: 2 * world], table[: 2 * world])
    for each, row in rows.items():
        assert torch.equal(weight[row_of[each]], table[row])
    assert sorted(row_of.values()) == list(range(2 * world, len(weight)))
    *before, last = (each["exported"]["said"] for each in found)
    assert "its table must be sharded by rows. Got a Embedding." in last
    for each in before:
        assert "which exports the table, rejected its input" in each


def test_one_process_alone_exports_what_an_ordinary_vocabulary_does():
    table = torch.nn.Embedding(41, 3)
    plain = sparsestep.nn.Vocabulary(41, shared=2)
    copied = torch.nn.Embedding.from_pretrained(table.weight.detach().clone())
    sparsestep.distributed.shard(table, plan="rows")
    ours = sparsestep.distributed.Vocabulary(table, shared=2)
    for step in range(4):
        assert torch.equal(ours(batch_of(step, 0)), plain(batch_of(step, 0)))
    exported = ours.export(table)
    assert exported is not None
    embedding, row_of = plain.export(copied)
    assert torch.equal(exported[0].weight, embedding.weight)
    assert exported[1] == row_of
