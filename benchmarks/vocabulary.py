"""How many ids a second does a vocabulary look up? Against a dict and two kinds of binary search.

Batches of 65,536 ids out of 10,000,000 known ones, uniform, on one thread, in CPU time, all in
turn: `sparsestep.nn.Vocabulary` in evaluation and in training mode (which counts each id as seen
and moves it to the front of those that keep their rows), a Python dict, and NumPy's and torch's
`searchsorted` in the sorted ids. Also what each keeps in memory for an id.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy
import torch
from torch import Tensor

import sparsestep
from sparsestep.nn.id_table import IdTable

BATCH, SETS = 65_536, 8


def known_ids(count: int) -> Tensor:
    """Different ids, all over the 64 bits."""
    return torch.arange(1, count + 1) * -7046029254386353131


def filled(ids: Tensor, **options: str) -> sparsestep.nn.Vocabulary:
    vocabulary = sparsestep.nn.Vocabulary(len(ids) + 1, **options)  # type: ignore[arg-type]
    for some in ids.split(1 << 20):
        vocabulary(some)
    return vocabulary


def bytes_of(vocabulary: sparsestep.nn.Vocabulary) -> int:
    assert isinstance(vocabulary.id_table, IdTable)
    return vocabulary.id_table.num_bytes


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=10_000_000)
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    ids, count = known_ids(options.ids), options.ids
    quiet, seeing = filled(ids).eval(), filled(ids, evict="lru")
    known = dict(zip(ids.tolist(), range(1, count + 1), strict=True))
    ordered, rows = ids.sort()
    as_numpy, rows_numpy = ordered.numpy(), rows.numpy()
    chance = torch.Generator().manual_seed(0)
    sets = [ids[torch.randint(0, count, (BATCH,), generator=chance)] for _ in range(SETS)]
    contestants: dict[str, Callable[[Tensor], object]] = {
        "vocabulary, evaluation": quiet,
        "vocabulary, training": seeing,
        "dict": lambda batch: torch.tensor([known.get(each, 0) for each in batch.tolist()]),
        "numpy.searchsorted": lambda b: rows_numpy[numpy.searchsorted(as_numpy, b.numpy())],
        "torch.searchsorted": lambda batch: rows[torch.searchsorted(ordered, batch)],
    }
    sizes = {
        "vocabulary, evaluation": bytes_of(quiet) / count,
        "vocabulary, training": bytes_of(seeing) / count,
        "dict": (sys.getsizeof(known) + 2 * 32 * count) / count,
        "numpy.searchsorted": 16.0,
        "torch.searchsorted": 16.0,
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(options.rounds):
        for name, look_up in contestants.items():
            began = time.process_time()
            look_up(sets[number % SETS])
            times[name].append(time.process_time() - began)
    print(f"{count:,} ids, batches of {BATCH:,}, one thread, CPU time")
    ours = statistics.median(times["vocabulary, evaluation"])
    for name, found in times.items():
        median = statistics.median(found)
        rate = BATCH / median / 1e6
        print(
            f"{name:24} {rate:7.1f} million ids/s  {median / ours:6.1f} times ours"
            f"  {sizes[name]:6.1f} bytes per id"
        )


if __name__ == "__main__":
    main()
