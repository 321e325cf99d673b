"""Allocations that fail: the library that is preloaded.

Allocations of a few bytes also happen where C++ must not throw, so a sweep over all of them can end
in ``std::terminate``.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("allocations.c")


def shim() -> Path | None:
    """Build the library, once; ``None`` without a C compiler or away from glibc."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or platform.libc_ver()[0] != "glibc":
        return None
    library = ROOT / "build" / "faults" / "allocations.so"
    if library.exists() and library.stat().st_mtime >= SOURCE.stat().st_mtime:
        return library
    library.parent.mkdir(parents=True, exist_ok=True)
    mine = library.with_suffix(f".{os.getpid()}")  # several test processes may build at once
    flags = ["-shared", "-fPIC", "-O2", "-fno-builtin"]
    subprocess.run([compiler, *flags, "-o", mine, SOURCE, "-ldl"], check=True, timeout=60)
    os.replace(mine, library)
    return library
