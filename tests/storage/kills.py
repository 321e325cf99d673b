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
import math
import os
import random
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


def train(folder: Path, kind: int, die_at: int | None, last: float, writer: int) -> None:
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
            tell("saved", run.done, run.digest() if last < math.inf else "")


def lines_of(folder: Path, kind: int, die_at: int | None, last: float, stop_at: int) -> list[Any]:
    """Run a process, which is killed after so many lines at the latest; what it has written."""
    pid, reader = fork(functools.partial(train, folder, kind, die_at, last))
    lines = []
    with open(reader) as pipe:
        for line in pipe:
            if line.endswith("\n"):
                lines.append(line.split())
            if len(lines) == stop_at:
                os.kill(pid, signal.SIGKILL)  # and what it still wrote is read
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return lines


def check(kind: int, kills: int, chance: random.Random) -> None:
    """Kill a training so often, and compare what each process found with a whole run."""
    found: list[list[str]] = []
    saved = 0
    with tempfile.TemporaryDirectory() as folder:
        (killed := Path(folder) / "killed").mkdir()
        (whole := Path(folder) / "whole").mkdir()
        for turn in range(kills + 1):
            die_at, last, stop_at = None, math.inf, chance.randint(1, 16)
            if turn == kills:  # it only tells what it finds
                last, stop_at = 0, 1000
            elif chance.random() < 0.5:  # a load takes some 15,000 calls
                die_at, stop_at = chance.randint(1, chance.choice((15_000, 60_000))), 1000
            for word, *rest in lines_of(killed, kind, die_at, last, stop_at):
                if word == "found":
                    assert int(rest[0]) >= saved, f"{rest[0]} found, {saved} had been saved"
                    found.append(rest)
                elif word == "saved":
                    saved = int(rest[0])
        lines = lines_of(whole, kind, None, max(int(done) for done, _ in found), -1)
        expected = {done: digest for word, done, *digest in lines[1:] if word != "step"}
        for done, digest in found:
            assert [digest] == expected[done], f"other bits after {done} steps"


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
    for kind in range(len(OPTIMIZERS)):
        kills = len(range(kind, options.kills, len(OPTIMIZERS)))
        check(kind, kills, chance)
        print(f"kind {kind}: {kills} kills, each went on with the same bits", flush=True)


if __name__ == "__main__":
    main()
