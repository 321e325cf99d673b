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
import sparsestep.errors
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import checkpoint as checkpoints

ROWS, DIM, BATCH = 2000, 64, 40
EVERY = 3  # steps between checkpoints
LAST = 300  # then it begins anew

OPTIMIZERS: list[Callable[[Any], RuleOptimizer]] = [
    lambda params: sparsestep.Adam(params, lr=0.1),
    lambda params: sparsestep.RowwiseAdagrad(params, lr=0.1),
    lambda params: sparsestep.AdamW(params, lr=0.1, semantics="dense"),
    lambda params: sparsestep.Adagrad(params, lr=0.1, initial_accumulator_value=0.5),
    lambda params: sparsestep.RowwiseAdam(params, lr=0.1),
    lambda params: sparsestep.Adam(params, lr=0.1),
]
EVICTING, GROWING = 4, 5  # kinds with a vocabulary: rows change hands; and there come to be more
TOGETHER = (0, EVICTING)  # kinds whose rows have room for their state
CAPACITY, GROWN, GROWS_AT = 300, 450, 20


class Run:
    """A model, made as a process makes it that begins or goes on."""

    def __init__(self, folder: Path, kind: int) -> None:
        torch.manual_seed(kind)
        self.saved = folder / "saved"
        there = (self.saved / "manifest.json").exists()
        if not there:  # nothing to go on from: what a process before has left is of no use
            for file in folder.glob("table*"):
                file.unlink()
        self.kind, self.done = kind, 0
        self.make(folder, CAPACITY)
        if there:
            try:
                self.load()
            except sparsestep.errors.InputError:  # which has changed nothing: the table has grown
                torch.manual_seed(kind)
                self.make(folder, GROWN)
                self.load()

    def make(self, folder: Path, capacity: int) -> None:
        self.vocabulary, self.evictions = None, 0
        if self.kind == GROWING:  # a file has the size that it was made with
            embedding: nn.Module = nn.Embedding(capacity, DIM, sparse=True)
        else:
            optimizer = OPTIMIZERS[self.kind] if self.kind in TOGETHER else None
            path = folder / "table"
            table = sparsestep.storage.mapped(path, (ROWS, DIM), optimizer=optimizer)
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
        if self.vocabulary is not None:
            self.evictions += len(self.vocabulary.taken_over)
        self.optimizer.step()
        self.done += 1

    def save(self) -> None:
        extra = {"done": self.done}
        sparsestep.storage.save(self.saved, self.model, self.optimizer, extra=extra)

    def digest(self) -> str:
        found = hashlib.sha256()
        records = self.optimizer.state_dict()["state"].values()
        state = [value for record in records for value in record.values()]
        for value in (*self.model.state_dict().values(), *state):
            found.update(torch.as_tensor(value).cpu().contiguous().numpy().tobytes())
        return found.hexdigest()


def child(work: Callable[[int], None]) -> tuple[int, int]:
    """Do something in a process of its own; its id, and a pipe from it."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        work(writer)
        os._exit(0)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)


def train(folder: Path, kind: int, writer: int, die_at: int | None) -> None:
    """Go on from the latest checkpoint, telling what is found and done, one line each."""

    def tell(*words: object) -> None:
        os.write(writer, (" ".join(map(str, words)) + "\n").encode())

    calls = 0

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
    while run.done < LAST:
        run.step()
        tell("step", run.done)
        if run.done % EVERY == 0:
            run.save()
            tell("saved", run.done)


def uninterrupted(folder: Path, kind: int, last: int) -> dict[int, str]:
    """What a run that is not killed is at each checkpoint."""

    def work(writer: int) -> None:
        run = Run(folder, kind)
        lines = [f"0 {run.digest()}"]
        while run.done < last:
            run.step()
            if run.done % EVERY == 0:
                run.save()
                lines.append(f"{run.done} {run.digest()}")
        print(f"kind {kind}: {last} steps, {run.evictions} evictions", flush=True)
        os.write(writer, "\n".join(lines).encode())

    pid, reader = child(work)
    with open(reader) as pipe:
        found = dict(line.split() for line in pipe)
    assert os.waitpid(pid, 0)[1] == 0
    return {int(done): digest for done, digest in found.items()}


def kill_once(folder: Path, kind: int, chance: random.Random) -> tuple[str, str | None, int]:
    """Start a process and see it killed: what it found, its last line, what it had saved."""
    # A load takes some 15,000 calls.
    die_at = chance.randint(1, chance.choice((15_000, 60_000))) if chance.random() < 0.5 else None
    lines_to_read = chance.randint(1, 16)
    pid, reader = child(lambda writer: train(folder, kind, writer, die_at))
    found, last, saved, count = "", None, 0, 0
    with open(reader) as pipe:
        for line in pipe:
            if not line.endswith("\n"):
                break
            last, count = line.strip(), count + 1
            if last.startswith("found"):
                found = last
            if last.startswith("saved"):
                saved = int(last.split()[1])
            if die_at is None and count == lines_to_read:
                os.kill(pid, signal.SIGKILL)  # and what it still wrote is read
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"exit status {status}"
    return found, last if status else None, saved


def main() -> None:
    """Kill as often as was asked for; ends with an error where a process finds other bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sparsestep.SGD([torch.zeros(1)])  # here, and not in every process: torch imports its compiler
    # So that journals are merged now and then, in such short runs too.
    checkpoints._LEAST_BYTES, checkpoints._MOST_OF_BASE = 1, 0.6
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
                found, at, more = kill_once(killed, kind, chance)
                if found:
                    _, done, digest = found.split()
                    assert int(done) >= saved, f"{done} found, {saved} had been saved"
                    assert digest == expected[int(done)], f"other bits after {done} steps"
                saved = max(saved, more)
                kills += at is not None or not found
                print(f"kill {kills}: found {found[:20]!r}, last {at!r}", flush=True)
                if saved >= last - 9 * EVERY or at is None:
                    shutil.rmtree(killed)
                    killed.mkdir()
                    saved = 0
    print(f"{kills} kills, each went on with the same bits")


if __name__ == "__main__":
    main()
