"""Vocabularies in checkpoints that one number of ranks saves and another loads."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import sparsestep
from sparsestep.distributed import wire
from tests.distributed import pair
from tests.distributed.runs import said

Found = dict[Any, Any]

ROWS, MORE, DIM = 75, 5, 3  # of a table; rows more of the other one; of a row
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
# Too few rows for all ids: whoever comes to own too many gives some up, or refuses.
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
    saved, rows = local._ids.save(), local.as_dict()
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
        found[each] += [int(saved.counts[row]), int(local._now - saved.seen[row])]
    candidates = zip(saved.candidate_ids.tolist(), saved.candidate_counts.tolist(), strict=True)
    second = model["second"].weight
    padding, whole = model["second"].padding_idx, model["second"].num_embeddings
    others = range(vocabulary.rows, whole)
    return {
        "ids": found,
        "free": free,
        "candidates": dict(list(candidates)[: saved.candidates]),
        "shared": model["first"].weight[: local._options.shared].tolist(),
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


def load_half(
    folder: Path, kind: str, rank: int, world: int, saved_by: int, mesh: Any = None
) -> Found:
    """Load what others have saved, and train to the end."""
    found: Found = {}
    for name, case in CASES.items():
        model, optimizer = begin(case, kind, mesh)
        sparsestep.distributed.load(folder / f"{name}-{saved_by}", model, optimizer)
        key = name, saved_by, world
        found[(*key, "half")] = known(model, optimizer, rank, world)
        found[(*key, "whole")] = go_on(model, optimizer, WHOLE, rank, world)
    return found


def load_ordinary(folder: Path, rank: int, world: int) -> Found:
    """Into a vocabulary of which each rank has a copy, beside sharded tables; in many messages."""
    case = CASES["per row"]
    model, optimizer = begin(case, "rows")
    model["ids"] = sparsestep.nn.Vocabulary(ROWS, **case.ids)
    whole, wire.CHUNK = wire.CHUNK, 24
    try:
        sparsestep.distributed.load(folder / "per row-2", model, optimizer)
    finally:
        wire.CHUNK = whole
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


def save_full(folder: Path, kind: str, rank: int, world: int, mesh: Any = None) -> Found:
    found: Found = {}
    for name, ids in FULL.items():
        case = Case(sparsestep.Adagrad, {}, ids)
        model, optimizer = begin(case, kind, mesh, FEW)
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


def work(rank: int, meeting: str) -> Found:
    """The first two of three ranks save, all load and save, the first two load."""
    folder = Path(sys.argv[2])
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=3)
    two = DeviceMesh("cpu", [0, 1])
    found: Found = {}
    if rank < 2:
        found.update(save_half(folder, "rows", rank, 2, two))
        found.update(save_full(folder, "rows", rank, 2, two))
    dist.barrier()
    found.update(save_half(folder, "rows", rank, 3))
    found.update(load_full(folder, rank, 3))
    found.update(load_ordinary(folder, rank, 3))
    found.update(load_refused(folder, rank, 3))
    for saved_by in (1, 2, 3):
        found.update(load_half(folder, "rows", rank, 3, saved_by))
    if rank < 2:
        for saved_by in (1, 2, 3):
            found.update(load_half(folder, "rows", rank, 2, saved_by, two))
    dist.barrier()
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    pair.main(work)
