"""What ranks do that is not training as usual: errors, parts left out, DDP, other loops."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sparsestep
from sparsestep import InputError
from sparsestep.distributed import lockstep, shard
from sparsestep.optimizer.base import RuleOptimizer
from tests.distributed.shard_cases import KINDS

Found = dict[str, Any]


def table(kind: str, rows: int = 7, **options: Any) -> tuple[nn.Embedding, RuleOptimizer]:
    torch.manual_seed(0)
    made = nn.Embedding(rows, 2)
    shard(made, plan=kind, reduce="sum", **options)
    return made, sparsestep.SGD(made.parameters(), lr=1.0)


def said(work: Callable[[], Any]) -> str:
    try:
        work()
    except InputError as error:
        return str(error)
    return ""


def bad_ids(rank: int, world: int, kind: str) -> Found:
    """The last rank has an id that there is not."""
    made, opt = table(kind)
    before = made.weight.detach().clone()
    ids = torch.tensor([1, 99 if rank == world - 1 else 2])
    message = said(lambda: made(ids))
    unchanged = torch.equal(before, made.weight)
    made(torch.tensor([rank])).sum().backward()
    opt.step()
    return {
        "said": message,
        "unchanged": unchanged,
        "before": before,
        "after": made.weight.detach(),
    }


def different_places(rank: int, world: int) -> Found:
    """The first rank steps where the others look up."""
    made, opt = table("rows")
    message = said(opt.step if rank == 0 else lambda: made(torch.tensor([1])))
    made(torch.tensor([rank])).sum().backward()
    opt.step()
    return {"said": message, "after": made.weight.detach()}


def left_out(rank: int, world: int, kind: str) -> Found:
    """Only the first rank's loss has the table; then nobody's has."""
    torch.manual_seed(0)
    made = nn.EmbeddingBag(7, 2, mode="sum")
    shard(made, plan=kind, reduce="sum")
    opt = sparsestep.Adam(made.parameters(), lr=0.5)
    before = made.weight.detach().clone()
    rows = made(torch.tensor([[0, 3], [4, 0]]))
    if rank == 0:
        rows.sum().backward()
    opt.step()
    opt.zero_grad()
    once = made.weight.detach().clone()
    made(torch.tensor([[1, 2]]))
    opt.step()
    steps = [int(state["step"]) for state in opt.state.values()]
    moved = (once != before).any(1).tolist()
    return {"moved": moved, "again": not torch.equal(once, made.weight), "steps": steps}


def loops(rank: int, world: int, kind: str) -> Found:
    """Several lookups, several backward calls, a gradient that is thrown away, an older graph."""
    made, opt = table(kind, order="global")
    ones = torch.ones(2, 2)
    made(torch.tensor([5, 6])).backward(ones)
    opt.zero_grad()  # thrown away
    first, second = made(torch.tensor([0, rank])), made(torch.tensor([1, 0]))
    (first + second).backward(ones, retain_graph=True)
    made(torch.tensor([2, 2])).backward(ones)
    sparsestep.clip_grad_norm_(made.parameters(), 1e9)
    opt.step()
    opt.zero_grad()
    second.backward(ones)  # a graph from before the step
    opt.step()
    del first, second
    ledger = made._exchange._ledger
    with torch.no_grad():
        made(torch.tensor([0]))
    return {"after": made.weight.detach(), "kept": len(ledger.answers)}


def refusals(rank: int, world: int) -> Found:
    made, opt = table("rows")
    made(torch.tensor([rank, 1])).sum().backward()
    weight = made.weight
    found = {
        "shown": repr(weight.grad),
        "copy": said(lambda: weight.grad.clone().coalesce()),
        "read": weight.grad.coalesce().values().sum(),
        "in backward": said(lambda: opt.step_in_backward([weight])),
        "order": said(lambda: sparsestep.clip_grad_norm_([weight], 1.0, norm_type=-1.0)),
        "torch's norm": said(lambda: nn.utils.clip_grad_norm_([weight], 1.0)),
    }
    opt.step_in_backward().remove()
    opt.step()
    return found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        sizes = {"user": (11, 4), "item": (13, 4), "day": (3, 4)}
        self.tables = sparsestep.nn.EmbeddingBagCollection(sizes, mode="sum")
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(sum(self.tables(ids).values()).sin())


PLAN = {"user": "rows", "item": "tables", "day": "copy"}


def net_batch(step: int, rank: int) -> Tensor:
    draw = torch.Generator().manual_seed(31 * step + rank)
    return torch.randint(0, 3, (6, 3, 2), generator=draw)


def with_ddp(rank: int, world: int) -> Found:
    """A whole model, clipped; the dense layer is DDP's."""
    model = Net()
    shard(model, plan=PLAN)
    ddp = DistributedDataParallel(model)
    opt = sparsestep.AdamW(model.parameters(), lr=0.1)
    norms = []
    for step in range(4):
        opt.zero_grad()
        ddp(net_batch(step, rank)).square().mean().backward()
        norms.append(float(sparsestep.clip_grad_norm_(model.parameters(), 0.5)))
        opt.step()
    kinds = {type(table.weight.grad).__name__ for table in model.tables.tables.values()}
    found = {name: param.detach().clone() for name, param in model.named_parameters()}
    return {**found, "norms": norms, "gradients": sorted(kinds)}


def ends(rank: int, world: int) -> Found:
    """The first rank has no data at all, the others as many batches as their number."""
    made, opt = table("rows")
    sizes = []
    for ids in lockstep([torch.tensor([0, rank])] * rank):
        opt.zero_grad()
        made(ids).sum().backward()
        opt.step()
        sizes.append(len(ids))
    return {"sizes": sizes, "after": made.weight.detach()}


def masked(rank: int, world: int, kind: str) -> Found:
    """Only some rows may move."""
    made = nn.Embedding(7, 2)
    plan = shard(made, plan=kind, reduce="sum")
    mask = plan.local("", torch.tensor([True, False] * 3 + [True]))
    opt = sparsestep.SGD([{"params": [made.weight], "mask": mask}], lr=1.0)
    before = made.weight.detach().clone()
    made(torch.arange(7)).sum().backward()
    opt.step()
    return {"moved": (before != made.weight).any(1).tolist()}


def in_chunks(rank: int, world: int) -> Found:
    """Messages of many pieces."""
    from sparsestep.distributed import wire

    whole, wire.CHUNK = wire.CHUNK, 24
    try:
        return loops(rank, world, "rows")
    finally:
        wire.CHUNK = whole


def scaled(rank: int, world: int, kind: str) -> Found:
    """The last rank's gradient is infinite in the second step: all ranks skip it."""
    made, opt = table(kind)
    other, _ = table("tables")
    opt.add_param_group({"params": [other.weight]})
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    taken = []
    for step in range(3):
        opt.zero_grad()
        factor = float("inf") if step == 1 and rank == world - 1 else 1.0
        rows, unused = made(torch.tensor([2])), other(torch.tensor([1]))
        loss = (rows * factor).sum() if rank else rows.sum() * factor + unused.sum()
        scaler.scale(loss).backward()
        before = made.weight.detach().clone()
        scaler.unscale_(opt)
        scaler.step(opt)
        scaler.update()
        taken.append((not torch.equal(before, made.weight), scaler.get_scale()))
    return {"taken": taken, "after": made.weight.detach()}


def behaviour(rank: int, world: int) -> Found:
    found: Found = {}
    for kind in KINDS:
        found["bad ids", kind] = bad_ids(rank, world, kind)
        found["left out", kind] = left_out(rank, world, kind)
        found["loops", kind] = loops(rank, world, kind)
        found["masked", kind] = masked(rank, world, kind)
        found["scaled", kind] = scaled(rank, world, kind)
    for work in (different_places, refusals, with_ddp, ends, in_chunks):
        with contextlib.suppress(ImportError):
            found[work.__name__] = work(rank, world)
        dist.barrier()
    return found
