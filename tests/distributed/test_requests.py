"""Whatever torch's modules take, a sharded one takes: ranks are threads of this process."""

from __future__ import annotations

import itertools
import struct
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.distributed._table import ShardedTable
from sparsestep.distributed.collectives import Collectives, Messages, pack, unpack
from sparsestep.distributed.grads import ShardedGradSource
from sparsestep.distributed.placement import PLACEMENTS
from sparsestep.distributed.shard import _convert_table
from sparsestep.nn import lookup
from tests.distributed.runs import KINDS, each_kind

WORLD, ROWS, DIM = 3, 10, 4


class Hall:
    """Where ranks that are threads meet."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD, timeout=30)
        self.lock = threading.Lock()
        self.desk: list[Any] = [None] * WORLD
        self.sent = 0  # bytes, to others

    def swap(self, rank: int, outgoing: list[Tensor]) -> list[Tensor]:
        self.desk[rank] = outgoing
        self.barrier.wait()
        found = [theirs[rank].clone() for theirs in self.desk]
        self.barrier.wait()
        return found


class Threads(Collectives):
    def __init__(self, hall: Hall, rank: int) -> None:
        self.group, self.hall, self.rank, self.world_size = None, hall, rank, WORLD
        self._allocate_buffers()

    def all_to_all_rows(self, outgoing: Tensor) -> Tensor:
        return torch.stack(self.hall.swap(self.rank, list(outgoing)))

    def _exchange_bytes(
        self, outgoing: Tensor, incoming: Tensor, outgoing_sizes: Any, incoming_sizes: Any
    ) -> None:
        others = [n for rank, n in enumerate(outgoing_sizes) if rank != self.rank]
        with self.hall.lock:
            self.hall.sent += sum(max(0, n - 1) for n in others)
        found = self.hall.swap(self.rank, list(outgoing.split(outgoing_sizes)))
        assert [len(each) for each in found] == list(incoming_sizes)
        incoming.copy_(torch.cat(found))


def placement_of(kind: str, rows: int) -> Any:
    owner = {"owner": 1} if kind == "tables" else {}
    return PLACEMENTS[kind]("", rows, DIM, 4, **owner)  # type: ignore[arg-type]


def on_threads(
    make: Any, kind: str, order: str, calls: list[tuple[Any, ...]], grads: Any, hall: Any = None
) -> Any:
    """The outputs of all ranks, and the table after a step."""
    hall, outputs, modules = hall or Hall(), [None] * WORLD, [make() for _ in range(WORLD)]
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            ranks, module = Threads(hall, rank), modules[rank]
            placement = placement_of(kind, module.num_embeddings)
            options: Any = {"reduce": "sum", "order": order}
            table = ShardedTable(0, module, placement, ranks, **options)
            table.init_rows(0)
            table.build_local(module)
            group = ShardedGradSource(ranks, [table], 1)
            _convert_table(module, table, group)
            outputs[rank] = module(*calls[rank])
            outputs[rank].backward(grads[rank])
            sparsestep.SGD(module.parameters(), lr=0.5).step()
        except BaseException as error:
            hall.barrier.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    weights = [module.weight.detach() for module in modules]
    if kind == "rows":
        return outputs, torch.stack(weights, 1).flatten(0, 1)[:ROWS]
    return outputs, weights[1]


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
ORDERS = ("fast", "global")


@pytest.mark.parametrize("name", list(CALLS))
def test_bags(name: str):
    for kind, order in itertools.product(KINDS, ORDERS):
        if (kind, name) not in REFUSED:
            check_bags(name, kind, order)


def check_bags(name: str, kind: str, order: str) -> None:
    """One process looks up the bags of all ranks, one after the other."""
    arguments, options = CALLS[name]
    options = {"mode": "sum", **options}

    def make() -> nn.EmbeddingBag:
        torch.manual_seed(0)
        return nn.EmbeddingBag(ROWS, DIM, **options)

    calls = [arguments(rank) for rank in range(WORLD)]
    dtype = options.get("dtype", torch.float32)
    grads = [weights(10 + rank, 3, DIM).to(dtype) for rank in range(WORLD)]
    outputs, after = on_threads(make, kind, order, calls, grads)
    rows, offsets, factors, begin = [], [], [], 0
    for call in calls:
        mine, starts, scale = (*call, None, None)[:3]
        if mine.dim() == 2:
            starts = torch.arange(3) * mine.shape[1]
        scale = torch.ones(mine.numel(), dtype=dtype) if scale is None else scale
        rows.append(mine.flatten().long())
        offsets.append(starts[:3] + begin)
        factors.append(scale.flatten())
        begin += mine.numel()
    if options.get("include_last_offset"):
        offsets.append(torch.tensor([begin]))
    plain = sparsestep.nn.fuse(make())
    scales = torch.cat(factors) if options["mode"] == "sum" else None
    found = plain(torch.cat(rows), torch.cat(offsets), scales)
    found.backward(torch.cat(grads))
    sparsestep.SGD(plain.parameters(), lr=0.5).step()
    tolerance = 3e-2 if dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(torch.cat(outputs), found, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(after, plain.weight.detach(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["offsets", "long mean", "long factors"])
def test_bags_that_the_core_declines(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(lookup, "look_up", lambda requests: None)
    for kind in ("tables", "rows"):
        check_bags(name, kind, "fast")


@pytest.mark.parametrize("options", [{}, {"padding_idx": 3}, {"scale_grad_by_freq": True}], ids=str)
def test_rows_of_any_shape(options: dict[str, Any]):
    def make() -> nn.Embedding:
        torch.manual_seed(0)
        return nn.Embedding(ROWS, DIM, **options)

    calls = [(ids(0, 2, 3),), (ids(1),), (ids(2, 0),)]
    grads = [weights(10 + rank, *call[0].shape, DIM) for rank, call in enumerate(calls)]
    plain = sparsestep.nn.fuse(make())
    found = plain(torch.cat([call[0].flatten() for call in calls]))
    found.backward(torch.cat([grad.reshape(-1, DIM) for grad in grads]))
    sparsestep.SGD(plain.parameters(), lr=0.5).step()
    # Each rank has its own frequencies of a copy.
    kinds = KINDS[:2] if "scale_grad_by_freq" in options else KINDS
    for kind, order in itertools.product(kinds, ORDERS):
        outputs, after = on_threads(make, kind, order, calls, grads)
        assert [tuple(each.shape) for each in outputs] == [(2, 3, DIM), (DIM,), (0, DIM)]
        assert torch.equal(torch.cat([each.reshape(-1, DIM) for each in outputs]), found)
        torch.testing.assert_close(after, plain.weight.detach())


@each_kind
def test_outputs_may_be_written_to(kind: Any):
    """As a layer does that works in place."""
    model = sparsestep.nn.EmbeddingBagCollection([(5, 2), (5, 2)], mode="sum")
    sparsestep.distributed.shard(model, plan=kind)
    for found in model([torch.tensor([[1, 2]])] * 2):
        found.relu_().sum().backward()


@each_kind
def test_arguments_may_be_overwritten_after_the_call(kind: Any):
    table = nn.EmbeddingBag(5, 2, mode="sum")
    sparsestep.distributed.shard(table, plan=kind)
    rows, factors = torch.tensor([[1, 2]]), torch.tensor([[2.0, 3.0]])
    found = table(rows, None, factors)
    rows.zero_()
    factors.zero_()
    found.sum().backward()
    before = table.weight.detach().clone()
    sparsestep.SGD(table.parameters(), lr=1.0).step()
    assert (before - table.weight.detach())[:, 0].tolist() == [0.0, 2.0, 3.0, 0.0, 0.0]


def test_factors_that_need_a_gradient_are_refused():
    table = nn.EmbeddingBag(5, 2, mode="sum")
    sparsestep.distributed.shard(table)
    factors = torch.ones(1, 2, requires_grad=True)
    with pytest.raises(sparsestep.InputError, match="must not require a gradient"):
        table(torch.tensor([[1, 2]]), None, factors)


@pytest.mark.parametrize("length", [1, 3, 12])
@each_kind
def test_what_is_sent_is_what_the_plan_says(kind: str, length: int):
    """Of rows on average; here every owner has as many ids as the others."""
    hall, rows, batch = Hall(), 36, 12
    calls = []
    for rank in range(WORLD):
        begin = torch.arange(batch).reshape(-1, 1) + rank
        calls.append(((begin + batch * torch.arange(length)) % rows,))
    grads = [torch.ones(batch, DIM)] * WORLD
    on_threads(lambda: nn.EmbeddingBag(rows, DIM, mode="sum"), kind, "fast", calls, grads, hall)
    said = WORLD * placement_of(kind, rows).bytes_per_step(WORLD, batch, length)
    if kind == "rows" and length == 3:  # all ids of a bag have one owner here: fewer parts
        assert hall.sent < said
    else:
        assert hall.sent == said


def test_messages_are_packed_and_unpacked():
    """Of three sections: split, sent to all ranks as a whole, and empty."""
    own, gap = 1, 1
    sections = [torch.arange(6, dtype=torch.int32), torch.tensor([7.5], dtype=torch.float64), None]
    sizes = torch.tensor([[4, 8, 0], [8, 8, 0], [12, 8, 0]])
    buffer = torch.full((4 + 8 + 1 + 1 + 12 + 8 + 1,), 255, dtype=torch.uint8)
    pack(sections, sizes, own, gap, buffer)
    first, second, third = buffer.split([13, 1, 21])
    assert first[:4].view(torch.int32).tolist() == [0]
    assert bytes(first[4:12].tolist()) == bytes(third[12:20].tolist()) == struct.pack("d", 7.5)
    assert third[:12].clone().view(torch.int32).tolist() == [3, 4, 5]
    assert first[-1] == second[-1] == third[-1] == 255
    # The other ranks send one and three numbers; this one sends itself two, and the float.
    messages = Messages(buffer, sizes, own, gap, sections, sizes)
    read = messages.read([torch.int32, torch.float64, torch.int64])
    assert [each.tolist() for each in read] == [[0, 1, 2, 3, 4, 5], [7.5] * 3, []]
    for wrong in (sizes + 1, sizes * torch.tensor([[1], [-1], [3]]), sizes.t()):
        with pytest.raises(ValueError, match="no such"):
            pack(sections, wrong, own, gap, buffer)
        with pytest.raises(ValueError, match="no such"):
            unpack(Messages(buffer, wrong, own, gap, sections, sizes), read)
    with pytest.raises(ValueError, match="no such messages"):
        pack(sections, sizes, own, gap, buffer[:-1])
