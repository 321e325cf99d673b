"""From a seed to a case: which kind it is, and what came of it."""

from __future__ import annotations

import gc
import warnings
from dataclasses import dataclass
from typing import Any

import torch

from sparsestep import _native
from tests.fuzz import dense
from tests.fuzz.findings import where
from tests.fuzz.operations import OPERATIONS
from tests.fuzz.spoiling import spoil
from tests.fuzz.world import Say, World
from tests.generate.params import folder_of_tables
from tests.generate.source import NotApplicableError, SeededSource
from tests.oracle import FindingError
from tests.processes import Lost
from tests.table import INSTRUCTION_SETS


@dataclass
class Outcome:
    """How a case ended: what was found, in a word or two, and the same with numbers."""

    kind: str
    finding: str = ""
    detail: str = ""


Kind = tuple[type[World], bool, dict[Any, int], int]  # by hand, operations, weight
VALID: dict[str, Kind] = {
    "optimizer": (World, False, OPERATIONS, 15),
    "by hand": (World, True, OPERATIONS, 12),
    "dense semantics": (dense.DenseWorld, False, dense.OPERATIONS, 6),
    "dense semantics by hand": (dense.DenseWorld, True, dense.OPERATIONS, 3),
}
WITH_GARBAGE = " and garbage"
KINDS = {**VALID, **{f"{name}{WITH_GARBAGE}": kind for name, kind in VALID.items()}}


def program(world: World, operations: dict[Any, int], *, garbage: bool) -> None:
    """Some operations on an optimizer, one after the other."""
    world.build()
    for _ in range(world.chance.integer(1, 8)):
        if garbage and world.chance.one_in(2):
            spoil(world)
        else:
            world.chance.weighted(operations)(world)
        if world.over:
            return
    world.end()


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
    name = chance.weighted({name: weight for name, (*_, weight) in KINDS.items()})
    make, by_hand, operations, _ = KINDS[name]
    say(f"{name}, instruction set {_native.instruction_set()}")
    try:
        program(make(chance, say, by_hand=by_hand), operations, garbage=WITH_GARBAGE in name)
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
