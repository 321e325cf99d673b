"""One of several processes that share tables."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed import pair
from tests.distributed.shard_ahead import ahead
from tests.distributed.shard_behaviour import behaviour
from tests.distributed.shard_cases import on_ranks
from tests.distributed.shard_runs import QUICK
from tests.distributed.shard_vocabulary import vocabularies
from tests.distributed.shard_vocabulary_changes import changes


def work(rank: int, meeting: str) -> pair.Results:
    world = pair.world_size()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    found: pair.Results = {}
    for name, case in QUICK.items():
        found[name] = on_ranks(case, rank, world)[0]
    found.update(behaviour(rank, world))
    found.update(ahead(rank, world))
    found.update(vocabularies(rank, world))
    found.update(changes(rank, world))
    dist.destroy_process_group()
    return found


if __name__ == "__main__":
    pair.main(work)
