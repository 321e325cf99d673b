"""What rows have missed, done by the core; ``motions.py`` has the same in torch operations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep.contract.rule import State
from sparsestep.core import core, isa
from sparsestep.dense.history import History

_ALONG = ("nothing", "buffer", "sign", "quotient", "leader")  # as in native/types.h


def catch_up(
    history: History,
    specs: Sequence[State],
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int | None:
    """Bring rows up to date; returns how many were not where they should have been.

    Args:
        history: what the steps since would have done.
        specs: what the rule keeps.
        last: the step that each row has reached.
        param: the parameter, real.
        state: its state tensors, real.
        rows: which ones; ``None`` for all.

    Returns:
        ``None``, and nothing done, where the core cannot.
    """
    if core is None or not param.is_cpu:
        return None
    idle, hyper, names = history.idle, history.hyper, [kept.name for kept in specs]
    elements = sum(not kept.per_row for kept in specs)
    integers = (
        history.now,
        history.base,
        elements,
        len(specs) - elements,
        _ALONG.index(idle.along),
        names.index(idle.buffer) if idle.buffer in names else -1,
        names.index(idle.square) if idle.square in names else -1,
        int(history.converges),
        history.reach,
        history.follow,
    )
    lr = hyper.get("lr", 0.0)
    numbers = (
        history.first,
        history.fade,
        history.eps,
        history.small_for(param.dtype),
        1 / lr if lr else 0.0,
        *(float(hyper.get(name, 0.0)) for name in ("beta", "l1", "l2")),
    )
    done: tuple[int, int] | None = core.catch_up(
        (param, *state),
        None if rows is None else rows.contiguous(),
        last,
        tuple(idle.fades.get(name, -1) + 1 for name in names),
        integers,
        numbers,
        history.tables,
        torch.get_num_threads(),
        isa.index,
    )
    if done is None:
        return None
    behind, stale = done
    # A row may be behind and its parameter right. FTRL computes it anew in any case.
    if stale or (behind and idle.along == "leader"):
        increment_version([param])
    return stale
