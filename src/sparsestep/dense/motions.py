"""What rows have missed, done in torch operations: the oracle of the native kernel."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sparsestep.contract.rule import State
from sparsestep.dense.history import History

# What an average whose sign counts never becomes smaller than; usually the smallest normal number.
_LEAST = {torch.float16: 2.0**-24}


@torch.no_grad()
def catch_up(
    history: History,
    specs: Sequence[State],
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int:
    """In float64. Returns how many rows were not where they should have been.

    What is known of a row is looked up on the CPU, then moved to where its entries are. For the
    arguments see ``kernel.py``.
    """
    rows = torch.arange(len(last), device="cpu") if rows is None else rows.cpu().unique()
    old = last[rows].long()
    fresh = old < 0
    since = torch.where(fresh, ~old, old) - history.base
    behind = since < history.steps
    stamps = rows, torch.where(fresh, ~history.now, history.now).to(torch.int32)
    rows, since, fresh = rows[behind], since[behind], fresh[behind]
    if not rows.numel() or not param.numel():
        last[stamps[0]] = stamps[1]
        return 0
    there = rows.to(param.device)
    wide = [t[there].double().reshape(len(there), -1) for t in (param, *state)]
    named = dict(zip((s.name for s in specs), wide[1:], strict=True))
    moved = _moved(history, wide[0], named, since, param.dtype)
    faded = _faded(history, named, since, [tensor.dtype for tensor in state])
    stale = int(_is_stale(history, wide[0], moved, since, fresh).sum())
    written = list(zip(state, faded, strict=True))
    if stale or history.idle.along == "leader":  # else autograd is told of a change in vain
        written.append((param, moved))
    for tensor, new in written:
        tensor[there] = new.to(tensor.dtype).reshape(tensor[there].shape)
    last[stamps[0]] = stamps[1]  # in the end: whatever fails before, the rows are still behind
    return stale


def _is_stale(
    history: History, before: Tensor, after: Tensor, since: Tensor, fresh: Tensor
) -> Tensor:
    """Which rows were not where they should have been."""
    n, along = history.steps, history.idle.along
    if along == "leader":  # more than a rounding, of bfloat16
        return ((after - before).abs() > after.abs() / 256).any(dim=1)
    decayed = history.growth[since] != history.growth[n]
    if along == "nothing":
        return decayed
    if along != "sign" and not history.converges:  # there is no sum that would tell
        return decayed | ~fresh
    sums = history.sums[0]
    return decayed | ~fresh & (sums[since] != (sums[n] if along == "sign" else 0.0))


def _column(of_rows: Tensor, entries: Tensor) -> Tensor:
    """Numbers of rows beside their entries."""
    return of_rows.to(entries.device)[..., None]


def _faded(
    history: History, state: dict[str, Tensor], since: Tensor, dtypes: list[torch.dtype]
) -> list[Tensor]:
    missed = history.steps - since
    factors = history.firsts[missed], history.seconds[missed]
    idle, result = history.idle, []
    for (name, old), dtype in zip(state.items(), dtypes, strict=True):
        new = old * _column(factors[idle.fades[name]], old) if name in idle.fades else old
        if idle.along == "sign" and name == idle.buffer and history.first:
            least = _LEAST.get(dtype, torch.finfo(dtype).smallest_normal)
            new = torch.where(new.abs() < least, old.sign() * least, new)
        result.append(new)
    return result


def _moved(
    history: History, param: Tensor, state: dict[str, Tensor], since: Tensor, dtype: torch.dtype
) -> Tensor:
    idle, n, grown = history.idle, history.steps, history.grown
    left = _column(history.growth[since] / grown, param)
    if idle.along == "leader":
        rested = history.sums[0, n] == history.sums[0, since]
        return torch.where(_column(rested, param), param, _leader(history, param, state))
    if idle.along == "nothing":
        return param * left
    buffer = state[idle.buffer]
    if idle.along == "sign":
        end = n if history.first else since + 1  # from where on there is no sign left
        drift = (history.sums[0, end] - history.sums[0, since]) / grown
        return param * left - buffer.sign() * _column(drift, param)
    sums = _column(history.sums[:, since] / grown, param)
    if idle.along == "buffer" and history.converges:
        return param * left - buffer * sums[0]
    if idle.along == "buffer":
        return param * left - buffer * _followed(history, torch.ones_like(buffer), since)
    root = state[idle.square].sqrt()
    small = torch.zeros_like(buffer, dtype=torch.bool)
    move = torch.zeros_like(buffer)
    if history.converges:
        missed = _column((n - since).clamp(max=history.reach).double(), param)
        ratio = history.eps / root
        small = ratio * history.fade**-missed <= history.small_for(dtype)
        y = -ratio
        move = buffer / root * (sums[0] + y * (sums[1] + y * (sums[2] + y * sums[3])))
        small = small.expand_as(buffer)
    followed = buffer * _followed(history, root.expand_as(buffer), since, ~small & (buffer != 0))
    move = torch.where(small, move, followed)
    return param * left - torch.where(buffer == 0, 0.0, move)


def _followed(history: History, root: Tensor, since: Tensor, where: Tensor | None = None) -> Tensor:
    """The sum of the moves of each entry, for a buffer of one, term by term."""
    n, quotient = history.steps, history.idle.along == "quotient"
    total = torch.zeros_like(root)
    where = torch.ones_like(root, dtype=torch.bool) if where is None else where
    rows = where.any(dim=1).nonzero().squeeze(1)
    since = since[rows.cpu()]
    for k in range(1, min(history.follow, n - int(since.min())) + 1 if since.numel() else 0):
        step = since + k
        on = step <= n
        step = step.clamp(max=n)
        size = history.sizes[step] * history.growth[step] / history.grown
        weight = _column(torch.where(on, size * history.firsts[k], 0.0), root)
        if quotient:
            roots = _column(history.roots[step], root)
            total[rows] += weight / (root[rows] * history.fade**k / roots + history.eps)
        else:
            total[rows] += weight
    return total


def _leader(history: History, param: Tensor, state: dict[str, Tensor]) -> Tensor:
    hyper = history.hyper
    if not hyper["lr"]:
        return param
    linear, root = state["linear"], state["sum"].sqrt()
    leader = (linear.sign() * hyper["l1"] - linear) / (
        (hyper["beta"] + root) / hyper["lr"] + hyper["l2"]
    )
    return torch.where(linear.abs() <= hyper["l1"], 0.0, leader)
