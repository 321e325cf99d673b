"""Every public operation of one process, small enough to be repeated thousands of times."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial, partialmethod
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.engines import torch_fused
from sparsestep.optim.optimizer import RuleOptimizer
from sparsestep.storage import checkpoint
from tests.faults.snapshot import Snapshot, difference, of_optimizer, snapshot
from tests.table import COUNTERPARTS

ROWS, DIM = 3000, 16

Make = Callable[[Any], RuleOptimizer]


class Operation:
    """Something that must happen as a whole or not at all; a step, if nothing else is said."""

    faults: tuple[str, ...] = ("line", "allocation", "signal")  # "kill" needs ``reopen``
    may_raise_late = False  # whether torch may still run out of memory when it is complete
    pending: int | None = None  # the batch whose gradients are there
    optimizer: RuleOptimizer

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def prepare(self) -> Any:
        torch.manual_seed(0)
        self.setup()
        self.precede()
        if self.pending is not None:
            self.backward(self.pending)
        return self

    def setup(self) -> None:
        raise NotImplementedError

    def precede(self) -> None:
        """What an operation needs besides its base's setup."""

    def backward(self, step: int) -> None:
        """Make the gradients of a batch."""
        raise NotImplementedError

    def train(self, step: int) -> None:
        self.backward(step)
        self.optimizer.step()

    def run(self) -> None:
        self.optimizer.step()

    def values(self) -> dict[str, Any]:
        """Everything that the operation may change."""
        return {**of_optimizer(self.optimizer), **self.more()}

    def more(self) -> dict[str, Any]:
        """What it may change besides the optimizer's tensors and options."""
        return {}

    def snapshot(self) -> Snapshot:
        return snapshot(self.values())

    def reopen(self) -> Snapshot:
        """In another process, after this one was killed."""
        raise NotImplementedError


def of(base: type[Operation], make: Make | None = None, **attributes: Any) -> Any:
    """An operation with other attributes and methods."""
    if make is not None:
        attributes["make"] = staticmethod(make)
    return type(base.__name__, (base,), attributes)


def ids_of(seed: int, count: int = 400, below: int = ROWS) -> Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))


def adam(params: Any, **options: Any) -> RuleOptimizer:
    return sparsestep.Adam(params, **{"lr": 0.1, **options})


def deferred(params: Any, **options: Any) -> RuleOptimizer:
    return sparsestep.AdamW(params, lr=0.1, semantics="dense", **options)


# Steps


class Step(Operation):
    """One step on two tables and two layers, after a first one."""

    make: Make = staticmethod(adam)
    dtype = torch.float32
    layout = "coo"
    has_layers = False
    steps_before = 1

    def setup(self) -> None:
        shapes = [(ROWS, DIM), (ROWS // 2, 5)]
        if self.layout == "strided":
            shapes = [(40, 7), (9,), (300, 40)]
        elif self.has_layers:
            shapes += [(30, DIM), (30,)]
        self.params = [nn.Parameter(torch.randn(shape).to(self.dtype)) for shape in shapes]
        self.optimizer = self.make(self.params)
        for step in range(self.steps_before):
            self.train(step)
        self.backward(self.steps_before)

    def backward(self, step: int) -> None:
        for number, param in enumerate(self.params):
            if self.layout == "strided" or number >= 2:
                param.grad = torch.randn(param.shape).to(self.dtype)
            else:
                ids = ids_of(10 * step + number, below=len(param))
                values = torch.randn(len(ids), *param.shape[1:]).to(self.dtype)
                param.grad = torch.sparse_coo_tensor(
                    ids[None], values, param.shape, check_invariants=True
                )


@sparsestep.rule(state={"average": 0.0})
def averaged(param: Tensor, grad: Tensor, average: Tensor, *, lr: float = 0.1, step: int = 0):
    average = 0.9 * average + 0.1 * grad
    return param - lr * average / (average.abs() + 1e-8), average


@sparsestep.rule(state={"average": 0.0})
def sorted_average(param: Tensor, grad: Tensor, average: Tensor, *, lr: float = 0.1):
    average = 0.9 * average + 0.1 * grad.sort(dim=-1).values  # no traced operation
    return param - lr * average, average


class FunctionalStep(Step):
    has_layers = True
    calls_before = 1

    def precede(self) -> None:
        self.functional = sparsestep.FunctionalAdam(self.params)
        self.optimizer = self.functional.optimizer
        for _ in range(self.calls_before):
            self.run()

    def run(self) -> None:
        self.functional.step([param.grad for param in self.params])


class FunctionalCall(Operation):
    """A call with options that the core has seen."""

    def setup(self) -> None:
        self.tensors = [torch.randn(ROWS, DIM).abs() for _ in range(3)]
        ids = ids_of(0)
        self.grad = sparsestep.IndexedGrad(ids, torch.randn(len(ids), DIM))
        self.run()

    def run(self) -> None:
        param, *state = self.tensors
        sparsestep.functional.adam_(param, self.grad, *state, step=2)

    def values(self) -> dict[str, Any]:
        return {"tensors": self.tensors}


def catch_up_rows_of_gradients(step: Step) -> None:
    for param in step.params:
        assert param.grad is not None
        step.optimizer.catch_up(param, param.grad._indices()[0])


class DenseStep(Step):
    """A step in torch's kernels.

    Attributes:
        few_params: up to so many, copies are put back; beyond, pieces are computed again.
    """

    layout = "strided"
    faults = (*Step.faults, "out of memory")
    few_params = 16

    def setup(self) -> None:
        torch_fused._FEW_PARAMS, torch_fused.PIECE = self.few_params, 2048
        super().setup()


def dense_steps() -> dict[str, type[Step]]:
    """Each class, its variants, first steps and later ones."""
    loop = {"foreach": False}
    makes: dict[str, Make] = {
        **{ours.__name__: partial(ours, weight_decay=0.1, **loop) for ours, _ in COUNTERPARTS},
        "Adam": partial(sparsestep.Adam, weight_decay=0.1, amsgrad=True, **loop),
        "AdamW": partial(sparsestep.AdamW, foreach=True),
        "AdamW fused": partial(sparsestep.AdamW, fused=True),
        "Adagrad": partial(sparsestep.Adagrad, foreach=True, maximize=True),
        "SGD": partial(sparsestep.SGD, momentum=0.9, nesterov=True, **loop),
        "SGD foreach": partial(sparsestep.SGD, lr=0.1, momentum=0.9, foreach=True),
        "RMSprop": partial(sparsestep.RMSprop, momentum=0.9, centered=True, **loop),
    }
    found: dict[str, type[Step]] = {}
    for name, make in makes.items():
        for when, steps in (("first ", 0), ("", 1)):
            found[f"{when}dense step: {name}"] = of(DenseStep, make, steps_before=steps)
    for name in ("dense step: Adam", "dense step: AdamW fused", "first dense step: SGD"):
        found[f"{name}, in pieces"] = of(found[name], few_params=0)
    return found


def masked_adamw(params: Any) -> RuleOptimizer:
    masks = [torch.rand(len(param)) < 0.3 for param in params]
    return sparsestep.AdamW([{"params": params, "mask": masks}], lr=0.1)


Mixed = of(Step, has_layers=True)
Current = of(Step, precede=catch_up_rows_of_gradients)
NativeDense = of(Step, sparsestep.AdamW, layout="strided", faults=DenseStep.faults)
# The history of deferred updates doubles in the middle of it.
Deferred = of(Mixed, deferred, dtype=torch.float64, steps_before=16)
reference = partial(adam, lr=1e-3, engine="reference")
rounded = partial(adam, lr=1e-3, stochastic_rounding=True)
elementwise = partial(sparsestep.RowwiseAdam, lr=0.1, dense="elementwise")
STEPS: dict[str, type[Operation]] = {
    "step": Step,
    "first step": of(Step, steps_before=0),
    "replayed step": of(Step, steps_before=3),
    "mixed step": Mixed,
    "first mixed step": of(Mixed, steps_before=0),
    "complex step": of(Mixed, dtype=torch.complex64),
    "Lion step": of(Mixed, partial(sparsestep.Lion, lr=0.1)),
    "first element-wise step": of(Mixed, elementwise, steps_before=0),
    "reference step": of(Mixed, reference),
    "rounded reference step": of(Mixed, partial(rounded, engine="reference"), dtype=torch.bfloat16),
    "deferred step": Deferred,
    "deferred reference step": of(Deferred, partial(deferred, engine="reference")),
    "replayed deferred step": of(Current, deferred, dtype=torch.float64, steps_before=3),
    "int8 step": of(Step, partial(adam, lr=1e-3, state_dtype=torch.int8)),
    "rounded step": of(Step, rounded, dtype=torch.bfloat16),
    "rule step": of(Mixed, averaged),
    "untraced rule step": of(Mixed, sorted_average),
    "functional step": FunctionalStep,
    "replayed functional step": of(FunctionalStep, has_layers=False, calls_before=3),
    "functional call": FunctionalCall,
    "masked step": of(Mixed, masked_adamw),
    "first dense step": of(NativeDense, steps_before=0),
    "dense step": NativeDense,
    "replayed dense step": of(NativeDense, steps_before=3),
    **dense_steps(),
}


# Modules


class Model(Operation):
    """Tables of ``sparsestep.nn``, whose gradients are compact."""

    dtype = torch.float32
    make: Make = staticmethod(adam)

    def tables(self) -> list[nn.Module]:
        return [sparsestep.nn.Embedding(ROWS, DIM), sparsestep.nn.EmbeddingBag(ROWS, DIM)]

    def setup(self) -> None:
        self.model = nn.ModuleList([*self.tables(), nn.Linear(DIM, 3)]).to(self.dtype)
        self.optimizer = self.make(self.model.parameters())
        self.attach()
        for step in range(2):
            self.train(step)
        self.optimizer.zero_grad()

    def attach(self) -> None:
        """Before the first step."""

    def loss(self, step: int) -> Tensor:
        *tables, layer = self.model
        ids = ids_of(step).view(-1, 8)
        pooled = [table(ids).view(len(ids), -1, DIM).sum(1) for table in tables]
        return layer(torch.stack(pooled).sum(0)).square().sum()

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()


def clip(world: Model) -> None:
    sparsestep.clip_grad_norm_(world.model.parameters(), 0.5)


def dense_grads(world: Model) -> dict[str, Any]:
    grads = [param.grad for param in world.model.parameters()]
    return {"grads": [grad.to_dense() if grad is not None else None for grad in grads]}


class OneTable(Model):
    def tables(self) -> list[nn.Module]:
        return [sparsestep.nn.Embedding(ROWS, DIM)]


class StepInBackward(OneTable):
    """Each parameter is a step of its own, after which torch's backward goes on."""

    may_raise_late = True

    def precede(self) -> None:
        self.model[-1].requires_grad_(False)
        self.optimizer.step_in_backward([self.model[0].weight])
        self.computed = self.loss(7)

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.computed.backward(retain_graph=True)


class TrackedLookup(OneTable):
    """Rows catch up before they are read."""

    dtype = torch.float64
    make = staticmethod(deferred)
    guard = False

    def attach(self) -> None:
        self.optimizer.track(self.model, guard=self.guard)

    def run(self) -> None:
        self.loss(8)


def catch_up(world: Model) -> None:
    world.optimizer.catch_up()


def forget(world: Model) -> None:
    world.optimizer.forget(world.model[0].weight, ids_of(3, 50))


def set_mask(world: Model, *, by_row: bool = False) -> None:
    weight = world.model[0].weight
    shape = weight.shape[:1] if by_row else weight.shape
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
    world.optimizer.set_mask(weight, mask)


def masks(world: Model) -> dict[str, Any]:
    found = [group.get("mask") for group in world.optimizer.param_groups]
    return {"masks": [mask for each in found for mask in each or ()]}


def grow(world: Model) -> None:
    torch.manual_seed(3)
    sparsestep.nn.grow(world.model[0], ROWS + 500, world.optimizer)


class AddGroup(Model):
    def precede(self) -> None:
        self.layer = nn.Linear(4, 4)

    def run(self) -> None:
        self.optimizer.add_param_group({"params": list(self.layer.parameters()), "lr": 0.5})

    def more(self) -> dict[str, Any]:
        return {"groups": len(self.optimizer.param_groups)}


class LoadStateDict(Model):
    def precede(self) -> None:
        self.saved = copy.deepcopy(self.optimizer.state_dict())
        for group in self.saved["param_groups"]:
            group["lr"] = 0.7
        self.train(5)

    def run(self) -> None:
        self.optimizer.load_state_dict(self.saved)


# Vocabularies


class VocabularyLookup(Model):
    """New ids take over rows, which start over with their state."""

    options: ClassVar[dict[str, Any]] = {"evict": "lru"}
    rows = 500

    def tables(self) -> list[nn.Module]:
        return [sparsestep.nn.Embedding(self.rows, DIM)]

    def attach(self) -> None:
        self.vocabulary = sparsestep.nn.Vocabulary(self.rows, **self.options)
        self.vocabulary.attach(self.model[0], self.optimizer)
        if self.optimizer.semantics == "dense":
            self.optimizer.track(self.model)

    def loss(self, step: int) -> Tensor:
        ids = ids_of(step, below=5 * ROWS).view(-1, 8) + 100 * step
        return self.model[1](self.model[0](self.vocabulary(ids)).sum(1)).square().sum()

    def run(self) -> None:
        torch.manual_seed(3)
        self.vocabulary(ids_of(8, below=5 * ROWS) + 800)

    def more(self) -> dict[str, Any]:
        return {
            "vocabulary": dict(self.vocabulary.state_dict()),
            "used": self.vocabulary.used,
            "evicted": self.vocabulary.taken_over,
        }


def mapped_tables(world: VocabularyLookup) -> list[nn.Module]:
    weight = sparsestep.storage.mapped(world.folder / "vocabulary", (world.rows, DIM))
    weight[:] = torch.randn(weight.shape)
    return [sparsestep.nn.Embedding.from_pretrained(weight, freeze=False)]


def grow_vocabulary(world: VocabularyLookup) -> None:
    torch.manual_seed(3)
    world.vocabulary.grow(world.rows + 100)


class MergeVocabulary(VocabularyLookup):
    def precede(self) -> None:
        self.vocabulary.grow(self.rows + 20)
        self.other = sparsestep.nn.Vocabulary(20)
        self.other(ids_of(9, count=9))

    def run(self) -> None:
        self.vocabulary.merge(self.other)


class LoadVocabulary(VocabularyLookup):
    def precede(self) -> None:
        self.saved = {k: v.clone() for k, v in self.vocabulary.state_dict().items()}
        self.train(5)

    def run(self) -> None:
        self.vocabulary.load_state_dict(self.saved)


# Tables in files


class Mapped(Operation):
    """A model with a table in a file, and what a checkpoint has of it."""

    in_rows = False
    semantics = "masked"
    evicts = False  # rows belong to ids of a vocabulary, which loses some in every step

    def new(self, path: str) -> None:
        make = partial(sparsestep.Adam, lr=0.1, semantics=self.semantics)
        dtype = torch.float64 if self.semantics == "dense" else torch.float32
        self.table = sparsestep.storage.mapped(
            self.folder / path, (ROWS, DIM), dtype, optimizer=make if self.in_rows else None
        )
        embedding = nn.Embedding.from_pretrained(self.table, freeze=False, sparse=True)
        self.model = nn.Sequential(embedding, nn.Linear(DIM, 2, dtype=dtype))
        self.optimizer = make(self.model.parameters())
        if self.semantics == "dense":
            self.optimizer.track(self.model)
        self.vocabulary = sparsestep.nn.Vocabulary(100, admit=2, evict="lru")
        if self.evicts:
            self.vocabulary.attach(embedding, self.optimizer)
            self.model.insert(0, self.vocabulary)

    def setup(self) -> None:
        self.new("table")
        for step in range(2):
            self.train(step)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        ids = ids_of(step, 60)
        (self.model(ids % 80 + 9 * step if self.evicts else ids) - 1).square().sum().backward()

    def more(self) -> dict[str, Any]:
        return {"vocabulary": dict(self.vocabulary.state_dict())}

    def save(self, note: str) -> None:
        sparsestep.storage.save(self.folder / "saved", self.model, self.optimizer, extra=note)

    def load(self) -> Any:
        return sparsestep.storage.load(self.folder / "saved", self.model, self.optimizer)


class CreateTable(Operation):
    """A file that does not exist yet."""

    faults = (*Operation.faults, "kill")
    tensor: Tensor | None = None

    def setup(self) -> None:
        pass

    def run(self) -> None:
        self.tensor = sparsestep.storage.mapped(self.folder / "new", (ROWS, DIM))

    def values(self) -> dict[str, Any]:
        """A file of zeros may remain, which the next call opens; nothing else may."""
        leftovers = [path.name for path in self.folder.iterdir() if path.name != "new"]
        return {"open": self.tensor is not None, "leftovers": leftovers}

    def reopen(self) -> Snapshot:
        self.run()
        return snapshot({"table": self.tensor})


class Save(Mapped):
    """A checkpoint in a folder, which has some already."""

    faults = (*Mapped.faults, "kill")
    checkpoints = 0
    compacts = False

    def precede(self) -> None:
        for number in range(self.checkpoints):
            self.save(f"checkpoint {number}")
            self.train(10 + number)

    def run(self) -> None:
        if self.compacts:  # journals are merged into the base
            checkpoint._COMPACT_MIN_BYTES, checkpoint._COMPACT_RATIO = 1, 0.01
        self.save("latest")

    def values(self) -> dict[str, Any]:
        return {"live": super().values(), "saved": self.saved()}

    def saved(self, *, saves_again: bool = False) -> dict[str, Any]:
        """What the folder gives a process that starts from it."""
        if not (self.folder / "saved" / "manifest.json").exists():
            return {}
        for leftover in self.folder.glob("another*"):
            leftover.unlink()
        torch.manual_seed(5)
        other = type(self)(self.folder)
        other.new("another")
        found = {"extra": other.load(), **super(Save, other).values()}
        if saves_again:  # beside what was left
            other.save("again")
        return found

    def reopen(self) -> Snapshot:
        found = snapshot({"saved": self.saved(saves_again=True)})
        assert difference(found, snapshot({"saved": self.saved()})) in ([], ["saved.extra"])
        return found


class TrainAndSave(Save):
    """What a process had done since a checkpoint is lost, or all of it is in the next one."""

    faults = ("kill",)

    def run(self) -> None:
        self.train(20)
        super().run()


class Load(Mapped):
    """The table in the file has moved on since the checkpoint."""

    faults = (*Mapped.faults, "kill")

    def precede(self) -> None:
        self.save("first")
        self.train(5)
        self.save("latest")
        rows = [self.table.clone()]
        for step in range(6, 9):
            self.train(step)
        torch.save([*rows, self.table.clone()], self.folder / "rows")

    def run(self) -> None:
        self.load()

    def reopen(self) -> Snapshot:
        """Open the same file and load once more, which gives what loading would have given.

        The file has its old content or its new one, and nothing else is left in the end.
        """
        torch.manual_seed(6)
        self.new("table")
        if self.semantics == "masked":  # otherwise rows catch up when they are saved
            assert any(torch.equal(self.table, each) for each in torch.load(self.folder / "rows"))
        self.load()
        known = {"table", "table.exp_avg", "table.exp_avg_sq", "saved", "rows"}
        assert {path.name for path in self.folder.iterdir()} <= known
        return self.snapshot()


OPERATIONS: dict[str, type[Operation]] = {
    **STEPS,
    "compact step": of(Model, pending=7),
    "step in backward": StepInBackward,
    "clip": of(Model, pending=7, run=clip, values=dense_grads),
    "lookup: tracked": TrackedLookup,
    "lookup: guarded": of(TrackedLookup, guard=True),
    "catch_up": of(TrackedLookup, run=catch_up),
    "forget": of(Model, run=forget),
    "forget: deferred": of(TrackedLookup, run=forget),
    "set_mask": of(Model, run=set_mask, more=masks),
    "set_mask: deferred": of(TrackedLookup, run=partialmethod(set_mask, by_row=True), more=masks),
    "grow": of(Model, run=grow, more=lambda world: {"rows": world.model[0].num_embeddings}),
    "add_param_group": AddGroup,
    "load_state_dict": LoadStateDict,
    "vocabulary: lru": VocabularyLookup,
    "vocabulary: admit": of(VocabularyLookup, options={"admit": 2}),
    "vocabulary: lfu": of(VocabularyLookup, options={"evict": "lfu", "shared": 2}),
    "vocabulary: deferred": of(VocabularyLookup, deferred, dtype=torch.float64),
    "vocabulary: mapped": of(VocabularyLookup, tables=mapped_tables),
    "vocabulary: grow": of(VocabularyLookup, run=grow_vocabulary),
    "vocabulary: load": LoadVocabulary,
    "vocabulary: merge": MergeVocabulary,
    "mapped step": of(Mapped, pending=7),
    "mapped step: in rows": of(Mapped, pending=7, in_rows=True),
    "mapped step: deferred": of(Mapped, pending=7, semantics="dense"),
    "mapped: create": CreateTable,
    "save: first": Save,
    "save: changes": of(Save, checkpoints=2),
    "save: compact": of(Save, checkpoints=2, compacts=True),
    "save: in rows": of(Save, checkpoints=2, in_rows=True),
    "train and save": of(TrainAndSave, checkpoints=2, compacts=True),
    "train and save: deferred": of(TrainAndSave, checkpoints=2, semantics="dense"),
    "train and save: evicting": of(TrainAndSave, checkpoints=2, in_rows=True, evicts=True),
    "load": Load,
    "load: in rows": of(Load, in_rows=True),
    "load: deferred": of(Load, semantics="dense"),
}
