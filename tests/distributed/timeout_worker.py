"""Two ranks of which one stops taking part; the other does not wait longer than its group says."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _set_pg_timeout

import sparsestep
from sparsestep.distributed import lockstep, shard
from sparsestep.distributed.groups import new_group_like
from sparsestep.torch_internals import group_timeout
from tests.distributed import pair

SHORT = timedelta(seconds=3)
IDS = torch.tensor([0, 1, 4])


def looks_up() -> Callable[[], object]:
    table = nn.Embedding(7, 2)
    shard(table, plan="rows")
    table(IDS)
    return lambda: table(IDS)


def steps() -> Callable[[], object]:
    table = nn.Embedding(7, 2)
    group = dist.new_group(timeout=SHORT)
    shard(table, DeviceMesh.from_group(group, "cpu"), plan="rows")
    opt = sparsestep.Adam(table.parameters())
    table(IDS).sum().backward()
    return lambda: (table, opt.step())  # the table knows the other rank


def prefetches() -> Callable[[], object]:
    table = nn.Embedding(7, 2)
    shard(table, plan="rows")
    batches = [IDS.clone() for _ in range(9)]
    loop = iter(lockstep(batches, prefetch=1))
    for _ in range(2):
        table(next(loop))
    # The loop itself uses the default group; only its thread uses one of ours.
    sent = sparsestep.distributed.ahead._loops[-1]
    sending = sent.send(batches[0]) if dist.get_rank() == 0 else None

    def wait() -> None:
        assert sending is not None
        sending.done.wait()
        if sending.error is not None:
            raise sending.error

    return wait


def work(rank: int, meeting: str) -> pair.Results:
    world = pair.world_size()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    store = dist.FileStore(
        str(Path(url2pathname(urlparse(meeting).path)).with_name("store")), world
    )
    found: pair.Results = {"said": {}, "waited": {}}
    _set_pg_timeout(SHORT)
    part = dist.new_group([0, 1], timeout=timedelta(seconds=7))
    groups = [new_group_like(None), new_group_like(None, "gloo"), new_group_like(part)]
    timeouts = [group_timeout(each) for each in groups]
    found["timeouts"] = [each.total_seconds() for each in timeouts if each is not None]
    if timeouts[0] != SHORT:  # it would take half an hour
        return found
    for prepare in (looks_up, steps, prefetches):
        action = prepare()
        if rank:  # it is busy with something else
            store.wait([prepare.__name__], timedelta(seconds=100))
            continue
        begin = time.monotonic()
        try:
            action()
        except RuntimeError as error:
            found["said"][prepare.__name__] = str(error)
        found["waited"][prepare.__name__] = time.monotonic() - begin
        store.set(prepare.__name__, "done")
    return found


if __name__ == "__main__":
    pair.main(work)
