"""Operations that several ranks perform together; one of them has the fault."""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import sparsestep
from tests.faults.operations import Operation, ids_of, of
from tests.faults.snapshot import Snapshot, snapshot

ROWS, DIM = 101, 8
TIMEOUT = timedelta(seconds=15)


class RankOperation(Operation):
    """An operation of all ranks.

    Attributes:
        world_size: number of ranks.
        hosts: on how many hosts they say that they are.
        faulty: the rank that has the fault.
        plan: where rows are, as in ``shard``.
        options: other options of ``shard``.
        semantics: of the optimizer; with ``"dense"``, it tracks the model.
        dim: elements of a row.
        bags: how many a rank looks up.
        layers: parameters whose gradients ranks add up.
        is_repeatable: whether it can be called again when ranks were interrupted; otherwise they
            may have lost each other.
    """

    world_size = 2
    hosts = 1
    faulty = 1
    plan = "rows"
    options: ClassVar[dict[str, Any]] = {}
    semantics = "masked"
    dim = DIM
    bags = 6
    is_repeatable = True
    layers: tuple[nn.Parameter, ...] = ()

    @property
    def rank(self) -> int:
        return dist.get_rank()

    def setup(self) -> None:
        self.new()
        for step in range(2):
            self.train(step)

    def new(self) -> None:
        torch.manual_seed(1)
        table = sparsestep.nn.EmbeddingBag(ROWS, self.dim)
        self.model = nn.Sequential(table, nn.Linear(self.dim, 2))
        if self.semantics == "dense":
            self.model.double()
        sparsestep.distributed.shard(self.model, plan=self.plan, **self.options)
        self.layers = tuple(self.model[-1].parameters())
        params = self.model.parameters()
        self.optimizer = sparsestep.Adam(params, lr=0.1, semantics=self.semantics)
        if self.semantics == "dense":
            self.optimizer.track(self.model)

    def batch(self, step: int) -> Any:
        return ids_of(10 * step + self.rank, 4 * self.bags, ROWS).view(self.bags, 4)

    def loss(self, batch: Any) -> Tensor:
        return self.model(batch).square().sum()

    def left(self) -> Snapshot:
        """What another process finds when all ranks have ended."""
        return {}

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(self.batch(step)).backward()
        for param in self.layers:  # as DistributedDataParallel does
            dist.all_reduce(param.grad)


class ClippedStep(RankOperation):
    """Gradients have been exchanged: ranks agree by the numbers that start an exchange."""

    def backward(self, step: int) -> None:
        super().backward(step)
        clip(self)


class Clip(RankOperation):
    """Gradients are exchanged and scaled, or neither; the next step shows which."""

    pending = 5
    is_repeatable = False  # the step has used the gradients
    # While gradients are scaled, memory may run out.
    faults = ("line", "signal")

    def run(self) -> None:
        clip(self)

    def values(self) -> dict[str, Any]:
        self.optimizer.step()
        return super().values()


class PrefetchedLookup(RankOperation):
    """Ids have been sent by ``lockstep``, and rows come with the numbers."""

    def setup(self) -> None:
        self.new()
        batches = [self.batch(step) for step in range(4)]
        self.loop = iter(sparsestep.distributed.lockstep(batches, prefetch=1))
        for _ in batches[1:]:
            self.optimizer.zero_grad()
            self.loss(next(self.loop)).backward()
            self.optimizer.step()
        self.last = next(self.loop)

    def run(self) -> None:
        self.model(self.last)


class Shard(RankOperation):
    """With a group that exists: starting one needs threads, without which torch aborts."""

    def setup(self) -> None:
        torch.manual_seed(1)
        self.mesh = init_device_mesh("cpu", (self.world_size,))
        self.model = self.tables()

    def tables(self) -> nn.Module:
        return nn.Sequential(sparsestep.nn.EmbeddingBag(ROWS, DIM), nn.Linear(DIM, 2))

    def run(self) -> None:
        sparsestep.distributed.shard(self.model, self.mesh, self.plan)

    def values(self) -> dict[str, Any]:
        modules = {name: type(each).__name__ for name, each in self.model.named_modules()}
        files = sorted(path.name for path in self.folder.glob(f"items{self.rank}*"))
        return {"weights": list(self.model.parameters()), "modules": modules, "files": files}


class ShardVocabularies(Shard):
    """One table is in a file, of which each rank gets its own."""

    plan = "auto"

    def tables(self) -> nn.Module:
        return tables_with_vocabularies(self, in_files=True)


class ShardAlone(Operation):
    """One process, without threads of gloo: its allocations are the same ones every time."""

    def setup(self) -> None:
        self.model = tables_with_vocabularies(self, in_files=False)

    def run(self) -> None:
        sparsestep.distributed.shard(self.model)

    def values(self) -> dict[str, Any]:
        modules = {name: type(each).__module__ for name, each in self.model.named_modules()}
        return {"weights": list(self.model.parameters()), "modules": modules}


class SharedVocabularyLookup(RankOperation):
    def new(self) -> None:
        torch.manual_seed(1)
        self.table = sparsestep.nn.Embedding(41, DIM)
        sparsestep.distributed.shard(self.table, plan="rows", **self.options)
        self.optimizer = sparsestep.Adam(self.table.parameters(), lr=0.1)
        self.vocabulary = sparsestep.distributed.Vocabulary(self.table, self.optimizer, evict="lru")

    def batch(self, step: int) -> Any:
        return super().batch(step) + 30 * step

    def loss(self, batch: Any) -> Tensor:
        return self.table(self.vocabulary(batch)).square().sum()

    def run(self) -> None:
        self.vocabulary(self.batch(9))

    def more(self) -> dict[str, Any]:
        rows, used = self.vocabulary.rows, self.vocabulary.used
        return {"vocabulary": dict(self.vocabulary.state_dict()), "rows": rows, "used": used}


class GrowVocabulary(SharedVocabularyLookup):
    def precede(self) -> None:
        self.optimizer.zero_grad()

    def run(self) -> None:
        self.vocabulary.grow(60)


class MergeVocabulary(GrowVocabulary):
    """There is room for the ids of an ordinary vocabulary."""

    def precede(self) -> None:
        super().precede()
        super().run()
        self.other = sparsestep.nn.Vocabulary(20)
        self.other(ids_of(9, count=9))

    def run(self) -> None:
        self.vocabulary.merge(self.other)


def export(world: SharedVocabularyLookup) -> None:
    """It changes nothing."""
    world.vocabulary.export(world.table)


def tables_with_vocabularies(world: Any, *, in_files: bool) -> Any:
    bags = [sparsestep.nn.EmbeddingBag(41, DIM, mode="sum") for _ in range(2)]
    if in_files:
        path = world.folder / f"items{world.rank}"
        tensor = sparsestep.storage.mapped(path, (41, DIM), optimizer=sparsestep.Adam)
        bags[0] = nn.EmbeddingBag.from_pretrained(tensor, freeze=False, mode="sum")
    vocabularies = {n: sparsestep.nn.Vocabulary(41 - n, evict="lru") for n in range(2)}
    return sparsestep.nn.EmbeddingBagCollection(bags, vocabularies=vocabularies)


class Dynamic(RankOperation):
    """A collection of tables with vocabularies, whose owners assign rows in the lookup."""

    in_files = False

    def new(self) -> None:
        torch.manual_seed(1)
        self.model = tables_with_vocabularies(self, in_files=self.in_files)
        sparsestep.distributed.shard(self.model, **self.options)
        self.optimizer = sparsestep.Adam(self.model.parameters(), lr=0.1)
        self.model.attach(self.optimizer)

    def batch(self, step: int) -> Any:
        ids = [super(Dynamic, self).batch(each) + 30 * each for each in (step, step + 1)]
        return [ids[0], ids[1][:, :1]]

    def loss(self, batch: Any) -> Tensor:
        return torch.stack([each.square().sum() for each in self.model(batch)]).sum()

    def more(self) -> dict[str, Any]:
        return {"vocabularies": dict(self.model.vocabularies.state_dict())}


class PrefetchedDynamicLookup(PrefetchedLookup, Dynamic):
    """Rows of ids that were sent in advance are assigned in the lookup."""


def look_up(world: RankOperation) -> None:
    world.model(world.batch(9))


def look_up_single_ids(world: RankOperation) -> None:
    """Each id is requested once."""
    world.model(world.batch(9).view(-1, 1))


def clip(world: RankOperation) -> None:
    sparsestep.clip_grad_norm_(world.model.parameters(), 1.0)


def save(world: Any) -> None:
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


def saved(world: Operation) -> Snapshot:
    folder = world.folder / "saved"
    if not (folder / "sparsestep.json").exists():
        return {}
    return snapshot(sparsestep.distributed.consolidate(folder))


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


def collectives_started() -> int:
    """How many collectives this rank has started, in all process groups."""
    groups = dist.distributed_c10d._world.pg_map
    return sum(group._get_sequence_number_for_group() for group in groups)


FAULTS = (*Operation.faults, "kill")
# Two hosts of two ranks; the last two are the one that speaks for its host, and the other.
HOSTS: dict[str, Any] = {"world_size": 4, "hosts": 2, "options": {"topology": "hosts"}}
SAVE: dict[str, Any] = {"run": save, "left": saved, "faults": FAULTS, "is_repeatable": False}
LOAD: dict[str, Any] = {"run": load, "is_repeatable": False}
# Messages are too large for buffers that are allocated in advance.
LARGE: dict[str, Any] = {"dim": 512, "bags": 600, "faults": ("line", "allocation")}

OPERATIONS: dict[str, type[Operation]] = {
    "consolidate": Consolidate,
    "shard vocabularies": ShardAlone,
    "ranks: shard": Shard,
    "ranks: shard files and vocabularies": ShardVocabularies,
    "ranks: lookup": of(RankOperation, run=look_up, faults=FAULTS),
    "ranks: lookup of single ids": of(RankOperation, run=look_up_single_ids),
    "ranks: lookup in int8": of(RankOperation, run=look_up, options={"wire": "int8"}),
    "ranks: lookup of large messages": of(RankOperation, run=look_up, **LARGE),
    "ranks: lookup on hosts": of(RankOperation, run=look_up, faulty=2, **HOSTS),
    "ranks: tracked lookup": of(RankOperation, run=look_up, semantics="dense"),
    "ranks: prefetched lookup": PrefetchedLookup,
    "ranks: step": of(RankOperation, pending=5, faults=FAULTS),
    "ranks: step after clipping": of(ClippedStep, pending=5, faults=FAULTS),
    "ranks: step on whole tables": of(RankOperation, pending=5, plan="tables"),
    "ranks: step on copies": of(RankOperation, pending=5, plan="copy"),
    "ranks: step in bf16": of(RankOperation, pending=5, options={"wire": "bf16"}),
    "ranks: step of large messages": of(RankOperation, pending=5, **LARGE),
    "ranks: step on hosts": of(RankOperation, pending=5, faulty=3, **HOSTS),
    "ranks: deferred step": of(RankOperation, pending=5, semantics="dense"),
    "ranks: clip": Clip,
    "ranks: vocabulary": SharedVocabularyLookup,
    "ranks: vocabulary: grow": GrowVocabulary,
    "ranks: vocabulary: merge": MergeVocabulary,
    "ranks: vocabulary: export": of(SharedVocabularyLookup, run=export),
    "ranks: dynamic lookup": of(Dynamic, run=look_up, faults=FAULTS),
    "ranks: dynamic lookup in files": of(Dynamic, run=look_up, in_files=True),
    "ranks: dynamic lookup on hosts": of(Dynamic, run=look_up, faulty=2, **HOSTS),
    "ranks: prefetched dynamic lookup": PrefetchedDynamicLookup,
    "ranks: dynamic step": of(Dynamic, pending=5),
    "ranks: dynamic step in files": of(Dynamic, pending=5, in_files=True),
    "ranks: save files": of(Dynamic, in_files=True, **SAVE),
    "ranks: save changes of files": of(Dynamic, in_files=True, precede=save_and_train, **SAVE),
    "ranks: load files": of(Dynamic, in_files=True, precede=save_and_train, **LOAD),
    "ranks: load vocabularies": of(Dynamic, precede=save_and_train, **LOAD),
    "ranks: save": of(RankOperation, **SAVE),
    "ranks: save again": of(RankOperation, precede=save_and_train, **SAVE),
    "ranks: load": of(RankOperation, precede=save_and_train, faults=FAULTS, **LOAD),
    "ranks: reshard": of(RankOperation, precede=save_and_change_plan, **LOAD),
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


class Results(NamedTuple):
    """Results of a function that ran on all ranks.

    Attributes:
        ranks: by rank; ``None`` for one that was killed.
        left: what another process finds after the ranks have ended.
    """

    ranks: list[Any]
    left: Snapshot


def run(make: type[RankOperation], work: Callable[[Any], Any], attempts: int = 3) -> Results:
    """Set an operation up on all ranks and call a function there."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    try:
        pids = [_start(make, work, folder, rank) for rank in range(make.world_size)]
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        return Results(_results(make, folder, statuses), make(folder).left())
    except StartupError:
        if attempts == 1:
            raise
        return run(make, work, attempts - 1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _results(make: type[RankOperation], folder: Path, statuses: list[int]) -> list[Any]:
    found = []
    for rank, status in enumerate(statuses):
        path = folder / f"result{rank}"
        is_ready = len(list(folder.glob("ready*"))) == make.world_size
        if status == signal.SIGKILL and rank == make.faulty and is_ready:
            found.append(None)
            continue
        if status or not path.exists():
            log = (folder / f"log{rank}").read_text()
            words = f"rank {rank} ended with status {status}: {log[:1000]} [...] {log[-1000:]}"
            if not is_ready:
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
    status, world_size = 1, make.world_size
    try:
        log = os.open(folder / f"log{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(log, 2)
        os.environ["GROUP_RANK"] = str(rank * make.hosts // world_size)
        store = dist.FileStore(str(folder / "store"), world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT
        )
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
