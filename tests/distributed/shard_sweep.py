"""One of several processes that share tables, under every rule, kind and semantics."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed import pair
from tests.distributed.shard_cases import on_ranks
from tests.distributed.shard_runs import SWEEP


def work(rank: int, meeting: str) -> pair.Results:
    world = pair.world_size()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    found = {name: on_ranks(case, rank, world)[0] for name, case in SWEEP.items()}
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    pair.main(work)
