"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

The core reads the tensors' addresses and strides itself, keeps none of them beyond the step, and
checks the positions before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from sparsestep._native import ext, isa
from sparsestep.engines.base import ParamUpdate, Settings
from sparsestep.engines.programs import Programs, Recorded, recorded_again
from sparsestep.errors import InputError
from sparsestep.grads.indexed import bad_index
from sparsestep.grads.layouts import Gradient
from sparsestep.rules import int8

if TYPE_CHECKING:
    from sparsestep._C import _Group as Group
    from sparsestep.grads.masks import MaskBefore

    # Of a group as it was read: its values, what the core was told, its masks, if it has any.
    GroupBefore = tuple[tuple[Any, ...], Group | None, list[MaskBefore] | None]

_RULES: dict[str, tuple[int, int, int, int]] = ext.rules() if ext else {}


class Native:
    """The updates of one step that the core runs, all at once."""

    def __init__(self) -> None:
        assert ext is not None
        self._jobs = ext.Jobs(isa.index)
        self.programs: Programs = Programs()
        # Applies the updates, and counts those that were claimed in groups: one call of the core.
        self.commit: Callable[[], None] = self._jobs.commit

    def try_claim(
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
            The numbers of the parameters that the core declines, of those that have a gradient.
        """
        group = None
        if settings.seed is None:
            group = group_of(settings)
            if group is None:
                group = self.programs.usual_group(settings, params, state, grads)
        if group is None:
            return range(first, first + len(params))
        return self._jobs.try_claim(
            group, settings, params, state, known, seen, selections, grads, first
        )

    def claim(self, update: ParamUpdate) -> bool:
        """Take an update; false where the core has no way to run it."""
        settings = update.settings
        group = group_of(settings)
        if group is None and update.param.is_cpu:
            tensors = (*update.written, update.touched.values)
            in_double = any(tensor.dtype == torch.float64 for tensor in tensors)
            group = self.programs.group_of(settings, update.step, in_double=in_double)
        if group is None:
            return False
        touched = update.touched
        if not touched.values.is_contiguous():
            touched = touched.in_rows()
        param, *state = update.written
        return self._jobs.add(
            *(group, update.step, touched, param, state, update.seed, update.dealt),
            *(settings, update.index),
        )

    def why_not(self, settings: Settings) -> str | None:
        """Why a rule's formula could not be recorded, where that is so."""
        return self.programs.refused.get(id(settings))

    def prepare(self) -> None:
        """Do all that may fail; raises if any position is no slot."""
        bad = self._jobs.prepare(torch.get_num_threads())
        if bad is not None:
            settings, index, slots, position = bad
            why = bad_index(0, slots, position)
            raise InputError(f"{settings.who(index)}: {why}")


def group_of(settings: Settings) -> Group | None:
    """What the core is told of a param group; ``None`` where it does not know the rule."""
    rule = settings.rule
    twin = _RULES.get(rule.name)
    if ext is None or twin is None or not rule.is_native:
        return None
    found: Group | None = settings.core.get("group")
    if found is None:
        found = settings.core["group"] = ext.Group(
            twin[0],
            rule.state_names,
            rule.counts,
            settings.sign,
            settings.l2,
            settings.shrink,
            rule.numbers(settings.hyper),
            settings.stochastic,
            tuple(spec.int8 == "signed" for spec in rule.state[: int8.count(rule.state)]),
        )
    return found


class Before(NamedTuple):
    """The param groups of an optimizer in a step that can be done again.

    Attributes:
        told: the values of each when it was read, what the core was told of it, if anything, and
            its masks.
        recorded: those whose formula is recorded anew in every step, by number.
        made: what was recorded for a step that could not be done again after all.
    """

    told: list[GroupBefore]
    recorded: list[tuple[int, Settings]]
    made: list[Recorded]


def step_again(
    groups: list[dict[str, Any]],
    before: Before,
    state: dict[Tensor, Any],
    known: dict[int, tuple[Any, ...]],
) -> bool:
    """Do a whole step in one call of the core, where it is like one before.

    Args:
        groups: the param groups.
        before: what the core was told of them.
        state: of the optimizer.
        known: where the memory of each parameter and its state was when it was looked at.

    Returns:
        Whether it was done. If not, nothing was: a group says something else now, or a gradient is
        not in the usual form.
    """
    assert ext is not None
    told, recorded, made = before
    if recorded and len(groups) != len(told):
        return False
    for index, settings in recorded:
        values, _, masked = told[index]
        found = recorded_again(values, settings, groups[index], state)
        if found is None:
            return False
        made.append(found)
        if found.asks_for_float32:
            return False
        told[index] = (values, found.group, masked)
    threads = torch.get_num_threads()
    is_done = ext.step_again(isa.index, groups, told, state, known, threads)
    if is_done and recorded:
        made.clear()
    return is_done
