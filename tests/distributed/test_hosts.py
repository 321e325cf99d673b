"""A rank is killed or a host cut off: torchrun starts ranks that go on from the checkpoint.

Each host is a network namespace. Making one takes iproute2 and the rights of an administrator.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import sparsestep
from benchmarks.dynamic_hosts import NamespaceError, Run, namespaces
from sparsestep.distributed._hosts import warn_about_loopback
from tests.ranks import HAS_GLOO
from tests.table import same_bits

ROOT = Path(__file__).parents[2]
HOSTS, STEPS, EVERY, FAILS_BEFORE = 3, 8, 2, 6
PORT, TIMEOUT = 29_511, 15  # seconds, until ranks notice that one is gone


def batch(step: int) -> Tensor:
    """This rank's part of a batch."""
    whole = torch.randint(0, 11, (12, 3), generator=torch.Generator().manual_seed(step))
    return whole.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else whole


def train(folder: Path, *, fails: bool = False) -> None:
    """Go on from the latest checkpoint; save after every other step."""
    torch.manual_seed(0)
    table = nn.Embedding(11, 4)
    sparsestep.distributed.shard(table, plan="rows", reduce="sum", order="global")
    optimizer = sparsestep.Adam(table.parameters(), lr=0.1)
    done = [int(each.name) for each in folder.glob("*") if (each / "sparsestep.json").exists()]
    first = max(done, default=0)
    if first:
        sparsestep.distributed.load(folder / str(first), table, optimizer)
    saving = None
    for step in range(first + 1, STEPS + 1):
        if fails and step == FAILS_BEFORE:
            if "SPARSESTEP_TEST_HOST" in os.environ:
                subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
            else:
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        table(batch(step)).square().sum().backward()
        sparsestep.clip_grad_norm_(table.parameters(), 100.0)
        optimizer.step()
        if step % EVERY == 0:
            if saving is not None:
                saving.result()
            saving = sparsestep.distributed.async_save(folder / str(step), table, optimizer)
    assert saving is not None
    saving.result()


def main() -> None:
    """One of the processes that torchrun starts."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT))
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    print(f"{dist.get_world_size()} ranks, attempt {attempt}\n", end="", flush=True)  # one write
    is_last = os.environ.get("SPARSESTEP_TEST_HOST", os.environ["RANK"]) == sys.argv[2]
    train(Path(sys.argv[1]), fails=attempt == 0 and is_last)
    dist.destroy_process_group()


def torchrun(folder: Path, last: int, *options: str, host: tuple[int, str] | None = None) -> Any:
    """Start it, on this machine or in the namespace of a host."""
    folder.mkdir(exist_ok=True)
    enter = [] if host is None else ["ip", "netns", "exec", host[1]]
    command = [*enter, sys.executable, "-m", "torch.distributed.run", *options]
    loopback = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "lo")
    return subprocess.Popen(
        [*command, "-m", "tests.distributed.test_hosts", str(folder), str(last)],
        cwd=ROOT,
        env={
            **os.environ,
            "GLOO_SOCKET_IFNAME": loopback if host is None else "eth0",
            "OMP_NUM_THREADS": "1",
            **({} if host is None else {"SPARSESTEP_TEST_HOST": str(host[0])}),
            # Otherwise ranks that are started again find the addresses of those before them.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def check_goes_on(folder: Path, agents: list[Any], *words: str) -> None:
    """Some agents end well and say words; checkpoints are those of a run that nothing disturbed."""
    for agent in agents:
        output, _ = agent.communicate(timeout=240)
        assert agent.returncode == 0, output
        assert all(each in output for each in words), output
    (folder / "whole").mkdir()
    train(folder / "whole")
    for step in range(EVERY, STEPS + 1, EVERY):
        ours, theirs = (
            sparsestep.distributed.consolidate(folder / each / str(step))
            for each in ("disturbed", "whole")
        )
        assert same_bits(ours["model"]["weight"], theirs["model"]["weight"]), step
        for name, value in theirs["optimizer"]["state"][0].items():
            assert same_bits(ours["optimizer"]["state"][0][name], value), name


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")
def test_training_goes_on_after_a_rank_was_killed(tmp_path: Path):
    options = ("--nproc-per-node=2", "--max-restarts=1", "--standalone", "--local-addr=127.0.0.1")
    agent = torchrun(tmp_path / "disturbed", 1, *options)
    check_goes_on(tmp_path, [agent], "2 ranks, attempt 1")


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")
def test_training_goes_on_without_a_host_that_was_cut_off(tmp_path: Path):
    options = [f"--nnodes={HOSTS - 1}:{HOSTS}", "--nproc-per-node=1", "--max-restarts=3"]
    options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=10.77.0.1:{PORT}", "--rdzv-id=test"]
    agents: list[Any] = []
    try:
        with namespaces(HOSTS) as names:
            for host in enumerate(names):
                config = f"--rdzv-conf=last_call_timeout=15,is_host={host[0] == 0}"
                mine = [*options, config, f"--local-addr=10.77.0.{host[0] + 1}"]
                agents.append(torchrun(tmp_path / "disturbed", HOSTS - 1, *mine, host=host))
            check_goes_on(tmp_path, agents[:-1], f"{HOSTS} ranks", f"{HOSTS - 1} ranks")
    except NamespaceError as error:
        pytest.skip(str(error))
    finally:
        for agent in agents:
            agent.kill()
            agent.communicate()


CUT = """
    if dist.get_world_size() == 4 and model.step == 25 and os.environ["TEST_HOST"] == "4":
        subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
"""


@pytest.mark.slow
@pytest.mark.skipif(not HAS_GLOO, reason="needs gloo")
def test_the_program_and_the_command_of_the_page_go_on_without_a_host(tmp_path: Path):
    """As a reader copies them, but with this test's folder and addresses, and less to wait for."""
    page = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text()
    program, command = re.findall(r"^```(?:python|sh)\n(.*?)^```", page, re.M | re.S)
    checkpoint = tmp_path / "checkpoint"
    for old, new in {
        "/mnt/shared/checkpoint": str(checkpoint),
        "seconds=60": f"seconds={TIMEOUT}",
        "STEPS, SAVE_EVERY = 2_000, 100": "import os, subprocess\nSTEPS, SAVE_EVERY = 40, 10",
        "    optimizer.step()\n": f"    optimizer.step(){CUT}",
    }.items():
        assert old in program
        program = program.replace(old, new)
    (tmp_path / "train.py").write_text(program)
    agents: list[Any] = []
    try:
        with namespaces(4) as names:
            for host, name in enumerate(names, 1):
                mine = command.replace("ME=10.0.0.1", f"ME=10.0.0.{host}")
                mine = mine.replace("10.0.0.", "10.77.0.")
                agents.append(shell(mine, tmp_path, name, host))
            for agent in agents[:-1]:
                agent.wait(timeout=240)
    except NamespaceError as error:
        pytest.skip(str(error))
    finally:
        for agent in agents:
            with suppress(ProcessLookupError):
                os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()
    printed = "".join((tmp_path / f"{host}.log").read_text() for host in range(1, 4))
    assert [agent.returncode for agent in agents[:-1]] == [0, 0, 0], printed
    found = re.findall(r"^(\d) ranks, from step (\d+)$", printed, re.M)
    assert found == [("4", "0"), ("3", "20")]
    assert sparsestep.distributed.consolidate(checkpoint)["model"]["step"] == 40


def shell(command: str, folder: Path, namespace: str, host: int) -> subprocess.Popen[bytes]:
    """A command, with the programs of this environment, in a namespace; it writes a log."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    with (folder / f"{host}.log").open("w") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace, "sh", "-c", command],
            cwd=folder,
            env={**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "TEST_HOST": str(host)},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


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
