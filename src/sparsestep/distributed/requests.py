"""What a rank requests from the owners of a table's rows, and how it combines their answers.

An owner gets bags of its own row numbers and answers with a row for each. With ``"tables"``, a bag
goes to one owner as it is. With ``"rows"``, each owner gets the part of a bag whose rows it has. If
bags have one id, each id is requested once, however often it occurs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsestep._torch import cat
from sparsestep.distributed import _packing as owners
from sparsestep.distributed._table import Table
from sparsestep.grads.indexed import HALVES
from sparsestep.nn.lookup import check_ids, refusal
from sparsestep.nn.pooling import Bags

LENGTHS = torch.int32  # what lengths of bags are sent as
# Bags with so many ids for each rank are sent to all ranks. Of ids at random, fewer than two in a
# hundred parts of them are then empty.
LONG = 4


@dataclass(slots=True)
class Request:
    """What is asked of a table, in the order of the ranks that are asked.

    Attributes:
        table: which one.
        ids: numbers of rows, as their owners count them.
        counts: how many of them go to each rank.
        length: how many ids each bag has, at least one; 0: as ``lengths`` say.
        lengths: how many ids each bag has, where that differs; int32.
        bags: how many bags go to each rank.
        factors: one for each id.
        is_summed: whether every rank gets all bags, as far as it has them, and the rows that they
            send back are summed.
        which: for each row of the output, which of those that come back it is; ``None``: its own.
        finish: makes the output of the rows that come back, by operations that autograd records.
    """

    table: Table
    ids: Tensor
    counts: list[int]
    length: int
    lengths: Tensor | None
    bags: list[int]
    factors: Tensor | None
    finish: Callable[[Tensor], Tensor]
    is_summed: bool = False
    which: Tensor | None = None


def request(table: Table, ids: Any, offsets: Any = None, factors: Any = None) -> Request:
    """What a call with these arguments asks for, or an error that says what is wrong with them."""
    if not table.is_bag:
        check_ids(table.whole, table.whole.weight, ids)
        shape, dim = ids.shape, table.dim
        found = _singles(table, ids.reshape(-1), None)
        inner = found.finish
        found.finish = lambda rows: inner(rows).reshape(*shape, dim)
        return found
    bags = Bags.of(table.whole, ids, offsets, factors)
    if bags.factors is not None and bags.factors.requires_grad and torch.is_grad_enabled():
        requirement = "per_sample_weights of a sharded table must not require a gradient"
        raise refusal(table.whole, requirement, "requires_grad=True", "Call detach() on them")
    if bags.length == 1 and table.kind != "copy":
        return _singles(table, bags.ids, bags.factors)
    return _bags(table, bags)


def _singles(table: Table, ids: Tensor, factors: Tensor | None) -> Request:
    """One id for each row of the output."""
    world = table.wire.world
    if table.kind == "copy":
        return Request(table, ids, [len(ids)], 1, None, [len(ids)], factors, lambda rows: rows)
    is_once = table.order == "fast" and table.mode != "max" and not table.by_frequency
    if is_once and factors is None and world > 1:
        return _distinct(table, ids)
    if table.kind == "tables" or world == 1:
        counts = _all_to(table)(len(ids))
        return Request(table, ids, counts, 1, None, counts, factors, lambda rows: rows)
    found = owners.split_singles(ids, world, table.id_dtype)
    factors = None if factors is None else factors[found.order]
    back = torch.empty_like(found.order)
    back[found.order] = torch.arange(len(back))
    counts = found.counts
    return Request(table, found.rows, counts, 1, None, counts, factors, lambda rows: rows[back])


def _distinct(table: Table, ids: Tensor) -> Request:
    """Each id once; the gradient of a row is the sum of those of its copies."""
    world = table.wire.world
    asked, which = owners.distinct(ids, table.rows)
    counts = _all_to(table)(len(asked))
    if table.kind == "rows":
        found = owners.split_singles(asked, world, table.id_dtype)
        asked, counts = found.rows, found.counts
        place = torch.empty_like(found.order)
        place[found.order] = torch.arange(len(place))
        which = place[which]

    return Request(table, asked, counts, 1, None, counts, None, lambda rows: rows, which=which)


def _bags(table: Table, bags: Bags) -> Request:
    ids, factors, world = bags.ids, bags.factors, table.wire.world
    inverse = _inverse_sizes(table, bags) if table.mode == "mean" else None

    def averaged(total: Tensor) -> Tensor:
        return total if inverse is None else total * inverse

    if table.kind == "rows" and world > 1:
        return _parts_of_bags(table, bags, averaged)
    length = max(bags.length, 0)
    lengths = None if length else _starts(bags).diff().to(LENGTHS)
    to = _all_to(table) if table.kind != "copy" else lambda count: [count]
    return Request(table, ids, to(len(ids)), length, lengths, to(bags.count), factors, averaged)


def _parts_of_bags(table: Table, bags: Bags, averaged: Callable[[Tensor], Tensor]) -> Request:
    """Each owner gets what it has of a bag. Of long bags, nearly every owner has a part of each."""
    factors, world, count = bags.factors, table.wire.world, bags.count
    is_summed = len(bags.ids) >= LONG * world * count
    found = owners.split(
        bags.ids,
        _starts(bags),
        world,
        table.id_dtype,
        wants_order=factors is not None,
        wants_all=is_summed,
    )

    def finish(rows: Tensor) -> Tensor:
        summed = rows.float() if rows.dtype in HALVES else rows
        total = summed.new_zeros(count, table.dim).index_add(0, found.bags, summed)
        return averaged(total.to(rows.dtype))

    return Request(
        table,
        found.rows,
        found.counts,
        0,
        found.lengths,
        found.parts,
        None if factors is None else factors[found.order],
        averaged if is_summed else finish,
        is_summed,
    )


def _starts(bags: Bags) -> Tensor:
    """Where each bag begins, and where the last one ends."""
    if bags.length >= 0:
        return torch.arange(bags.count + 1) * bags.length
    starts = bags.starts.long()
    return starts if bags.ends else cat([starts, torch.tensor([len(bags.ids)])])


def _inverse_sizes(table: Table, bags: Bags) -> Tensor:
    """What the sum of a bag is multiplied with to be its mean; padding does not count."""
    if table.padding is None and bags.length > 0:
        sizes = torch.full((1,), bags.length)
    else:
        sizes = _starts(bags).diff()
    if table.padding is not None:
        bag = torch.repeat_interleave(sizes, output_size=len(bags.ids))
        sizes = torch.bincount(bag[bags.ids != table.padding], minlength=bags.count)
    return sizes.clamp(min=1).to(table.weight.dtype).reciprocal().unsqueeze(1)


def _all_to(table: Table) -> Callable[[int], list[int]]:
    """A count for each rank, where the owner of a whole table gets everything."""
    return lambda count: [count if r == table.owner else 0 for r in range(table.wire.world)]
