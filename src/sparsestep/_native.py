"""Loads the extension ``_C``, built from ``native/``: its instruction set, or why it is missing."""

from __future__ import annotations

import os
from functools import cached_property
from importlib import import_module
from typing import TYPE_CHECKING, cast

from sparsestep.errors import InputError, message

if TYPE_CHECKING:
    from sparsestep._C import Core

ext: Core | None = None
import_error: str = ""
try:
    ext = cast("Core", import_module("sparsestep._C"))
except ImportError as _error:  # installed without it (SPARSESTEP_PURE=1), or a broken build
    import_error = str(_error)

# Names of the real float dtypes: the extension's table if it is there.
dtype_names: tuple[str, ...] = ext.dtypes if ext else ("float16", "bfloat16", "float32", "float64")


def instruction_sets() -> dict[str, bool]:
    """Return the instruction sets of the extension, and whether this machine has them."""
    return dict(ext.instruction_sets()) if ext else {}


class _InstructionSet:
    """The instruction set in use: the widest there is, or what SPARSESTEP_ISA says."""

    @cached_property
    def index(self) -> int:
        # At first use, not at import: `sparsestep info` must be able to report a bad value.
        self.use(os.environ.get("SPARSESTEP_ISA"))
        return self.index

    def use(self, name: str | None) -> None:
        """Use one instruction set from now on; ``None`` or an empty name: the widest."""
        available = [known for known, here in instruction_sets().items() if here]
        name = name or available[-1]
        if name not in available:
            requirement = f"SPARSESTEP_ISA must be one of {', '.join(available)} on this machine"
            raise InputError(message(requirement, repr(name)))
        self.index = list(instruction_sets()).index(name)


isa: _InstructionSet = _InstructionSet()


def instruction_set() -> str | None:
    """The instruction set in use, or ``None`` if the extension is not installed."""
    if ext is None:
        return None
    return list(instruction_sets())[isa.index]


# The results do not depend on it.
use_instruction_set = isa.use
