"""Starts ranks on Linux: one process imports torch, and then forks into all of them.

``python -m tests.distributed.starter MODULE FOLDER WORLD KILLED`` runs the module once per rank, as
``python -m MODULE RANK FOLDER WORLD`` would. It ends with 0 if all ranks have, but for the one that
is to be killed (-1: none). Importing takes longer than most of what the ranks do.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from pathlib import Path

import torch

import sparsestep


def main() -> None:
    module, folder, world, killed = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    sparsestep.SGD([torch.zeros(1)])  # with the first optimizer torch imports its compiler
    ranks: dict[int, int] = {}
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            be_rank(module, rank, folder, world)
            return
        ranks[pid] = rank
    while ranks:
        pid, status = os.wait()
        if ranks.pop(pid) != killed and status != 0:
            for other in ranks:  # which might wait for the one that failed
                os.kill(other, signal.SIGKILL)
            sys.exit(1)


def be_rank(module: str, rank: int, folder: str, world: int) -> None:
    """Run the module; then the interpreter ends as usual, which must work, too."""
    log = os.open(Path(folder) / f"log{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    sys.argv = [module, str(rank), folder, str(world)]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
