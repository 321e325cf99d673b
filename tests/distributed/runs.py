"""Models that ranks train, ways to train them, and the one process that they are compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from tests.ranks import Rank
from tests.table import EVERY, Variant, sm3_by_rows

ROWS = {"user": 11, "item": 13, "tags": 9, "grams": 7}  # which no number of ranks divides
DIM, STEPS, BATCH = 4, 4, 6
KINDS = ("tables", "rows", "copy")
Results = dict[str, Any]

each_kind = pytest.mark.parametrize("kind", KINDS)


class Tables(nn.Module):
    """One id each, bags that are summed, bags with padding whose mean is taken, and n-grams."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.user = nn.Embedding(ROWS["user"], DIM, dtype=dtype)
        self.item = nn.EmbeddingBag(ROWS["item"], DIM, mode="sum", dtype=dtype)
        self.tags = nn.EmbeddingBag(ROWS["tags"], DIM, mode="mean", padding_idx=1, dtype=dtype)
        self.grams = sparsestep.nn.NgramEmbedding(ROWS["grams"], DIM).to(dtype)

    def forward(self, batch: Batch) -> list[Tensor]:
        bags = [self.user(batch.user), self.item(*batch.item), self.tags(batch.tags)]
        return [*bags, self.grams(batch.tags)]


@dataclass
class Batch:
    user: Tensor
    item: tuple[Tensor, Tensor]  # ids and offsets
    tags: Tensor
    grads: list[Tensor] = field(default_factory=list)  # of the outputs


def batch_of(step: int, rank: int, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    draw = torch.Generator().manual_seed(1000 * step + rank)

    def ids(rows: int, *shape: int) -> Tensor:
        return torch.randint(0, rows, shape, generator=draw)

    lengths = ids(4, size)
    offsets = torch.zeros(size, dtype=torch.int64)
    if size:
        offsets[1:] = lengths.cumsum(0)[:-1]
    shapes = [(DIM,), (DIM,), (DIM,), (3, DIM)]
    grads = [torch.randn(size, *shape, generator=draw).to(dtype) for shape in shapes]
    items = ids(ROWS["item"], int(lengths.sum()))
    return Batch(ids(ROWS["user"], size), (items, offsets), ids(ROWS["tags"], size, 3), grads)


def joined(batches: list[Batch]) -> Batch:
    """All batches one after the other."""
    before, offsets = 0, []
    for batch in batches:
        offsets.append(batch.item[1] + before)
        before += len(batch.item[0])
    item = (torch.cat([b.item[0] for b in batches]), torch.cat(offsets))
    grads = [torch.cat(each) for each in zip(*(b.grads for b in batches), strict=True)]
    user, tags = torch.cat([b.user for b in batches]), torch.cat([b.tags for b in batches])
    return Batch(user, item, tags, grads)


def sizes_of(step: int, world: int) -> list[int]:
    """Uneven batches, and a rank that has nothing in one step."""
    sizes = [BATCH + rank for rank in range(world)]
    if step == 2:
        sizes[-1] = 0
    return sizes


@dataclass(frozen=True)
class Case:
    """A way to train."""

    kind: str = "rows"
    order: str = "global"
    reduce: str = "sum"
    semantics: str = "masked"
    make: Callable[..., RuleOptimizer] = sparsestep.Adam
    options: tuple[tuple[str, Any], ...] = ()
    dtype: torch.dtype = torch.float32
    clip: float | None = None
    wire: str | None = None

    def optimizer(self, model: nn.Module) -> RuleOptimizer:
        params = list(model.parameters())
        opt = self.make(params, lr=0.1, semantics=self.semantics, **dict(self.options))
        if self.semantics == "dense":
            opt.track(model)
        return opt

    def step(self, model: Tables, opt: RuleOptimizer, batch: Batch, share: int = 1) -> Any:
        opt.zero_grad()
        grads, outputs = [grad / share for grad in batch.grads], model(batch)
        if self.wire is not None:  # a loss that depends on the rows that came
            grads = [grad * rows.detach() for grad, rows in zip(grads, outputs, strict=True)]
        torch.autograd.backward(outputs, grads)
        norm = None
        if self.clip is not None:
            norm = sparsestep.clip_grad_norm_(model.parameters(), self.clip)
        opt.step()
        return norm


def in_one_process(case: Case, world: int) -> Results:
    """The tables and their state after training on all ranks' batches."""
    model = sparsestep.nn.fuse(Tables(case.dtype))
    opt = case.optimizer(model)
    norms = []
    for step in range(STEPS):
        batches = [
            batch_of(step, r, size, case.dtype) for r, size in enumerate(sizes_of(step, world))
        ]
        share = world if case.reduce == "mean" else 1
        norms.append(case.step(model, opt, joined(batches), share))
    return collected(model, opt, norms)


def trained(case: Case, rank: int, world: int, **options: Any) -> Results:
    """The shards of the tables and of their state that this rank has after training."""
    model = Tables(case.dtype)
    options |= {"plan": case.kind, "reduce": case.reduce, "order": case.order, "wire": case.wire}
    sparsestep.distributed.shard(model, **options)
    opt = case.optimizer(model)
    norms = []
    for step in range(STEPS):
        batch = batch_of(step, rank, sizes_of(step, world)[rank], case.dtype)
        norms.append(case.step(model, opt, batch))
    return collected(model, opt, norms)


def collected(model: Tables, opt: RuleOptimizer, norms: list[Any]) -> Results:
    opt.catch_up()
    found: Results = {"norms": norms}
    for name in ROWS:
        weight = getattr(model, name).weight
        found[name] = weight.detach().clone()
        for key, value in opt.state.get(weight, {}).items():
            found[f"{name}.{key}"] = value.clone() if isinstance(value, Tensor) else value
    return found


def whole(rank: Rank, local: Tensor, kind: str = "rows", rows: int = 7) -> Tensor:
    """All rows of a table, from the shards of all ranks."""
    parts = rank.gather(local.detach())
    if kind == "rows":
        return torch.stack(parts, 1).flatten(0, 1)[:rows]
    return next(part for part in parts if len(part))


def initial_rows() -> Tensor:
    """The table of :func:`sharded` before the first step."""
    torch.manual_seed(0)
    return nn.Embedding(7, 2).weight.detach()


def sharded(kind: str, **options: Any) -> tuple[nn.Embedding, RuleOptimizer]:
    torch.manual_seed(0)
    table = nn.Embedding(7, 2)
    sparsestep.distributed.shard(table, plan=kind, reduce="sum", **options)
    return table, sparsestep.SGD(table.parameters(), lr=1.0)


def said(work: Callable[[], Any], errors: Any = sparsestep.InputError) -> str:
    """The message of the error that a call raises, if any."""
    try:
        work()
    except errors as error:
        return str(error)
    return ""


def put_together(parts: list[Results], kind: str) -> Results:
    """The whole of what each rank has a part of."""
    whole: Results = {}
    for key in dict.fromkeys(key for part in parts for key in part):
        name, _, state = key.partition(".")
        # A rank that has no row of a whole table counts nothing for it.
        having = [part for part in parts if key == "norms" or len(part[name])]
        values = [part[key] for part in having if key in part]
        if key == "norms" or state == "step" or not isinstance(values[0], Tensor):
            assert all(str(value) == str(values[0]) for value in values), f"{key} is not agreed"
            whole[key] = values[0]
        elif kind == "copy":
            assert all(torch.equal(value, values[0]) for value in values), f"{key} differs"
            whole[key] = values[0]
        elif kind == "tables":
            (whole[key],) = values
        else:
            whole[key] = torch.stack(values, 1).flatten(0, 1)[: ROWS[name]]
    return whole


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


def has_dense_form(variant: Variant) -> bool:
    try:
        variant([torch.zeros(1, 1)], semantics="dense")
    except sparsestep.InputError:
        return False
    return True


ROUNDED = (
    ("stochastic_rounding", True),
    ("rounding_seed", 7),
    ("state_dtype", torch.bfloat16),
)
CODED = (("state_dtype", torch.int8), ("rounding_seed", 7))
QUICK = {
    **{f"{kind}-global": Case(kind) for kind in KINDS},
    **{f"{kind}-fast": Case(kind, order="fast", reduce="mean") for kind in KINDS},
    "dense": Case("rows", semantics="dense", make=sparsestep.AdamW),
    "by row": Case("rows", make=sparsestep.RowwiseAdagrad),
    "clipped": Case("tables", clip=0.5),
    **{f"user rule-{kind}": Case(kind, make=sm3_by_rows) for kind in KINDS},
    **{
        f"{wire}-{kind}": Case(kind, order="fast", make=sparsestep.SGD, wire=wire)
        for wire in ("bf16", "int8")
        for kind in KINDS
    },
}
LOW_PRECISION = {
    "half-rows": Case("rows", order="fast", dtype=torch.bfloat16),
    **{
        f"rounded-{kind}-{rule.__name__}": Case(
            kind, make=rule, options=ROUNDED, dtype=torch.bfloat16
        )
        for kind, rule in (
            ("tables", sparsestep.RowwiseAdagrad),
            ("rows", sparsestep.Adam),
            ("rows", sm3_by_rows),
            ("copy", sparsestep.Adam),
        )
    },
    "int8-rows": Case("rows", make=sparsestep.Adam, options=CODED),
}

# Every rule with every kind, under both semantics where the rule has both.
SWEEP = {
    f"{variant}-{kind}-{semantics}": Case(
        kind,
        semantics=semantics,
        make=variant.cls,
        options=tuple(variant.options.items()),
    )
    for variant in EVERY
    for kind in KINDS
    for semantics in ("masked", "dense")
    if semantics == "masked" or has_dense_form(variant)
}
