"""State costs what was touched, not what the table holds."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sparsestep.memory import lazy as pages


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (300_000, 8)], ids=str)
def test_zeros_are_ordinary_tensors(shape, dtype):
    ours = pages.zeros(torch.Size(shape), dtype, torch.device("cpu"))
    assert torch.equal(ours, torch.zeros(shape, dtype=dtype))
    ours += 1
    assert torch.equal(copy.deepcopy(ours), torch.ones(shape, dtype=dtype))


def test_full_takes_any_value():
    assert torch.equal(
        pages.full(torch.Size([3]), 0.5, torch.float32, torch.device("cpu")),
        torch.full((3,), 0.5),
    )


RESIDENT = """
import torch, sparsestep

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024
"""
LARGE_TABLE = """
ROWS, DIM, LOOKUPS = 40_000_000, 16, 256
# The param is lazy too, or the test would need 2.5 GB for it.
param = sparsestep.memory.lazy.zeros(
    torch.Size([ROWS, DIM]), torch.float32, torch.device("cpu")
)
opt = sparsestep.SparseAdam([param], lr=0.1)
rows = (torch.arange(LOOKUPS) * (ROWS // LOOKUPS))[None]
before = resident()
for _ in range(2):
    param.grad = torch.sparse_coo_tensor(rows, torch.ones(LOOKUPS, DIM), param.shape)
    opt.step()
grown = resident() - before
assert grown < 64, f"{grown} MiB"
assert param[rows[0]].max() < -0.1
print("ok")
"""


NEW_TOKENS = """
ROWS, DIM, NEW = 150_000, 1_024, 5
shape, cpu = torch.Size([ROWS, DIM]), torch.device("cpu")
param, grad = (sparsestep.memory.lazy.zeros(shape, torch.float32, cpu) for _ in range(2))
mask = torch.arange(ROWS) >= ROWS - NEW
grad[mask] = 1.0
opt = sparsestep.AdamW([{"params": [param], "mask": mask}], lr=0.1)
before = resident()
for _ in range(3):
    param.grad = grad
    opt.step()
grown = resident() - before
assert grown < 16, f"{grown} MiB"  # the moments of all rows would be 1,172
assert param[mask].max() < -0.2
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("program", [LARGE_TABLE, NEW_TOKENS], ids=["sparse", "masked"])
def test_a_step_on_a_large_table_takes_memory_for_what_it_touches_only(program):
    done = subprocess.run(
        [sys.executable, "-c", RESIDENT + program], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr


def strict_overcommit() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return True


@pytest.mark.skipif(strict_overcommit(), reason="the system promises no more than it has")
def test_state_may_be_larger_than_the_machine():
    """As long as only a little of it is touched."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    count = 2 * machine // 4
    state = pages.zeros(torch.Size([count]), torch.float32, torch.device("cpu"))
    state[-1] = 1.0
    assert state[[0, -1]].tolist() == [0.0, 1.0]


TOO_LARGE = """
import resource, torch, sparsestep
size = 1 << 25
param = torch.zeros(size // 8, 4).requires_grad_()
opt = sparsestep.Adam([param])
param.grad = torch.sparse_coo_tensor([[3]], torch.ones(1, 4), param.shape, check_invariants=True)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + size, used + size))
try:
    opt.step()
except MemoryError as error:
    print(error)
assert len(opt.state) == 0 and not param[3].any()
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads how much is in use")
def test_state_for_which_there_is_no_room_is_refused():
    done = subprocess.run(
        [sys.executable, "-c", TOO_LARGE], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("the state of a parameter needs")
    assert "Got Cannot allocate memory. Choose a smaller state_dtype" in done.stdout
