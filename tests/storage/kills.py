"""Processes that are killed at random moments, and have to go on as if nothing had happened.

``python -m tests.storage.kills --kills 200`` trains a model again and again in the same folder.
Each process loads the latest checkpoint, says what it found, trains and saves; then it is killed.
What it found must have the bits of a run that was never killed, and must be no older than the last
checkpoint that a process before it has finished. Half of the processes kill themselves at some call
of a function, in Python or in C, some of them while they load; the others are killed from outside,
at any instruction.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import checkpoint
from tests.storage.training import fork, now

ROWS, DIM, BATCH = 2000, 64, 40
EVERY = 3  # steps between checkpoints
LAST = 300  # then it starts over

OPTIMIZERS: list[Callable[[Any], RuleOptimizer]] = [
    functools.partial(sparsestep.Adam, lr=0.1),
    functools.partial(sparsestep.RowwiseAdagrad, lr=0.1),
    functools.partial(sparsestep.AdamW, lr=0.1, semantics="dense"),
    functools.partial(sparsestep.Adagrad, lr=0.1, initial_accumulator_value=0.5),
    functools.partial(sparsestep.RowwiseAdam, lr=0.1),
    functools.partial(sparsestep.Adam, lr=0.1),
]
EVICTING, GROWING = 4, 5  # kinds with a vocabulary: rows are reassigned; and it grows
IN_ROWS = (0, EVICTING)  # kinds whose rows have room for their state
CAPACITY, GROWN, GROWS_AT = 300, 450, 20


class Run:
    """A model, made as a process makes it that begins or goes on."""

    def __init__(self, folder: Path, kind: int) -> None:
        torch.manual_seed(kind)
        self.saved = folder / "saved"
        there = (self.saved / "manifest.json").exists()
        if not there:  # nothing to go on from: files of a process before are of no use
            for file in folder.glob("table*"):
                file.unlink()
        self.kind, self.done = kind, 0
        self.make(folder, CAPACITY)
        if there:
            try:
                self.load()
            except sparsestep.InputError:  # nothing has changed: the table has grown
                torch.manual_seed(kind)
                self.make(folder, GROWN)
                self.load()

    def make(self, folder: Path, capacity: int) -> None:
        self.vocabulary = None
        if self.kind == GROWING:  # a file does not grow
            embedding: nn.Module = nn.Embedding(capacity, DIM, sparse=True)
        else:
            optimizer = OPTIMIZERS[self.kind] if self.kind in IN_ROWS else None
            table = sparsestep.storage.mapped(folder / "table", (ROWS, DIM), optimizer=optimizer)
            embedding = nn.Embedding.from_pretrained(table, freeze=False, sparse=True)
        self.model = nn.Sequential(embedding, nn.Linear(DIM, 2))
        if self.kind % 2:
            sparsestep.nn.fuse(self.model)
        self.optimizer = OPTIMIZERS[self.kind](self.model.parameters())
        if self.optimizer.semantics == "dense":
            self.optimizer.track(self.model)
        if self.kind in (EVICTING, GROWING):
            self.vocabulary = sparsestep.nn.Vocabulary(capacity, admit=2, evict="lru")
            self.vocabulary.attach(self.model[0], self.optimizer)
            self.model.insert(0, self.vocabulary)

    def load(self) -> None:
        self.done = sparsestep.storage.load(self.saved, self.model, self.optimizer)["done"]

    def step(self) -> None:
        chance = torch.Generator().manual_seed(self.done)
        ids = (torch.rand(BATCH, generator=chance).pow(2) * ROWS).long()
        self.optimizer.zero_grad()
        if self.vocabulary is not None:
            ids = ids // 8 + 5 * self.done  # others every few steps
            if self.kind == GROWING and self.done == GROWS_AT:
                self.vocabulary.grow(GROWN)
        (self.model(ids) - 1).square().sum().backward()
        self.optimizer.step()
        self.done += 1

    def save(self) -> None:
        extra = {"done": self.done}
        sparsestep.storage.save(self.saved, self.model, self.optimizer, extra=extra)

    def digest(self) -> str:
        found = hashlib.sha256()
        for value in now(self.model, self.optimizer):
            found.update(value.contiguous().numpy().tobytes())
        return found.hexdigest()


def train(folder: Path, kind: int, die_at: int | None, last: int, writer: int) -> None:
    """Go on from the latest checkpoint; writes a line for everything that is found and done."""
    calls = 0

    def tell(*words: object) -> None:
        os.write(writer, (" ".join(map(str, words)) + "\n").encode())

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls == die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    tell("starts")
    if die_at is not None:
        sys.setprofile(count)
    run = Run(folder, kind)
    tell("found", run.done, run.digest())
    while run.done < last:
        run.step()
        tell("step", run.done)
        if run.done % EVERY == 0:
            run.save()
            tell("saved", run.done, run.digest() if die_at is None else "")


def uninterrupted(folder: Path, kind: int, last: int) -> dict[int, str]:
    """The digest of a run that is not killed at each checkpoint."""
    pid, reader = fork(functools.partial(train, folder, kind, None, last))
    with open(reader) as pipe:
        lines = [line.split() for line in pipe]
    assert os.waitpid(pid, 0)[1] == 0
    return {int(line[1]): line[2] for line in lines if line[0] in ("found", "saved")}


def kill_once(folder: Path, kind: int, chance: random.Random) -> tuple[list[str], int, bool]:
    """Start a process and kill it: what it found, its last checkpoint, whether it was killed."""
    # A load takes some 15,000 calls.
    die_at = chance.randint(1, chance.choice((15_000, 60_000))) if chance.random() < 0.5 else None
    lines_to_read = chance.randint(1, 16)
    pid, reader = fork(functools.partial(train, folder, kind, die_at, LAST))
    found, saved, count = [], 0, 0
    with open(reader) as pipe:
        for line in pipe:
            if not line.endswith("\n"):
                break
            words, count = line.split(), count + 1
            if words[0] == "found":
                found = words[1:]
            if words[0] == "saved":
                saved = int(words[1])
            if die_at is None and count == lines_to_read:
                os.kill(pid, signal.SIGKILL)  # and what it still wrote is read
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return found, saved, bool(status)


def main() -> None:
    """Kill as often as asked for; ends with an error if a process finds other bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sparsestep.SGD([torch.zeros(1)])  # here, and not in every process: torch imports its compiler
    # So that journals are merged now and then, in such short runs too.
    checkpoint._COMPACT_MIN_BYTES, checkpoint._COMPACT_RATIO = 1, 0.6
    chance = random.Random(options.seed)
    kills = 0
    per_kind = -(-options.kills // len(OPTIMIZERS))
    for kind in range(len(OPTIMIZERS)):
        with tempfile.TemporaryDirectory() as folder:
            (whole := Path(folder) / "whole").mkdir()
            (killed := Path(folder) / "killed").mkdir()
            last = min(LAST, per_kind * 3 * EVERY + 9 * EVERY)
            expected = uninterrupted(whole, kind, last)
            saved = 0
            for _ in range(min(per_kind, options.kills - kills)):
                found, more, was_killed = kill_once(killed, kind, chance)
                if found:
                    done = int(found[0])
                    assert done >= saved, f"{done} found, {saved} had been saved"
                    assert found[1] == expected[done], f"other bits after {done} steps"
                saved = max(saved, more)
                kills += was_killed or not found
                print(f"kill {kills} of kind {kind}: found {found[:1]}, saved {saved}", flush=True)
                if saved >= last - 9 * EVERY or not was_killed:
                    shutil.rmtree(killed)
                    killed.mkdir()
                    saved = 0
    print(f"{kills} kills, each went on with the same bits")


if __name__ == "__main__":
    main()
