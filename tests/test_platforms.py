"""Importing and training without the modules and functions that only POSIX systems have."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import mmap, os, sys, torch, torch._dynamo, torch.distributed.checkpoint

for name in ("fcntl", "grp", "posix", "pwd", "resource", "termios"):
    sys.modules[name] = None
for module, prefixes in {
    os: ("SEEK_", "getuid", "posix_", "register_at_fork", "sched_", "statvfs", "sysconf"),
    mmap: ("MADV_", "MAP_", "PROT_"),
}.items():
    for name in [name for name in vars(module) if name.startswith(prefixes)]:
        if name not in ("SEEK_SET", "SEEK_CUR", "SEEK_END"):
            delattr(module, name)

import sparsestep
import sparsestep.cli

table = sparsestep.nn.Embedding(1 << 17, 8)
optimizer = sparsestep.SparseAdam(table.parameters())
for _ in range(2):
    table(torch.tensor([1, 70000])).sum().backward()
    optimizer.step()
print(int((optimizer.state[table.weight]["exp_avg"] != 0).sum()))
"""


def test_import_and_step_need_nothing_that_windows_lacks():
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120
    )
    assert (run.returncode, run.stdout) == (0, "16\n"), run.stderr
