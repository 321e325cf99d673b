"""By how much the peak of resident memory grows, in a process of its own (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys

# What is measured calls begin(), and at its end print(growth()).
_PRELUDE = """
import sys

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

def begin():
    global before
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # from here on, the peak counts anew
    before = kilobytes("VmRSS")

def growth():
    return (kilobytes("VmHWM") - before) * 1024
"""


def growth(code: str, *arguments: object, at_once: bool = False) -> int:
    """Run Python code that calls ``begin()`` and ends with ``print(growth())``; bytes.

    Args:
        code: the code.
        *arguments: what it finds in ``sys.argv[1:]``.
        at_once: large blocks go back to the system as soon as they are freed, so that what counts
            is what is in use.
    """
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if at_once else {})}
    command = [sys.executable, "-W", "ignore", "-c", _PRELUDE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)
