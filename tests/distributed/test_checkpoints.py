"""What some ranks save, other numbers of ranks load; ids of vocabularies bring their rows along."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed import collectives
from sparsestep.distributed.checkpoint._reshard import (
    NEW_ROW,
    ReassignedIds,
    VocabularyBlock,
    VocabularyLayout,
    reassign_ids,
)
from sparsestep.distributed.placement import hash_owner
from sparsestep.memory.disk import FolderLock
from sparsestep.nn.id_table import Options
from tests.distributed.runs import said
from tests.ranks import on_ranks

pytestmark = pytest.mark.xdist_group(__name__)

Found = dict[Any, Any]

ROWS, MORE, DIM = 75, 5, 3  # of a table; rows more of the other one; of a row
PLAIN = {"item": 13, "tags": 9, "day": 7}  # tables without a vocabulary
SAVED_PLAN = {"first": "rows", "second": "rows", "item": "rows", "tags": "tables", "day": "copy"}
WORLDS = (1, 2, 3)
PAIRS = list(itertools.product(WORLDS, repeat=2))  # ranks that save, and that load
FEW_PAIRS = [(1, 3), (3, 2), (2, 1), (3, 3)]
HALF, REST = range(4), range(4, 8)
GLOBAL = 3  # batches of each step, whatever the number of ranks


class Case(NamedTuple):
    """Which optimizer, which vocabulary, and the row of the second table that is padding."""

    make: Any
    options: dict[str, Any]
    ids: dict[str, Any]
    padding: int = 0
    pairs: list[tuple[int, int]] = FEW_PAIRS


INT8 = {"state_dtype": torch.int8, "rounding_seed": 7}
CASES = {
    "per row": Case(sparsestep.Adam, {"bias_correction": "per_row"}, {"admit": 2}, pairs=PAIRS),
    "dense": Case(sparsestep.AdamW, {"semantics": "dense"}, {"shared": 2, "admit": 2}, padding=1),
    "int8": Case(sparsestep.Adam, INT8, {"evict": "lfu", "admit": 2}),
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


class Training:
    """Two tables with a vocabulary and some without, all of whose rows begin alike."""

    def __init__(
        self, case: Case, kind: str, rank: int, world: int, mesh: Any = None, rows: int = ROWS
    ) -> None:
        self.rank, self.world, self.kind = rank, world, kind
        first = nn.Embedding(rows, DIM)
        second = nn.EmbeddingBag(rows + MORE, 2, mode="sum", padding_idx=case.padding)
        plain = {name: nn.Embedding(count, DIM) for name, count in PLAIN.items()}
        self.model: Any = nn.ModuleDict({"first": first, "second": second, **plain})
        for table in self.model.values():
            nn.init.ones_(table.weight)
        ids: Any = sparsestep.nn.Vocabulary(rows, **case.ids)
        if kind == "plain":
            sparsestep.nn.fuse(self.model)
        else:
            plan = SAVED_PLAN if kind == "saved" else "rows"
            sparsestep.distributed.shard(self.model, mesh, plan, reduce="sum", order="global")
        self.optimizer = case.make(self.model.parameters(), lr=0.1, **case.options)
        init = nn.init.ones_
        if kind == "plain":
            ids.attach(first, self.optimizer, init=init)
        else:
            ids = sparsestep.distributed.Vocabulary(first, self.optimizer, init=init, **case.ids)
        ids.attach(second, self.optimizer, init=init)
        self.model["ids"] = ids
        if self.optimizer.semantics == "dense":
            self.optimizer.track(self.model)

    def save(self, path: Path) -> None:
        sparsestep.distributed.save(path, self.model, self.optimizer)

    def load(self, path: Path) -> None:
        sparsestep.distributed.load(path, self.model, self.optimizer)

    def go_on(self, steps: range) -> Found:
        model = self.model
        for step in steps:
            self.optimizer.zero_grad()
            ids = batch_of(step, self.rank, self.world)
            rows = model["ids"](ids)
            # Also one that is not the vocabulary's to give.
            other = torch.full((int(self.rank == 0),), model["ids"].rows + step % MORE)
            bags = torch.cat([rows, other]).view(-1, 1)
            loss = (model["first"](rows) ** 2).sum() + (model["second"](bags) ** 3).sum()
            loss = loss + sum((model[name](ids % n) ** 2).sum() for name, n in PLAIN.items())
            (loss * (1 + step)).backward()
            self.optimizer.step()
        return self.snapshot()

    def tensors_of(self, name: str) -> list[Tensor]:
        """The weight of a table, and its state where that has rows."""
        weight = self.model[name].weight
        state = sorted(self.optimizer.state[weight].items())
        return [weight.detach(), *(each for _, each in state if getattr(each, "ndim", 0))]

    def snapshot(self) -> Found:
        """Values and state by id, or by row; of ids count and age, too."""
        self.optimizer.catch_up()
        model, rank, world = self.model, self.rank, self.world
        vocabulary = model["ids"]
        local = getattr(vocabulary, "local", vocabulary)
        saved, rows = local.id_table.save(), local.as_dict()
        tensors = [*self.tensors_of("first"), *self.tensors_of("second")]
        ids = {each: [t[row].tolist() for t in tensors] for each, row in rows.items()}
        for each, row in rows.items():
            ids[each] += [int(saved.counts[row]), int(local.now - saved.seen[row])]
        candidates = zip(saved.candidate_ids.tolist(), saved.candidate_counts.tolist(), strict=True)
        second = model["second"].weight
        padding = model["second"].padding_idx
        others = {
            ("second", n): second[n // world].tolist()
            for n in range(vocabulary.rows, model["second"].num_embeddings)
            if n % world == rank
        }
        for name in PLAIN:
            table = [each.tolist() for each in self.tensors_of(name)]
            others.update({(name, row): values for row, *values in self.rows_of(name, table)})
        return {
            "ids": ids,
            "free": [[t[n].tolist() for t in tensors] for n in range(saved.used, local.rows)],
            "candidates": dict(list(candidates)[: saved.candidates]),
            "shared": model["first"].weight[: local.options.shared].tolist(),
            "padding": second[padding // world].tolist() if padding % world == rank else None,
            "others": others,
            "rows": {each: row * world + rank for each, row in rows.items()},
            "looked up": self.looked_up(),
        }

    def rows_of(self, name: str, table: list[Any]) -> list[tuple[Any, ...]]:
        """The rows of a table that this rank has, numbered; of a copy the first rank's."""
        kind = {"plain": "copy", "rows": "rows"}.get(self.kind) or SAVED_PLAN[name]
        if kind == "rows":
            numbers = range(self.rank, PLAIN[name], self.world)
        else:
            numbers = range(PLAIN[name] if table[0] and (kind == "tables" or not self.rank) else 0)
        return [(n, *values) for n, values in zip(numbers, zip(*table, strict=True), strict=False)]

    def looked_up(self) -> Found:
        """What a lookup finds for ids of all ranks; it changes nothing."""
        ids = torch.cat([batch_of(step, 0, 1) for step in (*HALF, *REST)]).unique()
        training = self.model["ids"].training
        rows = self.model["ids"].eval()(ids)
        self.model["ids"].train(training)
        with torch.no_grad():
            return dict(zip(ids.tolist(), self.model["first"](rows).tolist(), strict=True))


def save_half(folder: Path, kind: str, *where: Any) -> Found:
    """Train for half of the steps and save; then to the end."""
    found: Found = {}
    world = where[1]
    for name, case in CASES.items():
        training, path = Training(case, kind, *where), folder / f"{name}-{world}"
        found[name, "half", world] = training.go_on(HALF)
        if name == "per row":  # training goes on while it is saved, and must not be seen
            saving = sparsestep.distributed.async_save(path, training.model, training.optimizer)
            found[name, "end", world] = training.go_on(REST)
            saving.result()
        else:
            training.save(path)
            found[name, "end", world] = training.go_on(REST)
    return found


def _loads(world: int) -> Iterator[tuple[str, Case, int]]:
    for name, case in CASES.items():
        yield from ((name, case, saved_by) for saved_by, by in case.pairs if by == world)


def load_half(folder: Path, *where: Any) -> Found:
    """Load what other numbers of ranks have saved, and train to the end."""
    found: Found = {}
    world = where[1]
    for name, case, saved_by in _loads(world):
        kind = "plain" if world == 1 else "saved" if saved_by == world else "rows"
        training = Training(case, kind, *where)
        training.load(folder / f"{name}-{saved_by}")
        found[name, saved_by, world, "half"] = training.snapshot()
        found[name, saved_by, world, "end"] = training.go_on(REST)
    return found


def load_ordinary(folder: Path, rank: int, world: int) -> Found:
    """Into a vocabulary of which each rank has a copy, beside sharded tables; in many messages."""
    case = CASES["per row"]
    training = Training(case, "saved", rank, world)
    training.model["ids"] = ids = sparsestep.nn.Vocabulary(ROWS, **case.ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "MAX_MESSAGE_BYTES", 24)
        training.load(folder / "per row-2")
    return {"ordinary": (ids.as_dict(), training.looked_up())}


def load_refused(folder: Path, rank: int, world: int) -> Found:
    """The optimizer of the last rank has a mask that does not fit."""
    training = Training(CASES["per row"], "saved", rank, world)
    before, groups = training.go_on(range(1)), training.optimizer.param_groups
    options = [{**group, "params": []} for group in groups]
    load = partial(training.load, folder / "per row-2")
    if rank == world - 1:
        masks = [None] * len(groups[0]["params"])
        groups[0]["mask"] = [torch.ones(2, dtype=torch.bool), *masks[1:]]
    found: Found = {"said": said(load)}
    groups = training.optimizer.param_groups
    groups[0].pop("mask", None)
    same = [{**group, "params": []} for group in groups] == options
    found["unchanged"] = before == training.snapshot() and same
    found["next"] = said(load)
    return {"refused": found}


def save_full(folder: Path, *where: Any) -> Found:
    found: Found = {}
    for name, ids in FULL.items():
        training = Training(Case(sparsestep.Adagrad, {}, ids), "rows", *where, FEW)
        found["full", name] = training.go_on(HALF)
        training.save(folder / f"full-{name}")
    return found


def load_full(folder: Path, rank: int, world: int) -> Found:
    found: Found = {}
    for name, ids in FULL.items():
        training = Training(Case(sparsestep.Adagrad, {}, ids), "rows", rank, world, None, FEW)
        before = training.go_on(range(1))
        found["full", name, "said"] = said(partial(training.load, folder / f"full-{name}"))
        found["full", name, "loaded"] = after = training.snapshot()
        found["full", name, "unchanged"] = before == after
        training.go_on(REST)
    return found


def save_and_load(rank: int, world: int, folder: Path) -> Found:
    """The first two of three ranks save, all load and save, the first two load."""
    two = torch.distributed.device_mesh.DeviceMesh("cpu", [0, 1])
    found: Found = {}
    if rank < 2:
        found.update(save_half(folder, "saved", rank, 2, two))
        found.update(save_full(folder, rank, 2, two))
    torch.distributed.barrier()
    found.update(save_half(folder, "saved", rank, 3))
    found.update(load_full(folder, rank, 3))
    found.update(load_ordinary(folder, rank, 3))
    found.update(load_refused(folder, rank, 3))
    found.update(load_half(folder, rank, 3))
    if rank < 2:
        found.update(load_half(folder, rank, 2, two))
    return found


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Found]]:
    """One process saves, two ranks, and three; each loads what the others have saved."""
    folder = tmp_path_factory.mktemp("saved")
    alone = save_half(folder, "plain", 0, 1)
    ranks = on_ranks(3, save_and_load, folder)
    ranks[0].update(alone)
    ranks[0].update(load_half(folder, 0, 1))
    return folder, ranks


def of_all(ranks: list[Found], key: Any, what: str = "ids") -> Found:
    """What ranks know of their ids or rows, together."""
    parts = [each[key][what] for each in ranks if key in each]
    whole = {each: value for part in parts for each, value in part.items()}
    assert len(whole) == sum(map(len, parts))
    return whole


@pytest.mark.parametrize("name", CASES)
def test_every_id_finds_its_values_and_its_state(runs: Any, name: str):
    """For each pair of numbers of ranks: rows of all tables, moments, counts, ages."""
    _, ranks = runs
    shared = CASES[name].ids.get("shared", 1)
    for saved_by, world in CASES[name].pairs:
        before, after = (name, "half", saved_by), (name, saved_by, world, "half")
        for what in ("ids", "candidates", "others"):
            assert of_all(ranks, after, what) == of_all(ranks, before, what), (after, what)
        assert len(of_all(ranks, after, "others")) == MORE + sum(PLAIN.values())
        expected = {each: values[0] for each, values in of_all(ranks, before).items()}
        loaded = [each[after] for each in ranks[:world]]
        for rank, each in enumerate(loaded):
            assert {i: each["looked up"][i] for i in expected} == expected
            assert {row % world for row in each["rows"].values()} == {rank}
            owners = hash_owner(torch.tensor(list(each["rows"])), world)
            assert set(owners.tolist()) == {rank}
            # Shared rows are those of a rank that has saved.
            assert each["shared"] == ranks[rank % saved_by][before]["shared"]
        there = [each[before]["padding"] for each in ranks[:saved_by]]
        assert list(filter(None, (each["padding"] for each in loaded))) == list(filter(None, there))
        # Rows without an id have what they began with.
        free = [row for each in loaded for row in each["free"]]
        if name != "dense":  # under which they decay
            assert all(row == ranks[0][name, "half", 1]["free"][0] for row in free)
        assert len(free) + len(expected) + world * shared == ROWS


@pytest.mark.parametrize("name", CASES)
def test_training_goes_on(runs: Any, name: str):
    """As many ranks as have saved: to the bit. Others: as one process that did it all."""
    _, ranks = runs
    whole = name, "end", 1
    for saved_by, world in CASES[name].pairs:
        key = name, saved_by, world, "end"
        if saved_by == world:
            for each in ranks[:world]:
                assert each[key] == each[name, "end", world], key
        else:
            # An id of another row has other random bits.
            for what in ("others",) if name == "int8" else ("ids", "others"):
                assert of_all(ranks, key, what) == of_all(ranks, whole, what), (key, what)


@pytest.mark.parametrize("name", CASES)
def test_a_checkpoint_becomes_an_ordinary_one(runs: Any, name: str):
    folder, ranks = runs
    for world in (2, 3):
        found = sparsestep.distributed.consolidate(folder / f"{name}-{world}")
        training = Training(CASES[name], "plain", 0, 1)
        training.model.load_state_dict(found["model"])
        training.optimizer.load_state_dict(found["optimizer"])
        assert training.optimizer.param_groups[0]["lr"] == 0.1
        for what in ("ids", "others"):
            assert training.snapshot()[what] == of_all(ranks, (name, "half", world), what)


def test_rows_follow_an_ordinary_vocabulary_too(runs: Any):
    """Each rank has a copy of it, and a part of the tables."""
    _, ranks = runs
    expected = {each: values[0] for each, values in of_all(ranks, ("per row", "half", 2)).items()}
    for rows, looked_up in (each["ordinary"] for each in ranks):
        assert rows == ranks[0]["per row", 2, 1, "half"]["rows"]
        assert {each: looked_up[each] for each in expected} == expected


@pytest.mark.parametrize("name", ["lru", "lfu"])
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


def test_without_eviction_all_ranks_refuse_and_nothing_has_changed(runs: Any):
    _, ranks = runs
    said = [each["full", "none", "said"] for each in ranks]
    owner = next(rank for rank, text in enumerate(said) if text.startswith("load: a rank must"))
    assert (
        "rows and evict=None. Use evict='lru', or load with 2 ranks and call grow()" in said[owner]
    )
    for each in said:
        assert each.startswith(("load: a rank must", "rank "))
        assert each.startswith("load:") or "rejected its input" in each
    assert all(each["full", "none", "unchanged"] for each in ranks)


def test_if_the_optimizer_of_one_rank_refuses_no_rank_loads(runs: Any):
    _, ranks = runs
    *others, last = (each["refused"] for each in ranks)
    assert "mask" in last["said"]
    for each in others:
        assert each["said"] == f"rank 2: {last['said']}"
    for each in (*others, last):
        assert each["unchanged"]
        assert each["next"] == ""


# One process


def assert_refused(training: Training, path: Path, message: str) -> None:
    before = training.snapshot()
    assert message in said(lambda: training.load(path))
    assert training.snapshot() == before


def test_a_vocabulary_that_does_not_fit_is_refused(runs: Any, tmp_path: Path):
    folder, _ = runs
    saved = folder / "per row-1"
    for ids in ({"shared": 2, "admit": 2}, {}):
        other = Training(CASES["per row"]._replace(ids=ids), "saved", 0, 1)
        assert_refused(other, saved, "'ids' must be that of the checkpoint")
    training = Training(CASES["per row"], "plain", 0, 1)
    training.model["ids"].attach(nn.Embedding(ROWS, DIM))
    message = "since their rows move. Got only first.weight, second"
    assert_refused(training, folder / "per row-2", message)
    training.load(saved)  # rows stay where they were
    ids = training.model.pop("ids")
    training.save(tmp_path / "saved")
    training.model["ids"] = ids
    message = "all vocabularies of the model. Got none for"
    assert_refused(training, tmp_path / "saved", message)


# Ids that get new owners

# Two ranks have saved: the first has rows 0, 2, 4 and 6, the second 1, 3 and 5.
STORED = torch.tensor(
    [[0, 0, 0], [0, 0, 0], [10, 4, 8], [11, 2, 3], [12, 1, 9], [13, 9, 5], [0, 0, 0]]
)
CANDIDATES = torch.tensor([[20, 1], [30, 1], [21, 2], [31, 1], [22, 1], [0, 0]])
# In use, candidates, seen since counts were halved, the time, rows that changed hands.
NUMBERS = torch.tensor([[3, 3], [3, 2], [20, 15], [9, 5], [6, (1 << 40) + 4]])


def reassigned(**changes: Any) -> ReassignedIds:
    layout = VocabularyLayout(7, 2, shared=1, admit=2, tables={})
    block = VocabularyBlock(NUMBERS, 0, STORED, 0, CANDIDATES)._replace(**changes)
    return reassign_ids(collectives.Collectives(None), layout, block, Options(7, 1, 2, None))


def test_reassigned_ids_keep_counts_ages_order_and_rows():
    found = reassigned()
    assert found.saved.used == 5
    assert found.saved.ids[1:5].tolist() == [10, 11, 12, 13]
    assert found.saved.counts[1:5].tolist() == [4, 2, 1, 9]
    assert found.now == 9
    assert (found.now - found.saved.seen[1:5]).tolist() == [9 - 8, 5 - 3, 9 - 9, 5 - 5]
    assert found.saved.sightings == 35
    # Row 6 was free. The shared row of the second rank is not needed, another row is new.
    assert found.source.tolist() == [0, 2, 3, 4, 5, 6, NEW_ROW]
    # No seed is used twice.
    assert found.seed == 6
    more = NUMBERS.clone()
    more[4, 1] += 100
    assert reassigned(numbers=more).seed == 104


@pytest.mark.parametrize("room", [9, 4])
def test_candidates_take_turns(room: int, monkeypatch: pytest.MonkeyPatch):
    """Those that each rank has seen last come last; of too many, these are kept."""
    monkeypatch.setattr(Options, "candidates", room)
    saved = reassigned().saved
    ids, counts = (
        each[: saved.candidates].tolist() for each in (saved.candidate_ids, saved.candidate_counts)
    )
    assert ids == [20, 21, 30, 22, 31][-room:]
    assert counts == [dict(CANDIDATES.tolist())[each] for each in ids]


def test_a_process_group_that_was_destroyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        table = nn.Embedding(3, 2)
        sparsestep.distributed.shard(table, plan="rows")
    finally:
        torch.distributed.destroy_process_group()
    optimizer = sparsestep.Adam(table.parameters())
    for work in (sparsestep.distributed.save, sparsestep.distributed.load):
        message = said(partial(work, tmp_path, table, optimizer))
        assert message.startswith("the process group of sharded tables must exist")


def test_a_folder_is_written_by_one_program_at_a_time(tmp_path: Path):
    """A second one would remove the files of the first, or lose its own."""
    model, folder = nn.EmbeddingBag(10, 4), tmp_path / "saved"
    optimizer, distributed = sparsestep.Adam(model.parameters()), sparsestep.distributed
    distributed.save(folder, model, optimizer)
    with FolderLock(folder) as is_locked:
        assert is_locked
        for save in (distributed.save, distributed.async_save):
            refused = said(lambda save=save: save(folder, model, optimizer).result())
            assert "can be written by one program at a time" in refused
    distributed.load(folder, model, optimizer)
    distributed.save(folder, model, optimizer)
