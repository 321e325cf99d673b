"""State costs what was touched, not what the table holds."""

from __future__ import annotations

import copy
import os
from pathlib import Path

import pytest
import torch

from sparsestep.memory import lazy
from tests.processes import run_python

CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", [(), (0, 3), (5, 7), (300_000, 8)], ids=str)
def test_zeros_are_ordinary_tensors(shape):
    dtype = torch.bfloat16
    ours = lazy.zeros(torch.Size(shape), dtype, CPU)
    assert torch.equal(ours, torch.zeros(shape, dtype=dtype))
    ours += 1
    assert torch.equal(copy.deepcopy(ours), torch.ones(shape, dtype=dtype))
    assert torch.equal(lazy.full(torch.Size([3]), 0.5, dtype, CPU), torch.full((3,), 0.5).to(dtype))


# Rows of a table that is lazy, too; a few rows that a mask selects; a few entries in every layout.
PROGRAM = """
import warnings
from contextlib import contextmanager
import torch, sparsestep
from sparsestep import functional
from sparsestep.memory import lazy

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

@contextmanager
def grows_by_less_than(mebibytes, of=""):
    before = resident()
    yield
    grown = resident() - before
    assert grown < mebibytes, f"{of}: {grown} MiB"

shape, cpu = torch.Size([40_000_000, 16]), torch.device("cpu")
param = lazy.zeros(shape, torch.float32, cpu)
rows = (torch.arange(256) * (len(param) // 256))[None]
for opt in (
    sparsestep.SparseAdam([param], lr=0.1),
    sparsestep.SGD([param], lr=0.1, momentum=0.9, semantics="dense"),
):
    # The table has 2,441 MiB, the last steps of all rows would be 152.
    with grows_by_less_than(64, type(opt).__name__):
        for _ in range(2):
            opt.catch_up(param, rows)
            param.grad = torch.sparse_coo_tensor(rows, torch.ones(256, 16), param.shape)
            opt.step()
    assert param[rows[0]].max() < -0.1

shape = torch.Size([150_000, 1_024])
param, grad = (lazy.zeros(shape, torch.float32, cpu) for _ in range(2))
mask = torch.arange(len(param)) >= len(param) - 5
grad[mask] = 1.0
opt = sparsestep.AdamW([{"params": [param], "mask": mask}], lr=0.1)
with grows_by_less_than(16, "mask"):  # the moments of all rows would be 1,172
    for _ in range(3):
        param.grad = grad
        opt.step()
assert param[mask].max() < -0.2

warnings.simplefilter("ignore")
shape = torch.Size([2**17, 2**15])  # 8 GB for each tensor, were it touched
param, state = (lazy.zeros(shape, torch.float16, cpu) for _ in range(2))
rows, columns = torch.arange(7, 2**17, 2**14), torch.arange(5, 2**15, 2**12)
values = torch.ones(8, dtype=torch.float16)
down = torch.zeros(2**17 + 1, dtype=torch.int64).index_fill_(0, rows + 1, 1).cumsum(0)
across = torch.zeros(2**15 + 1, dtype=torch.int64).index_fill_(0, columns + 1, 1).cumsum(0)
csr = torch.sparse_csr_tensor(down, columns, values, shape)
blocks = values[:, None, None].repeat(1, 1, 2)
grads = {
    "coo": torch.sparse_coo_tensor(torch.stack([rows, columns]), values, shape),
    "csr": csr,
    "csc": torch.sparse_csc_tensor(across, rows, values, shape),
    "bsr": torch.sparse_bsr_tensor(down, columns // 2, blocks, shape),
    "masked": torch.masked.masked_tensor(csr, csr.bool()),
    "indexed": sparsestep.IndexedGrad(rows * 2**15 + columns, values, 2**32, 1),
}
sums = torch.zeros(2**17)
with grows_by_less_than(200, "layouts"):
    for engine in ("native", "reference"):
        for grad in grads.values():
            functional.adagrad_(param, grad, state, step=1, engine=engine)
            functional.rowwise_adagrad_(param, grad, sums, engine=engine)
assert param[rows, columns].max() < 0

import resource
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


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_steps_on_large_tables_take_memory_for_what_they_touch_or_are_refused():
    printed = run_python("-c", PROGRAM)
    assert printed.startswith("the state of a parameter needs")
    assert "Got Cannot allocate memory. Choose a smaller state_dtype" in printed


def strict_overcommit() -> bool:
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() == "2"
    except OSError:
        return True


@pytest.mark.skipif(strict_overcommit(), reason="the system promises no more than it has")
def test_state_may_be_larger_than_the_machine():
    """As long as only a little of it is touched."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    state = lazy.zeros(torch.Size([2 * machine // 4]), torch.float32, CPU)
    state[-1] = 1.0
    assert state[[0, -1]].tolist() == [0.0, 1.0]
