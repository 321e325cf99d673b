"""torchrun starts ranks again after one was killed; they go on from the latest checkpoint."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep
from tests.ranks import HAS_GLOO
from tests.table import same_bits

ROOT = Path(__file__).parents[2]
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
    """One of the processes that torchrun starts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    is_first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if not is_first_try:
        print(f"rank {dist.get_rank()} of another try\n", end="", flush=True)  # one write
    train(Path(sys.argv[1]), is_killed=is_first_try and dist.get_rank() == 1)
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")
def test_training_goes_on_after_a_rank_was_killed(tmp_path: Path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), "lo")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--standalone", "--local-addr=127.0.0.1"]
    command += ["-m", "tests.distributed.test_elastic", str(tmp_path / "killed")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": loopback,
            "OMP_NUM_THREADS": "1",
            # Otherwise ranks that are started again find the addresses of those before them.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rank 1 of another try" in done.stdout
    train(tmp_path / "whole", is_killed=False)
    for step in range(EVERY, STEPS + 1, EVERY):
        ours, theirs = (
            sparsestep.distributed.consolidate(tmp_path / each / str(step))
            for each in ("killed", "whole")
        )
        assert same_bits(ours["model"]["weight"], theirs["model"]["weight"]), step
        for name, value in theirs["optimizer"]["state"][0].items():
            assert same_bits(ours["optimizer"]["state"][0][name], value), name


if __name__ == "__main__":
    main()
