"""If one rank fails, or differs from the others, all ranks raise and nothing changes on any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep._torch import group_timeout
from sparsestep.distributed import collectives, grads, lookup
from sparsestep.distributed.placement import ByRow
from sparsestep.optim.step import Step
from tests.distributed.runs import said
from tests.ranks import Rank, ranks

lockstep, shard = sparsestep.distributed.lockstep, sparsestep.distributed.shard

IDS = torch.tensor([[0, 1, 4], [6, 6, 2]])

# Where the last rank runs out of memory: an attribute of a module or class, and which call of it.
LOOKUP_FAULTS: dict[str, tuple[Any, str, int]] = {
    "requests": (lookup, "id_counts", 1),
    "pack ids": (lookup, "split_by_rank", 1),
    "read ids": (lookup, "concat", 1),
    "serve": (lookup, "serve_lookups", 1),
    "pack rows": (lookup, "split_by_rank", 3),  # after those of ids and lengths
}
STEP_FAULTS: dict[str, tuple[Any, str, int]] = {
    "collect": (grads, "collect_pending", 1),
    "pack": (grads, "split_by_rank", 1),
    "read": (grads, "_received_grads", 1),
    "assign": (grads, "_remove_placeholder", 1),
    "plan": (Step, "add_group", 1),
    "prepare": (Step, "prepare", 1),
    # Where messages do not fit the buffers that are allocated in advance:
    "allocate large": (collectives, "pack_bytes", 1),
    "pack large": (grads, "split_by_rank", 1),
}
STEPS = [(n, k) for n in STEP_FAULTS for k in ("rows", "copy") if k == "rows" or "ack" not in n]


@contextmanager
def failing(
    where: tuple[Any, str, int], *, fails: bool, error: type[BaseException]
) -> Iterator[None]:
    """Have one call of a function raise."""
    owner, name, nth = where
    real, calls = getattr(owner, name), []

    def fail(*arguments: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise error("no memory, says the test")
        return real(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        if fails:
            patch.setattr(owner, name, fail)
        yield
    assert (len(calls) >= nth) == fails, "the test replaces what is not called"


def model_of(kind: str) -> tuple[nn.EmbeddingBag, Any]:
    torch.manual_seed(0)
    table = nn.EmbeddingBag(7, 2, mode="sum")
    shard(table, plan=kind, reduce="sum", order="global")
    return table, sparsestep.Adam(table.parameters(), lr=0.5)


def snapshot(table: Any, opt: Any) -> list[Tensor]:
    state = opt.state.get(table.weight, {})
    return [table.weight.detach().clone(), *(state[name].clone() for name in sorted(state))]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def assert_all_raise(
    rank: Rank, where: Any, work: Callable[[], Any], error: type[BaseException] = MemoryError
) -> None:
    """The last rank has the error, the others say what happened there."""
    what = "ran out of memory" if error is MemoryError else "was interrupted"
    with failing(where, fails=rank.is_last, error=error):
        if rank.is_last:
            with pytest.raises(error):
                work()
        else:
            with pytest.raises(sparsestep.InputError, match=f"^rank {rank.world - 1}.*{what}"):
                work()


def trained(kind: str, fault: Callable[[Any, Any, Tensor], bool] | None = None) -> list[Tensor]:
    """Three steps; in the second something may fail, and is tried again."""
    table, opt = model_of(kind)
    for step in range(3):
        opt.zero_grad()
        ids = (IDS + step) % 7
        if fault is None or step != 1 or fault(table, opt, ids):
            table(ids).square().sum().backward()
        opt.step()
    return snapshot(table, opt)


@ranks(2)
@pytest.mark.parametrize("where", list(LOOKUP_FAULTS))
def test_memory_that_runs_out_in_a_lookup(rank: Rank, where: str):
    def fault(table: Any, opt: Any, ids: Tensor) -> bool:
        before = snapshot(table, opt)
        assert_all_raise(rank, LOOKUP_FAULTS[where], partial(table, ids))
        assert same(before, snapshot(table, opt))
        return True

    assert same(trained("rows", fault), trained("rows"))


@ranks(2)
@pytest.mark.parametrize(("where", "kind"), STEPS)
def test_memory_that_runs_out_in_a_step(rank: Rank, where: str, kind: str):
    """The step can be taken once there is memory, with the gradients that are still there."""
    if "large" in where:
        rank.monkeypatch.setattr(collectives, "_BUFFER_BYTES", 8)
        rank.monkeypatch.setattr(collectives, "_BUFFER_BYTES_PER_RANK", 8)

    def fault(table: Any, opt: Any, ids: Tensor) -> bool:
        table(ids).square().sum().backward()
        before = snapshot(table, opt)
        assert_all_raise(rank, STEP_FAULTS[where], opt.step)
        assert same(before, snapshot(table, opt))
        return False

    assert same(trained(kind, fault), trained(kind))


@ranks(2)
def test_an_interrupted_rank_keeps_the_others_from_stepping(rank: Rank):
    """Ctrl-C on one rank, in the middle of an exchange: the step is taken, or no rank takes it."""
    table, opt = model_of("rows")
    table(IDS).sum().backward()
    before = snapshot(table, opt)
    assert_all_raise(rank, (Step, "prepare", 1), opt.step, KeyboardInterrupt)
    assert same(before, snapshot(table, opt))


@ranks(2)
def test_memory_that_runs_out_while_ids_are_prefetched(rank: Rank):
    """The lookup says so on every rank."""
    table, opt = model_of("rows")
    real, failed = lookup._unpack_ids, []

    def read(*arguments: Any) -> Any:
        if threading.current_thread().name == "sparsestep-ids" and not failed:
            failed.append(1)
            raise MemoryError("no memory, says the test")
        return real(*arguments)

    if rank.is_last:
        rank.monkeypatch.setattr(lookup, "_unpack_ids", read)
    messages = []
    for batch in lockstep([IDS.clone() for _ in range(5)], prefetch=1):
        opt.zero_grad()
        work = lambda batch=batch: table(batch).sum().backward()  # noqa: E731
        messages.append(said(work, Exception))
        opt.step()
    assert [bool(message) for message in messages].count(True) == 1
    if not rank.is_last:
        assert "rank 1, which looks up the table, ran out of memory" in "".join(messages)
    assert len({tuple(map(bool, each)) for each in rank.gather(messages)}) == 1


@ranks(2)
@pytest.mark.parametrize("where", ["owners", "read", "look up"])
def test_memory_that_runs_out_in_a_vocabulary(rank: Rank, where: str):
    """It counts no id and gives no row away, on any rank."""
    table = nn.Embedding(8, 2)
    shard(table, plan="rows")
    opt = sparsestep.SGD(table.parameters(), lr=1.0)
    vocabulary = sparsestep.distributed.Vocabulary(table, opt, evict="lru")
    vocabulary(torch.arange(4) + 4 * rank.index)
    before, weight = vocabulary.as_dict(), table.weight.detach().clone()
    points: dict[str, tuple[Any, str, int]] = {
        "owners": (sparsestep.distributed.vocabulary, "hash_owner", 1),
        "read": (sparsestep.distributed.vocabulary, "concat", 1),
        "look up": (vocabulary.local, "assign_rows", 1),
    }
    assert_all_raise(rank, points[where], lambda: vocabulary(torch.arange(100, 120)))
    assert before == vocabulary.as_dict()
    assert torch.equal(weight, table.weight)
    vocabulary(torch.arange(4) + 4 * rank.index)


# Ranks that differ


class Differs(nn.Module):
    def __init__(self, rows: int = 7, dim: int = 2, dtype: Any = None, more: int = 0) -> None:
        super().__init__()
        self.user = nn.Embedding(rows, dim, dtype=dtype)
        self.item = nn.EmbeddingBag(9, 2, mode="sum")
        self.more = nn.ModuleList([nn.Embedding(5, 2) for _ in range(more)])


# Options of the last rank's model, those of shard(), and what all ranks say.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "rows": ({"rows": 8}, {}, "shape of 'user': 7 x 2 on rank 0, 8 x 2 on rank 1"),
    "dim": ({"dim": 3}, {}, "shape of 'user': 7 x 2 on rank 0, 7 x 3 on rank 1"),
    "dtype": (
        {"dtype": torch.float64},
        {},
        "dtype of 'user': torch.float32 on rank 0, torch.float64 on rank 1",
    ),
    "tables": (
        {"more": 1},
        {},
        "tables: 'user', 'item' on rank 0, 'user', 'item', 'more.0' on rank 1",
    ),
    "plan": ({}, {"plan": "copy"}, "plan of 'user': 'rows' on rank 0, 'copy' on rank 1"),
    "plan of one": (
        {},
        {"plan": {"user": "rows", "item": "tables"}},
        "plan of 'item': 'rows' on rank 0, 'tables'",
    ),
    "reduce": ({}, {"reduce": "sum"}, "reduce of 'user': mean on rank 0, sum on rank 1"),
    "order": ({}, {"order": "global"}, "order: fast on rank 0, global on rank 1"),
    "refused": ({}, {"plan": "row"}, ""),
}


@ranks(2)
@pytest.mark.parametrize("name", list(MODELS))
def test_ranks_with_different_tables(rank: Rank, name: str):
    model_options, options, expected = MODELS[name]
    model = Differs(**model_options) if rank.is_last else Differs()
    before = {n: (p, p.detach().clone()) for n, p in model.named_parameters()}
    options = {"plan": "rows", **(options if rank.is_last else {})}
    message = said(lambda: shard(model, **options))
    if name == "refused":
        expected = "Got 'row'. Use 'rows'." if rank.is_last else "rank 1 rejected its input"
    assert expected in message
    for key, param in model.named_parameters():
        assert param is before[key][0]
        assert torch.equal(param, before[key][1])
    shard(model if name == "refused" else Differs(), plan="rows")  # nothing was sharded


OPTIMIZERS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "lr": (
        lambda p: sparsestep.Adam(p, lr=0.2),
        "copy",
        "lr for the group of 'user': 0.1 on rank 0, 0.2 on rank 1",
    ),
    "lr with rows": (
        lambda p: sparsestep.Adam(p, lr=0.2),
        "rows",
        "lr for the group of 'user': 0.1 on rank 0, 0.2 on rank 1",
    ),
    "betas": (
        lambda p: sparsestep.Adam(p, lr=0.1, betas=(0.8, 0.999)),
        "copy",
        "betas for the group of 'user': (0.9, 0.999) on rank 0, (0.8, 0.999) on rank 1",
    ),
    "class": (
        lambda p: sparsestep.SGD(p, lr=0.1),
        "copy",
        "caller: Adam.step() on rank 0, SGD.step() on rank 1.",
    ),
    "semantics": (
        lambda p: sparsestep.Adam(p, lr=0.1, semantics="dense"),
        "copy",
        "semantics: masked on rank 0, dense on rank 1",
    ),
    "groups": (
        lambda p: sparsestep.Adam([{"params": [each]} for each in p], lr=0.1),
        "copy",
        "param groups: 'user', 'item' on rank 0, 'user'; 'item' on rank 1.",
    ),
}


@ranks(2)
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_ranks_with_different_optimizers(rank: Rank, name: str):
    make, kind, expected = OPTIMIZERS[name]
    model = Differs()
    shard(model, plan=kind)
    params = list(model.parameters())
    opt = make(params) if rank.is_last else sparsestep.Adam(params, lr=0.1)
    ids = torch.tensor([1, rank.index])
    (model.user(ids).sum() + model.item(ids[None]).sum()).backward()
    before = [p.detach().clone() for p in params]
    assert expected in said(opt.step)
    assert all(map(torch.equal, before, params))
    assert not opt.state
    sparsestep.Adam(params, lr=0.1).step()  # the same on all ranks
    assert not all(map(torch.equal, before, params))


@ranks(2)
def test_a_learning_rate_that_differs_later(rank: Rank):
    """From the second step on; a tensor counts as its value."""
    table, opt = model_of("copy")
    (group,) = opt.param_groups
    if rank.index == 0:
        group["lr"] = torch.tensor(0.5)
    messages = []
    for lr in (group["lr"], 0.25 + rank.index, 0.25):
        opt.zero_grad()
        table(IDS).sum().backward()
        group["lr"] = lr
        messages.append(said(opt.step))
    assert (messages[0], messages[2]) == ("", "")
    assert "lr for the table: 0.25 on rank 0, 1.25 on rank 1" in messages[1]
    assert same(*rank.gather(snapshot(table, opt)))


@ranks(2)
def test_a_rank_that_steps_where_another_clips(rank: Rank):
    table, opt = model_of("rows")
    table(IDS).sum().backward()
    clip = partial(sparsestep.clip_grad_norm_, [table.weight], 1.0)
    message = said(opt.step if rank.index else clip)
    assert "clip_grad_norm_ on rank 0, Adam.step() on rank 1" in message


@ranks(2)
def test_a_table_that_one_rank_has_frozen(rank: Rank):
    table, opt = model_of("rows")
    table.weight.requires_grad_(rank.index == 0)
    rows = table(IDS)
    if rank.index == 0:
        rows.sum().backward()
    assert "frozen tables: none on rank 0, '' on rank 1" in said(opt.step)


# A rank that stops taking part


def looks_up() -> Callable[[], object]:
    table = nn.Embedding(7, 2)
    shard(table, plan="rows")
    table(IDS)
    return lambda: table(IDS)


def steps() -> Callable[[], object]:
    from torch.distributed.device_mesh import DeviceMesh

    table = nn.Embedding(7, 2)
    group = torch.distributed.new_group(timeout=timedelta(seconds=3))
    shard(table, DeviceMesh.from_group(group, "cpu"), plan="rows")
    opt = sparsestep.Adam(table.parameters())
    table(IDS).sum().backward()
    return lambda: (table, opt.step())  # the table knows the other rank


def prefetches() -> Callable[[], object]:
    from sparsestep.distributed.lockstep import _active_prefetchers

    table = nn.Embedding(7, 2)
    shard(table, plan="rows")
    batches = [IDS.clone() for _ in range(9)]
    loop = iter(lockstep(batches, prefetch=1))
    for _ in range(2):
        table(next(loop))
    # The loop itself uses the default group; only its thread uses one of ours.
    prefetcher = _active_prefetchers[-1]
    task = prefetcher.submit(batches[0]) if torch.distributed.get_rank() == 0 else None

    def wait() -> None:
        assert task is not None
        task.done.wait()
        if task.error is not None:
            raise task.error

    return wait


@ranks(2, timeout=100.0)  # a pool of its own: groups that have timed out cannot be used
def test_groups_wait_as_long_as_the_users(rank: Rank):
    from torch.distributed.distributed_c10d import _set_pg_timeout

    from sparsestep.distributed.collectives import new_group_like

    _set_pg_timeout(timedelta(seconds=3))
    part = torch.distributed.new_group([0, 1], timeout=timedelta(seconds=7))
    groups = [new_group_like(None), new_group_like(None, "gloo"), new_group_like(part)]
    assert [group_timeout(each) for each in groups] == [timedelta(seconds=n) for n in (3, 3, 7)]
    store = torch.distributed.FileStore(str(rank.folder / "store"), 2)
    for prepare in (looks_up, steps, prefetches):
        action = prepare()
        if rank.index:  # it is busy with something else
            store.wait([prepare.__name__], timedelta(seconds=100))
        else:
            with pytest.raises(RuntimeError, match=r"(?i)timed out"):
                action()
            store.set(prepare.__name__, "done")


# Tables in files


def collection(weight: nn.Parameter) -> nn.Module:
    made = sparsestep.nn.EmbeddingBagCollection({"user": tuple(weight.shape), "item": (5, 2)})
    made.tables["user"].weight = weight
    return made


def part(weight: nn.Parameter) -> nn.Module:
    return nn.EmbeddingBag(90, 2, _weight=nn.Parameter(weight.detach()[10:]))


def with_vocabulary(weight: nn.Parameter) -> nn.Module:
    table = sparsestep.nn.Embedding(*weight.shape, _weight=weight)
    vocabulary = sparsestep.nn.Vocabulary(len(weight))
    vocabulary.attach(table)
    return nn.ModuleDict({"table": table, "ids": vocabulary})


@pytest.mark.parametrize("make", [part, collection, with_vocabulary])
def test_a_table_in_a_file_is_not_sharded(tmp_path: Path, make: Any):
    model = make(nn.Parameter(sparsestep.storage.mapped(tmp_path / "items", (100, 2))))
    kinds = [type(each) for each in model.modules()]
    params = list(model.parameters())
    for plan in ("auto", "rows", "tables", "copy"):
        with pytest.raises(sparsestep.InputError, match="must be in memory") as raised:
            shard(model, plan=plan)
        assert "weight.detach().clone()" in str(raised.value)
    assert [type(each) for each in model.modules()] == kinds
    assert all(ours is theirs for ours, theirs in zip(params, model.parameters(), strict=True))


# Wrong arguments


def test_a_plan_for_bags_of_one_length():
    tables = [ByRow(name, 1000, 16, 4) for name in "ab"]
    plan = sparsestep.distributed.Plan(tables, world_size=2)
    by_name = plan.for_batch(512, {"a": 20, "b": 20})
    assert str(plan.for_batch(512, 20)) == str(by_name)
    assert by_name.bytes_sent_by(0) > plan.for_batch(512).bytes_sent_by(0)


HALF = 2.5
WRONG = [None, -1, HALF, float("nan"), "x", [], {3: 4}, torch.ones(2), 10**30, True]


def test_what_a_plan_refuses():
    for wrong in WRONG:
        check_that_a_plan_refuses(wrong)


def check_that_a_plan_refuses(wrong: Any) -> None:
    plan = shard(nn.Embedding(5, 2), plan="rows")
    placement = plan.placements[0]
    calls: list[Callable[[], Any]] = [
        lambda: plan.for_batch(wrong),
        lambda: plan.for_batch(512, {"": wrong} if wrong is not HALF else -HALF),
        lambda: plan.bytes_on(wrong),
        lambda: plan.bytes_sent_by(wrong),
        lambda: placement.rows_on(0, wrong),
        lambda: sparsestep.distributed.Plan([placement], wrong),
        lambda: ByRow("a", wrong, 4, 4),
        lambda: plan.local("", wrong),
        lambda: plan[wrong],
    ]
    for call in calls:
        with pytest.raises(sparsestep.InputError):
            call()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"plan": "row"}, "or a dict of these by table. Got 'row'. Use 'rows'."),
        ({"plan": {"": "row"}}, "Got 'row' for ''. Use 'rows'."),
        ({"plan": None}, "Got a NoneType."),
        ({"plan": ["rows"]}, "Got a list."),
        ({"plan": {"": ["rows"]}}, "Got ['rows'] for ''."),
        ({"plan": {3: "rows"}}, "a table's name must be one of ''. Got 3."),
        ({"reduce": None}, "Got None."),
        ({"reduce": {"x": "sum"}}, "Got a table 'x'. The tables are ''."),
        ({"order": ["fast"]}, "order must be one of fast, global"),
    ],
)
def test_what_shard_names(change: dict[str, Any], message: str):
    with pytest.raises(sparsestep.InputError) as raised:
        shard(nn.Embedding(5, 2), **change)
    assert message in str(raised.value)


def test_what_lockstep_refuses():
    with pytest.raises(sparsestep.InputError, match="the loader must be iterable"):
        lockstep(None)  # type: ignore[arg-type]
    for wrong in (2, torch.ones(2)):
        with pytest.raises(sparsestep.InputError, match="prefetch must be 0 or 1"):
            lockstep([], wrong)  # type: ignore[arg-type]
