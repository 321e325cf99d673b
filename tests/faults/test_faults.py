"""One fault in an operation of every kind, and the injectors; ``make faults`` has the rest."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults import allocations, planted
from tests.faults.allocations import ROOT, shim
from tests.faults.ranks import is_aborted

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux") or shim() is None,
    reason="needs glibc, fork and a C compiler",
)

PAIRS = (
    *("mixed step/signal", "deferred step/signal", "mixed step/allocation"),
    *("replayed step/line", "deferred step/line", "masked step/line"),
    *("dense step: Adam, in pieces/out of memory", "rule step/allocation", "functional step/line"),
    *("step in backward/line", "lookup: tracked/allocation", "grow/allocation"),
    *("load_state_dict/line", "vocabulary: lru/line", "mapped step/allocation"),
    *("save: changes/kill", "load/kill", "ranks: step/allocation", "ranks: load/line"),
    "ranks: clip/line",
)


def run(*options: str) -> str:
    """The output of the harness; its exit code is 1 where it has found something."""
    # More processes than cores: ranks and disks are waited for.
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", "--workers", "4", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.returncode in (0, 1), done.stderr
    assert bool(done.returncode) == ("FOUND" in done.stdout)
    return done.stdout


def test_no_operation_is_torn():
    found = run("--sample", "1", "--pairs", *PAIRS)
    assert f"{len(PAIRS)} cases, 0 findings" in found, found


def test_defects_are_found():
    text = run("--sample", "4", "--module", planted.__name__)
    parts = [line.split("'") for line in text.splitlines() if line.startswith("FOUND in")]
    found = {(part[1], part[3]) for part in parts}
    assert found >= {
        ("torn", "line"),
        ("torn", "allocation"),
        ("torn", "signal"),
        ("locked", "line"),
        ("deaf", "signal"),
        ("crashing", "allocation"),
        ("half", "kill"),
        ("alone", "allocation"),
    }


# At last a thread has no memory for its state, which ends the process with last words.
SCRIPT = """
import ctypes, torch
from tests.faults.allocations import Allocations, is_out_of_memory

allocations = Allocations()
for persistent, failures in (False, 1), (True, 3):
    allocations.arm(2, min_bytes=1 << 20, persistent=persistent)
    results = []
    for _ in range(4):
        try:
            results.append(torch.empty(1 << 20))
        except RuntimeError as error:
            assert is_out_of_memory(error), error
            results.append(None)
    assert allocations.disarm() == 4
    assert allocations.failed == failures
    assert [r is None for r in results] == [False, True, persistent, persistent]
    torch.empty(1 << 20)

allocations.arm(1, min_bytes=1 << 20)
try:
    bytearray(1 << 21)
    raise AssertionError("not failed")
except MemoryError:
    pass
assert allocations.disarm() == 1
print("done", flush=True)

new, interpreter = ctypes.pythonapi.PyThreadState_New, ctypes.pythonapi.PyInterpreterState_Get
new.restype = interpreter.restype = ctypes.c_void_p
new.argtypes = [ctypes.c_void_p]
current = interpreter()
allocations.arm(1, min_bytes=256)
new(current)
"""


def test_the_nth_allocation_fails():
    result = allocations.run("-c", SCRIPT)
    assert result.stdout == "done\n", result.stderr
    assert is_aborted(result.stderr)


def test_a_process_without_the_library_says_so():
    with pytest.raises(RuntimeError, match="start the process with `run`"):
        allocations.Allocations()
