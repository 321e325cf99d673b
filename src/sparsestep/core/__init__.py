"""The native core, if it is installed, and the instruction set that it uses.

The extension ``_native`` is built from ``native/``. It knows tensors and numbers, but not what they
mean. This package imports nothing but ``errors``, and everything may import it.
"""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, cast

from sparsestep.errors import InputError, sentence

if TYPE_CHECKING:
    from sparsestep.core._native import Core

core: Core | None = None
why_missing: str = ""
try:
    from sparsestep.core import _native
except ImportError as _error:  # installed without the core (SPARSESTEP_PURE=1), or a broken build
    why_missing = str(_error)
else:
    core = cast("Core", _native)

__all__ = ["core", "instruction_set", "instruction_sets", "use_instruction_set", "why_missing"]


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


isa: _InUse = _InUse()


def instruction_set() -> str | None:
    """The instruction set in use, or ``None`` where the core is not installed."""
    if core is None:
        return None
    return list(instruction_sets())[isa.index]


def use_instruction_set(name: str) -> None:
    """Use one instruction set from now on; the results do not depend on it."""
    isa.use(name)
