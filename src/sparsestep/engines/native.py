"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

The core reads the tensors' addresses and strides itself, keeps none of them beyond the step, and
checks the positions before it writes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsestep.core import core, isa
from sparsestep.engines.protocol import ParamUpdate, Settings
from sparsestep.errors import InputError
from sparsestep.gradients.layouts import Gradient
from sparsestep.gradients.touched import bad_index

_RULES: dict[str, tuple[int, int, int, int]] = core.rules() if core else {}


class Native:
    """The updates of one step that the core runs, all at once."""

    def __init__(self) -> None:
        assert core is not None
        self._jobs = core.Jobs(isa.index)
        # Applies the updates, and counts those that were claimed in groups: one call of the core.
        self.commit: Callable[[], None] = self._jobs.commit
        self._updates: list[ParamUpdate] = []
        self._settings: list[Settings] = []

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
        assert core is not None
        twin = _RULES.get(settings.rule.name)
        if twin is None or not settings.rule.is_native or settings.seed is not None:
            return range(first, first + len(params))
        tag = len(self._settings)
        group = settings.core.get(tag)
        if group is None:
            names = tuple(spec.name for spec in settings.rule.state)
            group = (twin[0], names, settings.rule.counts, _numbers(settings), tag)
            settings.core[tag] = group
        self._settings.append(settings)
        declined: list[int] = self._jobs.try_claim(
            group, params, state, known, seen, selections, grads, first
        )
        return declined

    def claim(self, update: ParamUpdate) -> bool:
        """Take an update; false where the core has no way to run it."""
        rule = update.settings.rule
        twin = _RULES.get(rule.name)
        if twin is None or not rule.is_native:
            return False
        touched = update.touched
        if not touched.values.is_contiguous():
            touched = touched.in_rows()
        param, *state = update.written
        numbers = _numbers(update.settings)
        claimed: bool = self._jobs.add(
            twin[0], numbers, update.step, touched, param, state, update.seed
        )
        if claimed:
            self._updates.append(update)
        return claimed

    def prepare(self) -> None:
        """Do all that may fail; raises if any position is no slot."""
        bad = self._jobs.prepare(torch.get_num_threads())
        if bad is not None:
            tag, index, slots, position = bad
            why = bad_index(0, slots, position)
            if tag < 0:
                raise self._updates[index].refuse(why)
            raise InputError(f"{self._settings[tag].who(index)}: {why}")


def _numbers(settings: Settings) -> tuple[float, ...]:
    """What the core is told of a group: sign of the gradient, decay, and the rule's options."""
    found: tuple[float, ...] | None = settings.core.get("numbers")
    if found is None:
        options = settings.rule.numbers(settings.hyper)
        found = settings.core["numbers"] = (settings.sign, settings.l2, settings.shrink, *options)
    return found
