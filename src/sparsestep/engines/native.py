"""The native engine: sums duplicates and applies the rule in one pass, in C++ on the CPU.

This file checks what the core must be able to rely on and turns tensors into addresses and strides.
The core keeps no pointer beyond the call, and checks the positions itself before it writes.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from sparsestep.contract import Update
from sparsestep.errors import InputError, sentence
from sparsestep.grads import bad_index

try:
    import sparsestep._native as _native
except ImportError as error:  # installed without the core (SPARSESTEP_PURE=1), or a broken build
    core = None
    why_missing = str(error)
else:
    core = _native
    why_missing = ""

_DTYPES = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2, torch.float64: 3}
_RULES: dict[str, tuple[int, int, int]] = core.rules() if core else {}

Job = tuple[float, ...]


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


class Prepared(NamedTuple):
    """An update as the core takes it, and what must stay alive until the core has run."""

    job: Job
    update: Update
    values: Tensor


class Preparation:
    """Turns the updates of one step into jobs."""

    def __init__(self) -> None:
        # Parameters of one group mostly have the same step count, hence the same coefficients.
        self._coefficients: dict[tuple[int, int], tuple[float, ...]] = {}

    def coefficients(self, update: Update) -> tuple[float, ...]:
        """The numbers that the rule's native twin takes."""
        key = (id(update.hyper), update.step)
        found = self._coefficients.get(key)
        if found is None:
            assert update.rule.coefficients is not None
            found = update.rule.coefficients(step=update.step, **update.hyper)
            self._coefficients[key] = found
        return found

    def job(self, update: Update) -> Prepared | None:
        """The update as the core takes it, or ``None`` where the core has no way to run it."""
        rule = _RULES.get(update.rule.name)
        if rule is None or update.rule.coefficients is None:
            return None
        positions, values, slots, block = update.touched
        if positions is None:
            entries, address = 1, 0
            values = values.contiguous()
        else:
            entries, address = positions.numel(), positions.data_ptr()
            if not values.is_contiguous():
                values = values.reshape(entries, block)
        job: list[float] = [rule[0], positions is None, address, entries, slots, block]
        job.append(update.maximize)
        fits = _append(job, values, entries, block) and _append(job, update.param, slots, block)
        for tensor in update.state:
            fits = fits and _append(job, tensor, slots, block)
        if not fits:
            return None
        job += self.coefficients(update)
        return Prepared(tuple(job), update, values)


def _append(job: list[float], tensor: Tensor, rows: int, block: int) -> bool:
    """Add a tensor's address, dtype and strides to the job; false if the core cannot take it."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None or not tensor.is_cpu:
        return False
    if tensor.is_contiguous():
        job += (tensor.data_ptr(), dtype, block, 1)
        return True
    try:
        strides = tensor.view(rows, block).stride()
    except RuntimeError:  # no two strides describe it
        return False
    job += (tensor.data_ptr(), dtype, *strides)
    return True


def run(prepared: Sequence[Prepared]) -> None:
    """Apply all updates at once; raises with nothing written if any position is no slot."""
    assert core is not None
    bad = core.step([each.job for each in prepared], torch.get_num_threads(), _isa.index)
    if bad is not None:
        job, _, position = bad
        update = prepared[job].update
        raise InputError(f"{update.who()}: {bad_index(0, update.touched.slots, position)}")
    increment_version([each.update.param for each in prepared])
