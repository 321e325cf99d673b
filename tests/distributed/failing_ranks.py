"""Two ranks of which one fails, or differs from the other: both raise, and both go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed import answers, arrivals, lookups, sending, shard, wire
from sparsestep.optimizer.plan import Plan
from tests.distributed import pair

IDS = torch.tensor([[0, 1, 4], [6, 6, 2]])

# Where the last rank runs out of memory: an attribute of a module or class.
LOOKUP_FAULTS: dict[str, tuple[Any, str]] = {
    "requests": (lookups, "numbers_of"),
    "pack ids": (sending, "shares"),
    "read ids": (sending, "joined"),
    "answer": (answers, "look_up"),
    "pack rows": (lookups, "shares"),
}
STEP_FAULTS: dict[str, tuple[Any, str]] = {
    "collect": (arrivals, "_collected"),
    "pack": (arrivals, "shares"),
    "read": (arrivals, "_parts"),
    "give": (arrivals, "_settle"),
    "plan": (Plan, "add_group"),
    "prepare": (Plan, "prepare"),
}
# The same where messages do not fit the buffers that are allocated in advance.
LARGE_FAULTS = {"allocate": (wire, "_packed"), "large pack": (arrivals, "shares")}


def outcome(work: Callable[[], Any]) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


@contextmanager
def failing(where: tuple[Any, str], *, fails: bool, error: type[BaseException]) -> Iterator[None]:
    """Have one function raise the first time that it is called."""
    owner, name = where
    real, calls = getattr(owner, name), []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            raise error("no memory, says the test")
        return real(*arguments, **options)

    if fails:
        setattr(owner, name, fail)
    try:
        yield
    finally:
        setattr(owner, name, real)
    assert bool(calls) == fails, "the test replaces what is not called"


def model_of(kind: str) -> tuple[nn.EmbeddingBag, Any]:
    torch.manual_seed(0)
    made = nn.EmbeddingBag(7, 2, mode="sum")
    shard(made, plan=kind, reduce="sum", order="global")
    return made, sparsestep.Adam(made.parameters(), lr=0.5)


def snapshot(table: nn.EmbeddingBag, opt: Any) -> list[Tensor]:
    state = opt.state.get(table.weight, {})
    return [table.weight.detach().clone(), *(state[name].clone() for name in sorted(state))]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def trained(kind: str, where: Any, *, fails: bool, error: Any = MemoryError) -> pair.Results:
    """Three steps; in the second something fails, and is tried again."""
    table, opt = model_of(kind)
    found: pair.Results = {"said": "", "unchanged": True}
    for step in range(3):
        opt.zero_grad()
        ids = (IDS + step) % 7
        if where is not None and step == 1:
            is_lookup = where in LOOKUP_FAULTS.values()
            if not is_lookup:
                table(ids).square().sum().backward()
            before = snapshot(table, opt)
            with failing(where, fails=fails, error=error):
                found["said"] = outcome(partial(table, ids) if is_lookup else opt.step)
            found["unchanged"] = same(before, snapshot(table, opt))
            if not is_lookup:
                opt.step()  # with the gradients that are still there
                continue
        table(ids).square().sum().backward()
        opt.step()
    found["after"] = snapshot(table, opt)
    return found


def interrupted(rank: int, world: int) -> pair.Results:
    """Ctrl-C on one rank, in the middle of an exchange: the step is taken, or no rank takes it."""
    table, opt = model_of("rows")
    table(IDS).sum().backward()
    before = snapshot(table, opt)
    said = ""
    try:
        where = (Plan, "prepare")
        with failing(where, fails=rank == world - 1, error=KeyboardInterrupt):
            opt.step()
    except (KeyboardInterrupt, sparsestep.InputError) as raised:
        said = f"{type(raised).__name__}: {raised}"
    return {"said": said, "unchanged": same(before, snapshot(table, opt))}


# Ranks that differ


class Differs(nn.Module):
    def __init__(self, rows: int = 7, dim: int = 2, dtype: Any = None, more: int = 0) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, dim, dtype=dtype)
        self.item = nn.EmbeddingBag(9, 2, mode="sum")
        self.more = nn.ModuleList([nn.Embedding(5, 2) for _ in range(more)])


MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "rows": ({"rows": 8}, {}),
    "dim": ({"dim": 3}, {}),
    "dtype": ({"dtype": torch.float64}, {}),
    "tables": ({"more": 1}, {}),
    "plan": ({}, {"plan": "copy"}),
    "plan of one": ({}, {"plan": {"user": "rows", "item": "tables"}}),
    "reduce": ({}, {"reduce": "sum"}),
    "order": ({}, {"order": "global"}),
    "refused": ({}, {"plan": "row"}),
}


def different_models(rank: int, world: int, name: str) -> pair.Results:
    model_options, options = MODELS[name] if rank == world - 1 else ({}, {})
    torch.manual_seed(0)
    model = Differs(**model_options)
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    said = outcome(lambda: shard(model, **{"plan": "rows", **options}))
    return {
        "said": said,
        "unchanged": all(
            p is before[n][0] and torch.equal(p, before[n][1]) for n, p in model.named_parameters()
        ),
        "types": [type(each).__mro__[0].__name__ for each in model.modules()],
        "sharded": any(hasattr(each, "_exchange") for each in model.modules()),
    }


OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "lr": lambda p: sparsestep.Adam(p, lr=0.2),
    "betas": lambda p: sparsestep.Adam(p, lr=0.1, betas=(0.8, 0.999)),
    "class": lambda p: sparsestep.SGD(p, lr=0.1),
    "semantics": lambda p: sparsestep.Adam(p, lr=0.1, semantics="dense"),
    "groups": lambda p: sparsestep.Adam([{"params": [each]} for each in p], lr=0.1),
}


def different_optimizers(rank: int, world: int, name: str, kind: str) -> pair.Results:
    torch.manual_seed(0)
    model = Differs()
    shard(model, plan=kind)
    params = list(model.parameters())
    opt = OPTIMIZERS[name](params) if rank == world - 1 else sparsestep.Adam(params, lr=0.1)
    loss = model.user(torch.tensor([1, rank])).sum() + model.item(torch.tensor([[2, rank]])).sum()
    loss.backward()
    before = [p.detach().clone() for p in params]
    said = outcome(opt.step)
    unchanged = all(map(torch.equal, before, params)) and not opt.state
    sparsestep.Adam(params, lr=0.1).step()  # what is the same everywhere works
    moved = not all(map(torch.equal, before, params))
    return {"said": said, "unchanged": unchanged, "moved": moved}


def later(rank: int, world: int) -> pair.Results:
    """A learning rate that differs from the second step on; a tensor counts as its value."""
    table, opt = model_of("copy")
    if rank == 0:
        opt.param_groups[0]["lr"] = torch.tensor(0.5)
    said = []
    for step in range(3):
        opt.zero_grad()
        table(IDS).sum().backward()
        if step == 1:
            opt.param_groups[0]["lr"] = 0.25 + rank
        elif step == 2:
            opt.param_groups[0]["lr"] = 0.25
        said.append(outcome(opt.step))
    return {"said": said, "after": snapshot(table, opt)}


def clipped(rank: int, world: int) -> pair.Results:
    """A rank that steps where the other one clips."""
    table, opt = model_of("rows")
    table(IDS).sum().backward()
    step_or_clip = opt.step if rank else lambda: sparsestep.clip_grad_norm_([table.weight], 1.0)
    return {"said": outcome(step_or_clip)}


def frozen(rank: int, world: int) -> pair.Results:
    """A table that only one rank has frozen since."""
    table, opt = model_of("rows")
    table.weight.requires_grad_(rank == 0)
    rows = table(IDS)
    if rank == 0:
        rows.sum().backward()
    return {"said": outcome(opt.step)}


# Vocabularies


def vocabularies(rank: int, world: int, where: str) -> pair.Results:
    """A lookup that fails on one rank counts no id and gives no row away, on any."""
    torch.manual_seed(0)
    table = nn.Embedding(8, 2)
    shard(table, plan="rows")
    opt = sparsestep.SGD(table.parameters(), lr=1.0)
    vocabulary = sparsestep.distributed.Vocabulary(table, opt, evict="lru")
    vocabulary(torch.arange(4) + 4 * rank)
    before, weight = vocabulary.as_dict(), table.weight.detach().clone()
    points: dict[str, tuple[Any, str]] = {
        "owners": (sparsestep.distributed.vocabulary, "owner_of"),
        "read": (sparsestep.distributed.vocabulary, "joined"),
        "look up": (vocabulary.local, "_look_up"),
    }
    with failing(points[where], fails=rank == world - 1, error=MemoryError):
        said = outcome(lambda: vocabulary(torch.arange(100, 120)))
    unchanged = before == vocabulary.as_dict() and torch.equal(weight, table.weight)
    rows = vocabulary(torch.arange(4) + 4 * rank)
    return {"said": said, "unchanged": unchanged, "rows": rows}


def _back(table: nn.EmbeddingBag, ids: Tensor) -> None:
    table(ids).sum().backward()


def prefetched(rank: int, world: int) -> pair.Results:
    """Memory runs out while ids are sent in advance: the lookup says so on every rank."""
    table, opt = model_of("rows")
    real, failed = sending._read, []

    def read(*arguments: Any) -> Any:
        if threading.current_thread().name == "sparsestep-ids" and not failed:
            failed.append(1)
            raise MemoryError("no memory, says the test")
        return real(*arguments)

    if rank == world - 1:
        sending._read = read
    said = []
    try:
        batches = [IDS.clone() for _ in range(5)]
        for batch in sparsestep.distributed.lockstep(batches, prefetch=1):
            opt.zero_grad()
            said.append(outcome(partial(_back, table, batch)))
            opt.step()
    finally:
        sending._read = real
    return {"said": said}


def work(rank: int, meeting: str) -> pair.Results:
    world = pair.world_size()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    last = rank == world - 1
    found: pair.Results = {}
    for kind in ("rows", "tables", "copy"):
        found["without", kind] = trained(kind, None, fails=False)
    for name, where in LOOKUP_FAULTS.items():
        found["lookup", name] = trained("rows", where, fails=last)
    for name, where in STEP_FAULTS.items():
        for kind in ("rows", "copy") if name != "pack" else ("rows",):
            found["step", name, kind] = trained(kind, where, fails=last)
    buffers = wire._BUFFER, wire._BUFFER_PER_RANK
    wire._BUFFER = wire._BUFFER_PER_RANK = 8
    for name, where in LARGE_FAULTS.items():
        found["step", name, "rows"] = trained("rows", where, fails=last)
    wire._BUFFER, wire._BUFFER_PER_RANK = buffers
    found["interrupted"] = interrupted(rank, world)
    for name in MODELS:
        found["model", name] = different_models(rank, world, name)
    for name in OPTIMIZERS:
        found["optimizer", name] = different_optimizers(rank, world, name, "copy")
    found["optimizer", "rows"] = different_optimizers(rank, world, "lr", "rows")
    found["later"] = later(rank, world)
    found["clipped"] = clipped(rank, world)
    found["frozen"] = frozen(rank, world)
    found["prefetched"] = prefetched(rank, world)
    for name in ("owners", "read", "look up"):
        found["vocabulary", name] = vocabularies(rank, world, name)
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    pair.main(work)
