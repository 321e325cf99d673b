"""A vocabulary that ranks share grows, is merged with others and exported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed.owners import owner_of
from tests.distributed.shard_behaviour import said
from tests.distributed.shard_vocabulary import Alone, batch_of, new_table

Found = dict[Any, Any]

# Neither divides among two ranks or three; some growth only fills what is left of a rank's rows.
SIZES = (17, 18, 23, 41)
STEPS = 3  # with each of them
MERGED = 200  # rows, so that there is room for the ids of another vocabulary
GROWING: dict[str, Any] = {
    "per row": (sparsestep.Adam, {"bias_correction": "per_row"}),
    "dense": (sparsestep.AdamW, {"semantics": "dense"}),
}


def loss_of(first: Tensor, second: Tensor) -> Tensor:
    return (first**2).sum() + (second**3).sum()


def new_tables() -> Any:
    """The second one has rows that its vocabulary does not give away at first."""
    tables = {"first": new_table(SIZES[0]), "second": new_table(SIZES[2])}
    return nn.ModuleDict(tables)


def grown(rank: int, world: int, name: str) -> Found:
    """What one of several ranks finds."""
    make, options = GROWING[name]
    tables = new_tables()
    sparsestep.distributed.shard(tables, plan="rows", reduce="sum", order="global")
    optimizer = make(tables.parameters(), lr=0.1, **options)
    if optimizer.semantics == "dense":
        optimizer.track(tables)
    vocabulary = sparsestep.distributed.Vocabulary(tables["first"], optimizer, init=nn.init.ones_)
    vocabulary.attach(tables["second"], optimizer, init=nn.init.ones_)
    weights = [table.weight for table in tables.values()]
    found: Found = {"rows": []}
    for turn, size in enumerate(SIZES):
        optimizer.catch_up()  # on all ranks alike: in two parts, a row is rounded twice
        vocabulary.grow(size)
        for step in range(turn * STEPS, turn * STEPS + STEPS):
            rows = vocabulary(batch_of(step, rank))
            found["rows"].append(rows)
            loss_of(tables["first"](rows), tables["second"](rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.catch_up()
    found["same"] = [table.weight for table in tables.values()] == weights
    found["sizes"] = [vocabulary.rows, *(table.num_embeddings for table in tables.values())]
    found["after"] = [weight.detach().clone() for weight in weights]
    found["state"] = state_of(optimizer, weights)
    found["ids"] = vocabulary.as_dict()
    return found


def state_of(optimizer: Any, weights: list[Any]) -> list[Tensor]:
    records = [optimizer.state[weight] for weight in weights]
    return [
        value.clone()
        for record in records
        for value in record.values()
        if isinstance(value, Tensor) and value.dim()
    ]


def grown_alone(world: int, name: str) -> Found:
    """What one process finds that does the work of all."""
    make, options = GROWING[name]
    tables, ids = new_tables(), Alone(world, {}, SIZES[0])
    optimizer = make(tables.parameters(), lr=0.1, **options)
    if optimizer.semantics == "dense":
        optimizer.track(tables)
    weights = [table.weight for table in tables.values()]
    found: Found = {"rows": []}
    for turn, size in enumerate(SIZES):
        optimizer.catch_up()
        for rank, part in enumerate(ids.parts):
            part.grow(len(range(rank, size, world)))
        for table in tables.values():
            if table.num_embeddings < size:
                sparsestep.nn.grow(table, size, optimizer, init=nn.init.ones_)
        for step in range(turn * STEPS, turn * STEPS + STEPS):
            rows, _ = ids.look_up([batch_of(step, rank) for rank in range(world)])
            found["rows"].append(rows)
            flat = torch.cat([each.reshape(-1) for each in rows])
            loss_of(tables["first"](flat), tables["second"](flat)).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.catch_up()
    found["after"] = [weight.detach() for weight in weights]
    found["state"] = state_of(optimizer, weights)
    found["ids"] = [
        {each: row * world + rank for each, row in part.as_dict().items()}
        for rank, part in enumerate(ids.parts)
    ]
    return found


def made(rows: int = 41, **options: Any) -> tuple[Any, Any, Any]:
    table = new_table(rows)
    sparsestep.distributed.shard(table, plan="rows", reduce="sum")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    optimizer.materialize_state()
    return table, optimizer, sparsestep.distributed.Vocabulary(table, optimizer, **options)


def snapshot(table: Any, optimizer: Any, vocabulary: Any) -> list[Any]:
    tensors = [table.weight, *optimizer.state[table.weight].values()]
    known = [each.clone() for each in (*tensors, *vocabulary.state_dict().values())]
    return [*known, torch.tensor([vocabulary.rows, table.num_embeddings])]


def unchanged(before: list[Any], after: list[Any]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(before, after, strict=True))


def growth_refused(rank: int, world: int) -> Found:
    """A rank has a gradient, or another number of rows, or fewer than there are."""
    table, optimizer, vocabulary = made()
    vocabulary(torch.arange(5))
    before = snapshot(table, optimizer, vocabulary)
    last, found = rank == world - 1, Found()
    if last:
        table.weight.grad = torch.zeros_like(table.weight)
    found["gradient"] = said(lambda: vocabulary.grow(50))
    table.weight.grad = None
    found["numbers"] = said(lambda: vocabulary.grow(50 + rank))
    found["fewer"] = said(lambda: vocabulary.grow(30 if last else 50))
    found["unchanged"] = unchanged(before, snapshot(table, optimizer, vocabulary))
    found["next"] = said(lambda: vocabulary.grow(50))
    found["new rows"] = table.weight.detach()[-2:].clone()
    return found


def today_and_more(rank: int, world: int) -> Found:
    """Merged with one that ranks share, with an ordinary one, and with what does not fit."""
    table, optimizer, vocabulary = made(MERGED)
    _, _, other = made(MERGED // 2)
    plain = sparsestep.nn.Vocabulary(60)
    vocabulary(batch_of(0, rank))
    for step in (1, 2):
        other(batch_of(step, rank))
    plain(torch.arange(9))
    found: Found = {"shared": vocabulary.merge(other), "there": other.as_dict()}
    found["plain"] = vocabulary.merge(plain)
    found["ids"] = vocabulary.as_dict()
    found["counts"] = counts_of(vocabulary.local)
    before = snapshot(table, optimizer, vocabulary)
    last = rank == world - 1
    different = sparsestep.nn.Vocabulary(60)
    different(torch.arange(9) + rank)
    found["different"] = said(lambda: vocabulary.merge(different))
    found["mixed"] = said(lambda: vocabulary.merge(other if last else plain))
    ids, many = torch.arange(10 * MERGED), sparsestep.nn.Vocabulary(MERGED)
    many(ids[owner_of(ids, world) == world - 1][: MERGED // world])
    found["too many"] = said(lambda: vocabulary.merge(many))
    found["none"] = said(lambda: vocabulary.merge({} if last else plain))
    found["unchanged"] = unchanged(before, snapshot(table, optimizer, vocabulary))
    return found


def counts_of(local: Any) -> Found:
    counts = local._ids.save().counts.tolist()
    return {each: counts[row] for each, row in local.as_dict().items()}


def exported(rank: int, world: int) -> Found:
    table, optimizer, vocabulary = made(shared=2)
    for step in range(3):
        rows = vocabulary(batch_of(step, rank))
        table(rows).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    found: Found = {"ids": vocabulary.as_dict(), "weight": table.weight.detach().clone()}
    exported = vocabulary.export(table)
    found["exported"] = exported and (exported[0].weight.detach(), exported[1])
    wrong = nn.Embedding(41, 3) if rank == world - 1 else table
    found["said"] = said(lambda: vocabulary.export(wrong))
    return found


def changes(rank: int, world: int) -> Found:
    found: Found = {("grown", name): grown(rank, world, name) for name in GROWING}
    found["growth refused"] = growth_refused(rank, world)
    found["merged"] = today_and_more(rank, world)
    found["exported"] = exported(rank, world)
    return found
