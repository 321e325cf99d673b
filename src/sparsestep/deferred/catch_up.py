"""Catch-up of deferred rows: native, and in torch operations as the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep._native import ext, isa
from sparsestep._process import uninterrupted
from sparsestep._torch import disable_compiler
from sparsestep.deferred.history import StepHistory
from sparsestep.engines.finishing import finish, reserve
from sparsestep.rules.rule import Rule

_IDLE_UPDATES = ext.idle_updates() if ext else []


def catch_up_native(
    history: StepHistory,
    rule: Rule,
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int | None:
    """Catch up in the core.

    Args:
        history: the steps since.
        rule: the rule of these steps.
        last: the last step of each row.
        param: the parameter, real.
        state: its state tensors, real.
        rows: the rows; ``None`` for all.

    Returns:
        Number of rows whose parameter was not current. ``None`` if the core declines; then nothing
        has changed.
    """
    if torch.compiler.is_compiling():  # the core stays outside graphs
        found: int | None = _uncompiled(history, rule, last, param, state, rows)
        return found
    idle = history.idle_update
    if ext is None or not param.is_cpu or idle.native not in _IDLE_UPDATES:
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
    deferred, stale = done
    # A row's state may be deferred while its parameter is current.
    if stale or (deferred and idle.recomputes):
        increment_version([param])
    return stale


def _work(history: StepHistory, rule: Rule, param: Tensor) -> Any:
    """Return a call of the core with the arguments that do not depend on rows."""
    assert ext is not None
    idle, names = history.idle_update, [spec.name for spec in rule.state]
    work = ext.CatchUp()
    work.idle_update = _IDLE_UPDATES.index(idle.native)
    work.param = param
    work.states_per_row = sum(spec.per_row for spec in rule.state)
    work.powers = tuple(map(history.powers.get, names))
    if idle.buffer:
        work.buffer = names.index(idle.buffer)
        work.buffer_decay = history.decays.get(idle.buffer, 1.0)
    if idle.square:
        work.square = names.index(idle.square)
        work.square_decay = history.decays.get(idle.square, 1.0)
    work.eps = history.eps
    work.max_error = history.max_error(param.dtype)
    work.converges = history.converges
    work.horizon = history.horizon
    work.inverse_decay, work.centers = history.inverse_decay, history.centers
    work.sizes, work.roots, work.sums = history.sizes, history.roots, history.sums
    if idle.recomputes:
        work.options = rule.pack_hyperparams(history.hyperparams)
    return work


_uncompiled = disable_compiler(catch_up_native)


@torch.no_grad()
def catch_up_reference(
    history: StepHistory,
    rule: Rule,
    last: Tensor,
    param: Tensor,
    state: list[Tensor],
    rows: Tensor | None,
) -> int:
    """Catch up in torch operations, in float64; arguments and result as ``catch_up_native``.

    A row's steps are looked up on the CPU, then moved to the parameter's device.
    """
    rows = torch.arange(len(last), device="cpu") if rows is None else rows.cpu().unique()
    old = last[rows].long()
    had_gradient = old >= 0
    since = torch.where(had_gradient, old, ~old) - history.base
    now = torch.where(had_gradient, history.now, ~history.now).to(torch.int32)
    set_last_step = partial(last.index_put_, (rows,), now)
    deferred = since < history.steps
    rows, since, had_gradient = rows[deferred], since[deferred], had_gradient[deferred]
    if not rows.numel() or not param.numel():
        set_last_step()
        return 0
    there = rows.to(param.device)
    before, *states = (t[there].double().reshape(len(there), -1) for t in (param, *state))
    named = dict(zip((spec.name for spec in rule.state), states, strict=True))
    idle, missed = history.idle_update, MissedSteps(history, since, had_gradient, param)
    after = idle.move(before, named, missed)
    written = [
        (tensor, idle.decay(name, named[name], missed, tensor.dtype))
        for tensor, name in zip(state, named, strict=True)
    ]
    stale = int(idle.is_stale(missed, before, after).sum())
    if stale or idle.recomputes:  # else leave the parameter's version as it is
        written.append((param, after))
    calls: list[Callable[[], object]] = [
        partial(
            tensor.detach().index_put_,
            (there,),
            new.to(tensor.dtype).reshape(len(there), *tensor.shape[1:]),
        )
        for tensor, new in written
    ]
    reserve()
    uninterrupted(partial(finish, [*calls, set_last_step]))
    return stale


class MissedSteps:
    """The steps that some rows missed, as the argument of an idle update (``rules/idle.py``).

    Args:
        history: all steps.
        since: the last step of each row, counted from the history's base, on the CPU.
        had_gradient: which rows ever had a gradient, on the CPU.
        param: has the device and dtype of the entries.
    """

    def __init__(
        self, history: StepHistory, since: Tensor, had_gradient: Tensor, param: Tensor
    ) -> None:
        self._history = history
        self._since = since
        self._had_gradient = had_gradient
        self._device = param.device
        self.hyperparams: Mapping[str, Any] = history.hyperparams
        self.decays: Mapping[str, float] = history.decays
        self.eps: float = history.eps
        self.converges: bool = history.converges
        self.max_error: float = history.max_error(param.dtype)

    def _column(self, of_rows: Tensor) -> Tensor:
        """Values per row as a column, on the parameter's device."""
        return of_rows.to(self._device)[..., None]

    @cached_property
    def shrink(self) -> Tensor:
        """The product of the weight decay factors."""
        history = self._history
        return self._column(history.inverse_decay[self._since] / history.latest_inverse_decay)

    @property
    def had_gradient(self) -> Tensor:
        """Which rows ever had a gradient."""
        return self._column(self._had_gradient)

    @cached_property
    def sums(self) -> Tensor:
        """The sum over the missed steps of each term of the idle update's series."""
        history = self._history
        return self._column(history.sums[self._since].T / history.latest_inverse_decay)

    @property
    def center(self) -> Tensor:
        """What a root is multiplied by, in about the middle of the steps."""
        return self._column(self._history.centers[self._since])

    def total_size(self, first: int | None = None) -> Tensor:
        """The sum of the sizes of the missed steps, or of the ``first`` few of them."""
        history, since = self._history, self._since
        end = history.steps if first is None else since + first
        totals = history.sums[:, 0]
        return self._column((totals[end] - totals[since]) / history.latest_inverse_decay)

    def what_is_left(self, name: str) -> Tensor:
        """The product of a state's decay factors."""
        return self._column(self._history.powers[name][self._history.steps - self._since])

    def replay(self, buffer: str, rows: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """Yield the steps of some rows one by one, within the horizon."""
        history, since = self._history, self._since[rows.cpu()]
        if not since.numel():
            return
        n, decay = history.steps, history.powers.get(buffer)
        for k in range(1, min(history.horizon, n - int(since.min())) + 1):
            step = since + k
            was_taken = step <= n
            step = step.clamp(max=n)
            size = history.sizes[step] * history.inverse_decay[step] / history.latest_inverse_decay
            size = size if decay is None else size * decay[k]
            yield (
                k,
                self._column(torch.where(was_taken, size, 0.0)),
                self._column(history.roots[step]),
            )
