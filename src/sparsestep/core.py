"""The native core, where it is installed. Use it through ``engines`` and ``layouts``."""

from __future__ import annotations

try:
    import sparsestep._native as _native
except ImportError as error:  # installed without the core (SPARSESTEP_PURE=1), or a broken build
    core = None
    why_missing = str(error)
else:
    core = _native
    why_missing = ""

__all__ = ["core", "why_missing"]
