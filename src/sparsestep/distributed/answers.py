"""Lookups of the rows that are here, for whoever asked, and what their gradients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsestep._torch import embedding_bag
from sparsestep.distributed._table import Table
from sparsestep.distributed.requests import Request
from sparsestep.distributed.sending import Asked
from sparsestep.grads.indexed import IndexedGrad
from sparsestep.nn import lookup
from sparsestep.nn.lookup import part, part_of

# What the gradients of rows are for the weight that they were looked up in.
Parts: TypeAlias = Callable[[Tensor], Sequence[IndexedGrad]]


class Looked(NamedTuple):
    """A lookup that was done.

    Attributes:
        rows: a row for each bag.
        parts: may be called as often as one likes, and does not keep the rows.
    """

    rows: Tensor
    parts: Parts


def look_up(
    tables: Sequence[Table], asked: Sequence[Request | Asked], *, wants_grad: bool
) -> list[Looked]:
    """Look up rows that are here, in all tables at once where the core does it.

    Args:
        tables: whose rows.
        asked: what of each.
        wants_grad: whether a gradient may come.
    """
    requests: list[lookup.Request] = []
    of_core: list[int] = []
    for n, (table, each) in enumerate(zip(tables, asked, strict=True)):
        if table.is_plain and any(each.bags) and not _is_left_to_torch(table, each):
            requests.append(_request(table, each, wants_grad=wants_grad))
            of_core.append(n)
    done = dict(zip(of_core, lookup.look_up(requests) or (), strict=False))
    return [
        _found(table, each, done[n]) if n in done else _by_torch(table, each, wants_grad=wants_grad)
        for n, (table, each) in enumerate(zip(tables, asked, strict=True))
    ]


def _is_left_to_torch(table: Table, asked: Request | Asked) -> bool:
    """Whether there is a factor for padding, too, which has no gradient."""
    return asked.factors is not None and table.padding_here >= 0


def _request(table: Table, asked: Request | Asked, *, wants_grad: bool) -> lookup.Request:
    ids, padding = asked.ids, table.padding_here
    factors = None if asked.factors is None else asked.factors.detach()
    starts, pooling = None, lookup.POOLING["sum"]
    if not table.is_bag or (asked.length == 1 and padding < 0 and factors is None):
        pooling = lookup.ROWS
    elif asked.lengths is not None:
        starts = _starts(asked.lengths)
    else:
        ids = ids.view(-1, asked.length)
        factors = None if factors is None else factors.view(-1, asked.length)
    has_gradient = wants_grad and table.weight.requires_grad
    weight = table.weight
    return lookup.Request(weight, ids, starts, True, factors, pooling, padding, has_gradient)


def _starts(lengths: Tensor) -> Tensor:
    starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=starts[1:])
    return starts


def _found(table: Table, asked: Request | Asked, found: lookup.Found) -> Looked:
    """What the core has found."""
    positions, source, factors = found.positions, found.source, _copy(asked.factors)
    shape, by_frequency = table.weight.shape, table.by_frequency
    rows, dim = shape

    def parts(grad: Tensor) -> list[IndexedGrad]:
        assert positions is not None
        if not by_frequency:
            return [IndexedGrad(positions, grad, rows, dim, source, factors)]
        return [part_of(shape, positions, grad, source, factors, by_frequency=True)]

    return Looked(found.output, parts)


def _by_torch(table: Table, asked: Request | Asked, *, wants_grad: bool) -> Looked:
    """With torch's operations, or by the module that is watched."""
    if not table.is_here:
        return Looked(table.weight.detach(), lambda grad: [])
    ids, lengths, factors = asked.ids.long(), asked.lengths, _copy(asked.factors)
    if lengths is None and asked.length > 1:
        lengths = torch.full((sum(asked.bags),), asked.length)
    if not table.is_plain:
        with torch.set_grad_enabled(wants_grad):
            found = table.look_up(ids, lengths, factors)
        return Looked(found.detach(), lambda grad: _backward(found, table.weight, grad))
    weight, padding = table.weight.detach(), table.padding_here
    starts: Tensor | None = None
    if lengths is not None:
        starts = _starts(lengths)
    elif table.is_bag and (padding >= 0 or factors is not None):
        starts = torch.arange(len(ids) + 1)
    if starts is None:
        rows = torch.index_select(weight, 0, ids)
    else:
        rows = embedding_bag(weight, ids, starts, False, 0, False, factors, True, padding)[0]
    ids = ids.clone()  # who asked may change its own

    def parts(grad: Tensor) -> list[IndexedGrad]:
        source = None
        if lengths is not None:
            source = torch.repeat_interleave(lengths.long(), output_size=len(ids))
        of = (weight.shape, ids, grad, source, factors)
        return [part(*of, padding=padding, by_frequency=table.by_frequency)]

    return Looked(rows, parts)


def _copy(factors: Tensor | None) -> Tensor | None:
    """Who asked may change its own."""
    return None if factors is None else factors.detach().clone()


def _backward(found: Tensor, weight: Tensor, rows: Tensor) -> Sequence[IndexedGrad]:
    """By the module's own gradient; the graph stays, for as long as more may come."""
    grad: Any
    (grad,) = torch.autograd.grad(found, weight, rows, retain_graph=True)
    parts: Sequence[IndexedGrad] = grad._parts
    return parts
