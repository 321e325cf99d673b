"""Loops over batches whose ids are sent ahead, and loaders that fail."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sparsestep.distributed import lockstep, lookups, shard
from tests.distributed.shard_behaviour import PLAN, Found, Net, net_batch, said, table
from tests.distributed.shard_cases import KINDS

STEPS = 6


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many lookups send ids when they are done."""
    calls: list[int] = []
    real = lookups.send_ids

    def send_ids(*arguments: Any) -> Any:
        calls.append(1)
        return real(*arguments)

    lookups.send_ids = send_ids
    try:
        yield calls
    finally:
        lookups.send_ids = real


def trained(rank: int, world: int, kind: str, prefetch: int) -> Found:
    """Ranks end at different times; one of them is given other tensors for a while."""
    made, opt = table(kind, order="global")
    batches = [{"ids": net_batch(step, rank)[:, 0, 0]} for step in range(STEPS - rank)]
    with counted() as sent:
        for step, batch in enumerate(lockstep(batches, prefetch)):
            opt.zero_grad()
            ids = batch["ids"]
            if step == 3 and rank == 0:
                ids = ids.clone()  # no tensor of the batch: all ranks send theirs now
            made(ids).square().sum().backward()
            opt.step()
    return {"after": made.weight.detach(), "sent": len(sent)}


def whole_model(rank: int, world: int, prefetch: int) -> Found:
    """Several tables of all kinds, looked up at once, and one of them once more."""
    model = Net()
    shard(model, plan=PLAN, reduce="sum", order="global")
    before = torch.cat([p.detach().flatten() for p in model.tables.parameters()])
    batches = [list(net_batch(step, rank).movedim(1, 0).contiguous()) for step in range(STEPS)]
    user: Any = model.tables.tables["user"]
    with counted() as sent:
        for ids in lockstep(batches, prefetch):
            rows = sum(model.tables(ids).values()) + user(ids[0])
            rows.square().sum().backward()
            with torch.no_grad():
                for param in model.tables.parameters():
                    if param.grad is not None and len(param):
                        param -= 0.01 * param.grad.coalesce().to_dense()
                    param.grad = None
    after = torch.cat([p.detach().flatten() for p in model.tables.parameters()])
    return {"after": after, "sent": len(sent), "moved": not torch.equal(before, after)}


def bad_ids_ahead(rank: int, world: int) -> Found:
    """The last rank's fourth batch has an id that there is not, as every loop goes on."""
    made, opt = table("rows")
    ids = [torch.tensor([1, rank]) for _ in range(STEPS)]
    if rank == world - 1:
        ids[3] = torch.tensor([1, 99])
    messages = []
    for batch in lockstep(ids, prefetch=1):
        opt.zero_grad()

        def step(batch: Tensor = batch) -> None:
            made(batch).sum().backward()
            opt.step()

        messages.append(said(step))
    return {"said": messages, "after": made.weight.detach()}


def failing(rank: int, world: int, prefetch: int) -> Found:
    """The loader of the last rank raises where it should give the third batch."""

    def loader() -> Iterator[Tensor]:
        yield torch.tensor([0])
        yield torch.tensor([1])
        if rank == world - 1:
            raise ValueError("the disk is gone")
        yield torch.tensor([2])

    seen = []
    try:
        for batch in lockstep(loader(), prefetch):
            seen.append(int(batch))
    except Exception as error:
        return {"seen": seen, "said": f"{type(error).__name__}: {error}"}
    return {"seen": seen, "said": ""}


def overwritten(rank: int, world: int) -> Found:
    """A loader that has one tensor for all batches."""
    buffer = torch.zeros(2, dtype=torch.int64)

    def loader() -> Iterator[Tensor]:
        for step in range(3):
            yield buffer.fill_(step)

    return {"said": said(lambda: list(lockstep(loader(), prefetch=1)))}


def ahead(rank: int, world: int) -> Found:
    found: Found = {}
    for prefetch in (0, 1):
        for kind in KINDS:
            found["ahead", kind, prefetch] = trained(rank, world, kind, prefetch)
        found["model ahead", prefetch] = whole_model(rank, world, prefetch)
        found["failing", prefetch] = failing(rank, world, prefetch)
    found["bad ids ahead"] = bad_ids_ahead(rank, world)
    found["overwritten"] = overwritten(rank, world)
    dist.barrier()
    return found
