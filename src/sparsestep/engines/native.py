"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

The core reads the tensors' addresses and strides itself, keeps none of them beyond the step, and
checks the positions before it writes.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep.contract import Settings, Update
from sparsestep.core import core as core
from sparsestep.core import why_missing as why_missing
from sparsestep.errors import InputError, sentence
from sparsestep.grads import Touched, bad_index
from sparsestep.layouts import Gradient

if TYPE_CHECKING:
    from sparsestep.catch_up import Idling

_RULES: dict[str, tuple[int, int, int, int]] = core.rules() if core else {}


def instruction_sets() -> dict[str, bool]:
    """Every instruction set the core was compiled for, and whether this machine has it."""
    return dict(core.instruction_sets()) if core else {}


def _widest() -> str:
    return [name for name, available in instruction_sets().items() if available][-1]


class _InUse:
    """The instruction set in use: the widest there is, or what SPARSESTEP_ISA says."""

    @cached_property
    def index(self) -> int:
        # At first use, not at import: `sparsestep info` must be able to report a bad value.
        self.use(os.environ.get("SPARSESTEP_ISA") or _widest())
        return self.index

    def use(self, name: str) -> None:
        available = [known for known, here in instruction_sets().items() if here]
        if name not in available:
            contract = f"SPARSESTEP_ISA must be one of {', '.join(available)} on this machine"
            raise InputError(sentence(contract, repr(name)))
        self.index = list(instruction_sets()).index(name)


_isa = _InUse()


def instruction_set() -> str | None:
    """The instruction set in use, or ``None`` where the core is not installed."""
    if core is None:
        return None
    return list(instruction_sets())[_isa.index]


def use_instruction_set(name: str) -> None:
    """Use one instruction set from now on; the results do not depend on it."""
    _isa.use(name)


class _Numbers(dict[int, tuple[float, ...]]):
    """What the core is told for each step count of a group, computed when it is asked for.

    It knows parts of the settings, not the settings: these lead to it, and to the parameters, which
    would be freed only when the garbage collector finds the circle.
    """

    def __init__(self, settings: Settings) -> None:
        assert settings.rule.coefficients is not None
        self._coefficients = settings.rule.coefficients
        self._hyper = settings.hyper
        self._common = (settings.sign, settings.l2, settings.shrink)

    def __missing__(self, step: int) -> tuple[float, ...]:
        if len(self) > 64:  # the settings may stay the same for long
            self.clear()
        found = (*self._common, *self._coefficients(step=step, **self._hyper))
        self[step] = found
        return found


class Step:
    """The updates of one step that the core runs, all at once."""

    def __init__(self) -> None:
        assert core is not None
        self._jobs = core.Jobs(_isa.index)
        self._updates: list[Update] = []
        self._settings: list[Settings] = []

    def take(
        self,
        settings: Settings,
        params: list[Tensor],
        state: dict[Tensor, Any],
        known: dict[int, tuple[Any, ...]],
        seen: set[int],
        selections: list[tuple[Tensor, int, torch.Size] | None] | None,
        grads: Sequence[Gradient | None] | None,
        first: int,
    ) -> Sequence[int]:
        """Let the core read the parameters of a group that are in the usual form.

        That is a row-sparse gradient on the CPU, or a dense one with a selection; state that fits;
        everything contiguous. It declines whatever is unusual, so all cases and all messages are on
        this side alone.

        Args:
            settings: of the group.
            params: of the group, all or some that follow each other.
            state: of the optimizer.
            known: where the memory of each parameter and its state was when it was looked at.
            seen: ids of parameters that were taken in this step.
            selections: what masks select, for each parameter.
            grads: the gradients, where they are not those that the parameters have.
            first: the number of the first of these parameters in the group.

        Returns:
            The numbers of the parameters that are left, of those that have a gradient.
        """
        assert core is not None
        twin = _RULES.get(settings.rule.name)
        if twin is None or settings.rule.coefficients is None or settings.seed is not None:
            return range(first, first + len(params))
        tag = len(self._settings)
        group = settings.core.get(tag)
        if group is None:
            names = tuple(kept.name for kept in settings.rule.state)
            group = (twin[0], names, settings.rule.counts, self._numbers(settings), tag)
            settings.core[tag] = group
        self._settings.append(settings)
        left: list[int] = self._jobs.take(
            group, params, state, known, seen, selections, grads, first
        )
        return left

    def add(self, update: Update) -> bool:
        """Take an update; false where the core has no way to run it."""
        rule = update.settings.rule
        twin = _RULES.get(rule.name)
        if twin is None or rule.coefficients is None:
            return False
        touched = update.touched
        if not touched.values.is_contiguous():
            touched = _in_rows(touched)
        numbers = self._numbers(update.settings)[update.step]
        state, seed = update.state, update.seed
        added: bool = self._jobs.add(twin[0], numbers, touched, update.param, state, seed)
        if added:
            self._updates.append(update)
        return added

    @staticmethod
    def _numbers(settings: Settings) -> _Numbers:
        found: _Numbers | None = settings.core.get("numbers")
        if found is None:
            found = settings.core["numbers"] = _Numbers(settings)
        return found

    def prepare(self) -> None:
        """Do all that may fail; raises if any position is no slot."""
        bad = self._jobs.prepare(torch.get_num_threads())
        if bad is not None:
            tag, index, slots, position = bad
            why = bad_index(0, slots, position)
            if tag < 0:
                raise self._updates[index].refuse(why)
            raise InputError(f"{self._settings[tag].who(index)}: {why}")

    @property
    def commit(self) -> Callable[[], None]:
        """Apply the updates, and count those that were taken: one call of the core."""
        commit: Callable[[], None] = self._jobs.commit
        return commit


_ALONG = ("nothing", "buffer", "sign", "quotient", "leader")  # as in native/types.h


def catch_up(idling: Idling, param: Tensor, state: list[Tensor], rows: Tensor | None) -> int | None:
    """Bring rows up to date; returns how many were not where they should have been.

    ``None``, and nothing done, where the core cannot.
    """
    if core is None or not param.is_cpu:
        return None
    history, specs = idling.history, idling.rule.state
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
        idling.last,
        tuple(idle.fades.get(name, -1) + 1 for name in names),
        integers,
        numbers,
        history.tables,
        torch.get_num_threads(),
        _isa.index,
    )
    if done is None:
        return None
    behind, stale = done
    # A row may be behind and its parameter right. FTRL computes it anew in any case.
    if stale or (behind and idle.along == "leader"):
        increment_version([param])
    return stale


_NORMS = {1.0: 1, 2.0: 2, math.inf: 3}  # as in native/types.h


def norms(touched: Touched, order: float) -> Tensor | None:
    """The norm of every slot of a gradient, in float64; no sum is written out.

    Args:
        touched: the gradient; it has positions.
        order: of the norm.

    Returns:
        A number for each entry: the slot's norm for the first of a slot, zero for the others.
        ``None`` where the core has no way to do it.

    Example:
        >>> positions = torch.tensor([3, 1, 3])
        >>> norms(Touched(positions, torch.tensor([[3.0, 0.0], [1.0, 0.0], [0.0, 4.0]]), 5, 2), 2.0)
        tensor([5., 1., 0.], dtype=torch.float64)
    """
    code = _NORMS.get(order)
    if core is None or code is None or not touched.values.is_cpu:
        return None
    positions = touched.positions
    assert positions is not None
    if not touched.values.is_contiguous():
        touched = _in_rows(touched)
    found = torch.zeros(positions.numel(), dtype=torch.float64, device="cpu")
    done = core.norms(touched, code, found, torch.get_num_threads(), _isa.index)
    if done is None:
        return None
    if done[0] is not None:
        raise InputError(bad_index(0, touched.slots, done[0]))
    return found


def _in_rows(touched: Touched) -> Touched:
    """Values as rows: a view where that is possible, else a copy."""
    values, block = touched.values, touched.block
    rows = values.numel() // block if block else len(values)
    values = values.reshape(rows, block)
    if touched.positions is None:
        values = values.contiguous()
    return touched._replace(values=values)
