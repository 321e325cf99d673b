"""From a seed to a case: which kind it is, and what came of it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from sparsestep import _native
from tests.fuzz import dense
from tests.fuzz.findings import where
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.spoiling import spoil
from tests.fuzz.world import Say, World
from tests.generate.params import folder_of_tables
from tests.generate.source import NotApplicableError, SeededSource, Source
from tests.oracle import FindingError
from tests.processes import Lost
from tests.table import INSTRUCTION_SETS

Kind = Callable[[Source, Say], None]


@dataclass
class Outcome:
    """How a case ended: what was found, in a word or two, and the same with numbers."""

    kind: str
    finding: str = ""
    detail: str = ""


def training(chance: Source, say: Say, *, by_hand: bool, garbage: bool) -> None:
    """Operations on an optimizer, or on one that is given gradients by hand."""
    world = World(chance, say, by_hand=by_hand)
    world.build()
    for _ in range(chance.integer(1, 6)):
        if garbage and chance.one_in(2):
            spoil(world)
        else:
            chance.weighted(OPERATIONS)(world)
        if world.over:
            return
    if garbage:
        spoil(world)


def dense_semantics(chance: Source, say: Say, *, garbage: bool) -> None:
    world = dense.DenseWorld(chance, say, by_hand=chance.one_in(3))
    world.build()
    for _ in range(chance.integer(3, 12)):
        chance.weighted(dense.WITH_GARBAGE if garbage else dense.OPERATIONS)(world)
        if world.over:
            return
    world.check()


VALID: dict[str, tuple[Kind, int]] = {
    "optimizer": (partial(training, by_hand=False, garbage=False), 15),
    "by hand": (partial(training, by_hand=True, garbage=False), 12),
    "dense semantics": (partial(dense_semantics, garbage=False), 8),
}
KINDS: dict[str, tuple[Kind, int]] = {
    **VALID,
    "optimizer and garbage": (partial(training, by_hand=False, garbage=True), 12),
    "by hand and garbage": (partial(training, by_hand=True, garbage=True), 12),
    "dense semantics and garbage": (partial(dense_semantics, garbage=True), 5),
}


def prepare() -> None:
    """Once per process: nothing of what is expected here is worth a warning."""
    warnings.simplefilter("ignore")
    torch.sparse.check_sparse_tensor_invariants.disable()
    folder_of_tables()
    gc.disable()  # so that one case is as fast as the next; processes do not live long


def run(seed: int, tell: Say | None = None) -> Outcome:
    """One case. ``tell`` gets its steps as they are taken."""
    chance, say = SeededSource(seed), tell or (lambda text: None)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if INSTRUCTION_SETS:
        _native.use_instruction_set(chance.pick(INSTRUCTION_SETS))
    name = chance.weighted({name: weight for name, (_, weight) in KINDS.items()})
    say(f"{name}, instruction set {_native.instruction_set()}")
    try:
        KINDS[name][0](chance, say)
    except FindingError as found:
        return Outcome(name, found.kind, found.detail)
    except NotApplicableError:
        pass
    except Exception as error:
        text = f"{type(error).__name__} at {where(error)}"
        return Outcome(name, text, " ".join(str(error).split())[:300])
    return Outcome(name)


def lost(why: Lost) -> Outcome:
    """A case whose process crashed or hangs, with the place that it was at."""
    lines = [line.strip() for line in why.log.splitlines() if "File" in line]
    ours = [line for line in lines if "/sparsestep/" in line]
    return Outcome("process", why.kind, (ours or lines or ["no trace"])[0])
