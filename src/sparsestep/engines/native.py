"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

The core reads the tensors' addresses and strides itself, keeps none of them beyond the step, and
checks the positions before it writes.
"""

from __future__ import annotations

import os
from functools import cached_property

import torch
from torch.autograd.graph import increment_version

from sparsestep.contract import Update
from sparsestep.errors import InputError, sentence
from sparsestep.grads import Touched, bad_index

try:
    import sparsestep._native as _native
except ImportError as error:  # installed without the core (SPARSESTEP_PURE=1), or a broken build
    core = None
    why_missing = str(error)
else:
    core = _native
    why_missing = ""

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


class Step:
    """The updates of one step that the core runs, all at once."""

    def __init__(self) -> None:
        assert core is not None
        self.updates: list[Update] = []
        self._jobs = core.Jobs(_isa.index)
        # Parameters of one group mostly have the same step count, hence the same numbers.
        self._numbers: dict[tuple[int, int], tuple[float, ...]] = {}

    def add(self, update: Update) -> bool:
        """Take the update; false where the core has no way to run it."""
        rule = update.settings.rule
        twin = _RULES.get(rule.name)
        if twin is None or rule.coefficients is None:
            return False
        touched = update.touched
        if not touched.values.is_contiguous():
            touched = _in_rows(touched)
        added: bool = self._jobs.add(
            twin[0],
            self._numbers_of(update),
            touched,
            update.param,
            update.state,
            update.seed,
        )
        if added:
            self.updates.append(update)
        return added

    def _numbers_of(self, update: Update) -> tuple[float, ...]:
        settings = update.settings
        key = (id(settings), update.step)
        found = self._numbers.get(key)
        if found is None:
            assert settings.rule.coefficients is not None
            coefficients = settings.rule.coefficients(step=update.step, **settings.hyper)
            found = (settings.sign, settings.l2, settings.shrink, *coefficients)
            self._numbers[key] = found
        return found

    def run(self) -> None:
        """Apply the updates; raises with nothing written if any position is no slot."""
        bad = self._jobs.run(torch.get_num_threads())
        if bad is not None:
            job, _, position = bad
            update = self.updates[job]
            raise update.refuse(bad_index(0, update.touched.slots, position))
        increment_version([update.param for update in self.updates])


def _in_rows(touched: Touched) -> Touched:
    """Values as rows: a view where that is possible, else a copy."""
    values, block = touched.values, touched.block
    rows = values.numel() // block if block else len(values)
    values = values.reshape(rows, block)
    if touched.positions is None:
        values = values.contiguous()
    return touched._replace(values=values)
