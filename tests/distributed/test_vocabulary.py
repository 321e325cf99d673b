"""A vocabulary that ranks share gives the rows, and trains the tables, of one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed.placement import hash_owner
from tests.distributed.runs import said, whole
from tests.distributed.test_collectives import Counted
from tests.faults.snapshot import Snapshot, of_optimizer, snapshot
from tests.nn.cases import splitmix64
from tests.ranks import Rank, ranks
from tests.table import same_bits

shard, Vocabulary = sparsestep.distributed.shard, sparsestep.distributed.Vocabulary
local_of = sparsestep.nn.Vocabulary

ROWS, DIM, STEPS = 41, 3, 12
MERGED = 200  # rows, so that there is room for the ids of another vocabulary
OPTIONS: dict[str, Any] = {
    "plain": {},
    "lru": {"evict": "lru"},
    "lfu": {"evict": "lfu", "shared": 2},
    "admit": {"admit": 2, "evict": "lru"},
}


def batch_of(step: int, rank: int) -> Tensor:
    """Ids that drift, of any value; sometimes none."""
    chance = torch.Generator().manual_seed(100 * step + rank)
    if (step + rank) % 5 == 4:
        return torch.empty(0, dtype=torch.int64)
    ids = torch.randint(4 * step, 4 * step + 50, (2, 13), generator=chance)
    return (ids * 0x9E3779B97F4A7C1) ^ -(ids % 2)


def batches_of(step: int, world: int) -> list[Tensor]:
    return [batch_of(step, rank) for rank in range(world)]


def new_table(rows: int = ROWS) -> sparsestep.nn.Embedding:
    torch.manual_seed(0)
    return sparsestep.nn.Embedding(rows, DIM)


class OneProcess:
    """One process in the place of all ranks: a vocabulary for each, and the whole tables."""

    def __init__(self, world: int, options: dict[str, Any], rows: int = ROWS) -> None:
        self.world = world
        self.parts = [
            sparsestep.nn.Vocabulary(len(range(rank, rows, world)), **options)
            for rank in range(world)
        ]
        self._before = self.taken_over()

    def __call__(self, batches: list[Tensor]) -> list[Tensor]:
        """The rows of each rank's ids."""
        ids = torch.cat([each.reshape(-1) for each in batches])
        owners, rows = hash_owner(ids, self.world), torch.empty_like(ids)
        for rank, part in enumerate(self.parts):
            rows[owners == rank] = part(ids[owners == rank]) * self.world + rank
        split = rows.split([each.numel() for each in batches])
        return [r.view(b.shape) for r, b in zip(split, batches, strict=True)]

    def taken_over(self) -> list[Tensor]:
        return [part.taken_over for part in self.parts]

    def reset(self, optimizer: Any, weights: list[Any]) -> int:
        """Start rows over that went to other ids in the latest call; how many there are."""
        count = 0
        for rank, (part, before) in enumerate(zip(self.parts, self._before, strict=True)):
            if part.taken_over is not before and len(part.taken_over):
                rows = part.taken_over * self.world + rank
                count += len(rows)
                for weight in weights:
                    optimizer.forget(weight, rows)
                    weight.data[rows] = 1.0
        self._before = self.taken_over()
        return count

    def ids_of(self, rank: int) -> dict[int, int]:
        return {i: row * self.world + rank for i, row in self.parts[rank].as_dict().items()}


def assert_ids_alike(rank: Rank, vocabulary: Any, reference: OneProcess) -> None:
    known = vocabulary.as_dict()
    assert known == reference.ids_of(rank.index)
    assert known
    everything = rank.gather(known)
    together = {key: row for each in everything for key, row in each.items()}
    assert len(together) == sum(map(len, everything)) == len(set(together.values()))
    assert {row % rank.world for row in known.values()} == {rank.index}
    assert set(hash_owner(torch.tensor(list(known)), rank.world).tolist()) == {rank.index}


# Neither divides among two ranks or three; some growth only fills what is left of a rank's rows.
SIZES = (17, 18, 23, 41)
# Optimizers, their options, and those of the vocabulary.
CASES: dict[str, tuple[Any, dict[str, Any], str]] = {
    "plain": (sparsestep.Adam, {}, "plain"),
    "per row": (sparsestep.Adam, {"bias_correction": "per_row"}, "lru"),
    "dense": (sparsestep.AdamW, {"semantics": "dense"}, "plain"),
    "lfu": (sparsestep.Adam, {}, "lfu"),
    "admit": (sparsestep.Adam, {}, "admit"),
}


def two_tables() -> Any:
    """The second one has rows that its vocabulary does not give away at first."""
    return nn.ModuleDict({"first": new_table(SIZES[0]), "second": new_table(SIZES[2])})


def optimizer_of(tables: Any, name: str) -> Any:
    make, options, _ = CASES[name]
    optimizer = make(tables.parameters(), lr=0.1, **options)
    if optimizer.semantics == "dense":
        optimizer.track(tables)
    return optimizer


def train(tables: Any, optimizer: Any, rows: Tensor) -> None:
    ((tables["first"](rows) ** 2).sum() + (tables["second"](rows) ** 3).sum()).backward()
    optimizer.step()
    optimizer.zero_grad()


def tensors_of(tables: Any, optimizer: Any) -> list[Tensor]:
    weights = [table.weight for table in tables.values()]
    state = [value for weight in weights for value in optimizer.state[weight].values()]
    return [*weights, *(v for v in state if isinstance(v, Tensor) and v.dim())]


@ranks(1, 3)
@pytest.mark.parametrize("name", list(CASES))
def test_ranks_find_and_grow_what_one_process_does(rank: Rank, name: str):
    """Rows, ids, weights and state to the bit; also from a vocabulary that was loaded half-way."""
    tables, plain, options = two_tables(), two_tables(), OPTIONS[CASES[name][2]]
    shard(tables, plan="rows", reduce="sum", order="global")
    optimizer, reference = optimizer_of(tables, name), optimizer_of(plain, name)
    weights, evicted = list(tables.parameters()), 0

    def attached() -> Any:
        found = Vocabulary(tables["first"], optimizer, init=nn.init.ones_, **options)
        found.attach(tables["second"], optimizer, init=nn.init.ones_)
        return found

    vocabulary, reference_ids = attached(), OneProcess(rank.world, options, SIZES[0])
    for turn, size in enumerate(SIZES):
        optimizer.catch_up()  # on all ranks alike: in two parts, a row is rounded twice
        reference.catch_up()
        vocabulary.grow(size)
        for index, part in enumerate(reference_ids.parts):
            part.grow(len(range(index, size, rank.world)))
        for table in plain.values():
            if table.num_embeddings < size:
                sparsestep.nn.grow(table, size, reference, init=nn.init.ones_)
        for step in range(3 * turn, 3 * turn + 3):
            rows = vocabulary(batch_of(step, rank.index))
            train(tables, optimizer, rows)
            expected = reference_ids(batches_of(step, rank.world))
            evicted += reference_ids.reset(reference, list(plain.parameters()))
            train(plain, reference, torch.cat([each.reshape(-1) for each in expected]))
            assert torch.equal(rows, expected[rank.index]), step
        saved, vocabulary = vocabulary.state_dict(), attached()
        vocabulary.load_state_dict(saved)
    assert bool(evicted) == ("evict" in options)
    optimizer.catch_up()
    reference.catch_up()
    assert vocabulary.used == len(vocabulary.as_dict()) + options.get("shared", 1)
    assert_ids_alike(rank, vocabulary, reference_ids)
    for part in reference_ids.parts:
        part.eval()
    expected = reference_ids(batches_of(STEPS, rank.world))
    assert torch.equal(vocabulary.eval()(batch_of(STEPS, rank.index)), expected[rank.index])
    assert all(ours is theirs for ours, theirs in zip(weights, tables.parameters(), strict=True))
    sizes = [vocabulary.rows, *(table.num_embeddings for table in tables.values())]
    assert sizes == [SIZES[-1]] * 3
    ours, theirs = tensors_of(tables, optimizer), tensors_of(plain, reference)
    for mine, its in zip(ours, theirs, strict=True):
        assert same_bits(whole(rank, mine, rows=SIZES[-1]), its.detach())


def made(rows: int = ROWS, **options: Any) -> tuple[Any, Any, Any]:
    table = new_table(rows)
    shard(table, plan="rows", reduce="sum")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    optimizer.materialize_state()
    return table, optimizer, Vocabulary(table, optimizer, **options)


def contents(optimizer: Any, vocabulary: Any) -> Snapshot:
    """Tables, their state, and the ids of one vocabulary or several."""
    return snapshot({"ids": dict(vocabulary.state_dict()), **of_optimizer(optimizer)})


def assert_refused(rank: Rank, call: Callable[[], Any], doing: str = "") -> None:
    """The last rank has an error of its own, the others name that rank."""
    message = said(call)
    assert message
    named = f"rank {rank.world - 1}{doing and f', which {doing},'} rejected"
    assert message.startswith(named) != rank.is_last, message


@ranks(3)
def test_if_a_rank_refuses_nothing_changes(rank: Rank):
    """Lookups, growth, merging and export."""
    table, optimizer, vocabulary = made(MERGED, evict="lru")
    other, plain, different = made(MERGED // 2)[2], local_of(60), local_of(60)
    plain(torch.arange(9))
    different(torch.arange(9) + rank.index)
    vocabulary(torch.arange(3) + rank.index)
    before = contents(optimizer, vocabulary)

    doing = "looks up ids of the table"
    ids = torch.arange(20.0) if rank.is_last else torch.arange(20)
    assert_refused(rank, lambda: vocabulary(ids), doing)
    param_state = optimizer.state[table.weight]
    right = param_state["exp_avg"]
    if rank.is_last:
        param_state["exp_avg"] = right[:1]
    assert_refused(rank, lambda: vocabulary(torch.arange(10 * MERGED)))
    param_state["exp_avg"] = right
    call = table if rank.is_last else vocabulary
    assert "in the same order" in said(lambda: call(torch.zeros(1, dtype=torch.int64)))

    doing = "grows the table"
    if rank.is_last:
        table.weight.grad = torch.zeros_like(table.weight)
    assert_refused(rank, lambda: vocabulary.grow(MERGED + 9), doing)
    table.weight.grad = None
    assert "the same number of rows" in said(lambda: vocabulary.grow(MERGED + rank.index))
    assert_refused(rank, lambda: vocabulary.grow(30 if rank.is_last else MERGED), doing)

    doing = "merges ids of the table with others"
    for wrong in (different, other if rank.is_last else plain):
        assert "must pass the same" in said(lambda wrong=wrong: vocabulary.merge(wrong))
    ids, many = torch.arange(10 * MERGED), local_of(MERGED)
    many(ids[hash_owner(ids, rank.world) == rank.world - 1][: MERGED // rank.world])
    assert_refused(rank, lambda: vocabulary.merge(many), doing)
    assert_refused(rank, lambda: vocabulary.merge({} if rank.is_last else plain), doing)

    unsharded = nn.Embedding(MERGED, DIM) if rank.is_last else table
    assert_refused(rank, lambda: vocabulary.export(unsharded), "exports the table")
    assert contents(optimizer, vocabulary) == before
    assert (vocabulary.rows, table.num_embeddings) == (MERGED, MERGED)
    vocabulary.grow(MERGED + 10)
    new_rows = rank.gather(table.weight.detach()[-2:])
    assert not torch.equal(new_rows[0][0], new_rows[-1][0])


def counts_of(local: Any) -> dict[int, int]:
    counts = local.id_table.save().counts.tolist()
    return {each: counts[row] for each, row in local.as_dict().items()}


@ranks(3)
def test_merging_is_that_of_each_rank(rank: Rank):
    """With a vocabulary that ranks share, then with an ordinary one."""
    world, index = rank.world, rank.index
    _, _, vocabulary = made(MERGED)
    _, _, other = made(MERGED // 2)
    vocabulary(batch_of(0, index))
    mine, theirs = OneProcess(world, {}, MERGED), OneProcess(world, {}, MERGED // 2)
    mine(batches_of(0, world))
    for step in (1, 2):
        other(batch_of(step, index))
        theirs(batches_of(step, world))
    local = mine.parts[index]
    shared = vocabulary.merge(other)
    assert torch.equal(shared, local.merge(theirs.parts[index]) * world + index)
    there = other.as_dict()
    known = vocabulary.as_dict()
    assert shared.tolist() == [index, *(known[i] for i in sorted(there, key=there.__getitem__))]
    plain, ids = local_of(60), torch.arange(9)
    plain(ids)
    merged = vocabulary.merge(plain)
    owned, is_mine = local_of(60), hash_owner(ids, world) == index
    owned(ids[is_mine])
    assert torch.equal(merged[1:][is_mine], local.merge(owned)[1:] * world + index)
    assert rank.gather(merged.tolist()) == [merged.tolist()] * world
    assert merged[0] == 0
    assert vocabulary.as_dict() == mine.ids_of(index)
    assert counts_of(vocabulary.local) == counts_of(local)


@ranks(1, 3)
def test_what_is_exported(rank: Rank):
    table, optimizer, vocabulary = made(shared=2)
    for step in range(3):
        rows = vocabulary(batch_of(step, rank.index))
        table(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    exported = vocabulary.export(table)
    assert (exported is None) == (rank.index > 0)
    weight = whole(rank, table.weight, rows=ROWS)
    known = {i: row for each in rank.gather(vocabulary.as_dict()) for i, row in each.items()}
    if exported is not None:
        ours, row_of = exported[0].weight, exported[1]
        shared = 2 * rank.world
        assert row_of.keys() == known.keys()
        assert torch.equal(ours[:shared], weight[:shared])
        assert all(torch.equal(ours[row_of[i]], weight[row]) for i, row in known.items())
        assert sorted(row_of.values()) == list(range(shared, len(ours)))


# One process


class Features(nn.Module):
    """One id each, bags, a table that shares the vocabulary of the first, and one without."""

    sizes: ClassVar = {"one": ROWS, "bag": ROWS, "other": ROWS, "fixed": 7}

    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        one, bag = local_of(ROWS, **options), local_of(ROWS - 5, **options)
        self.tables = sparsestep.nn.EmbeddingBagCollection(
            {name: (rows, DIM) for name, rows in self.sizes.items()},
            mode="sum",
            vocabularies={"one": one, "bag": bag, "other": one},
        )


def features_of(ids: Tensor) -> dict[str, Tensor]:
    ids = ids.view(-1, 13)
    return {"one": ids[:, :1], "bag": ids[:, :4], "other": ids[:, 4:6], "fixed": ids[:, :1] % 7}


@ranks(1, 3)
@pytest.mark.parametrize("name", list(OPTIONS))
@pytest.mark.parametrize(("order", "prefetch"), [("global", 0), ("fast", 0), ("global", 1)])
def test_a_collection_looks_up_ids_in_one_exchange(
    rank: Rank, name: str, order: Any, prefetch: int
):
    """The rows and weights that the vocabularies and tables of one process have, to the bit."""
    options = OPTIONS[name]
    model = Features(**options)
    plan = shard(model, plan={"fixed": "rows"}, reduce="sum", order=order)
    assert plan["one"].why == "has a vocabulary"
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1)
    model.tables.attach(optimizer, init=nn.init.ones_)
    counted, world = Counted(rank.monkeypatch), rank.world
    # The same in one process
    plain = Features(**options).tables.tables
    reference = sparsestep.Adam(plain.parameters(), lr=0.1)
    one, bag = OneProcess(world, options), OneProcess(world, options, rows=ROWS - 5)
    evicted = 0
    loader = [features_of(batch_of(step, rank.index)) for step in range(STEPS)]
    for step, batch in enumerate(sparsestep.distributed.lockstep(loader, prefetch)):
        optimizer.zero_grad()
        before = counted.number
        found = model.tables(batch)
        assert counted.since(before) <= 4  # one more than without vocabularies
        sum(each.sum() * (1 + step) for each in found.values()).backward()
        optimizer.step()
        reference.zero_grad()
        batches = [features_of(each) for each in batches_of(step, world)]
        rows = {name: [each[name] for each in batches] for name in Features.sizes}
        both = one([*rows["one"], *rows["other"]])
        rows["one"], rows["other"], rows["bag"] = both[:world], both[world:], bag(rows["bag"])
        evicted += one.reset(reference, [plain["one"].weight, plain["other"].weight])
        evicted += bag.reset(reference, [plain["bag"].weight])
        expected = {key: [plain[key](each) for each in some] for key, some in rows.items()}
        for key, each in found.items():
            wanted = expected[key][rank.index]
            is_single = key in ("one", "fixed")  # bags add up in another order
            assert same_bits(each, wanted) if is_single else torch.allclose(each, wanted, atol=1e-5)
        sum(e.sum() * (1 + step) for each in expected.values() for e in each).backward()
        reference.step()
    assert bool(evicted) == ("evict" in options) or world == 1
    assert_ids_alike(rank, model.tables.vocabularies["one"], one)
    for key, rows_of_table in Features.sizes.items():
        weight = model.tables.tables[key].weight
        assert same_bits(whole(rank, weight, rows=rows_of_table), plain[key].weight.detach())


@ranks(3)
@pytest.mark.parametrize("semantics", ["masked", "dense"])
def test_a_collection_changes_nothing_if_any_rank_fails(rank: Rank, semantics: Any):
    """Invalid ids, and an ``init`` that raises after rows have been reset."""
    model = Features(evict="lru")
    shard(model, plan={"fixed": "rows"})
    optimizer = sparsestep.Adam(model.parameters(), lr=0.1, semantics=semantics)
    if semantics == "dense":
        optimizer.track(model)
    model.tables.attach(optimizer)

    def step(number: int) -> None:
        optimizer.zero_grad()
        found = model.tables(features_of(batch_of(number, 1 + rank.index)))
        sum(each.square().sum() for each in found.values()).backward()
        optimizer.step()

    for number in range(8):
        step(number)
    vocabularies = model.tables.vocabularies
    before, features = (
        contents(optimizer, vocabularies),
        features_of(torch.arange(1014).view(-1, 13)),
    )
    wrong = {**features, "bag": features["bag"] * 1.0} if rank.is_last else features
    assert "rank 2" in said(lambda: model.tables(wrong)) or rank.is_last
    with rank.monkeypatch.context() as patch:
        if rank.is_last:
            bag = model.tables.vocabularies["bag"].local
            patch.setattr(bag.attached[0], "init", lambda rows: 1 / 0)
        error = ZeroDivisionError if rank.is_last else sparsestep.InputError
        assert said(lambda: model.tables(features), error)
    assert contents(optimizer, vocabularies) == before
    step(8)
    assert model.tables.vocabularies["bag"].taken_over.numel()


@given(ids=st.lists(st.integers(-(2**63), 2**63 - 1)), world=st.integers(1, 5000))
def test_the_owner_is_a_hash_of_the_id(ids: list[int], world: int):
    found = hash_owner(torch.tensor(ids, dtype=torch.int64), world).tolist()
    assert found == [(splitmix64(each) >> 32) % world for each in ids]


@ranks(2)
def test_growth_is_whole_where_one_rank_runs_out_of_memory(rank: Rank, monkeypatch):
    """One allocation fails before ranks exchange their numbers, and one while they commit."""
    table = nn.Embedding(20, DIM)
    shard(table, plan="rows")
    vocabulary = Vocabulary(table)
    full, commit_grow, failures = torch.full, Vocabulary._commit_grow, []

    def fail_once(name: str) -> None:
        if rank.is_last and name not in failures:
            failures.append(name)
            raise MemoryError(name)

    def failing_full(*arguments: Any, **options: Any) -> Tensor:
        fail_once("full")
        return full(*arguments, **options)

    def failing_commit(*arguments: Any) -> None:
        fail_once("commit")
        commit_grow(*arguments)

    monkeypatch.setattr(torch, "full", failing_full)
    monkeypatch.setattr(Vocabulary, "_commit_grow", failing_commit)
    vocabulary.grow(40)
    assert failures == (["full", "commit"] if rank.is_last else [])
    assert (vocabulary.rows, table.num_embeddings) == (40, 40)
