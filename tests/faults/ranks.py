"""Operations that several ranks perform together; one of them has the fault."""

from __future__ import annotations

import os
import pickle
import shutil
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sparsestep
from tests.faults.operations import Operation, ids_of, of

WORLD = 2
ROWS, DIM = 101, 8
TIMEOUT = timedelta(seconds=6)


class RankOperation(Operation):
    """An operation of all ranks.

    Attributes:
        faulty: the rank that has the fault.
    """

    faulty = 1
    plan = "rows"

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def setup(self) -> None:
        self.new()
        for step in range(2):
            self.train(step)

    def new(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(sparsestep.nn.EmbeddingBag(ROWS, DIM), nn.Linear(DIM, 2))
        sparsestep.distributed.shard(self.model, plan=self.plan)
        self.optimizer = sparsestep.Adam(self.model.parameters(), lr=0.1)

    def ids(self, step: int) -> Tensor:
        return ids_of(10 * step + self.rank, 24, ROWS).view(6, 4)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.model(self.ids(step)).square().sum().backward()
        for param in self.model[-1].parameters():  # as DistributedDataParallel does
            dist.all_reduce(param.grad)


class ClippedStep(RankOperation):
    """Gradients have been exchanged: ranks agree by the numbers that start an exchange."""

    def backward(self, step: int) -> None:
        super().backward(step)
        sparsestep.clip_grad_norm_(self.model.parameters(), 1.0)


def look_up(world: RankOperation) -> None:
    world.model(world.ids(9))


class Shard(RankOperation):
    """With a group that exists: starting one needs threads, without which torch aborts."""

    def setup(self) -> None:
        torch.manual_seed(1)
        self.mesh = init_device_mesh("cpu", (WORLD,))
        self.model = nn.Sequential(sparsestep.nn.EmbeddingBag(ROWS, DIM), nn.Linear(DIM, 2))

    def run(self) -> None:
        sparsestep.distributed.shard(self.model, self.mesh, "rows")

    def values(self) -> dict[str, Any]:
        return {"weights": list(self.model.parameters()), "kind": type(self.model[0]).__name__}


class SharedVocabularyLookup(RankOperation):
    def new(self) -> None:
        torch.manual_seed(1)
        self.table = sparsestep.nn.Embedding(41, DIM)
        sparsestep.distributed.shard(self.table, plan="rows")
        self.optimizer = sparsestep.Adam(self.table.parameters(), lr=0.1)
        self.vocabulary = sparsestep.distributed.Vocabulary(self.table, self.optimizer, evict="lru")

    def ids(self, step: int) -> Tensor:
        return super().ids(step) + 30 * step

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.table(self.vocabulary(self.ids(step))).square().sum().backward()

    def run(self) -> None:
        torch.manual_seed(3)
        self.vocabulary(self.ids(9))

    def more(self) -> dict[str, Any]:
        return {"vocabulary": dict(self.vocabulary.state_dict())}


class DynamicLookup(SharedVocabularyLookup):
    """Owners assign rows in the lookup of a collection."""

    in_files = False
    plan = "auto"

    def new(self) -> None:
        torch.manual_seed(1)
        bags = [sparsestep.nn.EmbeddingBag(41, DIM, mode="sum") for _ in range(2)]
        if self.in_files:
            path = self.folder / f"items{self.rank}"
            tensor = sparsestep.storage.mapped(path, (41, DIM), optimizer=sparsestep.Adam)
            bags[0] = nn.EmbeddingBag.from_pretrained(tensor, freeze=False, mode="sum")
        vocabularies = {n: sparsestep.nn.Vocabulary(41 - n, evict="lru") for n in range(2)}
        self.model = sparsestep.nn.EmbeddingBagCollection(bags, vocabularies=vocabularies)
        sparsestep.distributed.shard(self.model)
        self.optimizer = sparsestep.Adam(self.model.parameters(), lr=0.1)
        self.model.attach(self.optimizer)

    def look_up(self, step: int) -> Any:
        return self.model([self.ids(step), self.ids(step + 1)[:, :1]])

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        sum(each.square().sum() for each in self.look_up(step)).backward()

    def run(self) -> None:
        torch.manual_seed(3)
        self.look_up(9)

    def more(self) -> dict[str, Any]:
        return {"vocabularies": dict(self.model.vocabularies.state_dict())}


def save(world: Any) -> None:
    """Saving changes nothing that is live."""
    sparsestep.distributed.save(world.folder / "saved", world.model, world.optimizer)


def load(world: RankOperation) -> None:
    sparsestep.distributed.load(world.folder / "saved", world.model, world.optimizer)


def save_and_train(world: RankOperation) -> None:
    save(world)
    world.train(5)


def save_and_change_plan(world: RankOperation) -> None:
    """What one layout saved is loaded into another."""
    save_and_train(world)
    world.plan = "tables"
    world.new()
    world.train(6)


class Consolidate(Operation):
    found: Any = None

    def setup(self) -> None:
        self.model = nn.EmbeddingBag(ROWS, DIM, sparse=True)
        self.optimizer = sparsestep.Adam(self.model.parameters(), lr=0.1)
        self.model(ids_of(1, 24, ROWS).view(6, 4)).sum().backward()
        self.optimizer.step()
        save(self)

    def run(self) -> None:
        self.found = sparsestep.distributed.consolidate(self.folder / "saved")

    def more(self) -> dict[str, Any]:
        return {"found": self.found}


OPERATIONS: dict[str, type[Operation]] = {
    "consolidate": Consolidate,
    "ranks: shard": Shard,
    "ranks: lookup": of(RankOperation, run=look_up),
    "ranks: step": of(RankOperation, pending=5),
    "ranks: step after clipping": of(ClippedStep, pending=5),
    "ranks: step on whole tables": of(RankOperation, pending=5, plan="tables"),
    "ranks: vocabulary": SharedVocabularyLookup,
    "ranks: dynamic lookup": DynamicLookup,
    "ranks: dynamic lookup in files": of(DynamicLookup, in_files=True),
    "ranks: save files": of(DynamicLookup, in_files=True, run=save),
    "ranks: save changes of files": of(
        DynamicLookup, in_files=True, precede=save_and_train, run=save
    ),
    "ranks: load files": of(DynamicLookup, in_files=True, precede=save_and_train, run=load),
    "ranks: save": of(RankOperation, run=save),
    "ranks: load": of(RankOperation, precede=save_and_train, run=load),
    "ranks: reshard": of(RankOperation, precede=save_and_change_plan, run=load),
}


# Last words of libraries that end the process: the C library when a thread first uses its
# variables, torch's OpenMP when it starts its threads, CPython when a thread of gloo drops the last
# reference to a tensor, and gloo's own threads. The last two crash without words, so allocations.c
# supplies them.
_LAST_WORDS = (
    "cannot allocate memory for thread-local data",
    "libgomp: Out of memory",
    "no memory for PyThreadState_New",
    "no memory for gloo",
)


def is_aborted(log: str) -> bool:
    """Whether a library below torch has ended the process for want of memory."""
    return any(words in log for words in _LAST_WORDS)


class AbortedError(Exception):
    """A library below torch has ended a process, which nothing could have prevented."""


class StartupError(Exception):
    """Ranks did not meet in time, so the operation has not begun."""


def run(make: type[RankOperation], work: Callable[[Any], Any], attempts: int = 3) -> list[Any]:
    """Set an operation up on all ranks and call a function there; its results by rank."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        pids = [_start(make, work, folder, rank) for rank in range(WORLD)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        return _results(folder, statuses)
    except StartupError:
        if attempts == 1:
            raise
        return run(make, work, attempts - 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _results(folder: Path, statuses: list[int]) -> list[Any]:
    found = []
    for rank, status in enumerate(statuses):
        path = folder / f"result{rank}"
        if status or not path.exists():
            log = (folder / f"log{rank}").read_text()
            words = f"rank {rank} ended with status {status}: {log[:1000]} [...] {log[-1000:]}"
            if len(list(folder.glob("ready*"))) < WORLD:
                raise StartupError(words)
            if is_aborted(log):
                raise AbortedError(words)
            raise RuntimeError(words)
        kind, result = pickle.loads(path.read_bytes())
        if kind == "error":
            raise result
        found.append(result)
    return found


def _start(make: type[RankOperation], work: Callable[[Any], Any], folder: Path, rank: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        store = dist.FileStore(str(folder / "store"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD, timeout=TIMEOUT)
        world = make(folder).prepare()
        dist.barrier()
        (folder / f"ready{rank}").touch()
        try:
            result = ("result", work(world))
        except BaseException as error:
            traceback.print_exc()
            result = ("error", type(error)(str(error)))
        temporary = folder / f"writing{rank}"
        temporary.write_bytes(pickle.dumps(result))
        temporary.rename(folder / f"result{rank}")
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)
