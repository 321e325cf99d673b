"""A vocabulary that ranks share: what each of them does, and one process in the place of all."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed.owners import owner_of
from tests.distributed.shard_behaviour import said

Found = dict[Any, Any]

ROWS, DIM, STEPS = 41, 3, 12
OPTIONS = {
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


def new_table(rows: int = ROWS) -> sparsestep.nn.Embedding:
    torch.manual_seed(0)
    return sparsestep.nn.Embedding(rows, DIM)


def loss_of(rows: Tensor, step: int) -> Tensor:
    return (rows * rows).sum() * (1 + step)


def trained(rank: int, world: int, options: dict[str, Any]) -> Found:
    """What one of several ranks finds."""
    table = new_table()
    sparsestep.distributed.shard(table, plan="rows", reduce="sum", order="global")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    vocabulary = sparsestep.distributed.Vocabulary(table, optimizer, init=nn.init.ones_, **options)
    found: Found = {"rows": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = vocabulary(batch_of(step, rank))
        found["rows"].append(rows)
        loss_of(table(rows), step).backward()
        optimizer.step()
        if step == STEPS // 2:  # from here on with one that was loaded
            saved = vocabulary.state_dict()
            vocabulary = sparsestep.distributed.Vocabulary(
                table, optimizer, init=nn.init.ones_, **options
            )
            vocabulary.load_state_dict(saved)
    found["known"] = vocabulary.eval()(batch_of(STEPS, rank))
    found.update(
        after=table.weight.detach().clone(), ids=vocabulary.as_dict(), used=vocabulary.used
    )
    return found


class Alone:
    """One process in the place of several: a vocabulary for each rank, and the whole table."""

    def __init__(self, world: int, options: dict[str, Any], rows: int = ROWS) -> None:
        self._world = world
        self.parts = [
            sparsestep.nn.Vocabulary(len(range(rank, rows, world)), **options)
            for rank in range(world)
        ]

    def look_up(self, batches: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """The rows of each rank's ids, and those that changed hands on each."""
        ids = torch.cat([each.reshape(-1) for each in batches])
        owners, rows = owner_of(ids, self._world), torch.empty_like(ids)
        for rank, part in enumerate(self.parts):
            rows[owners == rank] = part(ids[owners == rank]) * self._world + rank
        split = rows.split([each.numel() for each in batches])
        taken = [part.taken_over * self._world + rank for rank, part in enumerate(self.parts)]
        return [r.view(b.shape) for r, b in zip(split, batches, strict=True)], taken


def alone(world: int, options: dict[str, Any]) -> Found:
    """What one process finds that does the work of all."""
    table, ids = new_table(), Alone(world, options)
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    found: Found = {"rows": [], "taken": 0}
    before = [torch.empty(0, dtype=torch.int64)] * world
    for step in range(STEPS):
        optimizer.zero_grad()
        rows, taken = ids.look_up([batch_of(step, rank) for rank in range(world)])
        for mine, earlier in zip(taken, before, strict=True):
            if mine is not earlier and mine.numel():
                found["taken"] += mine.numel()
                optimizer.forget(table.weight, mine)
                table.weight.data[mine] = 1.0
        before = taken
        found["rows"].append(rows)
        flat = torch.cat([each.reshape(-1) for each in rows])
        loss_of(table(flat), step).backward()
        optimizer.step()
    for part in ids.parts:
        part.eval()
    found["known"], _ = ids.look_up([batch_of(STEPS, rank) for rank in range(world)])
    found["ids"] = [
        {each: row * world + rank for each, row in part.as_dict().items()}
        for rank, part in enumerate(ids.parts)
    ]
    return {**found, "after": table.weight.detach()}


def refusals(rank: int, world: int) -> Found:
    """A rank has no ids, or cannot reset rows, or does something else: all are told."""
    table = new_table()
    sparsestep.distributed.shard(table, plan="rows", reduce="sum")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    optimizer.materialize_state()
    vocabulary = sparsestep.distributed.Vocabulary(table, optimizer, evict="lru")
    vocabulary(torch.arange(3) + rank)
    before = {name: value.clone() for name, value in vocabulary.state_dict().items()}
    weight = table.weight.detach().clone()
    last = rank == world - 1
    found: Found = {}
    found["no ids"] = said(lambda: vocabulary(torch.arange(20.0) if last else torch.arange(20)))
    record = optimizer.state[table.weight]
    right = record["exp_avg"]
    if last:
        record["exp_avg"] = right[:1]
    found["no reset"] = said(lambda: vocabulary(torch.arange(100)))
    record["exp_avg"] = right
    elsewhere = torch.zeros(1, dtype=torch.int64)
    found["elsewhere"] = said(lambda: (table if last else vocabulary)(elsewhere))
    after = vocabulary.state_dict()
    found["unchanged"] = torch.equal(weight, table.weight) and all(
        torch.equal(before[name], after[name]) for name in before
    )
    found["copied"] = said(lambda: copy.deepcopy(vocabulary))
    found["next"] = vocabulary(torch.arange(3) + rank).tolist()
    return found


def vocabularies(rank: int, world: int) -> Found:
    found: Found = {}
    for name, options in OPTIONS.items():
        found["vocabulary", name] = trained(rank, world, options)
    found["vocabulary refusals"] = refusals(rank, world)
    return found
