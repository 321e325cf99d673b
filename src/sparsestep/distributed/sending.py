"""Ids to the owners of rows: what a rank asks of others, and what others ask of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep.distributed.requests import Request
from sparsestep.distributed.table import Table
from sparsestep.distributed.wire import Reader, Wire, joined

NUMBERS = 3  # that a rank has for another, for each table of a lookup or each gradient


def is_sent(request: Request) -> bool:
    """Whether others have the rows; of a copy every rank has them."""
    return request.table.kind != "copy"


def numbers_of(asked: Sequence[Request]) -> Tensor:
    """What each rank is told: how many ids and bags it gets, and whether there are factors."""
    numbers = torch.tensor([_numbers(each) for each in asked], dtype=torch.int64)
    return numbers.movedim(2, 0).flatten(1)


def _numbers(request: Request) -> list[list[int]]:
    world = request.table.wire.world
    if not is_sent(request):
        return [[0] * world] * NUMBERS
    bags = [-1] * world if request.lengths is None else request.bags  # -1: one id each
    return [request.counts, bags, [int(request.factors is not None)] * world]


def sent_bytes(asked: Sequence[Request], numbers: Sequence[int]) -> int:
    """How many bytes a rank sends another, from what it has said."""
    total = 0
    for n, request in enumerate(asked):
        table = request.table
        ids, bags, has_factors = numbers[NUMBERS * n : NUMBERS * (n + 1)]
        of_factors = table.weight.dtype.itemsize if has_factors else 0
        total += ids * (table.id_dtype.itemsize + of_factors) + max(bags, 0) * 8
    return total


class Asked(NamedTuple):
    """What all ranks ask of this one in a table, one after the other.

    Attributes:
        ids: numbers of rows here.
        lengths: how many ids each bag has; ``None``: one each.
        factors: one for each id.
        bags: how many bags each rank has.
    """

    ids: Tensor
    lengths: Tensor | None
    factors: Tensor | None
    bags: list[int]


def send_ids(
    wire: Wire, asked: Sequence[Request], numbers: Sequence[Sequence[int]], largest: int
) -> list[Asked | None]:
    """Send ids to their owners; what this rank is asked for, in each table; ``None`` of copies.

    Args:
        wire: the ranks.
        asked: what this rank asks for.
        numbers: what each rank has said of what it asks of this one.
        largest: how many bytes any rank sends another.
    """
    outgoing: list[list[Tensor]] = [[] for _ in numbers]
    for each in filter(is_sent, asked):
        for piece, counts in _pieces(each):
            for tensors, part in zip(outgoing, piece.split(counts), strict=True):
                tensors.append(part)
    sizes = [sent_bytes(asked, row) for row in numbers]
    readers = [Reader(message) for message in wire.send(outgoing, sizes, largest)]
    found: list[Asked | None] = []
    for n, each in enumerate(asked):
        said = [row[NUMBERS * n : NUMBERS * (n + 1)] for row in numbers]
        found.append(_read(each.table, readers, said) if is_sent(each) else None)
    return found


def _pieces(request: Request) -> Iterator[tuple[Tensor, list[int]]]:
    """What is sent, and how much of it to each rank."""
    yield request.ids.to(request.table.id_dtype), request.counts
    if request.lengths is not None:
        yield request.lengths, request.bags
    if request.factors is not None:
        yield request.factors.detach(), request.counts


def _read(table: Table, readers: Sequence[Reader], said: Sequence[Sequence[int]]) -> Asked:
    is_all_single = all(some < 0 for _, some, _ in said)
    has_any_factors = any(has_factors for _, _, has_factors in said)
    ids, lengths, factors, bags = [], [], [], []
    dtype = table.weight.dtype
    for reader, (count, some, has_factors) in zip(readers, said, strict=True):
        ids.append(reader.take(count, table.id_dtype))
        bags.append(count if some < 0 else some)
        if some >= 0:
            lengths.append(reader.take(some, torch.int64))
        elif not is_all_single:
            lengths.append(torch.ones(count, dtype=torch.int64))
        if has_factors:
            factors.append(reader.take(count, dtype))
        elif has_any_factors:
            factors.append(torch.ones(count, dtype=dtype))
    return Asked(
        joined(ids),
        None if is_all_single else joined(lengths),
        joined(factors) if has_any_factors else None,
        bags,
    )
