"""Growth of the peak of resident memory, in a process of its own (Linux)."""

from __future__ import annotations

import os
import subprocess
import sys

# Measured code calls begin(), and at its end print(growth()).
_PRELUDE = """
import sys

def kilobytes(field):
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith(field))

def begin():
    global before
    with open("/proc/self/clear_refs", "w") as refs:
        refs.write("5")  # resets the peak
    before = kilobytes("VmRSS")

def growth():
    return (kilobytes("VmHWM") - before) * 1024
"""


def peak_rss_growth(code: str, *arguments: object, return_freed: bool = False) -> int:
    """Run Python code that calls ``begin()`` and ends with ``print(growth())``; bytes.

    Args:
        code: the code.
        *arguments: its ``sys.argv[1:]``.
        return_freed: return large blocks to the system as soon as they are freed, so that only
            memory in use counts.
    """
    environment = {**os.environ, **({"MALLOC_MMAP_THRESHOLD_": "65536"} if return_freed else {})}
    command = [sys.executable, "-W", "ignore", "-c", _PRELUDE + code, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)
