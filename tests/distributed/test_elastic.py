"""torchrun starts ranks again after one was killed; they go on from the latest checkpoint."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sparsestep
from tests.table import same_bits

if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
    pytest.skip("needs gloo", allow_module_level=True)

from tests.distributed.elastic_worker import EVERY, STEPS, train
from tests.distributed.pair import ROOT, TIMEOUT


@pytest.mark.slow
def test_training_goes_on_after_a_rank_was_killed(tmp_path: Path):
    (tmp_path / "killed").mkdir()
    (tmp_path / "whole").mkdir()
    loopback = next((n for _, n in socket.if_nameindex() if n in ("lo", "lo0")), "lo")
    command = [*(sys.executable, "-m", "torch.distributed.run"), "--nproc-per-node=2"]
    command += ["--max-restarts=1", "--standalone", "--local-addr=127.0.0.1"]
    command += [*("-m", "tests.distributed.elastic_worker"), str(tmp_path / "killed")]
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
        timeout=TIMEOUT,
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
