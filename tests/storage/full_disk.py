"""Training on a disk that fills up: ``OSError`` and nothing changed, never ``SIGBUS``.

``python -m tests.storage.full_disk --folder F --trials 40`` runs trials in a folder that should be
a small file system of its own. Each trial is a forked process that trains until the disk is full,
checks that the failed step has changed nothing, frees space and goes on.
"""

from __future__ import annotations

import argparse
import collections
import errno
import functools
import os
import random
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.memory.mapped_file import mapped_files
from sparsestep.storage import mapped
from tests.storage.training import fork, state_of

DIM = 24
LEVELS = (0, 4096, 20_000, 150_000, 600_000)  # bytes left
KINDS = ["lookup", "lookup", "by hand", "dense", "masked", "function", "deferred"]
OPTIMIZERS: list[Any] = [
    sparsestep.Adam,
    sparsestep.RowwiseAdagrad,
    sparsestep.SGD,
    functools.partial(sparsestep.Adagrad, initial_accumulator_value=0.5),
]


def check_full(error: OSError, path: Path | None = None) -> None:
    """An error must say that the disk is full, and name a file of the user."""
    assert error.errno == errno.ENOSPC, error
    assert path is None or str(error.filename).startswith(str(path)), error


def fill(folder: Path, leave: int) -> None:
    """Leave only so many bytes."""
    with open(folder / "filler", "ab") as file:
        for piece in (1 << 20, 1 << 16, 4096, 1024, 1):
            while True:
                about = os.statvfs(folder)
                if about.f_bavail * about.f_frsize < leave + piece:
                    break
                try:
                    os.write(file.fileno(), bytes(piece))
                except OSError as error:
                    check_full(error)
                    break
        os.fsync(file.fileno())


def read_in_order(folder: Path) -> None:
    """Read files as a backup does: the page cache then holds large folios, also over holes.

    First, nothing is cached, as after other programs have needed the memory.
    """
    for found in list(mapped_files.values()):
        file = found()
        if file is not None:
            os.fsync(file.descriptor)
            file.evict()
    for path in sorted(folder.glob("table*")):
        with open(path, "rb", buffering=0) as file:
            while file.read(1 << 20):
                pass


class Trial:
    """A model and an optimizer of some kind, with everything in files."""

    def __init__(self, folder: Path, chance: random.Random) -> None:
        self.folder, self.chance = folder, chance
        self.rows = chance.choice([300, 4000, 40_000])
        self.ids = torch.Generator().manual_seed(chance.randrange(1 << 30))
        self.kind = chance.choice(KINDS)
        make = chance.choice(OPTIMIZERS)
        if self.kind in ("function", "deferred"):
            make = sparsestep.Adam
        in_rows = make if chance.random() < 0.5 and self.kind != "function" else None
        self.param = nn.Parameter(mapped(folder / "table", (self.rows, DIM), optimizer=in_rows))
        group: dict[str, Any] = {"params": [self.param]}
        if self.kind == "masked":
            group["mask"] = torch.rand(self.rows, generator=self.ids) < 0.1
        more = {"semantics": "dense"} if self.kind == "deferred" else {}
        self.opt = make([group], lr=0.1, **more)
        self.by_hand: list[Tensor] = []
        self.spread = torch.arange(0, self.rows, self.rows // 30)
        self.is_spread = chance.random() < 0.5  # always the same rows, far apart

    @property
    def now(self) -> list[Tensor]:
        return [self.param.detach().clone(), *(t.clone() for t in state_of(self.opt))]

    def step(self) -> None:
        rows = torch.randint(0, self.rows, (32,), generator=self.ids)
        if self.is_spread:
            rows = self.spread[rows % len(self.spread)]
        values = torch.ones(32, DIM)
        if self.kind == "function":
            if not self.by_hand:
                shape = self.rows, DIM
                self.by_hand = [mapped(self.folder / f"table.{n}", shape) for n in "mv"]
            gradient, state = sparsestep.IndexedGrad(rows, values), self.by_hand
            sparsestep.functional.adam_(self.param.detach(), gradient, *state, step=1)
            return
        if self.kind in ("lookup", "deferred"):
            if self.kind == "deferred":
                self.opt.catch_up(self.param, rows)
            looked_up = nn.functional.embedding(rows, self.param, sparse=True)
            self.opt.zero_grad()
            looked_up.add(1).square().sum().backward()
        elif self.kind == "by hand":
            self.param.grad = torch.sparse_coo_tensor(
                rows[None], values, self.param.shape, check_invariants=False
            )
        else:
            self.param.grad = torch.ones(self.rows, DIM)
        self.opt.step()

    def run(self) -> str:
        """Train until the disk is full and go on afterwards; returns what happened, in a word."""
        if self.chance.random() < 0.5:
            self.opt.materialize_state()
        for _ in range(self.chance.choice([0, 12])):
            self.step()
        if self.chance.random() < 0.5:
            read_in_order(self.folder)
        fill(self.folder, self.chance.choice(LEVELS))
        if self.chance.random() < 0.3:
            read_in_order(self.folder)
        failures = 0
        for _ in range(60):
            before = self.now if self.rows < 1000 or failures < 2 else None
            try:
                self.step()
            except OSError as error:
                check_full(error, self.folder / "table")
                failures += 1
                if before is not None:
                    self.check_unchanged(before)
        os.unlink(self.folder / "filler")
        with open(self.folder / "table", "rb") as file:
            os.fsync(file.fileno())
        self.step()
        return "full" if failures else "fits"

    def check_unchanged(self, before: list[Tensor]) -> None:
        """Rows that catch up on the way keep their meaning, so they do not count."""
        if self.kind != "deferred":
            after = self.now
            # State may have been created, but holds what it would hold at the start.
            for old, new in zip(before, after, strict=len(before) == len(after)):
                assert torch.equal(old, new), self.kind


def trial(folder: Path, seed: int, writer: int) -> None:
    """Run one trial, and write what happened."""
    chance = random.Random(seed)
    if chance.random() < 0.15:
        fill(folder, chance.choice(LEVELS))
    try:
        made = Trial(folder, chance)
    except OSError as error:
        check_full(error, folder / "table")
        word = "refused"
    else:
        try:
            word = made.run()
        except OSError as error:  # it never fitted
            check_full(error)
            word = "too large"
    os.write(writer, word.encode())


def main() -> None:
    """Run trials; ends with an error if one ends in anything but an ``OSError``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--first", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sparsestep.SGD([torch.zeros(1)])  # imports what torch imports late
    counts: collections.Counter[str] = collections.Counter()
    for seed in range(options.first, options.first + options.trials):
        for path in options.folder.iterdir():
            if path.is_file():
                path.unlink()
        pid, reader = fork(functools.partial(trial, options.folder, seed))
        with open(reader) as pipe:
            word = pipe.read()
        status = os.waitpid(pid, 0)[1]
        counts[word if not status else "failed"] += 1
        if status:
            print(f"seed {seed}: status {status}", flush=True)
    print(dict(counts))
    sys.exit("failed" in counts)


if __name__ == "__main__":
    main()
