"""A vocabulary that some ranks save, other numbers of ranks load: ids bring their rows along."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed import collectives
from sparsestep.distributed.placement import hash_owner
from tests.distributed.runs import said
from tests.ranks import on_ranks

pytestmark = pytest.mark.xdist_group(__name__)

Found = dict[Any, Any]

ROWS, MORE, DIM = 75, 5, 3  # of a table; rows more of the other one; of a row
WORLDS = (1, 2, 3)
HALF, WHOLE = range(4), range(4, 8)
GLOBAL = 3  # batches of each step, whatever the number of ranks


class Case(NamedTuple):
    """Which optimizer, which vocabulary, and the row of the second table that is padding."""

    make: Any
    options: dict[str, Any]
    ids: dict[str, Any]
    padding: int = 0


CASES = {
    "per row": Case(sparsestep.Adam, {"bias_correction": "per_row"}, {"admit": 2}),
    "dense": Case(sparsestep.AdamW, {"semantics": "dense"}, {"shared": 2, "admit": 2}, padding=1),
    "int8": Case(sparsestep.Adam, {"state_dtype": torch.int8}, {"evict": "lfu", "admit": 2}),
}
# Too few rows for all ids: a rank that comes to own too many evicts some, or refuses.
FULL = {"lru": {"evict": "lru"}, "lfu": {"evict": "lfu"}, "none": {}}
FEW = 16


def batch_of(step: int, rank: int, world: int) -> Tensor:
    """A rank's part of the step's ids; the whole is the same for all numbers of ranks."""
    chance = torch.Generator().manual_seed(step)
    ids = torch.randint(3 * step, 3 * step + 20, (GLOBAL, 9), generator=chance)
    ids = (ids * 0x9E3779B97F4A7C1) ^ -(ids % 2)
    per = -(-GLOBAL // world)
    return ids[rank * per : (rank + 1) * per].flatten()


def begin(case: Case, kind: str, mesh: Any = None, rows: int = ROWS) -> tuple[Any, Any]:
    """A model of two tables, whose rows all begin alike, and the vocabulary of both."""
    tables: dict[str, Any] = {
        "first": nn.Embedding(rows, DIM),
        "second": nn.EmbeddingBag(rows + MORE, 2, mode="sum", padding_idx=case.padding),
    }
    for table in tables.values():
        nn.init.ones_(table.weight)
    model: Any = nn.ModuleDict(tables)
    if kind == "plain":
        sparsestep.nn.fuse(model)
        ids: Any = sparsestep.nn.Vocabulary(rows, **case.ids)
    else:
        sparsestep.distributed.shard(model, mesh, "rows", reduce="sum", order="global")
    optimizer = case.make(model.parameters(), lr=0.1, **case.options)
    if kind == "plain":
        ids.attach(model["first"], optimizer, init=nn.init.ones_)
    else:
        ids = sparsestep.distributed.Vocabulary(
            model["first"], optimizer, init=nn.init.ones_, **case.ids
        )
    ids.attach(model["second"], optimizer, init=nn.init.ones_)
    model["ids"] = ids
    if optimizer.semantics == "dense":
        optimizer.track(model)
    return model, optimizer


def go_on(model: Any, optimizer: Any, steps: range, rank: int, world: int) -> Found:
    for step in steps:
        optimizer.zero_grad()
        rows = model["ids"](batch_of(step, rank, world))
        # Also one that is not the vocabulary's to give.
        other = torch.full((int(rank == 0),), model["ids"].rows + step % MORE)
        bags = torch.cat([rows, other]).view(-1, 1)
        loss = (model["first"](rows) ** 2).sum() + (model["second"](bags) ** 3).sum()
        (loss * (1 + step)).backward()
        optimizer.step()
    return known(model, optimizer, rank, world)


def known(model: Any, optimizer: Any, rank: int, world: int) -> Found:
    """Of each id that this rank owns, and of each other row: values, state, count and age."""
    optimizer.catch_up()
    vocabulary = model["ids"]
    local = getattr(vocabulary, "local", vocabulary)
    saved, rows = local.id_table.save(), local.as_dict()
    found: Found = {each: [] for each in rows}
    free: list[Any] = [[] for _ in range(saved.used, local.rows)]
    for name in ("first", "second"):
        weight = model[name].weight
        record = optimizer.state[weight]
        tensors = [weight.detach(), *(t for t in record.values() if getattr(t, "ndim", 0))]
        for tensor in tensors:
            for each, row in rows.items():
                found[each].append(tensor[row].tolist())
            for place, values in enumerate(free):
                values.append(tensor[saved.used + place].tolist())
    for each, row in rows.items():
        found[each] += [int(saved.counts[row]), int(local.now - saved.seen[row])]
    candidates = zip(saved.candidate_ids.tolist(), saved.candidate_counts.tolist(), strict=True)
    second = model["second"].weight
    padding, whole = model["second"].padding_idx, model["second"].num_embeddings
    others = range(vocabulary.rows, whole)
    return {
        "ids": found,
        "free": free,
        "candidates": dict(list(candidates)[: saved.candidates]),
        "shared": model["first"].weight[: local.options.shared].tolist(),
        "padding": second[padding // world].tolist() if padding % world == rank else None,
        "others": {n: second[n // world].tolist() for n in others if n % world == rank},
        "rows": {each: row * world + rank for each, row in rows.items()},
        "looked up": looked_up(model),
    }


def looked_up(model: Any) -> Found:
    """What a lookup finds for ids of all ranks; it changes nothing."""
    ids = torch.cat([batch_of(step, 0, 1) for step in (*HALF, *WHOLE)]).unique()
    training = model["ids"].training
    rows = model["ids"].eval()(ids)
    model["ids"].train(training)
    with torch.no_grad():
        return dict(zip(ids.tolist(), model["first"](rows).tolist(), strict=True))


def save_half(folder: Path, kind: str, rank: int, world: int, mesh: Any = None) -> Found:
    """Train for half of the steps and save; then to the end."""
    found: Found = {}
    for name, case in CASES.items():
        model, optimizer = begin(case, kind, mesh)
        found[name, "half", world] = go_on(model, optimizer, HALF, rank, world)
        path = folder / f"{name}-{world}"
        if name == "per row":  # training goes on while it is saved, and must not be seen
            saving = sparsestep.distributed.async_save(path, model, optimizer)
            found[name, "whole", world] = go_on(model, optimizer, WHOLE, rank, world)
            saving.result()
        else:
            sparsestep.distributed.save(path, model, optimizer)
            found[name, "whole", world] = go_on(model, optimizer, WHOLE, rank, world)
    return found


def load_half(folder: Path, kind: str, rank: int, world: int, mesh: Any = None) -> Found:
    """Load what each number of ranks has saved, and train to the end."""
    found: Found = {}
    for (name, case), saved_by in itertools.product(CASES.items(), WORLDS):
        model, optimizer = begin(case, kind, mesh)
        sparsestep.distributed.load(folder / f"{name}-{saved_by}", model, optimizer)
        key = name, saved_by, world
        found[(*key, "half")] = known(model, optimizer, rank, world)
        found[(*key, "whole")] = go_on(model, optimizer, WHOLE, rank, world)
    return found


def load_ordinary(folder: Path) -> Found:
    """Into a vocabulary of which each rank has a copy, beside sharded tables; in many messages."""
    case = CASES["per row"]
    model, optimizer = begin(case, "rows")
    model["ids"] = sparsestep.nn.Vocabulary(ROWS, **case.ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MAX_MESSAGE_BYTES", 24)
        sparsestep.distributed.load(folder / "per row-2", model, optimizer)
    return {"ordinary": (model["ids"].as_dict(), looked_up(model))}


def load_refused(folder: Path, rank: int, world: int) -> Found:
    """The optimizer of the last rank has a mask that does not fit."""
    model, optimizer = begin(CASES["per row"], "rows")
    before = go_on(model, optimizer, range(1), rank, world)
    options = [{**group, "params": []} for group in optimizer.param_groups]
    load = partial(sparsestep.distributed.load, folder / "per row-2", model, optimizer)
    if rank == world - 1:
        optimizer.param_groups[0]["mask"] = [torch.ones(2, dtype=torch.bool), None]
    found: Found = {"said": said(load)}
    optimizer.param_groups[0].pop("mask", None)
    after = known(model, optimizer, rank, world)
    same = [{**group, "params": []} for group in optimizer.param_groups] == options
    found["unchanged"] = before == after and same
    found["next"] = said(load)
    return {"refused": found}


def save_full(folder: Path, rank: int, world: int, mesh: Any) -> Found:
    found: Found = {}
    for name, ids in FULL.items():
        case = Case(sparsestep.Adagrad, {}, ids)
        model, optimizer = begin(case, "rows", mesh, FEW)
        found["full", name] = go_on(model, optimizer, HALF, rank, world)
        sparsestep.distributed.save(folder / f"full-{name}", model, optimizer)
    return found


def load_full(folder: Path, rank: int, world: int) -> Found:
    found: Found = {}
    for name, ids in FULL.items():
        case = Case(sparsestep.Adagrad, {}, ids)
        model, optimizer = begin(case, "rows", None, FEW)
        before = go_on(model, optimizer, range(1), rank, world)
        load = partial(sparsestep.distributed.load, folder / f"full-{name}", model, optimizer)
        found["full", name, "said"] = said(load)
        found["full", name, "loaded"] = after = known(model, optimizer, rank, world)
        found["full", name, "unchanged"] = before == after
        found["full", name, "next"] = go_on(model, optimizer, WHOLE, rank, world)
    return found


def save_and_load(rank: int, world: int, folder: Path) -> Found:
    """The first two of three ranks save, all load and save, the first two load."""
    two = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    found: Found = {}
    if rank < 2:
        found.update(save_half(folder, "rows", rank, 2, two))
        found.update(save_full(folder, rank, 2, two))
    torch.distributed.barrier()
    found.update(save_half(folder, "rows", rank, 3))
    found.update(load_full(folder, rank, 3))
    found.update(load_ordinary(folder))
    found.update(load_refused(folder, rank, 3))
    found.update(load_half(folder, "rows", rank, 3))
    if rank < 2:
        found.update(load_half(folder, "rows", rank, 2, two))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    """One process saves, two ranks, and three; each loads what the others have saved."""
    folder = tmp_path_factory.mktemp("saved")
    alone = save_half(folder, "plain", 0, 1)
    ranks = on_ranks(3, save_and_load, folder)
    ranks[0].update(alone)
    ranks[0].update(load_half(folder, "plain", 0, 1))
    return folder, ranks


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
            owners = hash_owner(torch.tensor(list(each["rows"])), world)
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
    """But for the one that is padding, which is not trained."""
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
        mine = [i for i in saved if int(hash_owner(torch.tensor([i]), 3)) == rank]
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
