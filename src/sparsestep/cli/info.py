"""Show versions, engine and hardware, for a bug report.

Example:
  sparsestep info --json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from pathlib import Path

import torch

from sparsestep import _native
from sparsestep.errors import InputError
from sparsestep.version import __version__

Value = str | int | list[str] | None

_MISSING = "the C++ core is missing"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparsestep info``."""
    parser.add_argument("--json", action="store_true", help="print as JSON")


def run(options: argparse.Namespace) -> int:
    """Print versions and hardware as plain text, which pastes well."""
    values = collect()
    if options.json:
        print(json.dumps(values, indent=2))
        return 0
    width = max(map(len, values)) + 1
    for key, value in values.items():
        text = ", ".join(value) if isinstance(value, list) else value
        print(f"{key + ':':<{width}} {'none' if text in (None, '') else text}")
    return 0


def collect() -> dict[str, Value]:
    """Versions, engine, instruction sets, threads and machine, for a bug report."""
    return {
        "sparsestep": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": platform.platform(),
        "torch": str(torch.__version__),
        "engine": "native" if _native.ext else f"reference ({_MISSING}: {_native.import_error})",
        "instruction_set": instruction_set(),
        "instruction_sets": [name for name, here in _native.instruction_sets().items() if here],
        "SPARSESTEP_ISA": os.environ.get("SPARSESTEP_ISA"),
        "threads": torch.get_num_threads(),
        "threads_of": str(_native.ext.thread_source()) if _native.ext else None,
        "cpu": cpu_model(),
        "huge_pages": huge_pages(),
    }


def instruction_set() -> str | None:
    """The instruction set in use, or why there is none: SPARSESTEP_ISA may ask for too much."""
    try:
        return _native.instruction_set()
    except InputError as error:
        return str(error)


def proc_field(source: Path, name: str) -> str | None:
    """The first value of a field in a file of ``name : value`` lines; ``None`` if there is none."""
    try:
        found = re.search(rf"^{name}\s*:(.*)", source.read_text(), re.MULTILINE)
    except OSError:
        return None
    return None if found is None else found[1].strip()


def cpu_model(source: Path = Path("/proc/cpuinfo")) -> str:
    """The name of the processor, as Linux gives it, else as Python knows it."""
    named = proc_field(source, "model name")
    return named or platform.processor() or platform.machine() or "unknown"


def huge_pages(source: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled")) -> str:
    """Whether the system backs large tables with huge pages: always, madvise, never or unknown."""
    try:
        choices = source.read_text()
    except OSError:
        return "unknown"
    return choices.partition("[")[2].partition("]")[0] or "unknown"
