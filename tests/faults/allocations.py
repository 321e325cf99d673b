"""Fail the n-th memory allocation of a process.

``run`` starts a script with the library of ``allocations.c`` preloaded; in there, ``Allocations``
controls it::

    allocations = Allocations()
    allocations.arm(3, min_bytes=4096)  # the third allocation of at least 4 KiB fails
    try:
        optimizer.step()
    except MemoryError:
        ...
    seen = allocations.disarm()  # how many there were: where a sweep over n ends

Torch and Python report a failed allocation as ``MemoryError`` or as a ``RuntimeError`` that
``is_out_of_memory`` recognizes. Allocations of a few bytes also happen where C++ must not throw, so
a sweep over all of them (``min_bytes=0``) can end in ``std::terminate``.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = Path(__file__).with_name("allocations.c")


def shim() -> Path | None:
    """Build the library, once; ``None`` without a C compiler or away from glibc."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or not sys.platform.startswith("linux") or not _has_glibc():
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


def environment() -> dict[str, str]:
    """Environment variables of a process that preloads the library."""
    library = shim()
    if library is None:
        raise RuntimeError("environment: failing allocations needs a C compiler and glibc.")
    others = os.environ.get("LD_PRELOAD")
    preload = f"{library}:{others}" if others else str(library)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": path}


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """Run Python with the library preloaded, as in ``run("-m", "tests.faults")``."""
    return subprocess.run(
        [sys.executable, *command],
        env=environment(),
        cwd=ROOT,
        timeout=timeout,
        capture_output=True,
        text=True,
        check=False,
    )


# Of torch, its archives and gloo.
_TEXTS = ("allocate memory", "not enough memory", "bad_alloc", "allocation failed")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error reports a failed allocation."""
    text = str(error)
    return isinstance(error, MemoryError) or (
        isinstance(error, RuntimeError) and any(s in text for s in _TEXTS)
    )


class Allocations:
    """Control of the preloaded library."""

    def __init__(self) -> None:
        process = ctypes.CDLL(None)
        try:
            self._arm = process.sparsestep_faults_arm
            self._disarm = process.sparsestep_faults_disarm
            self._failed = process.sparsestep_faults_failed
        except AttributeError:
            raise RuntimeError("Allocations: start the process with `run`.") from None
        self._arm.argtypes = [ctypes.c_long, ctypes.c_size_t, ctypes.c_int]
        for function in (self._disarm, self._failed):
            function.restype = ctypes.c_long

    def arm(self, nth: int, min_bytes: int = 0, persistent: bool = False) -> None:
        """Fail the n-th allocation from now on of at least ``min_bytes``.

        Args:
            nth: counted from 1.
            min_bytes: smaller allocations are neither counted nor failed.
            persistent: fail all later ones, too.
        """
        if nth < 1:
            raise ValueError(f"arm: nth must be at least 1, got {nth}.")
        self._arm(nth, min_bytes, persistent)

    def disarm(self) -> int:
        """Fail no more; the number of allocations counted since ``arm``."""
        return self._disarm()

    @property
    def failed(self) -> int:
        """How many have been failed since ``arm``."""
        return self._failed()


def _has_glibc() -> bool:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") is not None
    except (AttributeError, OSError, ValueError):
        return False
