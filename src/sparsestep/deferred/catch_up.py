"""What rows have missed, done by the core; ``reference.py`` has the same in torch operations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._native import ext, isa
from sparsestep._torch import disable_compiler
from sparsestep.deferred.history import History
from sparsestep.rules.rule import Rule

_MOTIONS = ext.idle_updates() if ext else []


def catch_up(
    history: History,
    rule: Rule,
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int | None:
    """Bring rows up to date; returns how many were not where they should have been.

    Args:
        history: what the steps since would have done.
        rule: whose steps they are.
        last: the step that each row has reached.
        param: the parameter, real.
        state: its state tensors, real.
        rows: which ones; ``None`` for all.

    Returns:
        ``None``, and nothing done, where the core cannot.
    """
    if torch.compiler.is_compiling():  # the core stays outside graphs
        found: int | None = _uncompiled(history, rule, last, param, state, rows)
        return found
    motion = history.motion
    if ext is None or not param.is_cpu or motion.native not in _MOTIONS:
        return None
    work = _work(history, rule, param)
    work.state = tuple(state)
    work.rows = None if rows is None else rows.contiguous()
    work.last, work.now, work.base = last, history.now, history.base
    done: tuple[int, int] | None = work.run(
        threads=torch.get_num_threads(), instruction_set=isa.index
    )
    if done is None:
        return None
    behind, stale = done
    # A row may be behind and its parameter right.
    if stale or (behind and motion.recomputes):
        increment_version([param])
    return stale


def _work(history: History, rule: Rule, param: Tensor) -> Any:
    """What is the same for all rows."""
    assert ext is not None
    motion, names = history.motion, [spec.name for spec in rule.state]
    work = ext.CatchUp()
    work.motion = _MOTIONS.index(motion.native)
    work.param = param
    work.states_per_row = sum(spec.per_row for spec in rule.state)
    work.powers = tuple(map(history.powers.get, names))
    if motion.buffer:
        work.buffer = names.index(motion.buffer)
        work.buffer_decay = history.decays.get(motion.buffer, 1.0)
    if motion.square:
        work.square = names.index(motion.square)
        work.square_decay = history.decays.get(motion.square, 1.0)
    work.eps = history.eps
    work.largest_ratio = history.largest_ratio_for(param.dtype)
    work.converges = history.converges
    work.horizon = history.horizon
    work.most_replayed = history.most_replayed
    work.inverse_decay = history.inverse_decay
    work.sizes, work.roots, work.sums = history.sizes, history.roots, history.sums
    if motion.recomputes:
        work.options = rule.pack_hyperparams(history.hyper)
    return work


_uncompiled = disable_compiler(catch_up)
