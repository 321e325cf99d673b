"""What torchrun starts, and starts again after a rank was killed in the middle of its work."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep

STEPS, EVERY, KILLED_BEFORE = 8, 2, 6


def batch(step: int) -> Tensor:
    """This rank's part of a batch."""
    whole = torch.randint(0, 11, (4, 3), generator=torch.Generator().manual_seed(step))
    return whole.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else whole


def train(folder: Path, *, is_killed: bool) -> nn.Embedding:
    """Go on from the latest checkpoint; save after every other step."""
    torch.manual_seed(0)
    table = nn.Embedding(11, 4)
    sparsestep.distributed.shard(table, plan="rows", reduce="sum", order="global")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    done = [int(each.name) for each in folder.glob("*") if (each / ".metadata").exists()]
    first = max(done, default=0)
    if first:
        sparsestep.distributed.load(folder / str(first), table, optimizer)
    saving = None
    for step in range(first + 1, STEPS + 1):
        if is_killed and step == KILLED_BEFORE:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        table(batch(step)).square().sum().backward()
        optimizer.step()
        if step % EVERY == 0:
            if saving is not None:
                saving.result()
            saving = sparsestep.distributed.async_save(folder / str(step), table, optimizer)
    assert saving is not None
    saving.result()
    return table


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first_try:
        print("rank", dist.get_rank(), "of another try", flush=True)
    train(Path(sys.argv[1]), is_killed=is_first_try and dist.get_rank() == 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
