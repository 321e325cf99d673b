"""Lookups by the core: ids are checked, rows read and pooled in one pass, for all tables at once.

The core declines anything that is unusual or wrong. Then torch's own operations do the lookup, with
all special cases and all messages.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext, isa
from sparsestep._torch import dispatch_modes, forward_level

ROWS = 0  # a row for each id
POOLING = {"sum": 1, "mean": 2, "max": 3}


class Request(NamedTuple):
    """What is looked up in a table.

    Attributes:
        weight: the table.
        ids: of any shape for single rows; for bags, 2-D or 1-D with ``starts``.
        starts: where each bag begins.
        ends: whether ``starts`` has the end of the last bag as well.
        factors: what each row is multiplied with.
        pooling: what becomes of a bag: ``ROWS``, or as in ``POOLING``.
        padding: the id that does not count; -1 if there is none.
        has_gradient: whether the weight is to get a gradient.
    """

    weight: Tensor
    ids: Tensor
    starts: Tensor | None
    ends: bool
    factors: Tensor | None
    pooling: int
    padding: int
    has_gradient: bool


class Found(NamedTuple):
    """What was looked up, and what the gradient needs to know.

    Attributes:
        output: a row for each id or bag.
        positions: the ids that are no padding, int64; a copy that nobody else has.
        source: the row of the output that each of them went to; ``None``: its own number.
        winners: for the maximum, the id whose element it is.
        counted: how many ids of each bag are no padding.
    """

    output: Tensor
    positions: Tensor | None = None
    source: Tensor | None = None
    winners: Tensor | None = None
    counted: Tensor | None = None


def look_up(requests: list[Request]) -> list[Found] | None:
    """All of them, or ``None`` where the core declines; nothing has changed in either case.

    Where something watches every operation (a dispatch mode) or carries derivatives forward, torch
    has to see the lookup.

    Example:
        >>> table, ids = torch.arange(10.0).view(5, 2), torch.tensor([[3, 1], [4, 4]])
        >>> request = Request(table, ids, None, False, None, POOLING["sum"], -1, True)
        >>> for found in look_up([request]) or []:
        ...     print(found.output.tolist(), found.positions.tolist(), found.source.tolist())
        [[8.0, 10.0], [16.0, 18.0]] [3, 1, 4, 4] [0, 0, 1, 1]
    """
    if ext is None or dispatch_modes() or forward_level() >= 0:
        return None
    found = ext.look_up(requests, torch.get_num_threads(), isa.index)
    return None if found is None else [Found(*each) for each in found]
