"""Hosts with addresses of their own: one is cut off, and the others go on from the checkpoint.

Each host is a network namespace. Making one takes iproute2 and the rights of an administrator.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep
from benchmarks.dynamic_hosts import NamespaceError, Run, namespaces
from sparsestep.distributed._network import warn_about_loopback
from tests.ranks import HAS_GLOO
from tests.table import same_bits

ROOT = Path(__file__).parents[2]
HOSTS, STEPS, EVERY, CUT_BEFORE = 3, 8, 2, 6
PORT, TIMEOUT = 29_511, 15  # seconds, until ranks notice that one is gone


def batch(step: int) -> Tensor:
    """This rank's part of a batch."""
    whole = torch.randint(0, 11, (12, 3), generator=torch.Generator().manual_seed(step))
    return whole.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else whole


def train(folder: Path, *, is_cut_off: bool) -> None:
    """Go on from the latest checkpoint; save after every other step."""
    torch.manual_seed(0)
    table = nn.Embedding(11, 4)
    sparsestep.distributed.shard(table, plan="rows", reduce="sum", order="global")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    done = [int(each.name) for each in folder.glob("*") if (each / "sparsestep.json").exists()]
    first = max(done, default=0)
    if first:
        sparsestep.distributed.load(folder / str(first), table, optimizer)
    for step in range(first + 1, STEPS + 1):
        if is_cut_off and step == CUT_BEFORE:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        optimizer.zero_grad()
        table(batch(step)).square().sum().backward()
        sparsestep.clip_grad_norm_(table.parameters(), 100.0)
        optimizer.step()
        if step % EVERY == 0:
            sparsestep.distributed.save(folder / str(step), table, optimizer)


def main() -> None:
    """One of the processes that torchrun starts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    print(f"{os.environ['GROUP_WORLD_SIZE']} hosts\n", end="", flush=True)
    is_first_try = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    is_last_host = os.environ["SPARSESTEP_TEST_HOST"] == str(HOSTS - 1)
    train(Path(sys.argv[1]), is_cut_off=is_first_try and is_last_host)
    dist.destroy_process_group()


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    try:
        with namespaces(HOSTS) as found:
            yield found
    except NamespaceError as error:
        pytest.skip(str(error))


def started(name: str, number: int, folder: Path) -> subprocess.Popen[str]:
    """Torchrun on one host."""
    command = ["ip", "netns", "exec", name, sys.executable, "-m", "torch.distributed.run"]
    command += [f"--nnodes={HOSTS - 1}:{HOSTS}", "--nproc-per-node=1", "--max-restarts=3"]
    command += ["--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=test"]
    command += ["--rdzv-conf=last_call_timeout=15,is_host=" + str(number == 0)]
    command += [f"--local-addr=10.77.0.{number + 1}"]
    command += ["-m", "tests.distributed.test_hosts", str(folder)]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1",
            "SPARSESTEP_TEST_HOST": str(number),
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")
def test_training_goes_on_without_a_host_that_was_cut_off(tmp_path: Path, hosts: list[str]):
    (tmp_path / "cut").mkdir()
    (tmp_path / "whole").mkdir()
    agents = [started(name, number, tmp_path / "cut") for number, name in enumerate(hosts)]
    try:
        for agent in agents[:-1]:
            output, _ = agent.communicate(timeout=240)
            assert agent.returncode == 0, output
            assert f"{HOSTS} hosts" in output
            assert f"{HOSTS - 1} hosts" in output
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()
    train(tmp_path / "whole", is_cut_off=False)
    for step in range(EVERY, STEPS + 1, EVERY):
        ours, theirs = (
            sparsestep.distributed.consolidate(tmp_path / each / str(step))
            for each in ("cut", "whole")
        )
        assert same_bits(ours["model"]["weight"], theirs["model"]["weight"]), step
        for name, value in theirs["optimizer"]["state"][0].items():
            assert same_bits(ours["optimizer"]["state"][0][name], value), name


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")
def test_hosts_train_a_vocabulary_in_files_and_go_on_after_one_was_cut_off(tmp_path: Path):
    small = Run(rows=2_000, dim=8, batch=64, steps=9, every=3, cut_before=8, timeout=5)
    try:
        with namespaces(small.hosts) as names:
            whole = small.train(names, tmp_path / "whole", is_cut_off=False)
            assert small.train(names, tmp_path / "cut", is_cut_off=True) == whole
    except NamespaceError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("address", "variables", "is_warned"),
    [
        ("127.0.1.1", {}, True),
        (None, {}, True),  # the name has no address
        ("127.0.1.1", {"GLOO_SOCKET_IFNAME": "eth0"}, False),
        ("127.0.1.1", {"WORLD_SIZE": "2"}, False),  # all ranks are on this host
        ("0.0.0.0", {}, False),  # stands for an address that can be bound
    ],
)
def test_a_host_name_with_a_loopback_address_is_reported_before_ranks_connect(
    monkeypatch: pytest.MonkeyPatch,
    address: str | None,
    variables: dict[str, str],
    is_warned: bool,
):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", **variables}.items():
        monkeypatch.setenv(name, value)

    def resolve(*arguments: object, **options: object) -> list[object]:
        if address is None:
            raise socket.gaierror
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (address, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_about_loopback()
    assert len(found) == is_warned
    assert not is_warned or "GLOO_SOCKET_IFNAME" in str(found[0].message)


if __name__ == "__main__":
    main()
