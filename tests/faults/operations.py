"""Every public operation of one process, small enough to be repeated thousands of times."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

import sparsestep
from sparsestep.engines import torch_fused
from sparsestep.optim.optimizer import RuleOptimizer
from tests.faults.snapshot import Snapshot, of_optimizer, snapshot
from tests.table import COUNTERPARTS

ROWS, DIM = 3000, 16

Make = Callable[[Any], RuleOptimizer]


class Operation:
    """Something that must happen as a whole or not at all; a step, if nothing else is said.

    Attributes:
        faults: names of the faults that apply. ``"kill"`` needs ``reopen``.
        may_raise_late: whether torch may still run out of memory when the operation is complete.
        pending: the batch whose gradients are there, if there are any.
    """

    faults: tuple[str, ...] = ("line", "allocation", "signal")
    may_raise_late = False
    pending: int | None = None
    optimizer: RuleOptimizer

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.setup()
        if self.pending is not None:
            self.backward(self.pending)

    def setup(self) -> None:
        raise NotImplementedError

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
        return of_optimizer(self.optimizer)

    def snapshot(self) -> Snapshot:
        return snapshot(self.values())

    def reopen(self) -> Snapshot:
        """In another process, after this one was killed."""
        raise NotImplementedError


def of(base: type[Operation], make: Make | None = None, **attributes: Any) -> Any:
    """An operation with other attributes."""
    if make is not None:
        attributes["make"] = staticmethod(make)
    return type(base.__name__, (base,), attributes)


def ids_of(seed: int, count: int = 400, below: int = ROWS) -> Tensor:
    return torch.randint(below, (count,), generator=torch.Generator().manual_seed(seed))


# Steps


class Step(Operation):
    """One step on two tables and two layers, after a first one."""

    make: Make = staticmethod(lambda params: sparsestep.Adam(params, lr=0.1))
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

    def setup(self) -> None:
        super().setup()
        self.functional = sparsestep.FunctionalAdam(self.params)
        self.functional.step([param.grad for param in self.params])

    def run(self) -> None:
        self.functional.step([param.grad for param in self.params])

    def values(self) -> dict[str, Any]:
        return {
            "params": self.params,
            "state": [dict(self.functional.state.get(param) or {}) for param in self.params],
        }


class ReplayedFunctionalStep(FunctionalStep):
    has_layers = False

    def setup(self) -> None:
        super().setup()
        for _ in range(2):
            self.run()


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


class CurrentStep(Step):
    """No row of the gradient has to catch up."""

    def setup(self) -> None:
        super().setup()
        for param in self.params:
            assert param.grad is not None
            self.optimizer.catch_up(param, param.grad._indices()[0])


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
        "Adam": lambda params: sparsestep.Adam(params, weight_decay=0.1, amsgrad=True, **loop),
        "AdamW": lambda params: sparsestep.AdamW(params, foreach=True),
        "AdamW fused": lambda params: sparsestep.AdamW(params, fused=True),
        "Adagrad": lambda params: sparsestep.Adagrad(params, foreach=True, maximize=True),
        "SGD": lambda params: sparsestep.SGD(params, momentum=0.9, nesterov=True, **loop),
        "SGD foreach": lambda params: sparsestep.SGD(params, lr=0.1, momentum=0.9, foreach=True),
        "RMSprop": lambda params: sparsestep.RMSprop(params, momentum=0.9, centered=True, **loop),
    }
    found: dict[str, type[Step]] = {}
    for name, make in makes.items():
        for when, steps in (("first ", 0), ("", 1)):
            found[f"{when}dense step: {name}"] = of(DenseStep, make, steps_before=steps)
    for name in ("dense step: Adam", "dense step: AdamW fused", "first dense step: SGD"):
        found[f"{name}, in pieces"] = of(found[name], few_params=0)
    return found


NativeDenseStep = of(
    Step, sparsestep.AdamW, layout="strided", faults=(*Step.faults, "out of memory")
)


def masked_adamw(params: Any) -> RuleOptimizer:
    masks = [torch.rand(len(param)) < 0.3 for param in params]
    return sparsestep.AdamW([{"params": params, "mask": masks}], lr=0.1)


def reference(params: Any, **options: Any) -> RuleOptimizer:
    return sparsestep.Adam(params, engine="reference", **options)


def rounded(params: Any, **options: Any) -> RuleOptimizer:
    return sparsestep.Adam(params, stochastic_rounding=True, **options)


def deferred(params: Any, **options: Any) -> RuleOptimizer:
    return sparsestep.AdamW(params, lr=0.1, semantics="dense", **options)


Mixed = of(Step, has_layers=True)
# The history of deferred updates doubles in the middle of it.
Deferred = of(Mixed, deferred, dtype=torch.float64, steps_before=16)
STEPS: dict[str, type[Operation]] = {
    "step": Step,
    "first step": of(Step, steps_before=0),
    "replayed step": of(Step, steps_before=3),
    "mixed step": Mixed,
    "first mixed step": of(Mixed, steps_before=0),
    "complex step": of(Mixed, dtype=torch.complex64),
    "Lion step": of(Mixed, lambda params: sparsestep.Lion(params, lr=0.1)),
    "first element-wise step": of(
        Mixed,
        lambda params: sparsestep.RowwiseAdam(params, lr=0.1, dense="elementwise"),
        steps_before=0,
    ),
    "reference step": of(Mixed, reference),
    "rounded reference step": of(
        Mixed, lambda params: rounded(params, engine="reference"), dtype=torch.bfloat16
    ),
    "deferred step": Deferred,
    "deferred reference step": of(Deferred, lambda params: deferred(params, engine="reference")),
    "replayed deferred step": of(CurrentStep, deferred, dtype=torch.float64, steps_before=3),
    "int8 step": of(Step, lambda params: sparsestep.Adam(params, state_dtype=torch.int8)),
    "rounded step": of(Step, rounded, dtype=torch.bfloat16),
    "rule step": of(Mixed, averaged),
    "untraced rule step": of(Mixed, sorted_average),
    "functional step": FunctionalStep,
    "replayed functional step": ReplayedFunctionalStep,
    "functional call": FunctionalCall,
    "masked step": of(Mixed, masked_adamw),
    "first dense step": of(NativeDenseStep, steps_before=0),
    "dense step": NativeDenseStep,
    "replayed dense step": of(NativeDenseStep, steps_before=3),
    **dense_steps(),
}


# Modules


class Model(Operation):
    """Tables of ``sparsestep.nn``, whose gradients are compact."""

    dtype = torch.float32
    make: Make = staticmethod(lambda params: sparsestep.Adam(params, lr=0.1))

    def tables(self) -> list[nn.Module]:
        return [sparsestep.nn.Embedding(ROWS, DIM), sparsestep.nn.EmbeddingBag(ROWS, DIM)]

    def setup(self) -> None:
        self.model = nn.ModuleList([*self.tables(), nn.Linear(DIM, 3)]).to(self.dtype)
        self.optimizer = self.make(self.model.parameters())
        self.prepare()
        for step in range(2):
            self.train(step)
        self.optimizer.zero_grad()

    def prepare(self) -> None:
        """Before the first step."""

    def loss(self, step: int) -> Tensor:
        *tables, layer = self.model
        ids = ids_of(step).view(-1, 8)
        pooled = [table(ids).view(len(ids), -1, DIM).sum(1) for table in tables]
        return layer(torch.stack(pooled).sum(0)).square().sum()

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(step).backward()


class ClippedGrads(Model):
    pending = 7

    def run(self) -> None:
        sparsestep.clip_grad_norm_(self.model.parameters(), 0.5)

    def values(self) -> dict[str, Any]:
        grads = [param.grad for param in self.model.parameters()]
        return {"grads": [g.to_dense() if g is not None else None for g in grads]}


class StepInBackward(Model):
    """Each parameter is a step of its own, after which torch's backward goes on."""

    may_raise_late = True

    def tables(self) -> list[nn.Module]:
        return [sparsestep.nn.Embedding(ROWS, DIM)]

    def setup(self) -> None:
        super().setup()
        self.model[-1].requires_grad_(False)
        self.optimizer.step_in_backward([self.model[0].weight])
        self.computed = self.loss(7)

    def run(self) -> None:
        self.optimizer.zero_grad()
        self.computed.backward(retain_graph=True)


class TrackedLookup(Model):
    """Rows catch up before they are read."""

    dtype = torch.float64
    make = staticmethod(deferred)
    guard = False

    def tables(self) -> list[nn.Module]:
        return [sparsestep.nn.Embedding(ROWS, DIM)]

    def prepare(self) -> None:
        self.optimizer.track(self.model, guard=self.guard)

    def run(self) -> None:
        self.loss(8)


class CatchUp(TrackedLookup):
    def run(self) -> None:
        self.optimizer.catch_up()


class Forget(Model):
    def run(self) -> None:
        self.optimizer.forget(self.model[0].weight, ids_of(3, 50))


class DeferredForget(Forget, TrackedLookup):
    pass


class SetMask(Model):
    """From no mask to one over elements."""

    by_row = False

    def run(self) -> None:
        weight = self.model[0].weight
        shape = weight.shape[:1] if self.by_row else weight.shape
        mask = torch.rand(shape, generator=torch.Generator().manual_seed(4)) < 0.5
        self.optimizer.set_mask(weight, mask)

    def values(self) -> dict[str, Any]:
        masks = [group.get("mask") for group in self.optimizer.param_groups]
        return {**super().values(), "masks": [m for mask in masks for m in mask or ()]}


class DeferredSetMask(SetMask, TrackedLookup):
    by_row = True


class GrowTable(Model):
    def run(self) -> None:
        torch.manual_seed(3)
        sparsestep.nn.grow(self.model[0], ROWS + 500, self.optimizer)

    def values(self) -> dict[str, Any]:
        return {**super().values(), "rows": self.model[0].num_embeddings}


class AddGroup(Model):
    def setup(self) -> None:
        super().setup()
        self.layer = nn.Linear(4, 4)

    def run(self) -> None:
        self.optimizer.add_param_group({"params": list(self.layer.parameters()), "lr": 0.5})

    def values(self) -> dict[str, Any]:
        return {**super().values(), "groups": len(self.optimizer.param_groups)}


class LoadStateDict(Model):
    def setup(self) -> None:
        super().setup()
        self.saved = self.optimizer.state_dict()
        self.saved = {
            "state": {
                index: {name: torch.as_tensor(value).clone() for name, value in each.items()}
                for index, each in self.saved["state"].items()
            },
            "param_groups": [{**group, "lr": 0.7} for group in self.saved["param_groups"]],
        }
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

    def prepare(self) -> None:
        self.vocabulary = sparsestep.nn.Vocabulary(self.rows, **self.options)
        self.vocabulary.attach(self.model[0], self.optimizer)

    def loss(self, step: int) -> Tensor:
        ids = ids_of(step, below=5 * ROWS).view(-1, 8) + 100 * step
        return self.model[1](self.model[0](self.vocabulary(ids)).sum(1)).square().sum()

    def run(self) -> None:
        torch.manual_seed(3)
        self.vocabulary(ids_of(8, below=5 * ROWS) + 800)

    def values(self) -> dict[str, Any]:
        return {
            **super().values(),
            "vocabulary": dict(self.vocabulary.state_dict()),
            "used": self.vocabulary.used,
            "evicted": self.vocabulary.taken_over,
        }


class DeferredVocabularyLookup(VocabularyLookup):
    dtype = torch.float64
    make = staticmethod(deferred)

    def prepare(self) -> None:
        super().prepare()
        self.optimizer.track(self.model)


class MappedVocabularyLookup(VocabularyLookup):
    def tables(self) -> list[nn.Module]:
        weight = sparsestep.storage.mapped(self.folder / "vocabulary", (self.rows, DIM))
        weight[:] = torch.randn(weight.shape)
        return [sparsestep.nn.Embedding.from_pretrained(weight, freeze=False)]


class GrowVocabulary(VocabularyLookup):
    def run(self) -> None:
        torch.manual_seed(3)
        self.vocabulary.grow(self.rows + 100)


class MergeVocabulary(VocabularyLookup):
    def setup(self) -> None:
        super().setup()
        self.vocabulary.grow(self.rows + 20)
        self.other = sparsestep.nn.Vocabulary(20)
        self.other(ids_of(9, count=9))

    def run(self) -> None:
        self.vocabulary.merge(self.other)


class LoadVocabulary(VocabularyLookup):
    def setup(self) -> None:
        super().setup()
        self.saved = {k: v.clone() for k, v in self.vocabulary.state_dict().items()}
        self.train(5)

    def run(self) -> None:
        self.vocabulary.load_state_dict(self.saved)


# Tables in files


class Mapped(Operation):
    """A model with a table in a file, and what a checkpoint has of it."""

    in_rows = False
    semantics = "masked"
    path = "table"

    def new(self, path: str) -> None:
        make: Make = lambda params: sparsestep.Adam(params, lr=0.1, semantics=self.semantics)  # noqa: E731
        dtype = torch.float64 if self.semantics == "dense" else torch.float32
        self.table = sparsestep.storage.mapped(
            self.folder / path, (ROWS, DIM), dtype, optimizer=make if self.in_rows else None
        )
        embedding = nn.Embedding.from_pretrained(self.table, freeze=False, sparse=True)
        self.model = nn.Sequential(embedding, nn.Linear(DIM, 2, dtype=dtype))
        self.optimizer = make(self.model.parameters())
        if self.semantics == "dense":
            self.optimizer.track(self.model)

    def setup(self) -> None:
        self.new(self.path)
        for step in range(2):
            self.train(step)

    def backward(self, step: int) -> None:
        self.optimizer.zero_grad()
        (self.model(ids_of(step, 60)) - 1).square().sum().backward()

    def save(self, note: str) -> None:
        sparsestep.storage.save(self.folder / "saved", self.model, self.optimizer, extra=note)

    def load(self) -> Any:
        return sparsestep.storage.load(self.folder / "saved", self.model, self.optimizer)


class CreateTable(Mapped):
    """A file that does not exist yet."""

    faults = (*Mapped.faults, "kill")

    def setup(self) -> None:
        self.tensor: Tensor | None = None

    def run(self) -> None:
        self.tensor = sparsestep.storage.mapped(self.folder / "new", (ROWS, DIM))

    def values(self) -> dict[str, Any]:
        """A file of zeros may remain, which the next call opens; nothing else may."""
        leftovers = [path.name for path in self.folder.iterdir() if path.name != "new"]
        return {"open": self.tensor is not None, "leftovers": leftovers}

    def reopen(self) -> Snapshot:
        self.run()
        assert self.tensor is not None
        return snapshot({"table": self.tensor})


class Save(Mapped):
    """The first checkpoint in a folder."""

    faults = (*Mapped.faults, "kill")
    checkpoints = 0

    def setup(self) -> None:
        super().setup()
        for number in range(self.checkpoints):
            self.save(f"checkpoint {number}")
            self.train(10 + number)

    def run(self) -> None:
        self.save("latest")

    def values(self) -> dict[str, Any]:
        """What the folder gives a process that starts from it."""
        live = super().values()
        return {"live": live, "saved": self.loaded("another")}

    def loaded(self, path: str) -> dict[str, Any]:
        if not (self.folder / "saved" / "manifest.json").exists():
            return {}
        other = type(self).__new__(type(self))
        other.folder = self.folder
        for leftover in self.folder.glob(f"{path}*"):
            leftover.unlink()
        torch.manual_seed(5)
        other.new(path)
        extra = other.load()
        return {"extra": extra, **of_optimizer(other.optimizer)}

    def reopen(self) -> Snapshot:
        return snapshot({"saved": self.loaded("another")})


class SaveAndCompact(Save):
    """Journals are merged into the base."""

    checkpoints = 2

    def run(self) -> None:
        from sparsestep.storage import checkpoint as checkpoints

        checkpoints._COMPACT_MIN_BYTES, checkpoints._COMPACT_RATIO = 1, 0.01
        super().run()


class Load(Mapped):
    """The table in the file has moved on since the checkpoint."""

    faults = (*Mapped.faults, "kill")

    def setup(self) -> None:
        super().setup()
        self.save("first")
        self.train(5)
        self.save("latest")
        for step in range(6, 9):
            self.train(step)

    def run(self) -> None:
        self.extra = self.load()

    def reopen(self) -> Snapshot:
        """Open the same file and load once more, which gives what loading would have given."""
        torch.manual_seed(6)
        self.new(self.path)
        self.load()
        return self.snapshot()


OPERATIONS: dict[str, type[Operation]] = {
    **STEPS,
    "compact step": of(Model, pending=7),
    "step in backward": StepInBackward,
    "clip": ClippedGrads,
    "lookup: tracked": TrackedLookup,
    "lookup: guarded": of(TrackedLookup, guard=True),
    "catch_up": CatchUp,
    "forget": Forget,
    "forget: deferred": DeferredForget,
    "set_mask": SetMask,
    "set_mask: deferred": DeferredSetMask,
    "grow": GrowTable,
    "add_param_group": AddGroup,
    "load_state_dict": LoadStateDict,
    "vocabulary: lru": VocabularyLookup,
    "vocabulary: admit": of(VocabularyLookup, options={"admit": 2}),
    "vocabulary: lfu": of(VocabularyLookup, options={"evict": "lfu", "shared": 2}),
    "vocabulary: deferred": DeferredVocabularyLookup,
    "vocabulary: mapped": MappedVocabularyLookup,
    "vocabulary: grow": GrowVocabulary,
    "vocabulary: load": LoadVocabulary,
    "vocabulary: merge": MergeVocabulary,
    "mapped step": of(Mapped, pending=7),
    "mapped step: in rows": of(Mapped, pending=7, in_rows=True),
    "mapped step: deferred": of(Mapped, pending=7, semantics="dense"),
    "mapped: create": CreateTable,
    "save: first": Save,
    "save: changes": of(Save, checkpoints=2),
    "save: compact": SaveAndCompact,
    "save: in rows": of(Save, checkpoints=2, in_rows=True),
    "load": Load,
    "load: in rows": of(Load, in_rows=True),
    "load: deferred": of(Load, semantics="dense"),
}
