"""A handful of entries takes memory for a handful, in any layout."""

from __future__ import annotations

import subprocess
import sys

import pytest

LARGE = """
import sys, warnings
import torch, sparsestep
from sparsestep import IndexedGrad, functional
from sparsestep.memory import lazy as pages

warnings.simplefilter("ignore")

def resident():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS")) / 1024

SHAPE = torch.Size([2**17, 2**14])  # 4 GB for each tensor, were it touched
param, state = (
    pages.zeros(SHAPE, torch.float16, torch.device("cpu")) for _ in range(2)
)
rows, columns = torch.arange(7, 2**17, 2**14), torch.arange(5, 2**14, 2**11)
values = torch.ones(8, dtype=torch.float16)
starts = torch.zeros(2**17 + 1, dtype=torch.int64)
starts[rows + 1] = 1
starts = starts.cumsum(0)
across = torch.zeros(2**14 + 1, dtype=torch.int64)
across[columns + 1] = 1
across = across.cumsum(0)
coo = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, SHAPE)
csr = torch.sparse_csr_tensor(starts, columns, values, SHAPE)
csr_mask = torch.sparse_csr_tensor(starts, columns, values > 0, SHAPE)
grads = {
    "coo": coo,
    "csr": csr,
    "csc": torch.sparse_csc_tensor(across, rows, values, SHAPE),
    "bsr": torch.sparse_bsr_tensor(
        starts, columns // 2, values[:, None, None].repeat(1, 1, 2), SHAPE
    ),
    "masked": torch.masked.masked_tensor(csr, csr_mask),
    "touched": IndexedGrad(rows * 2**14 + columns, values, 2**31, 1),
}
sums = torch.zeros(2**17)
before = resident()
for engine in ("native", "reference"):
    for name, grad in grads.items():
        functional.adagrad_(param, grad, state, step=1, engine=engine)
        functional.rowwise_adagrad_(param, grad, sums, engine=engine)
        grown = resident() - before
        assert grown < 200, f"{engine} {name}: {grown} MiB"
assert param[rows, columns].max() < 0
print("ok")
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_handful_of_entries_takes_memory_for_a_handful():
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=False
    )
    assert done.stdout == "ok\n", done.stderr
