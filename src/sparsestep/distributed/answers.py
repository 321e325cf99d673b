"""Lookups of the rows that are here, for whoever asked, and what their gradients are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from sparsestep.distributed.table import Table
from sparsestep.gradients.touched import Touched
from sparsestep.nn.parts import part
from sparsestep.torch_internals import embedding_bag

# What the gradients of rows are for the weight that they were looked up in.
Parts: TypeAlias = Callable[[Tensor], Sequence[Touched]]


class Looked(NamedTuple):
    """A lookup that was done.

    Attributes:
        rows: a row for each bag.
        parts: may be called as often as one likes, and does not keep the rows.
    """

    rows: Tensor
    parts: Parts


def look_up(
    table: Table, ids: Tensor, lengths: Tensor | None, factors: Tensor | None, *, wants_grad: bool
) -> Looked:
    """Look up rows that are here.

    Args:
        table: whose rows.
        ids: numbers of rows here.
        lengths: how many ids each bag has; ``None``: one each.
        factors: one for each id.
        wants_grad: whether a gradient may come.
    """
    if not table.is_plain:
        with torch.set_grad_enabled(wants_grad):
            found = table.look_up(ids, lengths, factors)
        return Looked(found.detach(), lambda grad: _backward(found, table.weight, grad))
    # The same without a module and without a graph: this is done for each table in every step.
    weight, padding = table.weight.detach(), table.padding_here
    ids = ids.long()
    starts: Tensor | None = None
    factors = None if factors is None else factors.detach()
    if lengths is not None:
        starts = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        torch.cumsum(lengths, 0, out=starts[1:])
    elif table.is_bag and (padding >= 0 or factors is not None):
        starts = torch.arange(len(ids) + 1)
    if starts is None:
        rows = torch.index_select(weight, 0, ids)
    else:
        rows = embedding_bag(weight, ids, starts, False, 0, False, factors, True, padding)[0]

    def parts(grad: Tensor) -> list[Touched]:
        source = None
        if lengths is not None:
            source = torch.repeat_interleave(lengths, output_size=len(ids))
        if padding < 0 and not table.by_frequency:
            return [Touched(ids, grad, len(weight), table.dim, source, factors)]
        of = (weight.shape, ids, grad, source, factors)
        return [part(*of, padding=padding, by_frequency=table.by_frequency)]

    return Looked(rows, parts)


def _backward(found: Tensor, weight: Tensor, rows: Tensor) -> Sequence[Touched]:
    """By the module's own gradient; the graph stays, for as long as more may come."""
    grad: Any
    (grad,) = torch.autograd.grad(found, weight, rows, retain_graph=True)
    parts: Sequence[Touched] = grad._parts
    return parts
