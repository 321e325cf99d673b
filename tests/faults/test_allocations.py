"""The library that fails allocations."""

import pytest

from tests.faults import allocations
from tests.faults.ranks import is_aborted

needs_shim = pytest.mark.skipif(
    allocations.shim() is None, reason="failing allocations needs a C compiler and glibc"
)

SCRIPT = """
import torch
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
print("done")
"""


@needs_shim
def test_the_nth_allocation_fails():
    result = allocations.run("-c", SCRIPT)
    assert result.stdout == "done\n", result.stderr


THREAD_STATE = """
import ctypes
from tests.faults.allocations import Allocations

new, interpreter = ctypes.pythonapi.PyThreadState_New, ctypes.pythonapi.PyInterpreterState_Get
new.restype = interpreter.restype = ctypes.c_void_p
new.argtypes = [ctypes.c_void_p]
current = interpreter()
Allocations().arm(1, min_bytes=256)
new(current)
"""


@needs_shim
def test_a_thread_without_memory_for_its_state_has_last_words():
    assert is_aborted(allocations.run("-c", THREAD_STATE).stderr)


def test_a_process_without_the_library_says_so():
    with pytest.raises(RuntimeError, match="start the process with `run`"):
        allocations.Allocations()
