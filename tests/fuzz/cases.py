"""From a seed to a case: which kind it is, and what came of it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable

import torch

from sparsestep import _native
from tests.fuzz.findings import where
from tests.fuzz.kinds import clipping, dense, functions, making, modules, own_rules, training
from tests.fuzz.pool import Outcome
from tests.fuzz.world import INSTRUCTION_SETS, Say
from tests.generate.source import NotApplicableError, SeededSource, Source
from tests.oracle import FindingError

KINDS: dict[Callable[[Source, Say], None], int] = {
    **training.KINDS,
    **functions.KINDS,
    **dense.KINDS,
    **modules.KINDS,
    **clipping.KINDS,
    **making.KINDS,
    **own_rules.KINDS,
}


def prepare() -> None:
    """Once per process: nothing of what is expected here is worth a warning."""
    warnings.simplefilter("ignore")
    torch.sparse.check_sparse_tensor_invariants.disable()
    gc.disable()  # it is called between cases; so that one case is as fast as the next


def collect() -> None:
    """Between two batches."""
    gc.collect()


def run(seed: int, tell: Say | None = None) -> Outcome:
    """One case. ``tell`` gets its steps as they are taken."""
    chance, say = SeededSource(seed), tell or (lambda text: None)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    if INSTRUCTION_SETS:
        _native.use_instruction_set(chance.pick(INSTRUCTION_SETS))
    kind = chance.weighted(KINDS)
    name = kind.__name__.replace("_", " ")
    say(f"{name}, instruction set {_native.instruction_set()}")
    try:
        kind(chance, say)
    except FindingError as found:
        return Outcome(seed, name, found.kind, found.detail)
    except NotApplicableError:
        pass
    except Exception as error:
        text = f"{type(error).__name__} at {where(error)}"
        return Outcome(seed, name, text, " ".join(str(error).split())[:300])
    return Outcome(seed, name)
