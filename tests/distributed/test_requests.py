"""A sharded module takes every call that torch's module takes."""

from __future__ import annotations

import itertools
import struct
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed.collectives import Messages, pack, unpack
from sparsestep.nn import lookup
from tests.distributed.runs import KINDS, each_kind, said, whole
from tests.ranks import Rank, ranks

WORLD, ROWS, DIM = 3, 10, 4
shard = sparsestep.distributed.shard


def ids(rank: int, *shape: int) -> Tensor:
    return torch.randint(0, ROWS, shape, generator=torch.Generator().manual_seed(rank))


def weights(rank: int, *shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(rank))


OFFSETS = [[0, 2, 2], [0, 0, 5], [0, 1, 3]]
CALLS: dict[str, tuple[Any, Any]] = {
    "bags": (lambda r: (ids(r, 3, 4),), {}),
    "bags of one": (lambda r: (ids(r, 3, 1),), {}),
    "int32": (lambda r: (ids(r, 3, 4).int(),), {}),
    "offsets": (lambda r: (ids(r, 6), torch.tensor(OFFSETS[r])), {}),
    "some of one": (lambda r: (ids(r, 3, 4 if r else 1),), {}),
    "empty bags": (lambda r: (ids(r, 3, 0),), {}),
    "last offset": (
        lambda r: (ids(r, 6), torch.tensor([*OFFSETS[r], 6])),
        {"include_last_offset": True},
    ),
    "mean": (lambda r: (ids(r, 3, 4),), {"mode": "mean"}),
    "mean with padding": (lambda r: (ids(r, 3, 4),), {"mode": "mean", "padding_idx": 3}),
    "factors": (lambda r: (ids(r, 3, 4), None, weights(r, 3, 4)), {}),
    "some factors": (lambda r: (ids(r, 3, 2), None, weights(r, 3, 2) if r else None), {}),
    "by frequency": (lambda r: (ids(r, 3, 4),), {"scale_grad_by_freq": True}),
    "one by frequency": (lambda r: (ids(r, 3, 1),), {"scale_grad_by_freq": True}),
    "max_norm": (lambda r: (ids(r, 3, 4),), {"max_norm": 0.5}),
    "max": (lambda r: (ids(r, 3, 4),), {"mode": "max"}),
    "half": (lambda r: (ids(r, 3, 4),), {"dtype": torch.bfloat16}),
    # Long bags go to all owners of rows, also to those that have no row of them.
    "long": (lambda r: (ids(r, 3, 16),), {}),
    "long with offsets": (
        lambda r: (ids(r, 60), torch.tensor([[0, 50, 50], [0, 0, 9]][r % 2])),
        {},
    ),
    "long mean": (lambda r: (ids(r, 3, 16),), {"mode": "mean", "padding_idx": 3}),
    "long factors": (lambda r: (ids(r, 3, 16), None, weights(r, 3, 16)), {}),
    "long half": (lambda r: (ids(r, 3, 16),), {"dtype": torch.bfloat16}),
    "long of one id": (lambda r: (torch.full((3, 16), r),), {}),
    "some long": (lambda r: (ids(r, 3, 16 if r else 2),), {}),
}


# A copy's max_norm and frequencies are those of each rank; rows have no max over ranks.
REFUSED = [
    ("rows", "max"),
    ("copy", "max_norm"),
    ("copy", "by frequency"),
    ("copy", "one by frequency"),
]


def seeded(make: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    return make(ROWS, DIM, **options)


def check(rank: Rank, order: str, make: Any, calls: dict[str, Any], options: Any) -> None:
    """All ranks look up in tables of each kind, and one process looks up the inputs of all."""
    model, plan, used = nn.ModuleDict(), {}, []
    for name, kind in itertools.product(calls, KINDS):
        if (kind, name) not in REFUSED:
            plan[f"{name}-{kind}"] = kind
            used.append((name, kind))
            model[f"{name}-{kind}"] = seeded(make, **options[name])
    shard(model, plan=plan, reduce="sum", order=order)
    losses, checks = [], []
    for name, kind in used:
        inputs, grads, join = calls[name]
        table = model[f"{name}-{kind}"]
        output = table(*inputs[rank.index])
        losses.append((output * grads[rank.index]).sum())
        plain = seeded(getattr(sparsestep.nn, make.__name__), **options[name])
        found = plain(*join)
        found.backward(torch.cat([grad.reshape(-1, DIM) for grad in grads]))
        sparsestep.SGD(plain.parameters(), lr=0.5).step()
        expected = found.split([grad.numel() // DIM for grad in grads])[rank.index]
        tolerance = 3e-2 if output.dtype is torch.bfloat16 else 1e-6
        close = {"rtol": tolerance, "atol": tolerance, "msg": lambda m, n=name: f"{n}: {m}"}
        torch.testing.assert_close(output, expected.view_as(output), **close)
        checks.append((table, kind, plain.weight.detach(), close))
    sum(losses).backward()
    sparsestep.SGD(model.parameters(), lr=0.5).step()
    for table, kind, weight, close in checks:
        torch.testing.assert_close(whole(rank, table.weight, kind, ROWS), weight, **close)


@ranks(WORLD)
@pytest.mark.parametrize(("order", "by_core"), [("fast", True), ("global", True), ("fast", False)])
def test_bags(rank: Rank, order: str, by_core: bool):
    """In one process, the bags of all ranks come one after the other."""
    if not by_core:
        rank.monkeypatch.setattr(lookup, "look_up", lambda requests: None)
    calls, made = {}, {}
    for name, (arguments, options) in CALLS.items():
        made[name] = options = {"mode": "sum", **options}
        dtype = options.get("dtype", torch.float32)
        inputs = [arguments(each) for each in range(WORLD)]
        rows, offsets, factors, begin = [], [], [], 0
        for each in inputs:
            mine, starts, scale = (*each, None, None)[:3]
            if mine.dim() == 2:
                starts = torch.arange(3) * mine.shape[1]
            scale = torch.ones(mine.numel(), dtype=dtype) if scale is None else scale
            rows.append(mine.flatten().long())
            offsets.append(starts[:3] + begin)
            factors.append(scale.flatten())
            begin += mine.numel()
        if options.get("include_last_offset"):
            offsets.append(torch.tensor([begin]))
        scales = torch.cat(factors) if options["mode"] == "sum" else None
        grads = [weights(10 + each, 3, DIM).to(dtype) for each in range(WORLD)]
        calls[name] = inputs, grads, (torch.cat(rows), torch.cat(offsets), scales)
    check(rank, order, nn.EmbeddingBag, calls, made)


SHAPES = {"a": (7, 3), "one row": (1, 2), "no columns": (5, 0), "wide": (ROWS, DIM)}


def one_id_each(step: int, rank: int) -> dict[str, Tensor]:
    """Bags of one id as they come: int32, apart in memory, more in one step, none in another."""
    size = (4, 4, 9, 0, 4)[step] if rank else 4
    draw = torch.Generator().manual_seed(10 * step + rank)
    whole = torch.randint(0, 10, (size, len(SHAPES)), generator=draw)
    found = {name: whole[:, [n]] % SHAPES[name][0] for n, name in enumerate(SHAPES)}
    found["wide"] = whole[:, 3:]
    return {name: each.int() if name == "a" else each for name, each in found.items()}


@ranks(WORLD)
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("kind", ["tables", "rows"])
def test_collections_with_one_id_per_bag(rank: Rank, kind: str, prefetch: int):
    """The core requests all ids at once. All batches in one process give the same bits."""

    def train(world: int, batches: Any, join: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = sparsestep.nn.EmbeddingBagCollection(SHAPES, mode="sum")
        model.tables["wide"].to(torch.float64)
        if not join:
            shard(model, plan=kind, reduce="sum")
        opt = sparsestep.SGD(model.parameters(), lr=0.5)
        for step, ids in enumerate(batches):
            opt.zero_grad()
            outputs = [model(ids).values()] if not join else [model(each).values() for each in ids]
            # Small whole numbers: sums are exact in any order.
            loss = sum((1 + step) * rows.sum() for each in outputs for rows in each)
            assert isinstance(loss, Tensor)
            loss.backward()
            opt.step()
        return [table.weight.detach() for table in model.tables.values()]

    steps = [{n: t.clone() for n, t in one_id_each(k, rank.index).items()} for k in range(5)]
    if not prefetch:
        steps = [one_id_each(k, rank.index) for k in range(5)]
    mine = train(WORLD, sparsestep.distributed.lockstep(steps, prefetch), join=False)
    whole_batches = [[one_id_each(k, r) for r in range(WORLD)] for k in range(5)]
    for name, local, expected in zip(SHAPES, mine, train(1, whole_batches, join=True), strict=True):
        found = whole(rank, local, kind, SHAPES[name][0])
        assert torch.equal(found, expected), name


@ranks(WORLD)
def test_bad_ids_of_a_collection_name_the_table(rank: Rank):
    model = sparsestep.nn.EmbeddingBagCollection(SHAPES, mode="sum")
    shard(model, plan="rows")
    for _ in range(3):
        ids = one_id_each(0, rank.index)
        model(ids)
        if rank.is_last:
            ids["one row"] = ids["one row"] + 1
        named = "EmbeddingBag 'one row' (1 x 2): ids must be"
        assert (named if rank.is_last else "rank 2, which") in said(partial(model, ids))


@ranks(WORLD)
def test_rows_of_any_shape(rank: Rank):
    inputs = [ids(0, 2, 3), ids(1), ids(2, 0)]
    grads = [weights(10 + each, *ids.shape, DIM) for each, ids in enumerate(inputs)]
    call = [(each,) for each in inputs], grads, (torch.cat([each.flatten() for each in inputs]),)
    options = {"": {}, "padding": {"padding_idx": 3}, "by frequency": {"scale_grad_by_freq": True}}
    for order in ("fast", "global"):
        check(rank, order, nn.Embedding, dict.fromkeys(options, call), options)


@each_kind
def test_inputs_and_outputs_may_be_written_to(kind: Any):
    """As a layer does that works in place."""
    table = nn.EmbeddingBag.from_pretrained(torch.zeros(5, 2), freeze=False, mode="sum")
    shard(table, plan=kind)
    rows, factors = torch.tensor([[1, 2]]), torch.tensor([[2.0, 3.0]])
    found = table(rows, None, factors)
    rows.zero_()
    factors.zero_()
    found.mul_(2).sum().backward()
    sparsestep.SGD(table.parameters(), lr=1.0).step()
    assert table.weight[:, 0].tolist() == [0.0, -4.0, -6.0, 0.0, 0.0]
    collection = sparsestep.nn.EmbeddingBagCollection([(5, 2), (5, 2)], mode="sum")
    shard(collection, plan=kind)
    for found in collection([torch.tensor([[1, 2]])] * 2):
        found.relu_().sum().backward()
    with pytest.raises(sparsestep.InputError, match="must not require a gradient"):
        table(torch.tensor([[1, 2]]), None, torch.ones(1, 2, requires_grad=True))


def test_messages_are_packed_and_unpacked():
    """Of three sections: split, sent to all ranks as a whole, and empty."""
    own, begins = 1, torch.tensor([0, 13, 14])
    sections = [torch.arange(6, dtype=torch.int32), torch.tensor([7.5], dtype=torch.float64), None]
    sizes = torch.tensor([[4, 8, 0], [8, 8, 0], [12, 8, 0]])
    buffer = torch.full((4 + 8 + 1 + 1 + 12 + 8 + 1,), 255, dtype=torch.uint8)
    pack(sections, sizes, own, begins, buffer)
    first, second, third = buffer.split([13, 1, 21])
    assert first[:4].view(torch.int32).tolist() == [0]
    assert bytes(first[4:12].tolist()) == bytes(third[12:20].tolist()) == struct.pack("d", 7.5)
    assert third[:12].clone().view(torch.int32).tolist() == [3, 4, 5]
    assert first[-1] == second[-1] == third[-1] == 255
    # The other ranks send one and three numbers; this one sends itself two, and the float.
    messages = Messages(buffer, begins, sizes, own, sections, sizes)
    read = messages.read([torch.int32, torch.float64, torch.int64])
    assert [each.tolist() for each in read] == [[0, 1, 2, 3, 4, 5], [7.5] * 3, []]
    for wrong in (sizes + 1, sizes * torch.tensor([[1], [-1], [3]]), sizes.t()):
        with pytest.raises(ValueError, match="no such"):
            pack(sections, wrong, own, begins, buffer)
        with pytest.raises(ValueError, match="no such"):
            unpack(Messages(buffer, begins, wrong, own, sections, sizes), read)
    with pytest.raises(ValueError, match="no such messages"):
        pack(sections, sizes, own, begins, buffer[:-2])
