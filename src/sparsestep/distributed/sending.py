"""Ids to the owners of rows: what a rank asks of others, and what others ask of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep.distributed._table import Table
from sparsestep.distributed.collectives import Reader, Wire, joined, shares
from sparsestep.distributed.requests import LENGTHS, Request

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
    bags = [-request.length] * world if request.length else request.bags  # less than 0: a length
    return [request.counts, bags, [int(request.factors is not None)] * world]


def sent_bytes(asked: Sequence[Request], numbers: Sequence[int]) -> int:
    """How many bytes a rank sends another, from what it has said."""
    total = 0
    for n, request in enumerate(asked):
        table = request.table
        ids, bags, has_factors = numbers[NUMBERS * n : NUMBERS * (n + 1)]
        of_factors = table.weight.dtype.itemsize if has_factors else 0
        total += ids * (table.id_dtype.itemsize + of_factors) + max(bags, 0) * LENGTHS.itemsize
    return total


def _length(request: Request, rank: int) -> int:
    """How many bytes go to a rank."""
    if not is_sent(request):
        return 0
    of_factors = 0 if request.factors is None else request.factors.dtype.itemsize
    lengths = 0 if request.lengths is None else request.bags[rank] * LENGTHS.itemsize
    return request.counts[rank] * (request.table.id_dtype.itemsize + of_factors) + lengths


def rows_bytes(asked: Sequence[Request], numbers: Sequence[int]) -> int:
    """How many bytes of rows a rank gets back, from what it has said."""
    total = 0
    for n, request in enumerate(asked):
        ids, bags, _ = numbers[NUMBERS * n : NUMBERS * (n + 1)]
        total += _bags(ids, bags) * request.table.row_bytes if is_sent(request) else 0
    return total


def _bags(ids: int, bags: int) -> int:
    """How many bags there are; a negative number is the length of each."""
    return ids // -bags if bags < 0 else bags


class Asked(NamedTuple):
    """What all ranks ask of this one in a table, one after the other.

    Attributes:
        ids: numbers of rows here.
        length: how many ids each bag has, at least one; 0: as ``lengths`` say.
        lengths: how many ids each bag has, where that differs.
        factors: one for each id.
        bags: how many bags each rank has.
    """

    ids: Tensor
    length: int
    lengths: Tensor | None
    factors: Tensor | None
    bags: list[int]


def send_ids(
    wire: Wire, asked: Sequence[Request], numbers: Sequence[Sequence[int]], largest: int
) -> Callable[[], list[Asked | None]]:
    """Send ids to their owners.

    Args:
        wire: the ranks.
        asked: what this rank asks for.
        numbers: what each rank has said of what it asks of this one.
        largest: how many bytes any rank sends another.

    Returns:
        A function that reads what this rank is asked for, in each table; ``None`` for copies.
        Other ranks wait for the answer, so what it raises must be reported to them.
    """

    def outgoing() -> list[list[Tensor]]:
        found: list[list[Tensor]] = [[] for _ in numbers]
        for each in filter(is_sent, asked):
            for piece, dtype, counts in _pieces(each):
                for rank, part in shares(piece, counts):
                    found[rank].append(part if rank == wire.rank else part.to(dtype))
        return found

    def read() -> list[Asked | None]:
        found: list[Asked | None] = []
        for n, each in enumerate(asked):
            said = [row[NUMBERS * n : NUMBERS * (n + 1)] for row in numbers]
            found.append(_read(each.table, readers, said) if is_sent(each) else None)
        return found

    sizes = [sent_bytes(asked, row) for row in numbers]
    lengths = [sum(_length(each, rank) for each in asked) for rank in range(wire.world)]
    readers = wire.send(outgoing, sizes, largest, lengths)
    return read


def _pieces(request: Request) -> Iterator[tuple[Tensor, torch.dtype, list[int]]]:
    """What is sent, as what, and how much of it to each rank."""
    yield request.ids, request.table.id_dtype, request.counts
    if request.lengths is not None:
        yield request.lengths, LENGTHS, request.bags
    if request.factors is not None:
        yield request.factors.detach(), request.factors.dtype, request.counts


def _read(table: Table, readers: Sequence[Reader], said: Sequence[Sequence[int]]) -> Asked:
    # A rank that asks for nothing has bags of any length.
    known = {-some for count, some, _ in said if count or some > 0} or {1}
    length = max(known.pop(), 0) if len(known) == 1 else 0
    has_any_factors = any(has_factors for _, _, has_factors in said)
    ids, lengths, factors, bags = [], [], [], []
    dtype = table.weight.dtype
    for reader, (count, some, has_factors) in zip(readers, said, strict=True):
        ids.append(reader.take(count, table.id_dtype))
        bags.append(_bags(count, some))
        if some >= 0:
            lengths.append(reader.take(some, LENGTHS))
        elif not length:
            lengths.append(torch.full((bags[-1],), -some, dtype=LENGTHS))
        if has_factors:
            factors.append(reader.take(count, dtype))
        elif has_any_factors:
            factors.append(torch.ones(count, dtype=dtype))
    return Asked(
        joined(ids, table.id_dtype),
        length,
        None if length else joined(lengths),
        joined(factors) if has_any_factors else None,
        bags,
    )
