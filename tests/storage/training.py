"""Tables in files and in memory, trained alike."""

from __future__ import annotations

import errno
import functools
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import journal, load, save

ROWS, DIM = 300, 24

# Where the state of a table lies: in its rows, or in files next to it.
in_each_place = pytest.mark.parametrize("in_rows", [False, True], ids=["apart", "in rows"])
needs_holes = pytest.mark.skipif(
    sys.platform != "linux", reason="other file systems may not have holes"
)

adam = functools.partial(sparsestep.Adam, lr=0.1)


def initial(seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed)).to(dtype)


def table_in(
    path: Path,
    dtype: torch.dtype = torch.float32,
    optimizer: Callable[[list[Tensor]], RuleOptimizer] | None = None,
) -> sparsestep.storage.Mapped:
    table = sparsestep.storage.mapped(path, (ROWS, DIM), dtype, optimizer=optimizer)
    table.copy_(initial(dtype=dtype))
    return table


def embedding(table: Tensor) -> nn.Embedding:
    return nn.Embedding.from_pretrained(table, freeze=False, sparse=True)


def coo(rows: list[int], shape: tuple[int, ...]) -> Tensor:
    """A gradient of ones in some rows."""
    return torch.sparse_coo_tensor([rows], torch.ones(len(rows), *shape[1:]), shape)


def batches(seed: int) -> Iterator[Tensor]:
    """Some rows come often, one after the other is new."""
    chance = torch.Generator().manual_seed(seed)
    while True:
        yield (torch.rand(9, generator=chance).pow(3) * ROWS).long()


def train(model: nn.Module, optimizer: RuleOptimizer, steps: int, seed: int = 0) -> None:
    for rows, _ in zip(batches(seed), range(steps), strict=False):
        optimizer.zero_grad()
        model(rows).square().sum().backward()
        optimizer.step()


def state_of(optimizer: RuleOptimizer) -> list[Tensor]:
    """Every tensor of its state, in order."""
    return [
        torch.as_tensor(value)
        for param_state in optimizer.state_dict()["state"].values()
        for value in param_state.values()
    ]


def now(model: nn.Module, optimizer: RuleOptimizer) -> list[Tensor]:
    """A copy of everything that training changes."""
    return [tensor.clone() for tensor in (*model.state_dict().values(), *state_of(optimizer))]


class Run:
    """A model with a table in a file and other parameters, and its checkpoints."""

    def __init__(self, folder: Path, optimizer=sparsestep.Adam, in_rows=False, **options):
        folder.mkdir(exist_ok=True)
        self.folder, self.in_rows = folder, in_rows
        make = functools.partial(optimizer, lr=0.1, **options)
        table = table_in(folder / "table", optimizer=make if in_rows else None)
        self.model = nn.Sequential(embedding(table), nn.Linear(DIM, 3))
        nn.init.constant_(self.model[1].weight, 0.1)
        self.optimizer = make(self.model.parameters())
        if options.get("semantics") == "dense":
            self.optimizer.track(self.model)
        self.batches = batches(0)

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.model(next(self.batches)).square().sum().backward()
            self.optimizer.step()

    def save(self, path: Path | None = None, **more) -> None:
        save(path or self.folder / "saved", self.model, self.optimizer, **more)

    def load(self, path: Path | None = None) -> Any:
        return load(path or self.folder / "saved", self.model, self.optimizer)

    @property
    def now(self) -> list[Tensor]:
        return now(self.model, self.optimizer)

    @property
    def journals(self) -> list[int]:
        """How many rows each journal has."""
        return journals_in(self.folder / "saved")

    def files(self) -> dict[str, bytes]:
        """The table and its state as another process would read them."""
        return {path.name: path.read_bytes() for path in self.folder.glob("*table*")}


def saved_run(folder: Path, in_rows: bool = False) -> tuple[Run, list[Tensor]]:
    """A run that has gone on since its third checkpoint, and its content at that one."""
    run = Run(folder, in_rows=in_rows)
    for number in range(3):
        run.train()
        run.save(extra=number)
    before = run.now
    run.train(2)
    return run, before


def journals_in(folder: Path) -> list[int]:
    found = journal.read_manifest(folder)
    return [sum(part.rows for part in each.parts) for each in found.journals]


def raising(kind: type[BaseException], *args: Any) -> Callable[..., Any]:
    """A function that raises, however it is called."""

    def fail(*_: Any, **__: Any) -> None:
        raise kind(*args)

    return fail


full = raising(OSError, errno.ENOSPC, os.strerror(errno.ENOSPC))


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Run a function in a forked process, with a pipe to write to; returns its id and the pipe."""
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
