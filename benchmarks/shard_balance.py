"""How evenly rows that are dealt are asked for, by counting: nothing is timed.

Each rank looks up ids of Zipf's law, in order of frequency. Counted is what each owner is asked for
by all ranks together: of the busiest one, divided by the mean. ``dealt`` is row ``i`` on rank
``i % ranks``, as ``"rows"`` does it; ``blocks`` gives each rank as many rows that follow each
other. ``distinct`` is what is sent where a bag has one id, each id once per rank; ``all`` is every
id, as for bags of many.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from torch import Tensor

from sparsestep.distributed._requests import split_by_owner, unique_ids


def zipf(count: int, rows: int, draw: torch.Generator) -> Tensor:
    """Ids whose chance is about one by their number."""
    uniform = torch.rand(count, generator=draw, dtype=torch.float64)
    return (float(rows) ** uniform - 1).long().clamp_(0, rows - 1)


def busiest(ranks: int, rows: int, ids_per_rank: int) -> dict[str, float]:
    """What the busiest owner is asked for, divided by the mean.

    Args:
        ranks: how many there are.
        rows: of the table.
        ids_per_rank: that each looks up.
    """
    names = ("round-robin, distinct", "round-robin, all", "blocks, distinct", "blocks, all")
    asked = {name: torch.zeros(ranks, dtype=torch.int64) for name in names}
    draw = torch.Generator().manual_seed(0)
    block = -(-rows // ranks)
    for _ in range(ranks):
        ids = zipf(ids_per_rank, rows, draw)
        for name, some in (("distinct", unique_ids(ids, rows)[0]), ("all", ids)):
            counts = split_by_owner(some, None, ranks, torch.int64).ids_per_rank
            asked[f"round-robin, {name}"] += counts
            asked[f"blocks, {name}"] += torch.bincount(some // block, minlength=ranks)
    return {name: float(each.max() / each.double().mean()) for name, each in asked.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000, help="of the table")
    parser.add_argument("--ids", type=int, default=4_096, help="that each rank looks up")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[2**power for power in range(1, 11)]
    )
    options = parser.parse_args(arguments)
    for place, ranks in enumerate(options.ranks):
        found = busiest(ranks, options.rows, options.ids)
        if place == 0:
            print("ranks  " + "  ".join(found))
        cells = [f"{value:.2f}".rjust(len(name)) for name, value in found.items()]
        print(f"{ranks:5}  " + "  ".join(cells), flush=True)


if __name__ == "__main__":
    main()
