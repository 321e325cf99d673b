"""Train word vectors with torch's SparseAdam and with sparsestep's, and compare.

The words are the identifiers in the source of Python's standard library. Both
runs start from the same weights and see the same batches, in turns, so that
only the time differs. It takes about a minute at most. Press Ctrl-C to stop
early and see the results so far.

Example:
  sparsestep demo --seconds 20 --out loss.png
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

import sparsestep
from sparsestep.cli import identifiers, skipgram
from sparsestep.cli.options import number, output_path, whole_number
from sparsestep.cli.turns import Budget, stopped_by_ctrl_c, take_turns

if TYPE_CHECKING:
    from sparsestep.cli.display import Screen

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "torch.optim.SparseAdam": torch.optim.SparseAdam,
    "sparsestep.SparseAdam": sparsestep.SparseAdam,
}

_WARM_UP_STEPS = 20
_INTERRUPTED = 130  # what shells expect of a program that SIGINT ended


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``sparsestep demo``."""
    parser.add_argument(
        "--words",
        type=whole_number(10, 1_000_000),
        default=20_000,
        metavar="N",
        help="number of identifiers, the most frequent ones first (default: %(default)s)",
    )
    parser.add_argument(
        "--steps",
        type=whole_number(1, 1_000_000),
        default=5000,
        metavar="N",
        help="maximum number of batches for each run (default: %(default)s)",
    )
    parser.add_argument(
        "--seconds",
        type=number(1, 86_400),
        default=60.0,
        metavar="S",
        help="time limit for both runs together (default: %(default)g)",
    )
    parser.add_argument(
        "--dim",
        type=whole_number(1, 1024),
        default=64,
        metavar="N",
        help="length of a vector (default: %(default)s)",
    )
    parser.add_argument(
        "--seed",
        type=whole_number(0, 2**63 - 1),
        default=0,
        metavar="N",
        help="random seed for weights and batches (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=output_path(".png"),
        default="sparsestep-demo.png",
        metavar="FILE",
        help="PNG file for the picture (default: %(default)s)",
    )


def run(options: argparse.Namespace) -> int:
    """Read, train twice, compare; returns the exit code."""
    # Here and not above: these need rich and matplotlib, which `import sparsestep.cli` must not.
    from sparsestep.cli import display, picture

    screen = display.Screen()
    root = identifiers.standard_library()
    with screen.waiting(f"reading {root}"):
        files = identifiers.read(root)
        known = identifiers.vocabulary(files, options.words)
        near = skipgram.pairs(files, known)
    if near.shape[1] == 0:
        raise SystemExit(f"sparsestep: no Python source to learn from in {root}.")
    screen.say(
        f"The standard library of Python {platform.python_version()}: {len(files):,} files, "
        f"{sum(map(len, files)):,} identifiers.\n"
        f"Two tables of {len(known.words):,} x {options.dim}, {options.steps:,} steps per run or "
        f"{options.seconds:g} s, threads: {torch.get_num_threads()}."
    )
    batches = skipgram.Batches(near, known.counts, options.steps, options.seed)
    budget = Budget(options.steps, options.seconds)
    theirs, ours = _train(screen, batches, options.dim, budget)
    screen.show_neighbours(ours.tables.words, known)
    try:
        picture.draw(options.out, theirs, ours, len(known.words))
    except OSError as error:
        raise SystemExit(f"sparsestep: cannot write the picture: {error}.") from None
    screen.say(f"The loss over time: {options.out}")
    screen.compare(theirs, ours)
    if budget.interrupted:
        screen.say(f"Interrupted after {len(ours.losses):,} of {options.steps:,} steps.")
        return _INTERRUPTED
    return 0


def _train(
    screen: Screen, batches: skipgram.Batches, dim: int, budget: Budget
) -> list[skipgram.Run]:
    weights = skipgram.start(len(batches.counts), dim, batches.seed)
    # First use costs: threads start, code is loaded. Neither run shall pay for that.
    few = replace(batches, steps=_WARM_UP_STEPS)
    for name, optimizer in OPTIMIZERS.items():
        skipgram.train(name, optimizer, weights, few)
    runs = [skipgram.training(*each, weights, batches) for each in OPTIMIZERS.items()]
    with stopped_by_ctrl_c(budget), screen.bars() as bars:
        follow = {i: bars.follow(name, batches.steps) for i, name in enumerate(OPTIMIZERS)}
        return take_turns(runs, budget, follow)
