"""A vocabulary that some ranks save, other numbers of ranks load: ids bring their rows along."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

import sparsestep

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from sparsestep.distributed.owners import owner_of
from tests.distributed.conftest import Once
from tests.distributed.pair import run_ranks
from tests.distributed.shard_vocabulary_checkpoints import (
    CASES,
    DIM,
    FEW,
    FULL,
    HALF,
    ROWS,
    WHOLE,
    Case,
    Found,
    begin,
    go_on,
    known,
    load_half,
    save_half,
)

WORLDS = (1, 2, 3)


@pytest.fixture(scope="module")
def runs(once: Once) -> tuple[Path, list[Found]]:
    """One process saves, two ranks, and three; each loads what the others have saved."""

    def run(folder: Path) -> tuple[Path, list[Found]]:
        alone = save_half(folder, "plain", 0, 1)
        ranks: list[Any] = run_ranks("tests.distributed.shard_vocabulary_checkpoints", folder, 3)
        for saved_by in WORLDS:
            alone.update(load_half(folder, "plain", 0, 1, saved_by))
        ranks[0].update(alone)
        return folder, ranks

    return cast("tuple[Path, list[Found]]", once("vocabularies", run))


def of_all(ranks: list[Found], key: Any, what: str = "ids") -> Found:
    """What ranks know of their ids, together."""
    parts = [each[key][what] for each in ranks if key in each]
    whole = {each: value for part in parts for each, value in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


@pytest.mark.parametrize("name", CASES)
def test_every_id_finds_its_values_and_its_state(runs: Any, name: str):
    """For each pair of numbers of ranks: rows of all tables, moments, counts, ages."""
    _, ranks = runs
    for saved_by, world in itertools.product(WORLDS, repeat=2):
        before, after = (name, "half", saved_by), (name, saved_by, world, "half")
        for what in ("ids", "candidates", "others"):
            assert of_all(ranks, after, what) == of_all(ranks, before, what), (after, what)
        expected = {each: values[0] for each, values in of_all(ranks, before).items()}
        for rank, each in enumerate(each[after] for each in ranks[:world]):
            assert {i: each["looked up"][i] for i in expected} == expected
            assert {row % world for row in each["rows"].values()} == {rank}
            owners = owner_of(torch.tensor(list(each["rows"])), world)
            assert set(owners.tolist()) == {rank}


@pytest.mark.parametrize("name", CASES)
def test_rows_without_an_id_have_what_they_began_with(runs: Any, name: str):
    _, ranks = runs
    shared = CASES[name].ids.get("shared", 1)
    for saved_by, world in itertools.product(WORLDS, repeat=2):
        key = name, saved_by, world, "half"
        rows = [row for each in ranks[:world] for row in each[key]["free"]]
        if name != "dense":  # under which they decay
            assert all(row == ranks[0][name, "half", 1]["free"][0] for row in rows)
        assert len(rows) + len(of_all(ranks, key)) + world * shared == ROWS


def test_shared_rows_are_those_of_a_rank_that_has_saved(runs: Any):
    """But for the one that is padding, which nobody trains."""
    _, ranks = runs
    for name, saved_by, world in itertools.product(CASES, WORLDS, WORLDS):
        key = name, saved_by, world, "half"
        for rank, each in enumerate(ranks[:world]):
            before = ranks[rank % saved_by][name, "half", saved_by]["shared"]
            assert each[key]["shared"] == before
        padding = [each[key]["padding"] for each in ranks[:world]]
        there = [each[name, "half", saved_by]["padding"] for each in ranks[:saved_by]]
        assert [each for each in padding if each] == [each for each in there if each]


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(runs: Any, name: str):
    """As many ranks as have saved: to the bit. Others: as one process that did it all."""
    _, ranks = runs
    for saved_by, world in itertools.product(WORLDS, repeat=2):
        key = name, saved_by, world, "whole"
        if saved_by == world:
            for each in ranks[:world]:
                assert each[key] == each[name, "whole", world], key
        elif name != "int8":  # whose random bits are those of a row's number
            assert of_all(ranks, key) == of_all(ranks, (name, "whole", 1)), key


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_becomes_one_of_an_ordinary_vocabulary(runs: Any, name: str):
    folder, ranks = runs
    for world in WORLDS:
        found = sparsestep.distributed.consolidate(folder / f"{name}-{world}")
        model, optimizer = begin(CASES[name], "plain")
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        assert known(model, optimizer, 0, 1)["ids"] == of_all(ranks, (name, "half", world))
        if name != "int8":
            expected = of_all(ranks, (name, "whole", 1))
            assert go_on(model, optimizer, WHOLE, 0, 1)["ids"] == expected


def test_rows_follow_an_ordinary_vocabulary_too(runs: Any):
    """Each rank has a copy of it, and a part of the tables."""
    _, ranks = runs
    expected = {each: values[0] for each, values in of_all(ranks, ("per row", "half", 2)).items()}
    for rows, looked_up in (each["ordinary"] for each in ranks):
        assert rows == ranks[0]["per row", 2, 1, "half"]["rows"]
        assert {each: looked_up[each] for each in expected} == expected


@pytest.mark.parametrize("name", [name for name in FULL if name != "none"])
def test_ids_are_given_up_in_the_order_of_eviction(runs: Any, name: str):
    _, ranks = runs
    saved, rows = (of_all(ranks, ("full", name), what) for what in ("ids", "rows"))
    given_up = 0
    for rank, each in enumerate(ranks):
        mine = [i for i in saved if int(owner_of(torch.tensor([i]), 3)) == rank]
        mine.sort(key=lambda i: (name == "lfu" and saved[i][-2], -saved[i][-1], rows[i]))
        room = len(range(rank, FEW, 3)) - 1
        given_up += max(0, len(mine) - room)
        assert each["full", name, "said"] == ""
        loaded = each["full", name, "loaded"]["ids"]
        assert loaded == {i: saved[i] for i in mine[-room:]}
    assert given_up > 0


def test_without_eviction_all_ranks_refuse_and_nothing_was_changed(runs: Any):
    _, ranks = runs
    said = [each["full", "none", "said"] for each in ranks]
    owner = next(rank for rank, text in enumerate(said) if text.startswith("load: a rank must"))
    assert (
        "rows and evict=None. Use evict='lru', or load with 2 ranks and call grow()" in said[owner]
    )
    for each in said:
        assert each.startswith(("load: a rank must", "rank "))
        assert each.startswith("load:") or "which loads a checkpoint of 'first', rejected" in each
    assert all(each["full", "none", "unchanged"] for each in ranks)


def test_what_the_optimizer_of_one_rank_refuses_no_rank_loads(runs: Any):
    _, ranks = runs
    *others, last = (each["refused"] for each in ranks)
    assert "mask" in last["said"]
    for each in others:
        assert each["said"] == f"rank 2: {last['said']}"
    for each in (*others, last):
        assert each["unchanged"]
        assert each["next"] == ""


def saved_by_one(path: Path, **options: Any) -> None:
    model, optimizer = begin(Case(sparsestep.SGD, {}, options), "plain")
    go_on(model, optimizer, HALF, 0, 1)
    sparsestep.distributed.save(path, model, optimizer)


def test_another_vocabulary_is_refused(tmp_path: Path):
    saved_by_one(tmp_path / "saved", admit=2)
    for options in ({"shared": 2, "admit": 2}, {}):
        model, optimizer = begin(Case(sparsestep.SGD, {}, options), "rows")
        before = known(model, optimizer, 0, 1)
        with pytest.raises(sparsestep.InputError, match=r"'ids' must be that of the checkpoint"):
            sparsestep.distributed.load(tmp_path / "saved", model, optimizer)
        assert known(model, optimizer, 0, 1) == before


def test_a_table_whose_rows_would_not_move_is_refused(runs: Any):
    folder, _ = runs
    model, optimizer = begin(CASES["per row"], "plain")
    model["ids"].attach(nn.Embedding(ROWS, DIM))
    before = known(model, optimizer, 0, 1)
    with pytest.raises(
        sparsestep.InputError, match=r"since their rows move\. Got only first\.weight, second"
    ):
        sparsestep.distributed.load(folder / "per row-2", model, optimizer)
    assert known(model, optimizer, 0, 1) == before
    sparsestep.distributed.load(folder / "per row-1", model, optimizer)  # where they stay


def test_a_checkpoint_without_a_vocabulary_is_refused(tmp_path: Path):
    model, optimizer = begin(Case(sparsestep.SGD, {}, {}), "rows")
    ids = model.pop("ids")
    sparsestep.distributed.save(tmp_path / "saved", model, optimizer)
    model["ids"] = ids
    with pytest.raises(
        sparsestep.InputError, match=r"all vocabularies of the model\. Got none for"
    ):
        sparsestep.distributed.load(tmp_path / "saved", model, optimizer)
    assert isinstance(model["first"], nn.Embedding)
